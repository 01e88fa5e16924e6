"""Times FedAvg in pfl-research, set up as in its own CIFAR10 benchmark, on one thread. Needs `pfl` and torch only:

python tests/benchmarks/peer_pfl.py cnn --rounds 10 --warmup 2

Measured and left out, because they gain nothing here or cost time: SGD with foreach or fused, torch.compile.
"""

from __future__ import annotations

import importlib.metadata
import os

import torch
from peer_models import BATCH, CLIENTS, LR, Turns, model_name, workload
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

MANY = 10**6  # rounds


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
    """From the end of a round to the end of the next is everything a round costs its user."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.start = turns.wait()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.turns.done(self.start)
        self.start = self.turns.wait()
        return False, Metrics()


def main() -> None:
    os.environ["PFL_PYTORCH_DEVICE"] = "cpu"  # else it asks for a GPU at every batch
    net, data = workload(model_name("Time FedAvg in pfl-research, driven by compare.py."))
    classifier = Classifier(net)
    model = PyTorchModel(classifier, torch.optim.SGD, torch.optim.SGD(classifier.parameters(), lr=1.0))

    users = [Dataset(samples) for samples in data]  # made once, so that they keep their batches
    federation = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", range(CLIENTS)))
    backend = SimulatedBackend(federation, federation)  # no WeightByUser: every user has weight 1 anyway
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=MANY,
            evaluation_frequency=MANY,  # in round 0 alone, a warm-up round: it cannot be switched off
            train_cohort_size=CLIENTS,
            val_cohort_size=None,
        ),
        backend,
        model,
        NNTrainHyperParams(local_num_epochs=1, local_batch_size=BATCH, local_learning_rate=LR),
        callbacks=[Clock(Turns("pfl-research", importlib.metadata.version("pfl")))],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
