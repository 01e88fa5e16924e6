"""PFLEGO: exact stochastic gradient descent on a shared body and personal heads.

Reference: Nikoloutsopoulos, Koutsopoulos, Titsias, "Personalized federated learning with exact stochastic gradient
descent", 2022, arXiv 2202.09848, Algorithm 1.

    L(theta, W_1..W_I) = sum_i alpha_i l_i(W_i, theta)      alpha_i = N_i / N                                       (1)
    W_i   <- W_i - beta grad_W l_i(W_i, theta)              tau - 1 times, on features that are computed once       (2)
    (g_i^W, g_i) = (grad_W l_i, grad_theta l_i)             jointly, at the new W_i and the old theta
    W_i   <- W_i - rho (I/r) alpha_i g_i^W                                                                          (3)
    theta <- theta - rho (I/r) sum_{i in I_t} alpha_i g_i   or a step of Adam along that sum

The two last lines are one step of SGD on L: their expectation over the cohorts I_t of r clients is -rho grad L. The
body takes two forward passes and one backward pass, whatever tau (one of each for tau = 1, which has no step (2)); with
``batch_size`` every step has a minibatch of its own, whose features are computed for it, and with dropout its own mask.

Travels per round and participant: theta down, g_i up. Heads never travel. They start as ``start_heads`` says: alike, or
each at random numbers of its own, as in the paper's experiments.
Deviations: none. The released code (``variant = "released"``; github sotirisnik/PFLEGO) takes (3) without alpha_i, and
weights the server's sum by N_i / sum_{j in I_t} N_j, still times I/r: about I/r times the exact gradient.
Limits held by tests: r = I, tau = 1, SGD is one step of gradient descent on L; with one client it is gradient descent
on the head, then on both parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from hpcfl.algorithm import Rows, State
from hpcfl.block import Block
from hpcfl.engine import Engine
from hpcfl.personal_heads import HeadSteps
from hpcfl.registry import register
from hpcfl.round import Round
from hpcfl.theory.pflego import Joint, of_passes, of_steps, of_traffic
from hpcfl.theory.predictions import Prediction


@register("algorithm", "pflego")
@dataclass(frozen=True)
class PFLEGO(HeadSteps):
    """Exact SGD on a shared body and personal heads, with cheap local steps of the heads in between."""

    variant: Literal["paper", "released"] = "paper"

    def local_work(self, samples: np.ndarray) -> np.ndarray:
        return np.full_like(samples, self.local_steps)

    def client(self, b: Block, own: Rows, *, inverse_share: float) -> tuple[Rows, Rows]:
        theta, W = b.stack(b.shared["theta"]), own["W"]
        for t in b.steps[:-1]:
            W = W - self.head_lr * b.grad_head(W, b.features(theta, b.batch(t)))  # (2)
        g, g_W = b.grads(theta, W, b.batch(b.steps[-1]))
        alpha = b.share if self.variant == "paper" else 1.0
        W = W - self.server_lr * inverse_share * alpha * g_W  # (3)
        return {"W": W}, {"g": alpha * g}

    def round(self, state: State, r: Round) -> State:
        own, sent = r.clients(partial(self.client, inverse_share=r.inverse_share), state)
        g = r.sum(sent["g"]) if self.variant == "paper" else r.mean(sent["g"], by="sample")
        return State(self.server_step(state.shared, r.inverse_share * g, r.decision.index + 1), own)

    def predict(self, engine: Engine, cohort: int, rounds: int, accuracy: float) -> Iterator[Prediction]:
        task, start = engine.task, self.init(engine.task, engine.group)
        theta, W = start.shared["theta"], start.local["W"]
        kept = self.batch_size is None and not task.dropout_keys
        share = cohort / engine.group.population
        yield from of_steps(Joint(engine, theta, W), share, self.head_lr, self.server_lr, exact=kept)
        if self.server_optimizer != "sgd":
            yield Prediction("that limit of rho is SGD's: this server takes Adam", math.nan)
        if self.variant != "paper":
            yield Prediction('that limit of rho is of variant = "paper"', math.nan)
        yield from of_passes(self.local_steps, kept=kept)
        yield from of_traffic(cohort, rounds, task.split.body_size * task.item)
