"""Async-L2GD in NumPy: random settings, the regulariser, Algorithm 1 with every toss of its coins, dense solutions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest

from hpcfl.rng import Purpose, stream
from hpcfl.theory.async_l2gd import Setting, TauRule, tau_of

RULES = get_args(TauRule)
P = 3
CLUSTERS = {2: np.array([0, 0, 1, 0, 1]), 3: np.array([0, 2, 0, 0, 2, 1])}  # uneven; one alone


def draw(seed):
    return stream(seed, Purpose.DATA)


def setting(seed, k=3, tau: str | float = "balance", **fixed) -> Setting:
    """A random one, but for the fields given; for "exact" gamma is equal inside each cluster."""
    g, cluster = draw(seed), CLUSTERS[k]
    gamma, alpha = g.uniform(0.2, 3, len(cluster)), g.uniform(0, 1, k)
    p_global, p = float(g.uniform(0.1, 0.6)), g.uniform(0.1, 0.6, k)
    gamma = gamma[:k][cluster] if tau == "exact" else gamma
    s = SimpleNamespace(**{"gamma": gamma, "alpha": alpha, "p_global": p_global, "p_cluster": p} | fixed)
    rule = tau_of(tau, s.p_global, s.p_cluster, s.alpha, s.gamma, cluster) if isinstance(tau, str) else np.full(k, tau)
    return Setting(s.gamma, cluster, s.alpha, s.p_global, s.p_cluster, rule)


def means(s, x):
    """thetabar [P], thetabar_j [K, P]; zero where alpha = 0 everywhere."""
    mine = [s.cluster == j for j in range(len(s.alpha))]
    by_cluster = np.array([np.average(x[m], axis=0, weights=s.gamma[m]) for m in mine])
    w = s.alpha[s.cluster] * s.gamma
    return (np.average(x, axis=0, weights=w) if w.any() else np.zeros(x.shape[1])), by_cluster


def deviations(s, x):
    between, within = means(s, x)
    return x - between, x - within[s.cluster]


def psi(s, x):
    """The psi_j [K]."""
    return np.bincount(s.cluster, s.gamma * (deviations(s, x)[1] ** 2).sum(1) / 2)


def varphi(s, x):
    return (s.alpha[s.cluster] * s.gamma * (deviations(s, x)[0] ** 2).sum(1)).sum() / 2


def regulariser(s, x):
    return ((1 - s.alpha) * psi(s, x)).sum() + varphi(s, x)


def columns(s):
    """gamma, alpha, tau, p_j of each client, [N, 1]."""
    return s.gamma[:, None], *(field[s.cluster][:, None] for field in (s.alpha, s.tau, s.p_cluster))


def regulariser_gradient(s, x):
    (u, v), (gamma, alpha, *_) = deviations(s, x), columns(s)
    return gamma * (alpha * u + (1 - alpha) * v)


def oracle(s, gradients, x) -> Iterator[tuple[float, np.ndarray]]:
    """Algorithm 1 at x [N, P]: every toss of the coins, its probability and its G [N, P]; gradients of f_i [N, P]."""
    (u, v), (gamma, alpha, tau, p), p0 = deviations(s, x), columns(s), s.p_global
    if p0 > 0:
        yield p0, gamma / p0 * (alpha * u + tau * (1 - alpha) * v)
    for tosses in product((False, True), repeat=len(s.alpha)):
        chance = (1 - p0) * np.prod(np.where(tosses, s.p_cluster, 1 - s.p_cluster))
        if chance > 0:
            heads = np.array(tosses)[s.cluster]
            G = gradients / ((1 - p0) * (1 - p))
            G[heads] = (gamma * (1 - tau) * (1 - alpha) * v)[heads] / ((1 - p0) * p[heads])
            yield chance, G


def expected(s, gradients, x, of: Callable = lambda G: G):
    return sum(chance * of(G) for chance, G in oracle(s, gradients, x))


def second_moment(s, gradients, x) -> float:
    return expected(s, gradients, x, lambda G: (G**2).sum())


class Quadratic:
    """Clients f_i(x) = x' H_i x / 2 - b_i' x, with the regulariser of a setting; all minima by dense algebra."""

    def __init__(self, s, seed):
        g, n = draw(1000 + seed), len(s.gamma)
        a = g.standard_normal((n, P, P))
        self.s, self.H, self.b = s, np.einsum("nij,nkj->nik", a, a) + 0.1 * np.eye(P), g.standard_normal((n, P))
        self.L = float(np.linalg.eigvalsh(self.H).max())
        matrix = np.zeros((n, n))  # of the regulariser: diag(w) - w w' / sum w, for each mean with its weights w
        shared = s.alpha[s.cluster] * s.gamma
        for w, scale in [(shared, 1.0), *(((s.cluster == j) * s.gamma, 1 - a) for j, a in enumerate(s.alpha))]:
            matrix += scale * (np.diag(w) - (np.outer(w, w) / w.sum() if w.any() else 0))
        dense = np.kron(matrix, np.eye(P))
        for i in range(n):
            dense[i * P : (i + 1) * P, i * P : (i + 1) * P] += self.H[i]
        self.optimum = np.linalg.solve(dense, self.b.ravel()).reshape(n, P)

    def gradients(self, x):
        return np.einsum("nij,nj->ni", self.H, x) - self.b

    def F(self, x):
        return ((self.gradients(x) - self.b) * x).sum() / 2 + regulariser(self.s, x)

    def gradient(self, x):
        return self.gradients(x) + regulariser_gradient(self.s, x)

    def smoothness(self, x) -> float:
        """E||G(x) - G(theta*)||^2 / (2 (F(x) - F(theta*))): G is affine, so the difference is G of the difference."""
        d = x - self.optimum
        moment = second_moment(self.s, self.gradients(x) - self.gradients(self.optimum), d)
        return moment / (2 * (self.F(x) - self.F(self.optimum)))


def check_unbiased(s, seed):
    x, gradients = draw(seed).standard_normal((2, len(s.gamma), P))
    assert sum(chance for chance, _ in oracle(s, gradients, x)) == pytest.approx(1, rel=1e-14)
    full = gradients + regulariser_gradient(s, x)
    np.testing.assert_allclose(expected(s, gradients, x), full, rtol=0, atol=1e-12)
