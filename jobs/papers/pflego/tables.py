"""The tables of PFLEGO's experiments, in Markdown, from what runs are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TypeVar

import numpy as np
from formatting import over, table
from runs import last, whole
from settings import COHORT, DEGREES, METHODS, SETS, TAU, VALIDATION, Rates

RECENT = 10  # rounds over which accuracies are averaged
PARTICIPANTS = "/rounds/participants_test_accuracy"
PUBLISHED = {  # workshop version, 2023: test accuracy in percent and its deviation, in the order of DEGREES
    "mnist": {
        "fedper": ((97.88, 0.25), (92.83, 0.46), (87.23, 0.33)),
        "fedavg": ((97.54, 0.25), (92.83, 0.52), (93.12, 0.24)),
        "pflego": ((98.43, 0.21), (94.22, 0.43), (90.68, 0.17)),
    },
    "cifar10": {
        "fedper": ((85.15, 1.08), (61.01, 0.84), (37.88, 0.59)),
        "fedavg": ((85.18, 0.96), (64.53, 0.75), (61.33, 0.52)),
        "pflego": ((87.81, 0.94), (74.83, 0.66), (58.98, 0.81)),
    },
}
SCORE = (
    f"accuracy in percent of a round's participants with the models that they hold after their local work, over all "
    f"of their test samples: mean ± deviation over the last {RECENT} rounds"
)
COSTS = ["all clients", "s per round", "passes"]
COSTS_IN_WORDS = (
    "All clients: mean of their test accuracies after the last round, in percent, with their personal models (FedAvg: "
    "the global one; FedBABU: after 5 steps of the head; FedRecon: after its steps of the head). Seconds: median. "
    "Passes: forward + backward through the body, per participant and round"
)

Key = TypeVar("Key")


def comparison(
    results: Mapping[tuple[str, str, str, int], Path],
    degrees: Sequence[str],
    methods: Sequence[str],
    seeds: int,
    rates: Rates,
    tuned: Mapping[str, Rates],
) -> str:
    """The methods on each data set beside what was published. results: (data, degree, method, seed) -> run."""
    own = "; ".join(f"{DEGREES[g]} {in_words(r)}" for g, r in tuned.items() if g in degrees)
    title = (
        f"Test {SCORE}, {over(seeds, deviation=False)}; {in_words(rates)}{f' (PFLEGO: {own})' * bool(own)}. Published: "
        "workshop version, of three methods; with which rates is not known."
    )
    parts = []
    for data in dict.fromkeys(d for d, *_ in results):
        scores, costs = [], []
        for m in methods:
            runs = {g: [path for key, path in results.items() if key[:3] == (data, g, m)] for g in degrees}
            scores.append([METHODS[m], *(cell for g in degrees for cell in beside(runs[g], published(data, m, g)))])
            costs.append([METHODS[m], *(cell for g in degrees for cell in costs_of(m, runs[g]))])
        words = [DEGREES[g] for g in degrees]
        header = [SETS[data], *(column for word in words for column in (word, "published", "difference"))]
        parts.append(table(header, scores))
        parts.append(table([SETS[data], *(f"{word}: {column}" for word in words for column in COSTS)], costs))
    return "\n\n".join([title, f"{COSTS_IN_WORDS}.", *parts])


def participation(
    results: Mapping[tuple[str, int, int], Path],
    data: str,
    degree: str,
    methods: Sequence[str],
    shares: Sequence[int],
    seeds: int,
    rates: Rates,
) -> str:
    """How fast each method learns by the number of participants. results: (method, percent, seed) -> run."""
    at = checkpoints(results)
    rows = []
    for m, r in product(methods, shares):
        runs = [path for key, path in results.items() if key[:2] == (m, r)]
        rows.append([METHODS[m], f"{r} %", *progress(runs, at)])
    title = f"{SETS[data]}, {DEGREES[degree]}, {in_words(rates)}, {over(seeds, deviation=False)}. {progress_in_words()}"
    return f"{title}\n\n{table(['method', 'participants', *progress_header(at)], rows)}"


def learning_rates(results: Mapping[tuple[str, float, float, int], Path], data: str, degree: str, seeds: int) -> str:
    """How fast PFLEGO learns by beta and rho. results: (degree, beta, rho, seed) -> run."""
    at = checkpoints(results)
    rows: list[list[str]] = []
    early: dict[str, list[float]] = {">": [], "=": [], "<": []}
    for beta, rho in sorted({key[1:3] for key in results}, key=lambda pair: (-pair[0] / pair[1], pair)):
        runs = [path for key, path in results.items() if key[1:3] == (beta, rho)]
        rows.append([f"{beta:g}", f"{rho:g}", f"{beta / rho:.3g}", *progress(runs, at)])
        early[">" if beta > rho else "<" if beta < rho else "="] += [after(run, at[0]) for run in runs]
    title = f"PFLEGO on {SETS[data]}, {DEGREES[degree]}, {over(seeds, deviation=False)}. {progress_in_words()}"
    means = ", ".join(f"{np.mean(found):.2f} where beta {sign} rho" for sign, found in early.items() if found)
    return (
        f"{title}\n\n{table(['beta', 'rho', 'beta / rho', *progress_header(at)], rows)}\n\n"
        f"Mean after {at[0]} rounds: {means}."
    )


def omniglot(
    results: Mapping[tuple[str | int, int, str, int], Path],
    methods: Sequence[str],
    taus: Sequence[int],
    seeds: int,
    rates: Rates,
) -> str:
    """All methods, and FedRecon beside PFLEGO. results: (participants, tau, method, seed) -> run."""

    def of(*wanted: str | int) -> list[Path]:
        return [path for key, path in results.items() if key[:3] == wanted]

    rows = [[METHODS[m], beside(of("20 %", TAU, m))[0], *costs_of(m, of("20 %", TAU, m))] for m in methods]
    others = []
    for tau in taus:
        recon, pflego = (of(COHORT, tau, m) for m in ("fedrecon", "pflego"))
        apart = f"{score(pflego)[0] - score(recon)[0]:+.2f}" if pflego and recon else "-"
        others.append([str(tau), beside(recon)[0], beside(pflego)[0], apart])
    title = (
        f"Omniglot, tau = {TAU}, {in_words(rates)}, {over(seeds, deviation=False)}. Participants, 20 %: test {SCORE}. "
        f"{COSTS_IN_WORDS}. FedAvg shares an output for every character of the largest alphabet."
    )
    return (
        f"{title}\n\n{table(['Omniglot', 'participants', *COSTS], rows)}\n\n"
        f"The same score with {COHORT} participants in every round (published: 4 to 28, drawn anew in every round):\n\n"
        f"{table(['tau', METHODS['fedrecon'], METHODS['pflego'], 'difference'], others)}"
    )


def tuning(
    results: Mapping[tuple[str, float, float, int], Path],
    data: str,
    degrees: Sequence[str],
    betas: Sequence[float],
    rhos: Sequence[float],
    seeds: int,
) -> str:
    """PFLEGO's validation accuracy on a grid, and the best pairs. results: (degree, beta, rho, seed) -> run."""
    parts, best = [], []
    for g in degrees:
        found = {}
        for pair in product(betas, rhos):
            runs = [path for key, path in results.items() if key[:3] == (g, *pair)]
            if runs:
                found[pair] = 100 * np.mean([last(run, "/evaluations/personal_validation_accuracy") for run in runs])
        rows = [[f"{b:g}", *(f"{found[b, r]:.2f}" if (b, r) in found else "-" for r in rhos)] for b in betas]
        parts.append(table([f"{DEGREES[g]}: beta", *(f"rho = {r:g}" for r in rhos)], rows))
        if found:
            beta, rho = max(found, key=lambda pair: found[pair])
            best.append(f"{g}:{beta:g}:{rho:g}")
    title = (
        f"PFLEGO on {SETS[data]}, {over(seeds, deviation=False)}: mean of all clients' accuracies in percent on the "
        f"{VALIDATION:.0%} of their training samples that are kept for validation, after the last round."
    )
    return "\n\n".join([title, *parts, f"The best pairs: --rates {','.join(best)}"])


