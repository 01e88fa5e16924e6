"""FedBABU: the body learns under one fixed head; clients fine-tune before they use the model.

Reference: Oh, Kim, Yun, "FedBABU: toward enhanced representation for federated image classification", ICLR 2022,
arXiv 2106.06042. The orthogonal head and the momentum as in PFLEGO's experiments (arXiv 2202.09848).

    theta_i <- theta, u = 0;  tau times:  u <- mu u + grad_theta f_i(theta_i, W; xi);  theta_i <- theta_i - eta u
    theta = sum_i p_i theta_i       p_i = n_i / sum_j n_j ("sample") or 1/K ("client")

W is the same for all clients and never moves: U V^T of the singular value decomposition of the model's initial head.
Before an evaluation of all clients each fine-tunes ``fine_tune_steps`` times on its training data, its head or all,
without ``lr_schedule``. What a participant holds after its local work (``run.protocol``) is theta_i under W, as it is.

Travels per round and participant: theta down, theta_i up.
Deviations: none.
Limits held by tests: the head never moves. (So a model that is a head alone, as logistic regression is, never learns.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hpcfl.algorithm import LocalSGD, Rows, State, Weighting
from hpcfl.block import Block
from hpcfl.group import Group
from hpcfl.options import CountOrZero, OpenShare, Positive
from hpcfl.personal_heads import PersonalHeads
from hpcfl.registry import register
from hpcfl.round import Round
from hpcfl.task import Task


@register("algorithm", "fedbabu")
@dataclass(frozen=True)
class FedBABU(PersonalHeads, LocalSGD):
    """Training of the body alone, under a fixed orthogonal head; fine-tuning for each client's evaluation."""

    momentum: OpenShare = 0.9  # mu
    weighting: Weighting = "sample"
    fine_tune: Literal["head", "all"] = "head"
    fine_tune_steps: CountOrZero = 5
    fine_tune_lr: Positive | None = None  # absent: lr

    def first_heads(self, task: Task, group: Group, W: Tensor) -> Tensor:
        return super().first_heads(task, group, task.split.orthogonal(W))

    def client(self, b: Block, own: Rows) -> tuple[Rows, Rows]:
        theta = b.stack(b.shared["theta"])
        u = torch.zeros_like(theta)
        for t in b.steps:
            g, _ = b.grads(theta, own["W"], b.batch(t))
            u = self.momentum * u + g
            theta = theta - b.lr(t) * u
        return {}, {"theta": theta}

    def round(self, state: State, r: Round) -> State:
        own, sent = r.clients(self.client, state)
        return State({"theta": r.mean(sent["theta"], by=self.weighting)}, own)

    def personal(self, b: Block, own: Rows) -> Tensor:
        theta, W, lr = b.stack(b.shared["theta"]), own["W"], self.fine_tune_lr or self.lr
        for t in range(self.fine_tune_steps):
            if self.fine_tune == "head":
                W = W - lr * b.grad_head(W, b.features(theta, b.batch(t)))
            else:
                g, g_W = b.grads(theta, W, b.batch(t))
                theta, W = theta - lr * g, W - lr * g_W
        return b.join(theta, W)
