"""What theory predicts for a job of the Async-L2GD family, as lines for ``hpcfl theory``.

The formulas: theory/async_l2gd.py. Where the losses are quadratic, the minimiser is solved for (algorithms/blup.py),
and with it come the noise and the distance that is left after a number of iterations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from hpcfl.algorithm import Algorithm, RoundDecision, Work
from hpcfl.engine import Engine
from hpcfl.quadratics import is_quadratic
from hpcfl.reduce import to_host
from hpcfl.round import Round
from hpcfl.theory.async_l2gd import Setting, iterations_to, optimal_probabilities
from hpcfl.theory.curvature import Curvature


@dataclass(frozen=True)
class Prediction:
    """One line: what, and its value; one per cluster for an array [K]. key: what measures it in a run, if anything."""

    what: str
    value: float | np.ndarray
    key: str = ""


@dataclass(frozen=True)
class Traffic:
    """Vectors that a kind of round sends up and down: between all clients, within cluster j [K]."""

    between: tuple[int, int]
    within: tuple[np.ndarray, np.ndarray]

    @classmethod
    def of(cls, s: Setting, *, hierarchical: bool = True) -> Traffic:
        """hierarchical: clients send to their cluster, which sends its mean on; else to one server."""
        members = np.bincount(s.cluster, minlength=s.clusters)
        clients, clusters = len(s.cluster), s.clusters if hierarchical else 0
        return cls((clients + clusters, (1 + hierarchical) * clients + clusters), (members, members))


def of_setting(s: Setting, f: Curvature, L: float) -> Iterator[Prediction]:
    """The constants of the objective and of the coins, and the best coins. L: the smoothness that local steps meet."""
    yield Prediction("smoothness of the clients' losses, L", f.L)
    if L != f.L:
        yield Prediction("that of their samples, which takes L's place", L)
    yield Prediction("their strong convexity, mu", f.mu)
    yield Prediction("C_1 = max alpha_j gamma_i", s.c1)
    yield Prediction("C_2 = max (1 - alpha_j) gamma_i", s.c2)
    yield Prediction("alpha_j", s.alpha)
    yield Prediction("tau_j", s.tau)
    yield Prediction("p_0", s.p_global)
    yield Prediction("p_j", s.p_cluster)
    best = optimal_probabilities(L, s.c1, s.c2)
    yield Prediction("optimal p_0", best[0])
    yield Prediction("optimal p_j", best[1])
    for kind, terms in s.smoothness_terms(L).items():
        yield Prediction(f"expected smoothness, {kind} term", terms if len(terms) > 1 else float(terms[0]))
    yield Prediction("expected smoothness, their maximum, Lcal", s.expected_smoothness(L))


def of_rounds(s: Setting, traffic: Traffic, rounds: int, vector: int, refresh: float = 0.0) -> Iterator[Prediction]:
    """Expected counts. vector: bytes of a model; refresh: expected further averagings over all clients."""
    expected = s.expected_rounds(rounds)
    yield Prediction(f"global rounds of {rounds:,}", expected["global"], "global_rounds")
    yield Prediction("rounds within one cluster only", expected["within"], "cluster_rounds")
    yield Prediction("rounds in which a cluster forms its mean", expected["mean"], "mean_rounds")
    yield Prediction("local gradient steps of a client", expected["local"])
    yield Prediction("global rounds, consecutive ones merged", expected["global_merged"], "global_merged")
    yield Prediction("rounds with a cluster's mean, merged", expected["mean_merged"], "mean_merged")
    for way, what in enumerate(("up", "down")):
        vectors = (rounds * s.p_global + refresh) * traffic.between[way] + rounds * float(s.q @ traffic.within[way])
        yield Prediction(f"vectors {what}", vectors, f"vectors_{what}")
        yield Prediction(f"megabytes {what}", vectors * vector / 1e6, f"megabytes_{what}")


def of_descent(
    s: Setting, f: Curvature, L: float, eta: float, traffic: Traffic, accuracy: float, vector: int
) -> Iterator[Prediction]:
    """Step sizes, and what it takes to a relative accuracy of the squared distance to the minimiser. L as above."""
    smooth = s.expected_smoothness(L)
    yield Prediction("step size of this job, eta", eta)
    yield Prediction("largest eta that does not overshoot the means", s.largest_lr())
    yield Prediction("largest eta of the convergence theorem, 1/(2 Lcal)", 0.5 / smooth)
    iterations = iterations_to(accuracy, smooth, f.mu)
    yield Prediction(f"iterations to accuracy {accuracy:g} at eta = 1/(2 Lcal)", iterations)
    yield Prediction("global rounds until then", iterations * s.p_global)
    per_round = s.p_global * sum(traffic.between) + float(s.q @ (traffic.within[0] + traffic.within[1]))
    yield Prediction("megabytes until then, up and down", iterations * per_round * vector / 1e6)


def of_noise(
    engine: Engine,
    s: Setting,
    f: Curvature,
    eta: float,
    loss_scale: np.ndarray,
    theta: np.ndarray,
    rounds: int,
    *,
    constant: bool,
) -> Iterator[Prediction]:
    """The coins' noise at the minimiser theta* [N, P], and what it leaves of the distance to it. On one rank.

    constant: whether eta is. Of minibatches' noise nothing is said.
    """
    u, v = distances_to_means(s, theta)
    gradients = np.zeros(len(theta))
    for block in engine.blocks(engine.everyone, {}, 0, full_batch=True):
        rows = block.ids[: block.real]
        gradient = block.grad(torch.from_numpy(theta[block.ids]), block.batch(0))[: block.real]
        gradients[rows] = (to_host(gradient * gradient).sum(1)) * loss_scale[rows] ** 2
    sigma2 = s.noise(gradients, u, v)
    start = float(((to_host(engine.task.start()) - theta) ** 2).sum())
    floor = 2 * eta * sigma2 / f.mu if f.mu > 0 else math.inf
    holds = constant and eta <= 0.5 / s.expected_smoothness(f.L) * (1 + 1e-12)
    left = (1 - eta * f.mu) ** rounds * start + floor if holds else math.nan
    yield Prediction("noise of a step at the minimiser, sigma^2", sigma2)
    yield Prediction("squared distance to it at the start", start)
    if not holds:
        yield Prediction("no bound: eta is not constant, or above 1/(2 Lcal)", math.nan)
    yield Prediction("what noise leaves at most, 2 eta sigma^2/mu", floor if holds else math.nan)
    yield Prediction(f"distance after {rounds:,} iterations at most", left, "squared_distance")


def distances_to_means(s: Setting, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """theta_i - thetabar, theta_i - thetabar_j: [N, P] each."""
    sums = np.zeros((s.clusters, theta.shape[1]))
    np.add.at(sums, s.cluster, s.gamma[:, None] * theta)
    of_clusters, weights = sums / s.weights[:, None], s.alpha * s.weights
    thetabar = weights @ of_clusters / (weights.sum() or 1.0)
    return theta - thetabar, theta - of_clusters[s.cluster]


def solved(engine: Engine, solver: Work) -> np.ndarray | None:
    """[N, P] what a solver that is done after one round finds, by client; None for other than quadratic losses.

    On one rank.
    """
    if not is_quadratic(engine):
        return None
    prepared = cast(Algorithm, solver.prepare(engine))
    everyone = np.arange(engine.group.population)
    decision = RoundDecision(0, everyone, {}, evaluate=False, checkpoint=False, stop=None)
    theta = prepared.round(prepared.init(engine.task, engine.group), Round(engine, decision)).local["theta"]
    found = np.empty(theta.shape)
    found[engine.group.ids] = to_host(theta)
    return found
