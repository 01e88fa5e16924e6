"""Local training only: every client descends its own loss and never communicates.

Reference: the baseline of every paper on personalized federated learning.

    w_i <- w_i - eta_t grad f_i(w_i; xi_i^t)

Travels per round: nothing.
Deviations: none. All clients start from the same initial model, as in the other algorithms.
Limits held by tests: APFL with alpha = 1 has the same personal models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hpcfl.algorithm import LocalSGD, Rows, State
from hpcfl.block import Block
from hpcfl.group import Group
from hpcfl.registry import register
from hpcfl.round import Round
from hpcfl.task import Task


@register("algorithm", "local")
@dataclass(frozen=True)
class Local(LocalSGD):
    """Each client trains its own model on its own data."""

    evaluated: ClassVar[tuple[str, ...]] = ("personal",)
    own_heads: ClassVar[bool] = True

    def init(self, task: Task, group: Group) -> State:
        return State(local={"w": task.start().repeat(group.clients, 1)})

    def client(self, b: Block, own: Rows) -> tuple[Rows, Rows]:
        w = own["w"]
        for t in b.steps:
            w = w - b.lr(t) * b.grad(w, b.batch(t))
        return {"w": w}, {}

    def round(self, state: State, r: Round) -> State:
        own, _ = r.clients(self.client, state)
        return State(local=own)

    def personal(self, b: Block, own: Rows) -> Tensor:
        return own["w"]

    def local_model(self, b: Block, own: Rows, sent: Rows) -> Tensor:
        return own["w"]
