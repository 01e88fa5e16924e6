"""What the scripts that time other systems share: workload, models, command line, report. Needs only torch.

The workload is that of pfl-research's CIFAR10 benchmark (arXiv 2404.06430): 50 clients of 50 samples, one local epoch
of SGD with batches of 10 and step 0.1; the server takes the plain mean. One round is 250 client-steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
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


def model_name(description: str) -> str:
    """The model from the command line; torch is set to one thread and seed 0."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", choices=MODELS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return options.model


def workload(model: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """The model, and per client random inputs [50, ...] float32 and labels [50] int64."""
    build, shape = MODELS[model]
    samples = STEPS * BATCH
    clients = [(torch.randn(samples, *shape), torch.randint(CLASSES, (samples,))) for _ in range(CLIENTS)]
    return build(), clients


class Turns:
    """Rounds on demand: systems are compared in turns, a moment each, since a machine's speed changes by the second.

    Waits for a line on standard input before every round, and prints a line of JSON with its seconds after it. The end
    of the input ends the process. The first rounds are for warming up: compare.py drops them.
    """

    def __init__(self, system: str, version: str):
        print(json.dumps({"system": system, "version": version}), flush=True)

    def wait(self) -> float:
        """Returns when it is this system's turn, with the time."""
        if not sys.stdin.readline():
            raise SystemExit
        return time.perf_counter()

    def done(self, start: float, rounds: int = 1, **more: float) -> None:
        """After ``rounds`` rounds since ``start``."""
        print(json.dumps({"seconds": (time.perf_counter() - start) / rounds, **more}), flush=True)
