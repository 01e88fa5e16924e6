"""What the methods share that pull personal models towards the means of known clusters: options, and step factors.

    F(theta) = sum_i f_i(theta_i) + 1/2 sum_i gamma_i [(1 - alpha_j) ||theta_i - thetabar_j||^2
                                                        + alpha_j ||theta_i - thetabar||^2]

The notation, and where it comes from: theory/async_l2gd.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from hpcfl.algorithm import Rows, State, Work, one_or_each
from hpcfl.block import Block
from hpcfl.engine import Engine, Weights
from hpcfl.errors import InputError
from hpcfl.group import Group
from hpcfl.options import Count, NonNegative, NonNegatives, OpenShare, OpenShares, Positive, Positives, Share, Shares
from hpcfl.schedules import CONSTANT, Constant, Schedule
from hpcfl.task import Task
from hpcfl.theory.async_l2gd import Setting, TauRule, alpha_of, cluster_weights, optimal_probabilities, tau_of
from hpcfl.theory.curvature import Curvature, curvature, is_linear
from hpcfl.theory.predictions import Prediction, Traffic, of_descent, of_noise, of_rounds, of_setting

Objective = Literal["mean", "sum"]
Each = np.ndarray | float


@dataclass(frozen=True, kw_only=True)
class Pull(Work):
    """Clients' losses f_i and a pull of strength gamma_i towards means: a mixin."""

    gamma: Positive | Positives = 1.0  # strength of the pull towards the means: one, or one per client
    objective: Objective = "mean"  # f_i over the client's samples

    def gammas(self, engine: Engine) -> np.ndarray:
        """[N]."""
        return one_or_each("gamma", self.gamma, engine.group.population, "client")

    def loss_scale(self, engine: Engine) -> np.ndarray:
        """[N] what a client's mean loss is multiplied with to give f_i."""
        samples = engine.topology.placement.samples
        return np.ones(len(samples)) if self.objective == "mean" else samples.astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class ClusterPull(Pull):
    """The objective F: a mixin."""

    alpha: Share | Shares | None = None  # share of the pull towards the GLOBAL mean: one, or one per cluster
    lam: NonNegative | NonNegatives | None = None  # or lambda_j: alpha_j = lambda_j/(lambda_j + Gamma_j); default 1

    def __post_init__(self) -> None:
        if self.alpha is not None and self.lam is not None:
            raise InputError("algorithm.alpha and algorithm.lam: give one of the two, not both")

    def alphas(self, engine: Engine) -> np.ndarray:
        """[K]."""
        cluster, clusters = engine.topology.placement.cluster, engine.topology.placement.clusters
        if self.alpha is not None:
            return one_or_each("alpha", self.alpha, clusters, "cluster")
        lam = one_or_each("lam", 1.0 if self.lam is None else self.lam, clusters, "cluster")
        return alpha_of(lam, cluster_weights(self.gammas(engine), cluster, clusters))


@dataclass(frozen=True, kw_only=True)
class RandomSteps(Pull):
    """Gradient steps and averagings at random: a mixin."""

    lr: Positive | None = None  # eta; absent: from theory, by the smoothness
    p_global: OpenShare | Literal["optimal"] = 0.1  # p_0: probability of averaging over all clients
    smoothness: Positive | None = None  # L of the f_i (batch_size: of a sample's); absent: found from the data
    batch_size: Count | None = None  # absent: full batch

    @property
    def minibatch(self) -> int | None:
        return self.batch_size

    def L(self, engine: Engine) -> float:
        """Collective over the world: the smoothness that local steps meet."""
        return self.smoothness or curvature(engine, objective=self.objective).of_steps(self.batch_size)

    def curvature(self, engine: Engine) -> Curvature:
        """Collective over the world. Models without a known strong convexity count as having none."""
        mu = None if is_linear(engine) else 0.0
        return curvature(engine, objective=self.objective, L=self.smoothness, mu=mu)


@dataclass(frozen=True, kw_only=True)
class Descending(RandomSteps):
    """Such steps with a step size that may fall: a mixin."""

    lr_schedule: Schedule = CONSTANT

    def eta(self, engine: Engine, s: Setting) -> float:
        """Collective over the world: lr. Raises InputError where averaging would overshoot.

        Absent: 1/(2 Lcal), or less where that would overshoot (for other tau than those of the rules).
        """
        eta = self.lr or min(0.5 / s.expected_smoothness(self.L(engine)), s.largest_lr())
        first = self.lr_schedule.at(eta, 0, 0)
        if first > s.largest_lr():
            raise InputError(
                f"algorithm.lr = {first:g}: averaging would overshoot the means; the largest admissible lr is "
                f"{s.largest_lr() * (1 - 5e-6):.6g}"  # rounded down
            )
        return eta


