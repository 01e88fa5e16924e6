"""What is known of Async-L2GD before it runs: tau_j, step sizes, communication, rate and noise of convergence.

Reference: Lyu, Hanzely, Kolar, "Personalized federated learning with multiple known clusters", 2022, arXiv 2204.13619.
Clients i = 1..N in clusters I_1..I_K, with u_i = theta_i - thetabar and v_i = theta_i - thetabar_j:

    Gamma_j    = sum_{i in I_j} gamma_i
    thetabar_j = sum_{i in I_j} gamma_i theta_i / Gamma_j
    thetabar   = sum_i alpha_j gamma_i theta_i / sum_i alpha_j gamma_i
    F(theta)   = sum_i f_i(theta_i) + 1/2 sum_i gamma_i [(1 - alpha_j) ||v_i||^2 + alpha_j ||u_i||^2]       (2.1)

An iteration of Algorithm 1 is a between-cluster round with probability p_0; otherwise, for every cluster by itself, a
within-cluster round with probability p_j and a local gradient step with 1 - p_j. Its step is -eta G, and E G = grad F:

    between    G_i = gamma_i [alpha_j u_i + tau_j (1 - alpha_j) v_i] / p_0
    within     G_i = gamma_i (1 - tau_j) (1 - alpha_j) v_i / ((1 - p_0) p_j)
    local      G_i = grad f_i(theta_i) / ((1 - p_0) (1 - p_j))

The rules for tau, the counts of rounds, the constants of expected smoothness, the noise and the best probabilities are
derived from these; the paper's constants may differ. Everything is float64, clusters are numbered 0..K-1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hpcfl.errors import InputError

TauRule = Literal["balance", "bound", "exact"]


def cluster_weights(gamma: np.ndarray, cluster: np.ndarray, clusters: int) -> np.ndarray:
    """Gamma_j, the sum of gamma_i over cluster j: gamma [N], cluster [N] -> [K]."""
    return np.bincount(cluster, weights=gamma, minlength=clusters)


def alpha_of(lam: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """alpha_j = lambda_j / (lambda_j + Gamma_j), and 1 for lambda_j = inf: lam [K], weights [K] -> [K].

    With it F is the minimum over centres c, c_j of the hierarchical objective (derived)
    sum_i f_i(theta_i) + 1/2 sum_i gamma_i ||theta_i - c_j||^2 + 1/2 sum_j lambda_j ||c_j - c||^2.
    """
    total = lam + weights
    return np.divide(lam, total, out=np.isinf(lam).astype(np.float64), where=np.isfinite(lam) & (total > 0))


def tau_of(
    rule: TauRule, p_global: float, p_cluster: np.ndarray, alpha: np.ndarray, gamma: np.ndarray, cluster: np.ndarray
) -> np.ndarray:
    """tau_j, the between-cluster rounds' share of the pull towards the cluster's mean: [K], and 1 where p_j = 0.

    p_cluster [K], alpha [K], gamma [N], cluster [N]. With q_j = (1 - p_0) p_j; derived, the paper's may differ:

        "balance"  p_0 / (p_0 + q_j)      least variance of the estimate of this pull alone; equal steps in both rounds
        "bound"    p_0 / (p_0 + 2 q_j)    least constant of expected smoothness
        "exact"    p_0 / (p_0 + q_j) - q_j alpha_j / ((1 - alpha_j) (p_0 + q_j)), cut to [0, 1]    least E||G||^2

    Raises InputError where the exact value would depend on the models.
    """
    q = (1 - p_global) * p_cluster
    total = p_global + (2 if rule == "bound" else 1) * q
    tau = np.divide(p_global, total, out=np.ones(len(q)), where=q > 0)
    if rule != "exact":
        return tau
    mixed = (q > 0) & (alpha > 0) & (alpha < 1)
    unequal = mixed & (_extremes(np.maximum, gamma, cluster, len(q)) > _extremes(np.minimum, gamma, cluster, len(q)))
    if unequal.any():
        raise InputError(
            f'algorithm.tau = "exact": gamma differs inside {_named(unequal)}, so the best tau would change with the '
            'models; give equal gamma inside each cluster, or use "balance", "bound" or numbers'
        )
    pull = np.divide(q * alpha, (1 - alpha) * total, out=np.zeros(len(q)), where=mixed)
    return np.where(alpha < 1, np.clip(tau - pull, 0, 1), 1.0)  # no pull towards the cluster's mean: any tau will do


@dataclass(frozen=True)
class Setting:
    """All that Algorithm 1 needs apart from f_i. Raises InputError where its G would be biased."""

    gamma: np.ndarray  # [N] > 0
    cluster: np.ndarray  # [N] 0..K-1
    alpha: np.ndarray  # [K] in [0, 1]
    p_global: float  # in [0, 1); 0 only where every alpha_j is
    p_cluster: np.ndarray  # [K] in [0, 1)
    tau: np.ndarray  # [K] in [0, 1]

    def __post_init__(self) -> None:
        assert self.gamma.ndim == self.alpha.ndim == 1
        assert self.gamma.shape == self.cluster.shape
        assert self.alpha.shape == self.p_cluster.shape == self.tau.shape
        assert self.cluster.min() >= 0
        assert self.cluster.max() < self.clusters
        mistakes = list(self._mistakes())
        if mistakes:
            raise InputError("\n".join(mistakes))

    def _mistakes(self) -> Iterator[str]:
        """One line for each part of the regulariser that no round, or no round with the right weight, would serve."""
        if self.p_global == 0 and self.c1 > 0:
            yield (
                f"algorithm.p_global = 0: clusters would never be averaged with each other, but "
                f"{_named(self.alpha > 0)} has alpha > 0; give p_global > 0, or alpha = 0 (lam = 0) for every cluster"
            )
            return
        pulled = (1 - self.alpha) * self.gamma_max > 0  # towards the cluster's mean
        never, sometimes = pulled & (self.p_cluster == 0), pulled & (self.p_cluster > 0)
        if self.p_global == 0 and never.any():
            yield (
                f"algorithm.p_global = 0: {_named(never)} has p_cluster = 0, so it would never be averaged and "
                "its gamma be ignored; give p_cluster > 0 for every cluster, or p_global > 0"
            )
        tau, why = (0.0, "p_global = 0") if self.p_global == 0 else (1.0, "p_cluster = 0")
        wrong = (sometimes if self.p_global == 0 else never) & (self.tau != tau)
        if wrong.any():
            yield (
                f"algorithm.tau = {self.tau[wrong][0]}: for {_named(wrong)}, with {why}, any tau but {tau:g} biases "
                f"the gradient; give tau = {tau:g} there, or {why.replace('=', '>')}"
            )

    @property
    def clusters(self) -> int:
        return len(self.alpha)

    @property
    def weights(self) -> np.ndarray:
        """Gamma_j [K]."""
        return cluster_weights(self.gamma, self.cluster, self.clusters)

    @property
    def gamma_max(self) -> np.ndarray:
        """The largest gamma_i of each cluster [K]: psi_j is so smooth (Proposition 3.4; the constant is derived)."""
        return _extremes(np.maximum, self.gamma, self.cluster, self.clusters)

    @property
    def c1(self) -> float:
        """C_1 = max alpha_j gamma_i."""
        return float((self.alpha * self.gamma_max).max())

    @property
    def c2(self) -> float:
        """C_2 = max (1 - alpha_j) gamma_i."""
        return float(((1 - self.alpha) * self.gamma_max).max())

    @property
    def q(self) -> np.ndarray:
        """q_j = (1 - p_0) p_j [K], the probability of a within-cluster round."""
        return (1 - self.p_global) * self.p_cluster

    def averaging_steps(self, lr: float) -> tuple[np.ndarray, np.ndarray]:
        """The shares of the way to the means that an averaging step goes, between [N] and within [N]; they stay <= 1.

        eta gamma_i (alpha_j + tau_j (1 - alpha_j)) / p_0 and eta gamma_i (1 - tau_j) (1 - alpha_j) / ((1 - p_0) p_j);
        0 where there are no such rounds. With "balance" and eta <= 1 / (2 Lcal) they are <= 3/4 and <= 1/2 (derived).
        """
        between = _over(self.alpha + self.tau * (1 - self.alpha), self.p_global)
        within = _over((1 - self.tau) * (1 - self.alpha), self.q)
        return lr * (self.gamma * between[self.cluster]), lr * (self.gamma * within[self.cluster])

    def largest_lr(self) -> float:
        """The largest eta that keeps both averaging steps <= 1; inf where nothing is averaged."""
        most = max(steps.max() for steps in self.averaging_steps(1.0))
        return float(1 / most) if most > 0 else math.inf

    def smoothness_terms(self, L: float) -> dict[str, np.ndarray]:
        """The 2 K + 1 terms of Lcal: "local" [K], "between" [1], "within" [K]; L: smoothness of every f_i, convex.

        L / ((1 - p_0) (1 - p_j)),   2 C_1 / p_0,   (1 - alpha_j) max_i gamma_i [2 tau_j^2 / p_0 + (1 - tau_j)^2 / q_j]
        (Theorem 3.5; derived, the paper's constants may differ). A term without rounds is 0.
        """
        bracket = _over(2 * self.tau**2, self.p_global) + _over((1 - self.tau) ** 2, self.q)
        return {
            "local": L / ((1 - self.p_global) * (1 - self.p_cluster)),
            "between": _over(np.array([2 * self.c1]), self.p_global),
            "within": (1 - self.alpha) * self.gamma_max * bracket,
        }

    def expected_smoothness(self, L: float) -> float:
        """Lcal, the largest of the terms: E||G(x) - G(theta*)||^2 <= 2 Lcal (F(x) - F(theta*)).

        With it, for eta <= 1 / (2 Lcal) and mu-strongly convex f_i (Theorem 3.5; derived, constants may differ):
        E||theta^t - theta*||^2 <= (1 - eta mu)^t ||theta^0 - theta*||^2 + 2 eta sigma^2 / mu.
        """
        return float(max(terms.max() for terms in self.smoothness_terms(L).values()))

    def noise(self, gradients_squared: np.ndarray, u: np.ndarray, v: np.ndarray) -> float:
        """sigma^2 = E||G(theta*)||^2 (derived).

        gradients_squared [N]: ||grad f_i(theta_i*)||^2; u [N, P]: theta_i* - thetabar; v [N, P]: theta_i* - thetabar_j.
        """
        own, towards = self.alpha[self.cluster], (self.tau * (1 - self.alpha))[self.cluster]
        rest = ((1 - self.tau) * (1 - self.alpha))[self.cluster]
        local = gradients_squared / ((1 - self.p_global) * (1 - self.p_cluster))[self.cluster]
        between = _over(_squares(self.gamma[:, None] * (own[:, None] * u + towards[:, None] * v)), self.p_global)
        within = _over(_squares((self.gamma * rest)[:, None] * v), self.q[self.cluster])
        return float((local + between + within).sum())

    def expected_rounds(self, iterations: float) -> dict[str, Any]:
        """Expected counts in T iterations (Proposition 3.2; derived).

        "global": between-cluster rounds, a number; "within" [K]: rounds of one cluster only; "mean" [K]: rounds of
        either kind, in which cluster j forms its mean; "local" [K]: gradient steps. "global_merged", a number, and
        "mean_merged" [K] count consecutive such rounds as one, where it follows an iteration without: p (1 - p) T.
        With equal gamma inside the clusters no more needs to be sent. T iterations are of a long run: a run's very
        first iteration follows none, which makes a difference of at most one.
        """
        chances = self._chances()
        merged = {f"{kind}_merged": iterations * _blocks(chances[kind]) for kind in ("global", "mean")}
        return {kind: iterations * p for kind, p in chances.items()} | merged

    def variances(self, iterations: float) -> dict[str, Any]:
        """The variance of each count of ``expected_rounds``.

        Tosses are independent, so counts are binomial; of two merged communications at neighbouring iterations only
        one can be: T m (1 - m) - 2 (T - 1) m^2 for m = p (1 - p).
        """
        chances, pairs = self._chances(), max(iterations - 1, 0)
        merged = {kind: _blocks(chances[kind]) for kind in ("global", "mean")}
        return {kind: iterations * p * (1 - p) for kind, p in chances.items()} | {
            f"{kind}_merged": iterations * m * (1 - m) - 2 * pairs * m**2 for kind, m in merged.items()
        }

    def _chances(self) -> dict[str, Any]:
        """Probability of each kind of round in one iteration: a number for "global", else [K]."""
        local = (1 - self.p_global) * (1 - self.p_cluster)
        return {"global": float(self.p_global), "within": self.q, "mean": self.p_global + self.q, "local": local}


def optimal_probabilities(L: float, c1: float, c2: float) -> tuple[float, float]:
    """(p_0, p_j): least max{L / ((1 - p_0) (1 - p)), 2 C_1 / p_0, 2 C_2 / (p_0 + (1 - p_0) p)}, for L > 0.

    C_1 >= C_2 needs no within-cluster rounds, and the maximum is L + 2 C_1; otherwise it is L + 2 C_2, and of all
    minimisers this one has the fewest between-cluster rounds. The cases are the paper's; derived, the paper's constants
    may differ. C_1 = 0 gives p_0 = 0.
    """
    if c1 >= c2:
        return 2 * c1 / (L + 2 * c1), 0.0
    return 2 * c1 / (L + 2 * c2), 2 * (c2 - c1) / (L + 2 * c2 - 2 * c1)


def iterations_to(accuracy: float, expected_smoothness: float, mu: float) -> float:
    """Iterations until the start's part of E||theta^t - theta*||^2 has shrunk to ``accuracy``, a share in (0, 1].

    (2 Lcal / mu) log(1 / accuracy), at eta = 1 / (2 Lcal) (derived); inf at mu = 0.
    """
    return 2 * expected_smoothness / mu * math.log(1 / accuracy) if mu > 0 else math.inf


def _over(x: np.ndarray, p: np.ndarray | float) -> np.ndarray:
    """x / p, and 0 where p = 0: rounds that never come add nothing."""
    p = np.broadcast_to(p, x.shape)
    return np.divide(x, p, out=np.zeros(x.shape), where=p > 0)


def _extremes(pick: np.ufunc, x: np.ndarray, cluster: np.ndarray, clusters: int) -> np.ndarray:
    """The largest (np.maximum) or smallest (np.minimum) x [N] of each cluster [K]; 0 for a cluster without clients."""
    out = np.zeros(clusters)
    out[cluster] = x  # any of its own to begin with
    pick.at(out, cluster, x)
    return out


def _blocks(p: Any) -> Any:
    """Probability that an iteration of probability p follows one that was not."""
    return p * (1 - p)


def _squares(x: np.ndarray) -> np.ndarray:
    """||x_i||^2: [N, P] -> [N]."""
    return (x**2).sum(axis=1)


def _named(clusters: np.ndarray) -> str:
    """'cluster 3', or 'cluster 3 (and 2 others)', of a mask [K]."""
    first, *others = np.flatnonzero(clusters)
    return f"cluster {first}" + (f" (and {len(others)} other{'s' * (len(others) > 1)})" if others else "")
