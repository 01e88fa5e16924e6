"""Async-L2GD in hpcfl, a bare loop of the same arithmetic in torch, and the way of the released code, in turns:

python tests/benchmarks/async_l2gd.py [--seconds 30]        400 clients, d = 20, 10 observations, one thread, float64
python tests/benchmarks/async_l2gd.py --scale               40,000 clients against 400, in microseconds per client

hpcfl: everything in an iteration included (coins, averaging, bookkeeping, writing). Bare: batched products, means by
index, no bookkeeping, no reproducible sums. Released: a Python loop over clients in NumPy, as in the authors' scripts.
Prints medians over the turns in microseconds per iteration, and the median ratio within a turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from bench_hpcfl import MANY, Rank
from compare import HERE, in_turns, median_ratio
from peer_models import Turns

import hpcfl
from hpcfl.comm import Comm
from hpcfl.config import resolve
from hpcfl.run import run

CASES = {"global": (0.1, 0.0), "clusters": (0.05, 0.1)}  # p_0, p_j
TARGETS = {"global": 250, "clusters": 400}  # microseconds per iteration, on a core where bare needs 234 and 358
CLUSTERS, MEMBERS, D, OBSERVATIONS, ETA, ALPHA = 20, 20, 20, 10, 1e-4, 1 / 21
STEPS = {"bare": 1000, "released": 50}  # iterations per turn; hpcfl: a plan of about a second


def ours(case: str, members: int) -> None:
    p_0, p = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        data = {"name": "hierarchical-linear", "clients_per_cluster": members, "observations": OBSERVATIONS}
        job = resolve(
            {
                "run": {"rounds": MANY, "eval_every": MANY, "dtype": "float64", "out": folder},
                "data": data | {"test_observations": 1},
                "partition": {"name": "natural"},
                "model": {"name": "linear", "bias": False},
                "algorithm": {"name": "async_l2gd", "lr": ETA, "objective": "sum", "p_global": p_0, "p_cluster": p},
            },
            "bench",
            "bench",
        )
        rank = Rank(Comm(), Turns("hpcfl", hpcfl.__version__))
        run(job, Comm(), opened=rank.opened, progress=rank.progress)


class Peer:
    """Data, coins and state of the other systems."""

    def __init__(self, case: str):
        g = np.random.default_rng(0)
        clients = CLUSTERS * MEMBERS
        self.x, self.y = g.normal(size=(clients, OBSERVATIONS, D)), g.normal(size=(clients, OBSERVATIONS))
        self.cluster = np.arange(clients) // MEMBERS
        self.p_0, self.p = CASES[case]
        self.q = (1 - self.p_0) * self.p
        self.tau = self.p_0 / (self.p_0 + self.q)
        self.within = (1 - self.tau) * (1 - ALPHA) / self.q if self.q else 0.0
        self.local = 1 / ((1 - self.p_0) * (1 - self.p))
        self.generator = g

    def coins(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        draws = self.generator.random((count, 1 + CLUSTERS))
        return draws[:, 0] < self.p_0, draws[:, 1:] < self.p


def bare(peer: Peer) -> None:
    x, y, cluster = torch.from_numpy(peer.x), torch.from_numpy(peer.y), torch.from_numpy(peer.cluster)
    theta, turns = torch.zeros(len(x), D, dtype=torch.float64), Turns("bare", torch.__version__)
    while True:
        start = turns.wait()
        for xi_0, xi in zip(*peer.coins(STEPS["bare"]), strict=True):
            if xi_0 or xi.any():
                sums = torch.zeros(CLUSTERS, D, dtype=torch.float64).index_add_(0, cluster, theta)
                v = theta - (sums / MEMBERS)[cluster]
            if xi_0:
                u = theta - sums.mean(0) / MEMBERS
                theta = theta - ETA / peer.p_0 * (ALPHA * u + peer.tau * (1 - ALPHA) * v)
                continue
            residual = torch.bmm(x, theta.unsqueeze(2)).squeeze(2) - y
            local = theta - ETA * peer.local * torch.bmm(residual.unsqueeze(1), x).squeeze(1)
            if xi.any():
                mask = torch.from_numpy(xi)[cluster].unsqueeze(1)
                local = torch.where(mask, theta - ETA * peer.within * v, local)
            theta = local
        turns.done(start, STEPS["bare"])


def released(peer: Peer) -> None:
    theta, turns = [np.zeros(D) for _ in peer.x], Turns("released", np.__version__)
    while True:
        start = turns.wait()
        for xi_0, xi in zip(*peer.coins(STEPS["released"]), strict=True):
            means = [np.mean(theta[j * MEMBERS : (j + 1) * MEMBERS], axis=0) for j in range(CLUSTERS)]
            thetabar = np.mean(means, axis=0)
            for i, (x, y) in enumerate(zip(peer.x, peer.y, strict=True)):
                v = theta[i] - means[peer.cluster[i]]
                if xi_0:
                    pull = ALPHA * (theta[i] - thetabar) + peer.tau * (1 - ALPHA) * v
                    theta[i] = theta[i] - ETA / peer.p_0 * pull
                elif xi[peer.cluster[i]]:
                    theta[i] = theta[i] - ETA * peer.within * v
                else:
                    theta[i] = theta[i] - ETA * peer.local * (x.T @ (x @ theta[i] - y))
        turns.done(start, STEPS["released"])


def microseconds(reports: list[dict[str, float]]) -> float:
    return 1e6 * statistics.median(report["seconds"] for report in reports)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time Async-L2GD.")
    parser.add_argument("--seconds", type=float, default=30, help="of measurement per case")
    parser.add_argument("--scale", action="store_true", help="40,000 clients against 400, instead")
    parser.add_argument(
        "--system", choices=("hpcfl", "bare", "released"), help="play one system, driven by this script"
    )
    parser.add_argument("--case", choices=CASES, default="global")
    parser.add_argument("--members", type=int, default=MEMBERS, help="clients per cluster")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.system == "hpcfl":
        ours(options.case, options.members)
    elif options.system:
        {"bare": bare, "released": released}[options.system](Peer(options.case))
    else:
        drive(options.seconds, options.scale)


def drive(seconds: float, scale: bool) -> None:
    def command(system: str, case: str, members: int = MEMBERS) -> list[str]:
        script = str(HERE / Path(__file__).name)
        return [sys.executable, script, "--system", system, "--case", case, "--members", str(members)]

    if scale:
        for case in CASES:
            reports = in_turns({str(n): command("hpcfl", case, n) for n in (MEMBERS, 100 * MEMBERS)}, seconds)
            small, large = (microseconds(reports[str(n)]) for n in (MEMBERS, 100 * MEMBERS))
            print(
                f"{case}: {small:.0f} us at 400 clients, {large:.0f} us at 40,000: {large / 100 / small:.2f} x linear"
            )
        return
    for case, (p_0, p) in CASES.items():
        reports = in_turns({name: command(name, case) for name in ("hpcfl", "bare", "released")}, seconds)
        line = ", ".join(f"{name} {microseconds(reports[name]):.0f} us" for name in reports)
        ratio = 1 / median_ratio(reports["hpcfl"], reports["bare"])
        print(f"p_0 = {p_0}, p_j = {p}: {line}; hpcfl {ratio:.2f} x bare (target {TARGETS[case]} us)", flush=True)


if __name__ == "__main__":
    main()
