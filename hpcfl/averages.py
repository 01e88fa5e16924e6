"""Averages over a run with quadratic weights, kept on-line: the outputs that strongly convex analyses speak of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpcfl.algorithm import Rows
from hpcfl.block import Block


@dataclass(frozen=True)
class QuadraticWeights:
    """p_t = (t + a)^2, and the sum of the weights in closed form."""

    a: float

    def p(self, t: int) -> float:
        """Weight of iteration t = 1, 2, ..."""
        return (t + self.a) ** 2

    def total(self, t: int) -> float:
        """S_t = p_1 + ... + p_t."""
        return t * (t + 1) * (2 * t + 1) / 6 + self.a * t * (t + 1) + t * self.a**2


class Averages:
    """The p_t-weighted averages of a block's v_i^t over the run and of its w_i^t over this round."""

    def __init__(self, weights: QuadraticWeights, b: Block, own: Rows):
        """Brings vhat up to now: since the client last took part (after iteration ``seen``) its v_i stood still."""
        self.weights, self.before = weights, b.iteration(0)
        total = max(weights.total(self.before), 1.0)
        seen = torch.tensor([[weights.total(int(t))] for t in own["seen"]], dtype=torch.float64, device=own["v"].device)
        self.vhat = own["vhat"] + (1 - seen / total).to(own["v"]) * (own["v"] - own["vhat"])
        self.own: Rows = {"vhat": self.vhat, "seen": own["seen"]}
        self.sent: Rows = {}

    def add(self, t: int, v: Tensor, w: Tensor) -> None:
        """Iteration t = 1, 2, ... of the run: S <- S + p_t; mean <- mean + (p_t / S) (new - mean)."""
        p, total = self.weights.p(t), self.weights.total(t)
        self.vhat = self.vhat + p / total * (v - self.vhat)
        mean = self.sent.get("w_mean", w)
        self.sent = {"w_mean": mean + p / (total - self.weights.total(self.before)) * (w - mean)}
        self.own = {"vhat": self.vhat, "seen": torch.full_like(self.own["seen"], t)}
