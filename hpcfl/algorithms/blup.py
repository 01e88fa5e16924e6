"""BLUP: the exact minimiser of Async-L2GD's objective for linear models, by solving linear systems.

Reference: Lyu, Hanzely, Kolar, "Personalized federated learning with multiple known clusters", 2022, arXiv 2204.13619,
Section 5: for the hierarchical linear model the minimiser is the best linear unbiased predictor of theta_i.

    min sum_i f_i(theta_i) + 1/2 sum_i gamma_i ||theta_i - c_j||^2 + 1/2 sum_j lambda_j ||c_j - c||^2

which has the same theta_i as F of algorithms/async_l2gd.py with lambda_j = alpha_j Gamma_j/(1 - alpha_j). With
f_i = 1/2 theta^T A_i theta - b_i^T theta, H_i = (A_i + gamma_i I)^-1 and gamma-weighted means over cluster j
S_j = mean(I - gamma_i H_i), r_j = mean(H_i b_i), setting the derivatives to zero gives

    M_j = (alpha_j I + (1 - alpha_j) S_j)^-1
    c   = (sum_j Gamma_j alpha_j M_j S_j)^-1 sum_j Gamma_j alpha_j M_j r_j
    c_j = M_j ((1 - alpha_j) r_j + alpha_j c)
    theta_i = H_i (b_i + gamma_i c_j)

Travels, once: S_i and r_i up (P^2 + P numbers), c_j down; between clusters P^2 + P up, and their mean down.
Deviations: none; where the data leave a direction open, the solution of least norm. It is done after one round of
all clients, and every further one does the same again; of fewer, a round solves for those who are there.
Limits held by tests: a dense solve of generalised least squares; the limit of async_l2gd.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hpcfl.algorithm import Rows, State, Work
from hpcfl.block import Block
from hpcfl.engine import Engine
from hpcfl.group import Group
from hpcfl.known_clusters import ClusterPull, each
from hpcfl.members import ClusterMeans
from hpcfl.quadratics import need_quadratics, products, pseudo_inverse, quadratics
from hpcfl.registry import register
from hpcfl.round import Round
from hpcfl.task import Task

LEAST = 1e-10  # share of the largest eigenvalue up to which one is a rounding of zero


@register("algorithm", "blup")
@dataclass(frozen=True, kw_only=True)
class BLUP(ClusterPull):
    """The exact minimiser of async_l2gd's objective, for linear regression."""

    least_squares: ClassVar[bool] = True

    @classmethod
    def of(cls, pull: ClusterPull) -> BLUP:
        """With the objective of another algorithm."""
        return cls(gamma=pull.gamma, alpha=pull.alpha, lam=pull.lam, objective=pull.objective)

    def prepare(self, engine: Engine) -> Solver:
        need_quadratics(engine, "blup")
        return Solver(self.gammas(engine), self.alphas(engine), self.loss_scale(engine))


class Solver(Work):
    """What runs: with every gamma_i and alpha_j as numbers."""

    least_squares = True

    def __init__(self, gamma: np.ndarray, alpha: np.ndarray, loss_scale: np.ndarray):
        """gamma, loss_scale [N], alpha [K]."""
        self.gamma, self.alpha = gamma, alpha
        self.gamma_i, self.loss = each(gamma), each(loss_scale)

    def init(self, task: Task, group: Group) -> State:
        return State(local={"theta": task.start().repeat(group.clients, 1)})

    def round(self, state: State, r: Round) -> State:
        size = state.local["theta"].shape[1]
        _, sent = r.clients(self.send, state, full_batch=True)
        means = r.cluster_mean(sent["r"], by=self.gamma)
        S = matrices(r.cluster_mean(sent["S"], by=self.gamma), size, size)
        r_j = matrices(means, size, 1)
        weights = r.cluster_weights(self.gamma)  # Gamma_j
        alpha = torch.from_numpy(self.alpha[means.clusters, None, None]).to(S)
        M = pseudo_inverse(alpha * torch.eye(size).to(S) + (1 - alpha) * S, LEAST)
        left = r.mean_over_clusters(replace(means, values=products(alpha * M, S).flatten(1)), weights)
        right = r.mean_over_clusters(replace(means, values=products(alpha * M, r_j).flatten(1)), weights)
        c = pseudo_inverse(left.reshape(size, size), LEAST) @ right[:, None]
        c_j = products(M, (1 - alpha) * r_j + alpha * c)
        own, _ = r.clients(self.solve, state, given={"c_j": replace(means, values=c_j[..., 0])}, full_batch=True)
        return State(local=own)

    def send(self, b: Block, own: Rows) -> tuple[Rows, Rows]:
        V, d, b_i = self.spectrum(b)
        inverse = 1 / (d + self.per_client(b))
        return {}, {"S": ((V * (d * inverse)) @ V.mT).flatten(1), "r": ((V * inverse) @ b_i)[..., 0]}

    def solve(self, b: Block, own: Rows) -> tuple[Rows, Rows]:
        V, d, b_i = self.spectrum(b)
        gamma = self.per_client(b)
        c = V.mT @ b.shared["c_j"][..., None]
        return {"theta": ((V * (1 / (d + gamma))) @ (b_i + gamma * c))[..., 0]}, {}

    def spectrum(self, b: Block) -> tuple[Tensor, Tensor, Tensor]:
        """A_i = V diag(d) V^T, and V^T b_i: [C, P, P], [C, 1, P], [C, P, 1]; so H_i = V diag(1/(d + gamma_i)) V^T."""
        A, b_i = quadratics(b)
        f = b.each(self.loss)
        f = f[..., None] if isinstance(f, Tensor) else f
        d, V = torch.linalg.eigh(f * A)
        d = torch.where(d > LEAST * d[:, -1:], d, 0.0)
        return V, d[:, None], torch.where(d[..., None] > 0, V.mT @ (f * b_i[..., None]), 0.0)

    def per_client(self, b: Block) -> Tensor | float:
        """gamma_i as a number, or [C, 1, 1]."""
        gamma = b.each(self.gamma_i)
        return gamma[..., None] if isinstance(gamma, Tensor) else gamma

    def personal(self, b: Block, own: Rows) -> Tensor:
        return own["theta"]


def matrices(means: ClusterMeans, rows: int, columns: int) -> Tensor:
    """[H, rows, columns]; zeros for clusters that formed no mean, whose values may be anything, even of no width."""
    values = means.values if means.formed.any() else means.values.new_zeros(len(means.formed), rows * columns)
    formed = torch.from_numpy(means.formed[:, None]).to(values.device)
    return torch.where(formed, values, 0.0).unflatten(1, (rows, columns))
