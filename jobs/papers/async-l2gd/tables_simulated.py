"""Simulated data: how far from the true parameters each method ends, by the number of observations per client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from formatting import over, spread, table
from runs import Runs, last, whole

OBSERVATIONS = (1, 5, 10, 25, 50, 100, 200)
ITERATED = (5, 25, 100)  # observations for which the iterative methods run, too
GAMMAS = np.linspace(0.01, 2, 20)  # among which the single cluster's is chosen, by the true error
ERROR = "/evaluations/personal_estimation_error"  # mean over clients of ||theta_i - theta_i*||
MODELS = "/final/models/personal"

SOLVED = {"blup": "multi-cluster (BLUP)", "local": "local", "pooled": "pooled", "single": "single cluster, best gamma"}
REFERENCE = {  # closed form, 5 seeds, in the order of SOLVED
    1: (5.578, 6.023, 6.223, 6.073),
    5: (4.259, 5.370, 6.115, 5.324),
    10: (3.361, 4.430, 6.106, 4.375),
    25: (1.553, 2.082, 6.098, 1.687),
    50: (0.792, 0.814, 6.094, 0.802),
    100: (0.489, 0.492, 6.092, 0.490),
    200: (0.329, 0.330, 6.091, 0.329),
}
ITERATIVE = {"async": "Async-L2GD", "sync": "one coin", "vr": "accelerated"}
REFERENCE_ITERATED = {  # seed 0: BLUP's error, then error and mean distance to BLUP
    5: {"blup": (4.303,), "sync": (4.423, 1.069), "async": (4.426, 1.082)},
    25: {"blup": (1.568,), "sync": (1.568, 0.022), "async": (1.568, 0.019)},
}


def where(observations: int, seed: int) -> str:
    return f"simulated/{observations}-observations/seed-{seed}"


def run(
    runs: Runs, *, seeds: int, observations: Sequence[int], iterated: Sequence[int], iterated_seeds: int
) -> str | None:
    """Collective over the world: both tables as Markdown, on rank 0."""
    solved = {(o, s): _solve(runs, o, s) for o in observations for s in range(seeds)}
    several = [o for o in observations if o in iterated]
    descended = {
        (o, s): {name: _run(runs, name, o, s) for name in ITERATIVE}
        for o in several
        for s in range(min(seeds, iterated_seeds))
    }
    if runs.comm.rank != 0:
        return None
    parts = [_closed_form(solved, observations, seeds)]
    if descended:
        parts.append(_iterated(descended, solved, several, min(seeds, iterated_seeds)))
    return "\n\n".join(parts)


def _run(runs: Runs, name: str, observations: int, seed: int, *changes: str) -> Path:
    changes = (f"data.observations={observations}", f"run.seed={seed}", *changes)
    return runs.run(f"simulated/{name}.toml", where(observations, seed), *changes)


def _solve(runs: Runs, observations: int, seed: int) -> dict[str, list[Path]]:
    """Collective: method -> its runs, of which the one with the least true error counts."""
    found = {name: [_run(runs, name, observations, seed)] for name in ("blup", "local", "pooled")}
    return found | {
        "single": [_run(runs, "single", observations, seed, f"algorithm.gamma={float(gamma)}") for gamma in GAMMAS]
    }


def _closed_form(solved: dict[tuple[int, int], dict[str, list[Path]]], observations: Sequence[int], seeds: int) -> str:
    """Errors of what can be solved for."""
    rows = []
    for o in observations:
        errors = {
            name: [[float(last(run, ERROR)) for run in solved[o, s][name]] for s in range(seeds)] for name in SOLVED
        }
        row = [str(o)]
        for name, reference in zip(SOLVED, REFERENCE.get(o, [None] * len(SOLVED)), strict=True):
            row += [spread([min(e) for e in errors[name]]), "-" if reference is None else f"{reference:.3f}"]
        chosen = [GAMMAS[np.argmin(e)] for e in errors["single"]]
        rows.append([*row, spread(chosen, 2)])
    header = ["observations", *(column for name in SOLVED.values() for column in (name, "reference")), "best gamma"]
    title = (
        f"Estimation error ||theta_i - theta_i*||, mean over clients, {over(seeds)}. Reference: closed form, 5 seeds."
    )
    return f"{title}\n\n{table(header, rows)}"


def _iterated(
    descended: dict[tuple[int, int], dict[str, Path]],
    solved: dict[tuple[int, int], dict[str, list[Path]]],
    observations: Sequence[int],
    seeds: int,
) -> str:
    """Errors of the iterative methods, their distance to the minimiser, and rounds of averaging."""
    rows = []
    for o in observations:
        minimisers = [solved[o, s]["blup"][0] for s in range(seeds)]
        reference = REFERENCE_ITERATED.get(o, {})
        rows.append(_row(o, "BLUP", minimisers, ["-"] * 3, reference.get("blup", ())))
        for name, word in ITERATIVE.items():
            results = [descended[o, s][name] for s in range(seeds)]
            apart = [_distance(run, minimisers[s]) for s, run in enumerate(results)]
            between, within = np.mean([_averagings(run) for run in results], 0)
            shown = f"{np.mean(apart):.0e}" if np.mean(apart) < 0.0005 else spread(apart)
            rows.append(_row(o, word, results, [shown, f"{between:,.0f}", f"{within:,.0f}"], reference.get(name, ())))
    header = ["observations", "method", "error", "reference", "distance to BLUP", "reference"]
    header += ["averagings of all", "within a cluster"]
    title = (
        f"Iterative methods, {over(seeds)}. Distance: of the personal models to the minimiser, mean over the clients. "
        "Averagings within a cluster: without the others, mean over the clusters. Reference: seed 0."
    )
    return f"{title}\n\n{table(header, rows)}"


def _row(observations: int, word: str, results: list[Path], cells: list[str], reference: Sequence[float]) -> list[str]:
    """cells: distance, and averagings. reference: error, and distance, as far as known."""
    error, distance = [*(f"{x:.3f}" for x in reference), "-", "-"][:2]
    apart, *averagings = cells
    found = spread([float(last(run, ERROR)) for run in results])
    return [str(observations), word, found, error, apart, distance, *averagings]


def _distance(run: Path, minimiser: Path) -> float:
    return float(np.linalg.norm(whole(run, MODELS) - whole(minimiser, MODELS), axis=1).mean())


def _averagings(run: Path) -> tuple[float, float]:
    return float(whole(run, "/final/global_rounds")), float(whole(run, "/final/cluster_rounds").mean())
