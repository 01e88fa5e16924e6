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
from functools import cached_property

import numpy as np
from torch import Tensor

from hpcfl.algorithm import Rows, State, Work
from hpcfl.block import Block
from hpcfl.engine import Engine
from hpcfl.errors import InputError
from hpcfl.group import Group
from hpcfl.known_clusters import Coins
from hpcfl.options import Positive
from hpcfl.registry import register
from hpcfl.round import Round
from hpcfl.schedules import CONSTANT, Schedule
from hpcfl.task import Task
from hpcfl.theory.async_l2gd import Setting


@register("algorithm", "async_l2gd")
@dataclass(frozen=True, kw_only=True)
class AsyncL2GD(Coins):
    """Personal models near their cluster's mean and near the global one."""

    lr: Positive | None = None  # eta; absent: 1/(2 Lcal), Lcal the expected smoothness of the steps
    lr_schedule: Schedule = CONSTANT

    def prepare(self, engine: Engine) -> Algorithm1:
        s = self.setting(engine)
        eta = 0.5 / s.expected_smoothness(self.L(engine)) if self.lr is None else self.lr
        if self.lr_schedule.at(eta, 0, 0) > s.largest_lr() * (1 + 1e-12):
            raise InputError(
                f"algorithm.lr = {self.lr_schedule.at(eta, 0, 0):g}: averaging would overshoot the means, for which "
                f"eta gamma (alpha + tau (1 - alpha))/p_0 and eta gamma (1 - tau)(1 - alpha)/((1 - p_0) p_j) must not "
                f"exceed 1; the largest admissible lr is {s.largest_lr():.6g}"
            )
        return Algorithm1(self, s, eta, self.loss_scale(engine))


@dataclass(frozen=True)
class Algorithm1(Work):
    """What runs: the options with every gamma_i, alpha_j, p_j and tau_j."""

    options: AsyncL2GD
    s: Setting
    eta: float
    loss_scale: np.ndarray  # [N] of f_i by the client's mean loss

    def coins(self, n_clusters: int) -> dict[str, np.ndarray]:
        return {"global": np.array([self.s.p_global]), "cluster": self.s.p_cluster}

    def init(self, task: Task, group: Group) -> State:
        return State(local={"theta": task.start().repeat(group.clients, 1)})

    def round(self, state: State, r: Round) -> State:
        own, xi_0, xi = state.local, r.decision.coins["global"][0], r.decision.coins["cluster"]
        if xi_0:
            thetabar_j = r.cluster_mean(own["theta"], by=self.s.gamma)
            thetabar = r.mean_over_clusters(thetabar_j, by=self.weights)
            own, _ = r.clients(self.between, state, given={"thetabar_j": thetabar_j, "thetabar": thetabar})
            return State(local=own)
        if xi.any():
            thetabar_j = r.cluster_mean(own["theta"], by=self.s.gamma, only=xi)
            own, _ = r.clients(self.within, state, only=xi, given={"thetabar_j": thetabar_j})
        if not xi.all():
            own, _ = r.clients(self.local, State(local=own), only=~xi)
        return State(local=own)

    def between(self, b: Block, own: Rows) -> tuple[Rows, Rows]:
        theta, gamma, alpha, tau = own["theta"], b.each(self.s.gamma, b.ids), *self.of_cluster(b)
        u, v = theta - b.shared["thetabar"], theta - b.shared["thetabar_j"]
        return {"theta": theta - self.lr(b) / self.s.p_global * gamma * (alpha * u + tau * (1 - alpha) * v)}, {}

    def within(self, b: Block, own: Rows) -> tuple[Rows, Rows]:
        theta, gamma, alpha, tau = own["theta"], b.each(self.s.gamma, b.ids), *self.of_cluster(b)
        v, q = theta - b.shared["thetabar_j"], b.each(self.q, b.cluster)
        return {"theta": theta - self.lr(b) / q * gamma * (1 - tau) * (1 - alpha) * v}, {}

    def local(self, b: Block, own: Rows) -> tuple[Rows, Rows]:
        theta = own["theta"]
        return {"theta": theta - self.lr(b) * b.each(self.step, b.ids) * b.grad(theta, b.batch(0))}, {}

    def personal(self, b: Block, own: Rows) -> Tensor:
        return own["theta"]

    @cached_property
    def step(self) -> np.ndarray:
        """[N] 1/((1 - p_0)(1 - p_j)), for f_i in units of the client's mean loss."""
        return self.loss_scale / ((1 - self.s.p_global) * (1 - self.s.p_cluster))[self.s.cluster]

    @cached_property
    def weights(self) -> np.ndarray:
        """[K] of the clusters' means in thetabar: alpha_j Gamma_j."""
        return self.s.alpha * self.s.weights

    @cached_property
    def q(self) -> np.ndarray:
        """[K] (1 - p_0) p_j."""
        return self.s.q

    def lr(self, b: Block) -> float:
        """eta of this iteration."""
        return self.options.lr_schedule.at(self.eta, b.iteration(0), b.iteration(0))

    def of_cluster(self, b: Block) -> tuple[Tensor, Tensor]:
        """alpha_j, tau_j of each client: [C, 1]."""
        return b.each(self.s.alpha, b.cluster), b.each(self.s.tau, b.cluster)
