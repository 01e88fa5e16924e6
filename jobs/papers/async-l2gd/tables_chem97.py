"""Chemistry grades: the pull's strength by validation, and the squared error of each school's test pupils."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import TypeVar

import numpy as np
from formatting import table, with_error
from runs import Runs, last, whole

GAMMAS = tuple(10 ** (k / 2) for k in range(5))  # 1 to 100
LAMS = tuple(10.0**k for k in range(5))  # 1 to 10,000
METHODS = {
    "blup": "multi-cluster (exact)",
    "async": "Async-L2GD",
    "single": "single cluster (exact)",
    "local": "local",
    "pooled": "pooled",
}
VALIDATION = "/evaluations/personal_validation_squared_error"  # mean over schools
TEST = "/per_client/personal/test_squared_error"
PARAMETERS = 4

Key = TypeVar("Key")


def run(runs: Runs, *, seeds: int) -> str | None:
    """Collective over the world: the table as Markdown, on rank 0. A seed is a split of every school's pupils."""
    done = [_methods(runs, s) for s in range(seeds)]
    if runs.comm.rank != 0:
        return None
    folders = [folders for folders, _ in done]
    pupils = whole(folders[0]["blup"], "/clients/n_test")  # the same for all seeds
    tested = pupils > 0
    errors = {name: np.mean([last(one[name], TEST)[tested] for one in folders], 0) for name in METHODS}  # [schools]
    rows = []
    for name, word in METHODS.items():
        row = [word, with_error(errors[name]), f"{np.average(errors[name], weights=pupils[tested]):.4f}"]
        row += [f"{np.median(errors[name]):.4f}"]
        row += ["" if name == "blup" else with_error(errors[name] - errors["blup"], 5)]
        rows.append(row)
    header = ["test squared error", "mean over schools", "mean over pupils", "median school"]
    header += ["mean difference from the first"]
    few = int((whole(folders[0]["blup"], "/clients/n_train") < PARAMETERS).sum())
    chosen = "; ".join(f"seed {s}: {text}" for s, (_, text) in enumerate(done))
    title = (
        f"Squared error of the standardised grade in the {tested.sum():,} schools that have test pupils, each the mean "
        f"over {seeds} split{'s' * (seeds > 1)} of the pupils; ± is the standard error over schools. {few} schools "
        f"have fewer pupils to train on than the model has parameters ({PARAMETERS}): local least squares are there "
        f"those of least norm. Chosen by validation: {chosen}."
    )
    return f"{title}\n\n{table(header, rows)}"


def _methods(runs: Runs, seed: int) -> tuple[dict[str, Path], str]:
    """Collective: method -> its run, with gamma and lam that were chosen by validation; and what was chosen."""

    def one(name: str, *changes: str) -> Path:
        return runs.run(f"chem97/{name}.toml", f"chem97/seed-{seed}", f"run.seed={seed}", *changes)

    def best(tried: Mapping[Key, Path]) -> Key:
        return runs.comm.from_root(lambda: min(tried, key=lambda values: float(last(tried[values], VALIDATION))))

    both = {(g, m): one("blup", f"algorithm.gamma={g}", f"algorithm.lam={m}") for g, m in product(GAMMAS, LAMS)}
    alone = {g: one("single", f"algorithm.gamma={g}") for g in GAMMAS}
    gamma, lam = best(both)
    single = best(alone)
    lr = min(0.004, 0.04 / gamma)  # below the largest that averaging admits, 0.145/gamma
    iterated = one("async", f"algorithm.gamma={gamma}", f"algorithm.lam={lam}", f"algorithm.lr={lr}")
    folders = {"blup": both[gamma, lam], "async": iterated, "single": alone[single]}
    folders |= {name: one(name) for name in ("local", "pooled")}
    return folders, f"gamma {gamma:.3g} and lam {lam:g}; single cluster: gamma {single:.3g}"
