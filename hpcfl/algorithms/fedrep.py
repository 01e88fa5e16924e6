"""FedRep: local steps of the head first, then of the body; only bodies are averaged.

Reference: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting shared representations for personalized federated
learning", ICML 2021, arXiv 2102.07078.

    head_steps times:  W_i     <- W_i - eta grad_W f_i(theta, W_i; xi)
    body_steps times:  theta_i <- theta_i - eta grad_theta f_i(theta_i, W_i; xi)      from theta_i = theta
    theta = sum_i p_i theta_i       p_i = n_i / sum_j n_j ("sample") or 1/K ("client")

Every step has a minibatch of its own. Of a full batch without dropout the features are computed once for all
steps of the head.

Travels per round and participant: theta down, theta_i up.
Deviations: none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcfl.algorithm import Descent, Rows, State, Weighting
from hpcfl.block import Block
from hpcfl.options import Count
from hpcfl.personal_heads import TrainedHeads
from hpcfl.registry import register
from hpcfl.round import Round


@register("algorithm", "fedrep")
@dataclass(frozen=True)
class FedRep(TrainedHeads, Descent):
    """Each client fits its head to the shared body, then improves the body."""

    head_steps: Count = 10
    body_steps: Count = 1
    weighting: Weighting = "sample"

    def local_work(self, samples: np.ndarray) -> np.ndarray:
        return np.full_like(samples, self.head_steps + self.body_steps)

    def client(self, b: Block, own: Rows) -> tuple[Rows, Rows]:
        theta, W = b.stack(b.shared["theta"]), own["W"]
        for t in b.steps[: self.head_steps]:
            W = W - b.lr(t) * b.grad_head(W, b.features(theta, b.batch(t)))
        for t in b.steps[self.head_steps :]:
            g, _ = b.grads(theta, W, b.batch(t))
            theta = theta - b.lr(t) * g
        return {"W": W}, {"theta": theta}

    def round(self, state: State, r: Round) -> State:
        own, sent = r.clients(self.client, state)
        return State({"theta": r.mean(sent["theta"], by=self.weighting)}, own)
