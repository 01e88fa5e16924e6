"""What a round of PFLEGO costs beside one of FedPer, for several tau: full batches of 600, 10 outputs, one thread.

python tests/benchmarks/pflego.py [--model mlp|cnn] [--taus 1,10,50,200] [--turns 5] [--plot ratio.png]
python tests/benchmarks/pflego.py --memory        what rounds add to the process, for 100 to 1,600 clients, 20 a round

mlp: 784-200-10, four clients. cnn: PFLEGO's network for CIFAR-10 (1.75 million parameters), one client. Rounds of the
two algorithms in turns; medians over the turns, and of the ratio within a turn. Everything of a round is included
(batches, local work, the sum), nothing else. The line: tau (1 + b) / (2 + b) with b = 2, the cost of a backward pass in
forward passes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from hpcfl.algorithm import RoundDecision, State
from hpcfl.build import Built, build
from hpcfl.comm import Comm
from hpcfl.config import resolve
from hpcfl.coordinator import draw_participants
from hpcfl.round import Round

SAMPLES, CLASSES, B = 600, 10, 2.0
TARGET = {"mlp": 12, "cnn": 25}  # at tau = 50
CLIENTS = {"mlp": 4, "cnn": 1}
SHAPES = {"mlp": (1, 28, 28), "cnn": (3, 32, 32)}
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"name": "mlp", "hidden": [200]},
    "cnn": {"name": "cnn", "channels": [64, 64], "kernel": 5, "pool": 3, "hidden": [384, 192]},
}


class Federation:
    """One algorithm on random images, played round by round."""

    def __init__(self, folder: Path, model: str, algorithm: dict[str, Any], clients: int, cohort: int, samples: int):
        file = folder / f"{model}-{clients}.npz"
        if not file.exists():
            g = np.random.default_rng(0)
            x = g.integers(0, 256, (clients * samples, *SHAPES[model]), np.uint8)
            np.savez(file, x=x, y=np.arange(len(x)) % CLASSES)
        tables = {
            "run": {"rounds": 1, "clients_per_round": cohort, "device": "cpu"},
            "data": {"name": "file", "path": str(file)},
            "partition": {"name": "iid", "clients": clients, "test_share": 0.0},
            "model": MODELS[model],
            "algorithm": algorithm,
        }
        self.built: Built = build(resolve(tables, "bench", "bench"), Comm())
        self.state: State = self.built.algorithm.init(self.built.engine.task, self.built.engine.group)
        self.clients, self.cohort, self.done = clients, cohort, 0

    def round(self) -> float:
        """Seconds of one round."""
        who = draw_participants(0, self.done, self.clients, self.cohort)
        decision = RoundDecision(self.done, who, {}, evaluate=False, checkpoint=False, stop=None)
        start = time.perf_counter()
        self.state = self.built.algorithm.round(self.state, Round(self.built.engine, decision))
        self.done += 1
        return time.perf_counter() - start


def compare(model: str, taus: list[int], turns: int, plot: Path | None) -> None:
    ratios = []
    print(f"{model}, full batch of {SAMPLES}, {CLASSES} outputs; seconds per client and round")
    print("  tau    FedPer    PFLEGO    ratio    tau (1 + b)/(2 + b)")
    with tempfile.TemporaryDirectory() as folder:
        for tau in taus:
            algorithms = {"name": "fedper", "lr": 0.007, "local_steps": tau}, {"name": "pflego", "local_steps": tau}
            two = [Federation(Path(folder), model, a, CLIENTS[model], CLIENTS[model], SAMPLES) for a in algorithms]
            two[1].round()  # warm: the first use of a kernel costs more
            if model == "mlp":
                two[0].round()
            times = [[f.round() / CLIENTS[model] for f in two] for _ in range(turns)]
            fedper, pflego = (statistics.median(t) for t in zip(*times, strict=True))
            ratios.append(statistics.median(a / b for a, b in times))
            line = tau * (1 + B) / (2 + B)
            print(f"{tau:5}  {fedper:8.4f}  {pflego:8.4f}  {ratios[-1]:7.1f}  {line:8.1f}", flush=True)
            if tau == 50:
                print(
                    f"       target at tau = 50: {TARGET[model]}, {'met' if ratios[-1] >= TARGET[model] else 'MISSED'}"
                )
    if plot is not None:
        draw(plot, model, taus, ratios)


def draw(file: Path, model: str, taus: list[int], ratios: list[float]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.6), layout="constrained")
    axes.loglog(taus, ratios, "o-", label=f"measured, {model}")
    axes.loglog(taus, [tau * (1 + B) / (2 + B) for tau in taus], "--", label="tau (1 + b)/(2 + b), b = 2")
    axes.set(
        xlabel="local steps tau", ylabel="time of FedPer / time of PFLEGO", title="A round of FedPer beside PFLEGO's"
    )
    axes.legend()
    figure.savefig(file, dpi=150)


def memory(clients: int) -> None:
    """Prints by how much six rounds raise the process's peak of memory above what it has before them. On Linux."""
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(Path(folder), "mlp", {"name": "pflego", "local_steps": 50}, clients, 20, 60)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = resident("VmRSS")
        for _ in range(6):
            federation.round()
        print(
            f"{clients:6,} clients, 20 a round: peak memory in rounds {(resident('VmHWM') - before) / 1024:.0f} MB more"
        )


def resident(which: str) -> int:
    """Kilobytes, of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{which}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description="PFLEGO's rounds beside FedPer's.")
    parser.add_argument("--model", choices=list(MODELS), default="mlp")
    parser.add_argument("--taus", type=lambda text: [int(t) for t in text.split(",")], default=[1, 10, 50, 200])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--clients", type=int, help=argparse.SUPPRESS)  # of one process of --memory
    given = parser.parse_args()
    if given.clients:
        memory(given.clients)
    elif given.memory:
        for clients in (100, 400, 1600):  # a process each: the peak never falls
            subprocess.run([sys.executable, __file__, "--memory", "--clients", str(clients)], check=True)
    else:
        compare(given.model, given.taus, given.turns, given.plot)


if __name__ == "__main__":
    main()
