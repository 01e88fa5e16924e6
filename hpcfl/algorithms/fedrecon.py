"""FedRecon: clients reconstruct their heads, then send a gradient of the body.

Reference: Singhal, Sidahmed, Garrett, Wu, Rush, Prakash, "Federated reconstruction: partially local federated
learning", NeurIPS 2021, arXiv 2102.03448. The server's Adam as in PFLEGO's experiments (arXiv 2202.09848).

    tau times:         W_i <- W_i - beta grad_W f_i(theta, W_i; xi)       W_i as it was left, or drawn anew (``reset``)
    body_steps times:  d_i <- d_i + eta g_i;  theta_i <- theta_i - eta g_i,   g_i = grad_theta f_i(theta_i, W_i; xi)
    theta <- theta - rho sum_i p_i d_i, or a step of Adam along that sum      p_i = n_i / sum_{j in S_t} n_j

Unlike PFLEGO, all tau steps of the head have the rate beta, the body's gradient is taken after the last of them, and
the server's sum has neither I/r nor the weights of all clients. A client predicts with a head that it reconstructs on
its training data.

Travels per round and participant: theta down, d_i up.
Deviations: the paper lets support data for the heads and query data for the body differ; here both are the training
data, as in PFLEGO's experiments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpcfl.algorithm import Rows, State
from hpcfl.block import Block
from hpcfl.errors import InputError
from hpcfl.options import Count, Positive
from hpcfl.personal_heads import HeadSteps
from hpcfl.registry import register
from hpcfl.round import Round


@register("algorithm", "fedrecon")
@dataclass(frozen=True)
class FedRecon(HeadSteps):
    """Heads are reconstructed at every visit; the server descends along the body's gradients."""

    head_lr: Positive = 0.1
    body_steps: Count = 1
    body_lr: Positive = 1.0  # eta
    reset: bool = False  # draw the head anew at every visit

    def __post_init__(self) -> None:
        if self.reset and self.start_heads != "alike":
            raise InputError(
                f'algorithm.start_heads = "{self.start_heads}": with algorithm.reset = true every visit draws a head '
                "anew, whatever it started with; leave start_heads out"
            )

    def local_work(self, samples: np.ndarray) -> np.ndarray:
        return np.full_like(samples, self.local_steps + self.body_steps)

    def reconstructed(self, b: Block, own: Rows, theta: Tensor, steps: Iterable[int]) -> Tensor:
        """[C, P_head] the clients' heads after tau steps."""
        W = b.new_heads() if self.reset else own["W"]
        for t in steps:
            W = W - self.head_lr * b.grad_head(W, b.features(theta, b.batch(t)))
        return W

    def client(self, b: Block, own: Rows) -> tuple[Rows, Rows]:
        theta = b.stack(b.shared["theta"])
        W, d = self.reconstructed(b, own, theta, b.steps[: self.local_steps]), torch.zeros_like(theta)
        for t in b.steps[self.local_steps :]:
            g, _ = b.grads(theta, W, b.batch(t))
            step = self.body_lr * g
            d, theta = d + step, theta - step
        return {"W": W}, {"d": d}

    def round(self, state: State, r: Round) -> State:
        own, sent = r.clients(self.client, state)
        d = r.mean(sent["d"], by="sample")
        return State(self.server_step(state.shared, d, r.decision.index + 1), own)

    def personal(self, b: Block, own: Rows) -> Tensor:
        theta = b.stack(b.shared["theta"])
        return b.join(theta, self.reconstructed(b, own, theta, range(self.local_steps)))
