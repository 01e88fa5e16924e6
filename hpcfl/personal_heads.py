"""What the algorithms share that split a model into a body, which all clients learn together, and personal heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from hpcfl.algorithm import Rows, State, Work
from hpcfl.block import Block
from hpcfl.group import Group
from hpcfl.options import Count, Positive
from hpcfl.server import ServerStep
from hpcfl.task import Task


@dataclass(frozen=True, kw_only=True)
class PersonalHeads(Work):
    """The model of client i is the body theta with its own head W_i. A mixin."""

    own_heads: ClassVar[bool] = True

    def init(self, task: Task, group: Group) -> State:
        theta, W = task.split.parts(task.start())
        W = task.split.own_outputs(self.first_heads(task, group, W), group.outputs(np.arange(group.clients)))
        return State({"theta": theta.clone()}, {"W": W})

    def first_heads(self, task: Task, group: Group, W: Tensor) -> Tensor:
        """[C, P_head] from the model's initial head W [P_head]: all alike."""
        return W.repeat(group.clients, 1)

    def personal(self, b: Block, own: Rows) -> Tensor:
        return b.join(b.stack(b.shared["theta"]), own["W"])

    def local_model(self, b: Block, own: Rows, sent: Rows) -> Tensor:
        """With the client's own body, where it has trained one."""
        return b.join(sent["theta"] if "theta" in sent else b.stack(b.shared["theta"]), own["W"])


@dataclass(frozen=True, kw_only=True)
class TrainedHeads(PersonalHeads):
    """Heads that clients train and keep. A mixin.

    first_heads "alike" is the model's initial head for all, as all models start alike in other algorithms; "drawn" one
    for every client, as in PFLEGO's experiments. It matters where labels mean the same to all clients.
    """

    start_heads: Literal["alike", "drawn"] = "alike"

    def first_heads(self, task: Task, group: Group, W: Tensor) -> Tensor:
        if self.start_heads == "alike":
            return super().first_heads(task, group, W)
        return task.split.drawn_heads(group.seed, group.ids, 0).to(W)


@dataclass(frozen=True, kw_only=True)
class HeadSteps(TrainedHeads, ServerStep):
    """Clients descend with their heads, and the server along gradients of the body that they send. A mixin."""

    head_lr: Positive = 0.007  # beta
    local_steps: Count = 50  # tau
    batch_size: Count | None = None  # absent: full batch

    @property
    def minibatch(self) -> int | None:
        return self.batch_size

    def init(self, task: Task, group: Group) -> State:
        start = super().init(task, group)
        return State(self.server_start(start.shared["theta"]), start.local)
