"""L2GD: personal models are pulled towards one global mean, at random times; clusters are not looked at.

Reference: Hanzely, Richtarik, "Federated learning of a mixture of global and local models", 2020, arXiv 2002.05516.
It is Async-L2GD with alpha_j = 1 and p_j = 0 for all clusters, the baseline of its paper (arXiv 2204.13619):

    min F(theta) = sum_i f_i(theta_i) + 1/2 sum_i gamma_i ||theta_i - thetabar||^2

    xi = 0    theta_i <- theta_i - eta/(1 - p) grad f_i(theta_i)                 with xi ~ Bernoulli(p)
    xi = 1    theta_i <- theta_i - eta gamma_i/p (theta_i - thetabar)            thetabar the gamma-weighted mean

Travels: in an iteration with xi = 1 theta_i up and thetabar down for every client. Else nothing.
Deviations: F is n times the reference's objective with lambda = gamma, so eta is 1/n of its step. With partial
participation (not in the paper) the mean is that of the participants.
Limits held by tests: Async-L2GD with alpha = 1 and p_cluster = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hpcfl.algorithm import Rows, State
from hpcfl.algorithms.blup import BLUP
from hpcfl.block import Block
from hpcfl.engine import Engine
from hpcfl.errors import InputError
from hpcfl.known_clusters import Descending, Factors, RandomDescent, check_optimal
from hpcfl.registry import register
from hpcfl.round import Round
from hpcfl.theory.async_l2gd import Setting, optimal_probabilities
from hpcfl.theory.predictions import solved


@register("algorithm", "single_cluster")
@dataclass(frozen=True, kw_only=True)
class SingleCluster(Descending):
    """Personal models near one global mean."""

    def prepare(self, engine: Engine) -> L2GD:
        gamma, one, none = self.gammas(engine), np.ones(1), np.zeros(1)
        p = self.p_global
        if isinstance(p, str):
            p, _ = optimal_probabilities(self.L(engine), gamma.max(), 0.0)
            check_optimal(p)
        if p == 0:
            raise InputError("algorithm.p_global = 0: nothing would be averaged, and gamma ignored; give p_global > 0")
        s = Setting(gamma, np.zeros(len(gamma), np.int64), one, p, none, one)
        return L2GD(self, s, Factors(s, self.loss_scale(engine)), self.eta(engine, s))


@dataclass(frozen=True)
class L2GD(RandomDescent):
    """What runs: with every gamma_i and p as numbers."""

    options: SingleCluster

    hierarchical: ClassVar[bool] = False

    def coins(self, n_clusters: int) -> dict[str, np.ndarray]:
        return {"global": np.array([self.setting.p_global])}

    def round(self, state: State, r: Round) -> State:
        if r.decision.coins["global"][0]:
            thetabar = r.mean(state.local["theta"], by=self.k.gamma)
            own, _ = r.clients(self.average, state, given={"thetabar": thetabar})
        else:
            own, _ = r.clients(self.local, state)
        return State(local=own)

    def average(self, b: Block, own: Rows) -> tuple[Rows, Rows]:
        theta = own["theta"]
        return {"theta": theta - self.lr(b) * b.each(self.k.to_all) * (theta - b.shared["thetabar"])}, {}

    def local(self, b: Block, own: Rows) -> tuple[Rows, Rows]:
        theta = own["theta"]
        return {"theta": theta - self.lr(b) * b.each(self.k.local) * b.grad(theta, b.batch(0))}, {}

    def minimiser(self, engine: Engine) -> np.ndarray | None:
        return solved(engine, BLUP(gamma=self.options.gamma, alpha=1.0, objective=self.options.objective))
