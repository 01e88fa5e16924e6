"""FedAvg: clients run local SGD from the global model, the server averages.

Reference: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017, arXiv 1602.05629. Server momentum: Hsu, Qi, Brown, arXiv 1909.06335.

    w_i <- w;  tau times:  w_i <- w_i - eta grad f_i(w_i; xi)
    w+   = sum_i p_i w_i            p_i = n_i / sum_j n_j ("sample", the paper's) or 1/K ("client")
    u   <- beta u + (w+ - w);  w <- w + eta_s u      (eta_s = 1, beta = 0: w = w+)

Travels per round and participant: w down, w_i up.
Deviations: none.
Limits held by tests: APFL with alpha = 0 has the same global model when weighting = "client".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hpcfl.algorithm import LocalSGD, Rows, State, Weighting
from hpcfl.block import Block
from hpcfl.group import Group
from hpcfl.options import OpenShare, Positive
from hpcfl.registry import register
from hpcfl.round import Round
from hpcfl.task import Task


@register("algorithm", "fedavg")
@dataclass(frozen=True)
class FedAvg(LocalSGD):
    """Local SGD and averaging, with an optional server step."""

    weighting: Weighting = "sample"
    server_lr: Positive = 1.0  # eta_s
    server_momentum: OpenShare = 0.0  # beta

    evaluated: ClassVar[tuple[str, ...]] = ("global",)

    def init(self, task: Task, group: Group) -> State:
        w = task.start()
        return State({"w": w, "u": torch.zeros_like(w)} if self.server_momentum else {"w": w})

    def client(self, b: Block, own: Rows) -> tuple[Rows, Rows]:
        w = b.stack(b.shared["w"])
        for t in b.steps:
            w = w - b.lr(t) * b.grad(w, b.batch(t))
        return {}, {"w": w}

    def round(self, state: State, r: Round) -> State:
        _, sent = r.clients(self.client, state)
        w, new = state.shared["w"], r.mean(sent["w"], by=self.weighting)
        if self.server_momentum:
            u = self.server_momentum * state.shared["u"] + (new - w)
            return State({"w": w + self.server_lr * u, "u": u})
        return State({"w": new if self.server_lr == 1.0 else w + self.server_lr * (new - w)})

    def local_model(self, b: Block, own: Rows, sent: Rows) -> Tensor:
        return sent["w"]

    def global_model(self, state: State) -> Tensor:
        return state.shared["w"]
