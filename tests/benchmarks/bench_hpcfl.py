"""Times FedAvg in hpcfl, everything in the round included, on one thread per rank; the same command line as the peers:

python tests/benchmarks/bench_hpcfl.py mlp --rounds 20 --warmup 2 [--reduction float64]

Under mpirun every rank hosts its share of the clients. The report also has the share of the time outside local training.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from peer_models import BATCH, CLIENTS, LR, MODELS, STEPS, arguments, workload
from torch import nn

import hpcfl
from hpcfl.comm import Comm, world
from hpcfl.config import resolve
from hpcfl.models import Spec
from hpcfl.registry import register
from hpcfl.run import run


@register("model", "benchmark-cnn")
@dataclass(frozen=True)
class BenchmarkCNN:
    """The CNN of the comparison."""

    def build(self, spec: Spec) -> nn.Module:
        return MODELS["cnn"][0]()


TABLES = {"logistic": {"name": "logistic"}, "mlp": {"name": "mlp", "hidden": [200]}, "cnn": {"name": "benchmark-cnn"}}


def timed(comm: Comm, model: str, rounds: int, warmup: int, reduction: str) -> tuple[list[float], list[float]]:
    """Collective: (seconds, seconds of local training) per round, of each plan but the last, which evaluates."""
    total, training = [], []
    with tempfile.TemporaryDirectory() as folder:
        folder = comm.bcast(folder)
        if comm.rank == 0:
            _, clients = workload(model)
            x, y = (np.concatenate([c[k].numpy() for c in clients]) for k in (0, 1))
            np.savez(f"{folder}/data.npz", x=x, y=y, client=np.repeat(np.arange(CLIENTS), STEPS * BATCH))
        comm.barrier()
        all_rounds = warmup + rounds
        job = resolve(
            {
                "run": {
                    "rounds": all_rounds + 1,
                    "eval_every": all_rounds + 1,
                    "out": f"{folder}/out",
                    "reduction": reduction,
                },
                "data": {"name": "file", "path": f"{folder}/data.npz"},
                "partition": {"name": "natural", "test_share": 0},
                "model": TABLES[model],
                "algorithm": {
                    "name": "fedavg",
                    "lr": LR,
                    "local_epochs": 1,
                    "batch_size": BATCH,
                    "weighting": "client",
                },
            },
            "bench",
            "bench",
        )
        marks: list[tuple[int, float, float]] = []
        engines = []

        def progress(done: int, means: Mapping[str, float] | None) -> None:
            marks.append((done, time.perf_counter(), engines[0].seconds["compute"]))

        def opened(path: Path, writer: object, engine: object) -> None:
            engines.append(engine)

        run(job, comm, opened=opened, progress=progress)
        comm.barrier()
    for (a, start, trained), (b, stop, trained_then) in pairwise(marks[:-1] if len(marks) > 2 else marks):
        if a >= warmup:
            total.append((stop - start) / (b - a))
            training.append((trained_then - trained) / (b - a))
    return total, training


def main() -> None:
    reduction = "float64" if "--float64" in sys.argv else "reproducible"
    sys.argv = [a for a in sys.argv if a != "--float64"]
    options = arguments("Time FedAvg in hpcfl.")
    comm = world()
    total, training = timed(comm, options.model, options.rounds, options.warmup, reduction)
    outside = statistics.median(1 - t / s for s, t in zip(total, training, strict=True))
    if comm.rank == 0:
        rate = CLIENTS * STEPS / statistics.median(total)
        result = {
            "system": "hpcfl",
            "version": hpcfl.__version__,
            "model": options.model,
            "reduction": reduction,
            "ranks": comm.size,
        }
        print(
            json.dumps(
                result
                | {
                    "seconds_per_round": [round(s, 6) for s in total],
                    "client_steps_per_second": rate,
                    "outside_training": outside,
                }
            )
        )


if __name__ == "__main__":
    main()
