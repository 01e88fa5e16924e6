"""The donor data's surrogate: accuracy and cross entropy on the clients' own test rows, beside what was published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from formatting import over, table
from runs import Runs, last, whole

METHODS = {"async": "Async-L2GD", "single": "single cluster", "local": "local", "pooled": "pooled"}
CLIPPED = 6.0  # the published cross entropies are cut here
LARGE = 0.9  # of a cross entropy, and of an accuracy

HEADER = ["mean accuracy", "median", "std", "lower quartile", "max cross entropy"]
HEADER += ["clients with cross entropy > 0.9", "clients with accuracy > 0.9", "mean cross entropy", "estimation error"]
PUBLISHED = {  # 29,490 clients of the licensed data; the last two are numbers of clients
    "personalised (one coin)": (0.94240, 0.94845, 0.06611, 0.92063, 2.6677, 247, 24872),
    "local": (0.93991, 0.94737, 0.06987, 0.91914, 6.0, 1205, 24628),
    "pooled": (0.94226, 0.94847, 0.06698, 0.92085, 2.7603, 247, 24873),
}
PUBLISHED_CLIENTS = 29490
PUBLISHED_AT_LEAST = {"pooled": 0.9857, "local": 0.9717}  # share of clients whose personal accuracy is at least that


def run(runs: Runs, *, seeds: int, clients: int | None) -> str | None:
    """Collective over the world: the table as Markdown, on rank 0. clients: so many; None: as the job files say."""
    changes = [] if clients is None else [f"data.clients={clients}"]
    done = [
        {name: runs.run(f"donors/{name}.toml", f"donors/seed-{s}", f"run.seed={s}", *changes) for name in METHODS}
        for s in range(seeds)
    ]
    if runs.comm.rank != 0:
        return None
    values = [{name: _tested(name, folder) for name, folder in one.items()} for one in done]
    rows = [
        [f"{word}, surrogate", *_cells(np.mean([_statistics(*one[name]) for one in values], 0))]
        for name, word in METHODS.items()
    ]
    for name, numbers in PUBLISHED.items():
        *others, entropy, accuracy = numbers
        shares = [*others, entropy / PUBLISHED_CLIENTS, accuracy / PUBLISHED_CLIENTS]
        rows.append([f"{name}, published", *_cells(np.array(shares)), "-", "-"])
    beaten = []
    for name, published in PUBLISHED_AT_LEAST.items():
        share = np.mean([(one["async"][0] >= one[name][0]).mean() for one in values])
        beaten.append(f"{name} in {share:.2%} of the clients (published: {published:.2%})")
    number = len(whole(done[0]["async"], "/clients/n_test"))
    title = (
        "Of each client, on its own test rows. Published: 29,490 clients of the licensed data, a model chosen on the "
        f"test rows; surrogate: {number:,} clients of generated data, {over(seeds, deviation=False)}. The two can "
        f"agree in kind only. Cross entropies are cut at {CLIPPED:g}."
    )
    return (
        f"{title}\n\n{table(['test', *HEADER], rows)}\n\n"
        f"The personal model's accuracy is at least that of the other: {', '.join(beaten)}."
    )


def _tested(name: str, folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Accuracy, cross entropy, and distance from the true parameters [clients that have test rows]."""
    model, has_rows = "global" if name == "pooled" else "personal", whole(folder, "/clients/n_test") > 0
    names = ("test_accuracy", "test_loss", "estimation_error")
    accuracy, loss, error = (last(folder, f"/per_client/{model}/{n}")[has_rows].astype(np.float64) for n in names)
    return accuracy, np.minimum(loss, CLIPPED), error


def _statistics(accuracy: np.ndarray, entropy: np.ndarray, error: np.ndarray) -> list[float]:
    """In the order of HEADER."""
    first = [accuracy.mean(), np.median(accuracy), accuracy.std(ddof=1), np.quantile(accuracy, 0.25), entropy.max()]
    return [*first, (entropy > LARGE).mean(), (accuracy > LARGE).mean(), entropy.mean(), error.mean()]


def _cells(statistics: np.ndarray) -> list[str]:
    """In the order of HEADER, as far as given."""
    numbers = statistics.tolist()
    shares = [f"{numbers[5]:.2%}", f"{numbers[6]:.1%}"]
    return [*(f"{x:.4f}" for x in numbers[:5]), *shares, *(f"{x:.4f}" for x in numbers[7:])]
