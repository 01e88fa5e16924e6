"""What the algorithms share that split a model into a body, which all clients learn together, and personal heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hpcfl.algorithm import Rows, State, Work
from hpcfl.block import Block
from hpcfl.group import Group
from hpcfl.options import Count, Positive
from hpcfl.server import ServerStep
from hpcfl.task import Task


@dataclass(frozen=True, kw_only=True)
class PersonalHeads(Work):
    """The model of client i is the body theta with its own head W_i; all heads start alike. A mixin."""

    own_heads: ClassVar[bool] = True

    def init(self, task: Task, group: Group) -> State:
        theta, W = task.split.parts(task.start())
        return State({"theta": theta.clone()}, {"W": W.repeat(group.clients, 1)})

    def personal(self, b: Block, own: Rows) -> Tensor:
        return b.join(b.stack(b.shared["theta"]), own["W"])

    def local_model(self, b: Block, own: Rows, sent: Rows) -> Tensor:
        """With the client's own body, where it has trained one."""
        return b.join(sent["theta"] if "theta" in sent else b.stack(b.shared["theta"]), own["W"])


@dataclass(frozen=True, kw_only=True)
class HeadSteps(PersonalHeads, ServerStep):
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