@dataclass(frozen=True, kw_only=True)
class ClusterCoins(ClusterPull, RandomSteps):
    """F, and the coins of every cluster: a mixin."""

    p_cluster: OpenShare | OpenShares | Literal["optimal"] = 0.1  # p_j: within cluster j; one, or one per cluster
    tau: TauRule | Share | Shares = "balance"  # a rule, one number, or one per cluster

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.p_global == "optimal") != (self.p_cluster == "optimal"):
            raise InputError(
                'algorithm.p_global and algorithm.p_cluster: "optimal" finds both together; give it for both'
            )

    def setting(self, engine: Engine) -> Setting:
        """Collective over the world: everything as numbers. Raises InputError for what does not go together."""
        cluster, clusters = engine.topology.placement.cluster, engine.topology.placement.clusters
        gamma, alpha = self.gammas(engine), self.alphas(engine)
        if not isinstance(self.p_global, str) and not isinstance(self.p_cluster, str):
            p_global, p_cluster = self.p_global, one_or_each("p_cluster", self.p_cluster, clusters, "cluster")
        else:
            half = np.full(clusters, 0.5)
            s = Setting(gamma, cluster, alpha, 0.5, half, half)  # any probabilities: C_1, C_2 do not depend on them
            p_global, p = optimal_probabilities(self.L(engine), s.c1, s.c2)
            p_cluster = np.full(clusters, p)
            check_optimal(p_global, p)
        if isinstance(self.tau, str):
            tau = tau_of(self.tau, p_global, p_cluster, alpha, gamma, cluster)
        else:
            tau = one_or_each("tau", self.tau, clusters, "cluster")
        return Setting(gamma, cluster, alpha, p_global, p_cluster, tau)


class Factors:
    """What multiplies the parts of a step of Algorithm 1, for ``Block.each``."""

    def __init__(self, s: Setting, loss_scale: np.ndarray):
        """loss_scale [N]: of f_i by the client's mean loss."""
        alpha, tau, chance = s.alpha[s.cluster], s.tau[s.cluster], (1 - s.p_global) * (1 - s.p_cluster)
        rate = 1 / s.p_global if s.p_global else 0.0
        self.to_all = each(s.gamma * alpha * rate)  # gamma_i alpha_j/p_0
        self.to_cluster = each(s.gamma * tau * (1 - alpha) * rate)  # gamma_i tau_j (1 - alpha_j)/p_0
        self.within = each(s.averaging_steps(1.0)[1])  # gamma_i (1 - tau_j) (1 - alpha_j)/((1 - p_0) p_j)
        self.local = each(loss_scale / chance[s.cluster])  # 1/((1 - p_0)(1 - p_j)), and f_i by the mean loss
        self.loss, self.alpha, self.loss_scale = each(loss_scale), each(alpha), loss_scale
        self.gamma: Weights = s.gamma if np.ptp(s.gamma) else "client"  # of the clients in thetabar_j
        self.shares = s.alpha  # [K] of the clusters' weights Gamma_j with which thetabar_j count in thetabar


@dataclass(frozen=True)
class RandomDescent(Work):
    """What runs: theta_i descends F by random steps, with everything as numbers. A mixin."""

    options: Descending
    setting: Setting
    k: Factors
    eta: float

    hierarchical: ClassVar[bool] = True  # clients send to their cluster, which sends its mean on

    def init(self, task: Task, group: Group) -> State:
        return State(local={"theta": task.start().repeat(group.clients, 1)})

    def personal(self, b: Block, own: Rows) -> Tensor:
        return own["theta"]

    def lr(self, b: Block) -> float:
        """eta of this iteration."""
        return self.options.lr_schedule.at(self.eta, b.iteration(0), b.iteration(0))

    def predict(self, engine: Engine, cohort: int, rounds: int, accuracy: float) -> Iterator[Prediction]:
        need_everyone(engine, cohort)
        s, f, schedule = self.setting, self.options.curvature(engine), self.options.lr_schedule
        traffic, L = Traffic.of(s, hierarchical=self.hierarchical), f.of_steps(self.options.batch_size)
        yield from of_setting(s, f, L)
        yield from of_descent(s, f, L, schedule.at(self.eta, 0, 0), traffic, accuracy, engine.task.bytes)
        yield from of_rounds(s, traffic, rounds, engine.task.bytes)
        theta = self.minimiser(engine)
        if theta is not None and self.options.batch_size is None:
            constant = isinstance(schedule, Constant)
            yield from of_noise(engine, s, f, self.eta, self.k.loss_scale, theta, rounds, constant=constant)


def need_everyone(engine: Engine, cohort: int) -> None:
    """Raises InputError where some clients sit out: the theory of random steps is of all of them."""
    if cohort < engine.group.population:
        raise InputError("hpcfl theory: speaks of runs in which every client takes part; leave run.participation out")


def check_optimal(*probabilities: float) -> None:
    """Raises InputError where no local steps would be left."""
    if not all(p < 1 for p in probabilities):
        raise InputError(
            'algorithm.p_global = "optimal": is 1 for losses this flat beside gamma, which leaves no gradient steps; '
            "give numbers"
        )


def each(values: np.ndarray) -> Each:
    """Values of all clients [N] for ``Block.each``: one number where they are all the same."""
    return float(values[0]) if (values == values[0]).all() else values