def in_words(rates: Rates) -> str:
    return f"beta = {rates[0]:g}, rho = {rates[1]:g}"


def published(data: str, method: str, degree: str) -> tuple[float, float] | None:
    row = PUBLISHED.get(data, {}).get(method)
    return None if row is None else row[list(DEGREES).index(degree)]


def score(runs: Sequence[Path]) -> tuple[float, float]:
    """In percent: mean over the last rounds and deviation over them (divided by their number), mean over the runs."""
    recent = [100 * whole(run, PARTICIPANTS)[-RECENT:] for run in runs]
    return float(np.mean([r.mean() for r in recent])), float(np.mean([r.std() for r in recent]))


def beside(runs: Sequence[Path], other: tuple[float, float] | None = None) -> list[str]:
    """The runs' score, the published one, and the difference of the means."""
    cells = [f"{mean:.2f} ± {deviation:.2f}" for mean, deviation in ([score(runs)] if runs else [])] or ["-"]
    cells.append("-" if other is None else f"{other[0]:.2f} ± {other[1]:.2f}")
    return [*cells, "-" if other is None or not runs else f"{score(runs)[0] - other[0]:+.2f}"]


def costs_of(method: str, runs: Sequence[Path]) -> list[str]:
    """In the order of COSTS."""
    if not runs:
        return ["-"] * len(COSTS)

    def mean(values: Callable[[Path], np.ndarray]) -> float:
        return float(np.mean([values(run) for run in runs]))

    model = "global" if method == "fedavg" else "personal"
    everyone = mean(lambda run: 100 * last(run, f"/evaluations/{model}_test_accuracy"))
    seconds = mean(lambda run: np.median(whole(run, "/rounds/seconds")))
    forward = mean(lambda run: whole(run, "/rounds/forward_passes").mean())
    backward = mean(lambda run: whole(run, "/rounds/backward_passes").mean())
    return [f"{everyone:.2f}", f"{seconds:.3g}", f"{forward:g} + {backward:g}"]


def checkpoints(results: Mapping[Key, Path]) -> list[int]:
    """Rounds after which to look: a tenth, a quarter, half and all of those of the first run."""
    rounds = len(whole(next(iter(results.values())), PARTICIPANTS))
    return sorted({max(1, round(share * rounds)) for share in (0.1, 0.25, 0.5, 1)})


def after(run: Path, rounds: int) -> float:
    """Accuracy in percent, mean over the last few of the first ``rounds`` rounds."""
    return float(100 * whole(run, PARTICIPANTS)[max(0, rounds - RECENT) : rounds].mean())


def progress(runs: Sequence[Path], at: Sequence[int]) -> list[str]:
    """In the order of ``progress_header``."""
    if not runs:
        return ["-"] * (len(at) + 1)
    loss = np.mean([whole(run, "/rounds/train_loss")[-RECENT:].mean() for run in runs])
    return [*(f"{np.mean([after(run, rounds) for run in runs]):.2f}" for rounds in at), f"{loss:.4f}"]


def progress_header(at: Sequence[int]) -> list[str]:
    return [*(f"after {rounds} rounds" for rounds in at), "training loss"]


def progress_in_words() -> str:
    return (
        f"Test accuracy in percent of a round's participants with the models that they hold after their local work, "
        f"mean over the {RECENT} rounds before; training loss of the last {RECENT} rounds."
    )
