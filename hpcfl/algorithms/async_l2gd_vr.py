"""Async-L2GD, accelerated, variance-reduced and loopless: it converges to the exact minimiser at a constant step size.

Reference: Lyu, Hanzely, Kolar, "Personalized federated learning with multiple known clusters", 2022, arXiv 2204.13619,
Section 4, for finite sums f_i = (1/m) sum_l f_{i,l}. The objective F, the coins and tau_j: algorithms/async_l2gd.py.
With a reference point w, at which grad F(w) is stored, and u_i(x) = x_i - xbar, v_i(x) = x_i - xbar_j:

    x = theta1 z + theta2 w + (1 - theta1 - theta2) y

    xi_0 = 1           g_i = gamma_i/p_0 [alpha_j (u_i(x) - u_i(w)) + tau_j (1 - alpha_j) (v_i(x) - v_i(w))]
    xi_0 = 0, xi_j = 1 g_i = gamma_i (1 - tau_j) (1 - alpha_j)/((1 - p_0) p_j) (v_i(x) - v_i(w))
    xi_0 = xi_j = 0    g_i = [grad f_{i,l}(x_i) - grad f_{i,l}(w_i)]/((1 - p_0) (1 - p_j))         l from 1..m
    and in all cases   g_i <- g_i + grad_i F(w)

    y+ = x - eta g
    z+ = beta z + (1 - beta) x + (gamma/eta) (y+ - x)
    w+ = y with probability rho, else w

Travels: as for async_l2gd, with x in the place of theta; and after a move of w, w up and its means down.
Deviations: the paper's own pseudo-code was not at hand; this construction is unbiased, with the parameters of AL2SGD+
(theory/katyusha.py). A step's f_{i,l} is a minibatch (``batch_size``), by default all samples.
Limits held by tests: E g = grad F(x); squared error below 1e-20 where async_l2gd stalls at its noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from torch import Tensor

from hpcfl.algorithm import Rows, State, Work
from hpcfl.algorithms.blup import BLUP
from hpcfl.block import Block, Step
from hpcfl.engine import Engine
from hpcfl.errors import InputError
from hpcfl.group import Group
from hpcfl.known_clusters import ClusterCoins, Factors
from hpcfl.members import Given
from hpcfl.options import Positive, PositiveShare
from hpcfl.registry import register
from hpcfl.round import Round
from hpcfl.task import Task
from hpcfl.theory.async_l2gd import Setting
from hpcfl.theory.curvature import Curvature, curvature
from hpcfl.theory.katyusha import Katyusha, largest_eta
from hpcfl.theory.predictions import Prediction, Traffic, of_rounds, of_setting, solved


@register("algorithm", "async_l2gd_vr")
@dataclass(frozen=True, kw_only=True)
class AsyncL2GDVR(ClusterCoins):
    """Async-L2GD without its noise, accelerated."""

    whole_cohort: ClassVar[bool] = True  # the means of the reference point are of the clients who were there

    p_refresh: PositiveShare | None = None  # rho; absent: p_0 (1 - p_0), or the mean p_j (1 - p_j) where p_0 = 0
    strong_convexity: Positive | None = None  # mu of the f_i; absent: found from the data

    def prepare(self, engine: Engine) -> Section4:
        s = self.setting(engine)
        f = curvature(engine, objective=self.objective, L=self.smoothness, mu=self.strong_convexity)
        if f.mu < 1e-12:
            raise InputError(
                "algorithm.strong_convexity: some client's loss is not strongly convex (fewer samples than parameters, "
                "or a logistic model); give model.l2 > 0, or a value"
            )
        L_F = f.L + float(s.gamma.max())
        if f.mu > L_F:
            raise InputError(f"algorithm.strong_convexity = {f.mu:g}: larger than the smoothness of F, {L_F:.6g}")
        p = s.p_global or float(s.p_cluster.mean())
        rho = self.p_refresh or p * (1 - p)
        if rho < 1e-9:
            raise InputError(f"algorithm.p_refresh = {rho:g}: the reference point would never move; give a larger one")
        eta = self.lr or largest_eta(L_F, s.expected_smoothness(f.of_steps(self.batch_size)))
        return Section4(self, s, f, Factors(s, self.loss_scale(engine)), Katyusha(eta, f.mu, rho))


@dataclass(frozen=True)
class Section4(Work):
    """What runs: with everything as numbers."""

    options: AsyncL2GDVR
    setting: Setting
    curvature: Curvature
    k: Factors
    katyusha: Katyusha

    def coins(self, n_clusters: int) -> dict[str, np.ndarray]:
        p_0, p = np.array([self.setting.p_global]), self.setting.p_cluster
        return {"global": p_0, "cluster": p, "refresh": np.array([self.katyusha.rho])}

    def init(self, task: Task, group: Group) -> State:
        start = task.start().repeat(group.clients, 1)
        names = ("y", "z", "w", "grad_F", "u_w", "v_w")  # the last three follow from w, before the first iteration
        return State(local={name: start.clone() for name in names})

    def round(self, state: State, r: Round) -> State:
        if r.decision.index == 0:
            state = self.at_reference(state, r)
        theta1, theta2, own = self.katyusha.theta1, self.katyusha.theta2, state.local
        x = theta1 * own["z"] + theta2 * own["w"] + (1 - theta1 - theta2) * own["y"]
        xi_0, xi, refresh = r.decision.coins["global"][0], r.decision.coins["cluster"], r.decision.coins["refresh"][0]
        if xi_0:
            xbar_j = r.cluster_mean(x, by=self.k.gamma)
            xbar = r.mean_over_clusters(xbar_j, by=self.k.shares * r.cluster_weights(self.k.gamma))
            given: Given = {"xbar_j": xbar_j, "xbar": xbar}
            gradient: Step = self.between
        else:
            given = {"xbar_j": r.cluster_mean(x, by=self.k.gamma, only=xi)} if xi.any() else {}
            gradient = partial(self.within_or_local, xi)
        new, _ = r.clients(partial(self.step, gradient, refresh), State(local={**own, "x": x}), given=given)
        state = State(local={name: new[name] for name in own})
        return self.at_reference(state, r) if refresh else state

    def step(self, gradient: Step, refresh: bool, b: Block, own: Rows) -> tuple[Rows, Rows]:
        x, (eta, gamma, beta) = own["x"], (self.katyusha.eta, self.katyusha.gamma, self.katyusha.beta)
        y = x - eta * (gradient(b, own)["g"] + own["grad_F"])
        z = beta * own["z"] + (1 - beta) * x + gamma / eta * (y - x)
        return {"y": y, "z": z, "w": own["y"] if refresh else own["w"]}, {}

    def between(self, b: Block, own: Rows) -> Rows:
        u, v = own["x"] - b.shared["xbar"], own["x"] - b.shared["xbar_j"]
        return {"g": b.each(self.k.to_all) * (u - own["u_w"]) + b.each(self.k.to_cluster) * (v - own["v_w"])}

    def within_or_local(self, xi: np.ndarray, b: Block, own: Rows) -> Rows:
        return b.either(xi, self.within, self.local, own)

    def within(self, b: Block, own: Rows) -> Rows:
        return {"g": b.each(self.k.within) * (own["x"] - b.shared["xbar_j"] - own["v_w"])}

    def local(self, b: Block, own: Rows) -> Rows:
        batch = b.batch(0)
        return {"g": b.each(self.k.local) * (b.grad(own["x"], batch) - b.grad(own["w"], batch))}

    def at_reference(self, state: State, r: Round) -> State:
        """grad F(w), w_i - wbar and w_i - wbar_j, by all samples and with the means of w."""
        wbar_j = r.cluster_mean(state.local["w"], by=self.k.gamma)
        wbar = r.mean_over_clusters(wbar_j, by=self.k.shares * r.cluster_weights(self.k.gamma))
        own, _ = r.clients(self.full_gradient, state, given={"wbar": wbar, "wbar_j": wbar_j}, full_batch=True)
        return State(local=own)

    def full_gradient(self, b: Block, own: Rows) -> tuple[Rows, Rows]:
        w, s = own["w"], self.setting
        u, v = w - b.shared["wbar"], w - b.shared["wbar_j"]
        pull = b.each(s.gamma) * (b.each(self.k.alpha) * u + (1 - b.each(self.k.alpha)) * v)
        return {"grad_F": b.each(self.k.loss) * b.grad(w, b.batch(0)) + pull, "u_w": u, "v_w": v}, {}

    def predict(self, engine: Engine, cohort: int, rounds: int, accuracy: float) -> Iterator[Prediction]:
        s, k = self.setting, self.katyusha
        yield from of_setting(s, self.curvature, self.curvature.of_steps(self.options.batch_size))
        for name in ("eta", "rho", "theta1", "theta2", "beta", "gamma"):
            yield Prediction(f"accelerated steps, {name}", getattr(k, name))
        yield from of_rounds(s, Traffic.of(s), rounds, engine.task.bytes, refresh=1 + rounds * k.rho)

    def minimiser(self, engine: Engine) -> np.ndarray | None:
        return solved(engine, BLUP.of(self.options))

    def personal(self, b: Block, own: Rows) -> Tensor:
        return own["y"]
