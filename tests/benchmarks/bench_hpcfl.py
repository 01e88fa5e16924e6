"""Times FedAvg in hpcfl, everything in the round included, on one thread per rank, driven by compare.py.

Under mpirun every rank hosts its share of the clients. Also reports the share of the time outside local training.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass

import numpy as np
from peer_models import BATCH, CLIENTS, LR, MODELS, STEPS, Turns, model_name, workload
from torch import nn

import hpcfl
from hpcfl.comm import Comm, world
from hpcfl.config import Job, resolve
from hpcfl.models import Spec
from hpcfl.registry import register
from hpcfl.run import run
from hpcfl.start import Start


@register("model", "benchmark-cnn")
@dataclass(frozen=True)
class BenchmarkCNN:
    """The CNN of the comparison."""

    def build(self, spec: Spec) -> nn.Module:
        return MODELS["cnn"][0]()


MANY = 10**6  # rounds
TABLES = {"logistic": {"name": "logistic"}, "mlp": {"name": "mlp", "hidden": [200]}, "cnn": {"name": "benchmark-cnn"}}


def job(folder: str, model: str, rounds: int, reduction: str) -> Job:
    """FedAvg on the workload, which lies in the folder; evaluated after the last round only."""
    return resolve(
        {
            "run": {"rounds": rounds, "eval_every": rounds, "out": f"{folder}/out", "reduction": reduction},
            "data": {"name": "file", "path": f"{folder}/data.npz"},
            "partition": {"name": "natural", "test_share": 0},
            "model": TABLES[model],
            "algorithm": {"name": "fedavg", "lr": LR, "local_epochs": 1, "batch_size": BATCH, "weighting": "client"},
        },
        "bench",
        "bench",
    )


def save_workload(folder: str, model: str) -> None:
    _, clients = workload(model)
    x, y = (np.concatenate([c[k].numpy() for c in clients]) for k in (0, 1))
    np.savez(f"{folder}/data.npz", x=x, y=y, client=np.repeat(np.arange(CLIENTS), STEPS * BATCH))


def main() -> None:
    reduction = "float64" if "--float64" in sys.argv else "reproducible"
    sys.argv = [a for a in sys.argv if a != "--float64"]
    model = model_name("Time FedAvg in hpcfl, driven by compare.py; --float64: the other reduction.")
    comm = world()
    with tempfile.TemporaryDirectory() as own:
        folder = comm.bcast(own if comm.rank == 0 else None)
        comm.from_root(lambda: save_workload(folder, model))
        rank = Rank(comm, Turns("hpcfl", hpcfl.__version__) if comm.rank == 0 else None)
        run(job(folder, model, MANY, reduction), comm, opened=rank.opened, progress=rank.progress)


class Rank:
    """One rank between two turns: a turn is one plan of rounds."""

    def __init__(self, comm: Comm, turns: Turns | None):
        self.comm, self.turns = comm, turns
        self.begin(0, 0.0)

    def begin(self, done: int, trained: float) -> None:
        self.done, self.trained = done, trained
        self.start = self.turns.wait() if self.turns else time.perf_counter()
        self.comm.barrier()

    def opened(self, start: Start) -> None:
        self.engine = start.keeper.engine

    def progress(self, done: int, means: object) -> None:
        self.comm.barrier()
        trained = self.engine.seconds["compute"]
        if self.turns:
            share = (trained - self.trained) / (time.perf_counter() - self.start)
            self.turns.done(self.start, done - self.done, outside_training=1 - share)
        self.begin(done, trained)


if __name__ == "__main__":
    main()
