"""What the scripts that time other systems share: workload, models, command line, report. Needs only torch.

The workload is that of pfl-research's CIFAR10 benchmark (arXiv 2404.06430): 50 clients of 50 samples, one local epoch
of SGD with batches of 10 and step 0.1; the server takes the plain mean. One round is 250 client-steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

CLIENTS, STEPS, BATCH, LR, CLASSES = 50, 5, 10, 0.1, 10


def logistic() -> nn.Module:
    """Linear, 7,850 parameters; input [n, 784]."""
    return nn.Linear(784, CLASSES)


def mlp() -> nn.Module:
    """One hidden layer of 200, 159,010 parameters; input [n, 784]."""
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, CLASSES))


def cnn() -> nn.Module:
    """The CNN of pfl-research's CIFAR10 benchmark (dropout included), 1,626,442 parameters; input [n, 3, 32, 32]."""
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(12_544, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, CLASSES),
    )
    for layer in net:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return net


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "logistic": (logistic, (784,)),
    "mlp": (mlp, (784,)),
    "cnn": (cnn, (3, 32, 32)),
}


def arguments(description: str) -> argparse.Namespace:
    """``model``, ``rounds`` and ``warmup`` from the command line; torch is set to one thread and seed 0."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--rounds", type=int, default=10, help="rounds that are timed")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before them, at least 1")
    options = parser.parse_args()
    if options.rounds < 1 or options.warmup < 1:
        parser.error("--rounds and --warmup: 1 or more")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return options


def workload(model: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """The model, and per client random inputs [50, ...] float32 and labels [50] int64."""
    build, shape = MODELS[model]
    samples = STEPS * BATCH
    clients = [(torch.randn(samples, *shape), torch.randint(CLASSES, (samples,))) for _ in range(CLIENTS)]
    return build(), clients


def report(system: str, version: str, model: str, seconds: list[float]) -> None:
    """Print the result as one line of JSON; ``seconds`` are those of each timed round."""
    result = {
        "system": system,
        "version": version,
        "model": model,
        "seconds_per_round": [round(s, 5) for s in seconds],
        "client_steps_per_second": round(CLIENTS * STEPS / statistics.median(seconds), 1),
    }
    print(json.dumps(result))
