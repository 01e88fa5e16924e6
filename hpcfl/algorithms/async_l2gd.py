"""Async-L2GD: personal models are pulled towards known clusters, which average on their own schedules.

Reference: Lyu, Hanzely, Kolar, "Personalized federated learning with multiple known clusters", 2022, arXiv 2204.13619,
Algorithm 1. With thetabar_j the gamma-weighted mean of cluster j and thetabar the alpha gamma-weighted mean of all,

    min F(theta) = sum_i f_i(theta_i) + 1/2 sum_i gamma_i [(1 - alpha_j) ||theta_i - thetabar_j||^2
                                                            + alpha_j ||theta_i - thetabar||^2]                (2.1)

Every iteration flips xi_0 ~ Bernoulli(p_0), and if it is 0 for every cluster j by itself xi_j ~ Bernoulli(p_j):

    xi_0 = 1           theta_i <- theta_i - eta gamma_i/p_0 [alpha_j (theta_i - thetabar)
                                                             + tau_j (1 - alpha_j) (theta_i - thetabar_j)]    for all i
    xi_0 = 0, xi_j = 1 theta_i <- theta_i - eta gamma_i (1 - tau_j) (1 - alpha_j)/((1 - p_0) p_j)
                                            (theta_i - thetabar_j)                                         for i in I_j
    xi_0 = xi_j = 0    theta_i <- theta_i - eta/((1 - p_0) (1 - p_j)) grad f_i(theta_i)                    for i in I_j

Travels: in an iteration with xi_j = 1 theta_i up and thetabar_j down, for the clients of cluster j; with xi_0 = 1 for
all clients, and between clusters thetabar_j up and thetabar down, which the clients get, too. Else nothing.
Deviations: with partial participation (not in the paper) means are those of the participants. The released code runs
the variant with one coin: ``p_cluster = 0``, tau = 1.
Limits held by tests: E of the step is -eta grad F; alpha = 1 and p_cluster = 0 is L2GD; the paper's test problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from hpcfl.algorithm import Rows, State
from hpcfl.algorithms.blup import BLUP
from hpcfl.block import Block
from hpcfl.engine import Engine
from hpcfl.known_clusters import ClusterCoins, Descending, Factors, RandomDescent
from hpcfl.registry import register
from hpcfl.round import Round
from hpcfl.theory.predictions import solved


@register("algorithm", "async_l2gd")
@dataclass(frozen=True, kw_only=True)
class AsyncL2GD(ClusterCoins, Descending):
    """Personal models near their cluster's mean and near the global one."""

    def prepare(self, engine: Engine) -> Algorithm1:
        s = self.setting(engine)
        return Algorithm1(self, s, Factors(s, self.loss_scale(engine)), self.eta(engine, s))


@dataclass(frozen=True)
class Algorithm1(RandomDescent):
    """What runs: with every gamma_i, alpha_j, p_j and tau_j as numbers."""

    options: AsyncL2GD

    def coins(self, n_clusters: int) -> dict[str, np.ndarray]:
        return {"global": np.array([self.setting.p_global]), "cluster": self.setting.p_cluster}

    def round(self, state: State, r: Round) -> State:
        theta, xi_0, xi = state.local["theta"], r.decision.coins["global"][0], r.decision.coins["cluster"]
        if xi_0:
            thetabar_j = r.cluster_mean(theta, by=self.k.gamma)
            thetabar = r.mean_over_clusters(thetabar_j, by=self.k.shares * r.cluster_weights(self.k.gamma))
            own, _ = r.clients(self.between, state, given={"thetabar_j": thetabar_j, "thetabar": thetabar})
        else:
            given = {"thetabar_j": r.cluster_mean(theta, by=self.k.gamma, only=xi)} if xi.any() else {}
            own, _ = r.clients(partial(self.within_or_local, xi), state, given=given)
        return State(local=own)

    def between(self, b: Block, own: Rows) -> tuple[Rows, Rows]:
        theta = own["theta"]
        u, v = theta - b.shared["thetabar"], theta - b.shared["thetabar_j"]
        return {"theta": theta - self.lr(b) * (b.each(self.k.to_all) * u + b.each(self.k.to_cluster) * v)}, {}

    def within_or_local(self, xi: np.ndarray, b: Block, own: Rows) -> tuple[Rows, Rows]:
        return b.either(xi, self.within, self.local, own), {}

    def within(self, b: Block, own: Rows) -> Rows:
        theta = own["theta"]
        return {"theta": theta - self.lr(b) * b.each(self.k.within) * (theta - b.shared["thetabar_j"])}

    def local(self, b: Block, own: Rows) -> Rows:
        theta = own["theta"]
        return {"theta": theta - self.lr(b) * b.each(self.k.local) * b.grad(theta, b.batch(0))}

    def minimiser(self, engine: Engine) -> np.ndarray | None:
        return solved(engine, BLUP.of(self.options))
