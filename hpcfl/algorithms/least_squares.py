"""Exact least squares for linear models: every client alone, or one model for all.

The ends of the scale on which personalization lies, and baselines of arXiv 2204.13619 (Lyu, Hanzely, Kolar 2022). With
the mean losses f_i = 1/2 theta^T A_i theta - b_i^T theta and n_i training samples,

    alone     theta_i = A_i^+ b_i
    pooled    theta   = (sum_i n_i A_i)^+ sum_i n_i b_i

Travels: alone nothing; pooled, once, A_i and b_i up (P^2 + P numbers), theta down.
Deviations: none; where the data leave a direction open, the solution of least norm. It is done after one round of
all clients, and every further one does the same again; of fewer, a round solves for those who are there.
Limits held by tests: numpy.linalg.lstsq on each client's samples and on all samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hpcfl.algorithm import Rows, State, Work
from hpcfl.block import Block
from hpcfl.engine import Engine
from hpcfl.group import Group
from hpcfl.quadratics import need_quadratics, pseudo_inverse, quadratics
from hpcfl.registry import register
from hpcfl.round import Round
from hpcfl.task import Task


@register("algorithm", "least_squares")
@dataclass(frozen=True, kw_only=True)
class LeastSquares(Work):
    """Linear regression, solved exactly: of each client alone, or pooled."""

    pooled: bool = False

    least_squares: ClassVar[bool] = True

    def prepare(self, engine: Engine) -> Work:
        need_quadratics(engine, "least_squares")
        return self

    def init(self, task: Task, group: Group) -> State:
        return State(local={"theta": task.start().repeat(group.clients, 1)})

    def round(self, state: State, r: Round) -> State:
        if not self.pooled:
            own, _ = r.clients(self.solve, state, full_batch=True)
            return State(local=own)
        _, sent = r.clients(self.send, state, full_batch=True)
        A, right = r.mean(sent["A"], by="sample"), r.mean(sent["b"], by="sample")
        own, _ = r.clients(self.adopt, state, given={"theta": self.solution(A.reshape(-1, len(right)), right)})
        return State(local=own)

    def solution(self, A: Tensor, right: Tensor) -> Tensor:
        """Of A theta = right, [..., P, P] and [..., P]; eigenvalues of A have been rounded by up to P units or so."""
        least = 32 * A.shape[-1] * torch.finfo(A.dtype).eps
        return (pseudo_inverse(A, least) @ right[..., None])[..., 0]

    def solve(self, b: Block, own: Rows) -> tuple[Rows, Rows]:
        return {"theta": self.solution(*quadratics(b))}, {}

    def send(self, b: Block, own: Rows) -> tuple[Rows, Rows]:
        A, b_i = quadratics(b)
        return {}, {"A": A.flatten(1), "b": b_i}

    def adopt(self, b: Block, own: Rows) -> tuple[Rows, Rows]:
        return {"theta": b.stack(b.shared["theta"])}, {}

    def personal(self, b: Block, own: Rows) -> Tensor:
        return own["theta"]
