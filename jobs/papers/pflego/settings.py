"""The settings of PFLEGO's experiments (arXiv 2202.09848): each a job file of this folder with changes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

TAU = 50
DRAWN = 'start_heads = "drawn"'  # every client's head starts at random numbers of its own
BETA = 0.007
RHO = 0.001
RHO_OMNIGLOT = 0.003

SETS = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "emnist": "EMNIST",
    "cifar10": "CIFAR-10",
}
DEGREES = {"high": "High-Pers", "medium": "Medium-Pers", "none": "No-Pers"}
METHODS = {
    "fedavg": "FedAvg",
    "fedper": "FedPer",
    "fedrep": "FedRep",
    "fedbabu": "FedBABU",
    "fedrecon": "FedRecon",
    "pflego": "PFLEGO",
}
SHARES = (20, 40, 60, 100)  # percent of the clients that take part in a round
SLOW = 0.001  # beta and rho of the participation study
BETAS = (0.001, 0.003, 0.007, 0.02)  # the paper's grid is not known
RHOS = (0.001, 0.003, 0.007)
TAUS = (10, 25, 50)  # of the comparison with FedRecon; "several" in the paper
COHORT = 16  # its participants: the paper draws 4 to 28 anew in every round, here their mean takes part in all
VALIDATION = 0.1  # share of the training samples on which rates are chosen


@dataclass(frozen=True)
class Setting:
    """One run: a data set, and changes "part.key=value" of its job file."""

    data: str
    changes: tuple[str, ...]

    @property
    def job_file(self) -> str:
        return f"{self.data}.toml"


Rates = tuple[float, float]  # beta, rho


def algorithm(method: str, rates: Rates, tau: int = TAU) -> str:
    """The [algorithm] table of a method, full batches throughout.

    FedRep: how tau divides is not known; half of the steps are the head's. FedBABU's momentum as in the released code.
    """
    beta, rho = rates
    return {
        "fedavg": f'{{name = "fedavg", local_steps = {tau}, lr = {beta}}}',
        "fedper": f'{{name = "fedper", {DRAWN}, local_steps = {tau}, lr = {beta}}}',
        "fedrep": f'{{name = "fedrep", {DRAWN}, head_steps = {tau // 2}, body_steps = {tau - tau // 2}, lr = {beta}}}',
        "fedbabu": f'{{name = "fedbabu", local_steps = {tau}, lr = {beta}, momentum = 0.9}}',
        "fedrecon": f'{{name = "fedrecon", {DRAWN}, local_steps = {tau}, head_lr = {beta}, server_lr = {rho}}}',
        "pflego": f'{{name = "pflego", {DRAWN}, local_steps = {tau}, head_lr = {beta}, server_lr = {rho}}}',
    }[method]


def setting(data: str, method: str, seed: int, rates: Rates, *changes: str, tau: int = TAU) -> Setting:
    return Setting(data, (f"run.seed={seed}", f"algorithm={algorithm(method, rates, tau)}", *changes))


def degree_of(degree: str) -> str:
    return f"partition.degree={json.dumps(degree)}"


def table(
    sets: Iterable[str],
    degrees: Sequence[str],
    methods: Sequence[str],
    seeds: int,
    rates: Rates,
    tuned: Mapping[str, Rates],
) -> dict[tuple[str, str, str, int], Setting]:
    """(data, degree, method, seed) -> its run. tuned: PFLEGO's own rates by degree."""
    return {
        (d, g, m, s): setting(d, m, s, tuned.get(g, rates) if m == "pflego" else rates, degree_of(g))
        for d, g, m, s in product(sets, degrees, methods, range(seeds))
    }


def participation(
    data: str, degree: str, methods: Sequence[str], shares: Sequence[int], seeds: int, rates: Rates
) -> dict[tuple[str, int, int], Setting]:
    """(method, percent of the clients, seed) -> its run."""
    return {
        (m, r, s): setting(data, m, s, rates, degree_of(degree), f"run.participation={r / 100}")
        for m, r, s in product(methods, shares, range(seeds))
    }


def learning_rates(
    data: str, degrees: Sequence[str], betas: Sequence[float], rhos: Sequence[float], seeds: int, *changes: str
) -> dict[tuple[str, float, float, int], Setting]:
    """(degree, beta, rho, seed) -> its run of PFLEGO."""
    return {
        (g, b, r, s): setting(data, "pflego", s, (b, r), degree_of(g), *changes)
        for g, b, r, s in product(degrees, betas, rhos, range(seeds))
    }


def omniglot(
    methods: Sequence[str], taus: Sequence[int], seeds: int, rates: Rates
) -> dict[tuple[str | int, int, str, int], Setting]:
    """(participants, tau, method, seed) -> its run, where the participants are "20 %", or COHORT beside FedRecon.

    FedAvg has 55 outputs, as many as the largest alphabet has characters.
    """
    few = {("20 %", TAU, m, s): setting("omniglot", m, s, rates) for m, s in product(methods, range(seeds))}
    cohort = f"run.clients_per_round={COHORT}"
    return few | {
        (COHORT, t, m, s): setting("omniglot", m, s, rates, cohort, tau=t)
        for t, m, s in product(taus, ("fedrecon", "pflego"), range(seeds))
        if m in methods
    }
