"""Options of the methods that pull personal models towards the means of known clusters: mixins.

    F(theta) = sum_i f_i(theta_i) + 1/2 sum_i gamma_i [(1 - alpha_j) ||theta_i - thetabar_j||^2
                                                        + alpha_j ||theta_i - thetabar||^2]

The notation, and where it comes from: theory/async_l2gd.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hpcfl.algorithm import Work
from hpcfl.engine import Engine
from hpcfl.errors import InputError
from hpcfl.options import Count, NonNegative, NonNegatives, OpenShare, OpenShares, Positive, Positives, Share, Shares
from hpcfl.theory.async_l2gd import Setting, TauRule, alpha_of, cluster_weights, optimal_probabilities, tau_of
from hpcfl.theory.curvature import curvature

Objective = Literal["mean", "sum"]


@dataclass(frozen=True, kw_only=True)
class Pull(Work):
    """The objective F."""

    gamma: Positive | Positives = 1.0  # pull towards the means: one, or one per client
    alpha: Share | Shares | None = None  # share of it towards the GLOBAL mean: one, or one per cluster
    lam: NonNegative | NonNegatives | None = (
        None  # or lambda_j, alpha_j = lambda_j/(lambda_j + Gamma_j); both absent: 1
    )
    objective: Objective = "mean"  # f_i over the client's samples

    def __post_init__(self) -> None:
        if self.alpha is not None and self.lam is not None:
            raise InputError("algorithm.alpha and algorithm.lam: give one of the two, not both")

    def pull(self, engine: Engine) -> tuple[np.ndarray, np.ndarray]:
        """gamma [N], alpha [K]."""
        cluster, clusters = engine.topology.placement.cluster, engine.topology.placement.clusters
        gamma = one_or_each("gamma", self.gamma, len(cluster), "client")
        if self.alpha is not None:
            return gamma, one_or_each("alpha", self.alpha, clusters, "cluster")
        lam = one_or_each("lam", 1.0 if self.lam is None else self.lam, clusters, "cluster")
        return gamma, alpha_of(lam, cluster_weights(gamma, cluster, clusters))

    def loss_scale(self, engine: Engine) -> np.ndarray:
        """[N] what a client's mean loss is multiplied with to give f_i."""
        samples = engine.topology.placement.samples
        return np.ones(len(samples)) if self.objective == "mean" else samples.astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class Coins(Pull):
    """F, and the coins that say who averages when."""

    p_global: OpenShare | Literal["optimal"] = 0.1  # p_0: between all clusters
    p_cluster: OpenShare | OpenShares | Literal["optimal"] = 0.1  # p_j: within cluster j; one, or one per cluster
    tau: TauRule | Share | Shares = "balance"  # a rule, one number, or one per cluster
    smoothness: Positive | None = None  # L of the f_i; absent: found from the data where it is needed
    batch_size: Count | None = None  # absent: full batch

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.p_global == "optimal") != (self.p_cluster == "optimal"):
            raise InputError(
                'algorithm.p_global and algorithm.p_cluster: "optimal" finds both together; give it for both'
            )

    @property
    def minibatch(self) -> int | None:
        return self.batch_size

    def L(self, engine: Engine) -> float:
        """Collective over the world: the smoothness of every f_i."""
        return self.smoothness or curvature(engine, objective=self.objective).L

    def setting(self, engine: Engine) -> Setting:
        """Collective over the world: everything as numbers. Raises InputError for what does not go together."""
        cluster, clusters = engine.topology.placement.cluster, engine.topology.placement.clusters
        gamma, alpha = self.pull(engine)
        if isinstance(self.p_global, float) and self.p_cluster != "optimal":
            p_global, p_cluster = self.p_global, one_or_each("p_cluster", self.p_cluster, clusters, "cluster")
        else:
            balanced = Setting(gamma, cluster, alpha, 0.5, np.full(clusters, 0.5), np.full(clusters, 0.5))
            p_global, p = optimal_probabilities(self.L(engine), balanced.c1, balanced.c2)
            p_cluster = np.full(clusters, p)
        if isinstance(self.tau, str):
            tau = tau_of(self.tau, p_global, p_cluster, alpha, gamma, cluster)
        else:
            tau = one_or_each("tau", self.tau, clusters, "cluster")
        return Setting(gamma, cluster, alpha, p_global, p_cluster, tau)


def one_or_each(name: str, value: float | tuple[float, ...], count: int, of: str) -> np.ndarray:
    """[count] float64 from one number, or from one per client or cluster. Raises InputError for another number."""
    if not isinstance(value, tuple):
        return np.full(count, float(value))
    if len(value) != count:
        raise InputError(f"algorithm.{name}: {len(value)} values, expected one, or one per {of} ({count})")
    return np.array(value, np.float64)
