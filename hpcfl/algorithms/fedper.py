"""FedPer: local SGD on body and head together; only bodies are averaged.

Reference: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated learning with personalization layers", 2019,
arXiv 1912.00818.

    theta_i <- theta;  tau times:  (theta_i, W_i) <- (theta_i, W_i) - eta grad f_i(theta_i, W_i; xi)
    theta = sum_i p_i theta_i       p_i = n_i / sum_j n_j ("sample") or 1/K ("client")

Travels per round and participant: theta down, theta_i up.
Deviations: none.
Limits held by tests: with an empty head it is FedAvg, with an empty body local training.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcfl.algorithm import LocalSGD, Rows, State, Weighting
from hpcfl.block import Block
from hpcfl.personal_heads import TrainedHeads
from hpcfl.registry import register
from hpcfl.round import Round


@register("algorithm", "fedper")
@dataclass(frozen=True)
class FedPer(TrainedHeads, LocalSGD):
    """Local SGD on a shared body and a personal head, averaging of the bodies."""

    weighting: Weighting = "sample"

    def client(self, b: Block, own: Rows) -> tuple[Rows, Rows]:
        theta, W = b.stack(b.shared["theta"]), own["W"]
        for t in b.steps:
            g, g_W = b.grads(theta, W, b.batch(t))
            theta, W = theta - b.lr(t) * g, W - b.lr(t) * g_W
        return {"W": W}, {"theta": theta}

    def round(self, state: State, r: Round) -> State:
        own, sent = r.clients(self.client, state)
        return State({"theta": r.mean(sent["theta"], by=self.weighting)}, own)
