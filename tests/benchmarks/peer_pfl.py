"""Times FedAvg in pfl-research, set up as in its own CIFAR10 benchmark, on one thread. Needs `pfl` and torch only:

python tests/benchmarks/peer_pfl.py cnn --rounds 10 --warmup 2

Measured and left out, because they gain nothing here or cost time: SGD with foreach or fused, torch.compile.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import time

import torch
from peer_models import BATCH, CLIENTS, LR, arguments, report, workload
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class Classifier(nn.Module):
    """The net with the two methods that PyTorchModel asks for."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


class Clock(TrainingProcessCallback):
    """Notes when each round ends: from one end to the next is everything a round costs its user."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.ends.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    options = arguments("Time FedAvg in pfl-research.")
    os.environ["PFL_PYTORCH_DEVICE"] = "cpu"  # else it asks for a GPU at every batch
    net, data = workload(options.model)
    classifier = Classifier(net)
    model = PyTorchModel(classifier, torch.optim.SGD, torch.optim.SGD(classifier.parameters(), lr=1.0))

    users = [Dataset(samples) for samples in data]  # made once, so that they keep their batches
    federation = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", range(CLIENTS)))
    backend = SimulatedBackend(federation, federation)  # no WeightByUser: every user has weight 1 anyway

    rounds = options.warmup + options.rounds
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds,  # in round 0 alone, a warm-up round: it cannot be switched off
            train_cohort_size=CLIENTS,
            val_cohort_size=None,
        ),
        backend,
        model,
        NNTrainHyperParams(local_num_epochs=1, local_batch_size=BATCH, local_learning_rate=LR),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    ends = clock.ends[options.warmup - 1 :]
    seconds = [end - start for start, end in itertools.pairwise(ends)]
    report("pfl-research", importlib.metadata.version("pfl"), options.model, seconds)


if __name__ == "__main__":
    main()
