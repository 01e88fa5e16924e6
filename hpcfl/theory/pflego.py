"""What theory says of PFLEGO, as lines for ``hpcfl theory``: limits of its step sizes, cost of its rounds.

Reference: Nikoloutsopoulos, Koutsopoulos, Titsias 2022, arXiv 2202.09848, Proposition 2, for exact SGD on
L(psi) = sum_i alpha_i l_i(W_i, theta), psi = (theta, W_1..W_I), with cohorts of r of the I clients:

    0 < beta < 2/L,  0 < rho < (2/L)(r/I)       L the Lipschitz constant of grad L
    0 < beta < 2/L_W                            l_i of a fixed theta is convex in W_i, and L_W-smooth (derived)

A client's steps of the head descend on l_i, not on alpha_i l_i: of many clients the second limit may be the lower one.

L of a network is not known. The largest |eigenvalue| of the Hessian of L(psi) at the start estimates it: no bound,
since the curvature changes on the way. L_W is of the features at the start, for any heads: with [phi, 1] [B, M+1] of a
client's samples, weighted w_j = 1/N_i, the Hessian of its head is at most

    c lambda_max(sum_j w_j [phi_j, 1][phi_j, 1]^T) + l2         c = 1 for half the squared error, where this is exact,
                                                                1/2 for softmax (Boehning 1992)

Where the samples are many for the model, both are found from some of every client's. Of minibatches' noise nothing is
said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from hpcfl.batch import Batch
from hpcfl.engine import Engine
from hpcfl.errors import InputError
from hpcfl.members import Members
from hpcfl.rng import Purpose, stream
from hpcfl.splits import TRAIN
from hpcfl.task import Task
from hpcfl.theory.predictions import Prediction

PRODUCTS, CHANGE = 50, 1e-3  # most products with a Hessian, and the relative change of an eigenvalue that ends them
WORK = 4e9  # operations of a forward pass over the samples of a product: two seconds of a core, for dense layers
FEATURES = 4e10  # the same, over the samples whose features L_W is found from
FEWEST = 4  # samples of a client
BACKWARD = 2  # forward passes that a backward pass costs


class Joint:
    """L(psi) at one point. psi, and vectors beside it, lie flat: theta [P_body], then the heads [N, P_head].

    On one rank. most: samples of a client that count, evenly spaced: those of a forward pass of ``WORK`` operations.
    """

    def __init__(self, engine: Engine, theta: Tensor, W: Tensor):
        """theta [P_body], W [N, P_head]: the point."""
        self.engine, self.theta, self.W = engine, theta, W
        self.most = affordable(engine, WORK)

    def product(self, v: Tensor) -> Tensor:
        """The Hessian of L at psi times v. Block by block, client by client."""
        task, (v_theta, v_W) = self.engine.task, self._parts(v)
        result = torch.zeros_like(v)
        by_theta, by_W = self._parts(result)
        for members, batch in batches(self.engine, self.most):
            rows = torch.from_numpy(members.rows).to(v.device)
            w, along = (self._joined(*x, rows) for x in ((self.theta, self.W), (v_theta, v_W)))
            share = torch.from_numpy(members.samples / members.population_samples).to(v)  # alpha_i
            products = (share[:, None] * task.hessian_product(w, along, batch))[: members.real]
            of_theta, of_W = task.split.parts(products)
            by_theta += of_theta.sum(0)
            by_W[rows[: members.real]] = of_W
        return result

    def curvature(self) -> tuple[float, bool]:
        """The largest |eigenvalue| of the Hessian, and whether it settled. The vector to begin with is a random one."""
        g = stream(self.engine.seed, Purpose.INIT, step=1)
        start = g.standard_normal(len(self.theta) + self.W.numel())
        return largest_eigenvalue(self.product, torch.from_numpy(start).to(self.theta))

    def _parts(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Views [P_body], [N, P_head]."""
        return v[: len(self.theta)], v[len(self.theta) :].view(self.W.shape)

    def _joined(self, theta: Tensor, W: Tensor, rows: Tensor) -> Tensor:
        return self.engine.task.split.join(theta.expand(len(rows), -1), W[rows])


def largest_eigenvalue(product: Callable[[Tensor], Tensor], start: Tensor) -> tuple[float, bool]:
    """The largest |eigenvalue| of a symmetric matrix, from its products with vectors; and whether it settled.

    Lanczos' iteration, which makes the best of the products of a power iteration. It ends when an eigenvalue changes
    by less than ``CHANGE``, or after ``PRODUCTS`` products. Raises InputError where a product is not finite.
    """
    before, q, beta = torch.zeros_like(start), start / start.norm(), 0.0
    diagonal: list[float] = []
    beside: list[float] = []
    found = 0.0
    for _ in range(PRODUCTS):
        r = product(q) - beta * before
        diagonal.append(float(q @ r))
        r -= diagonal[-1] * q
        beta = float(r.norm())
        if not math.isfinite(beta):
            raise InputError("hpcfl theory: the curvature of the losses at the start is not finite; scale the data")
        tridiagonal = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
        last, found = found, float(np.abs(np.linalg.eigvalsh(tridiagonal)).max())
        if beta <= 1e-12 * found or abs(found - last) < CHANGE * found:
            return found, True
        beside.append(beta)
        before, q = q, r / beta
    return found, False


def head_curvature(engine: Engine, theta: Tensor, most: int) -> float:
    """L_W over all clients, at the features of at most so many samples of each by the body theta [P_body]. One rank."""
    split, found = engine.task.split, 0.0
    if split.layer is None:
        return found
    factor = 1.0 if engine.task.classes is None else 0.5
    split.body.train(False)
    for members, batch in batches(engine, most):
        phi = split.body.outputs(theta.expand(len(members.rows), -1), batch)
        x = phi if split.layer.bias is None else torch.cat([phi, torch.ones_like(phi[..., :1])], 2)
        x = x * batch.weight[..., None].sqrt()
        gram = x @ x.mT if x.shape[1] < x.shape[2] else x.mT @ x
        if not gram.isfinite().all():
            raise InputError("hpcfl theory: the features at the start are not finite; scale the data")
        found = max(found, factor * float(torch.linalg.eigvalsh(gram).max()) + engine.task.l2)
    return found


def batches(engine: Engine, most: int) -> Iterator[tuple[Members, Batch]]:
    """All clients block by block, with at most so many of their training samples, evenly spaced."""
    group = engine.group
    for members in engine.members(engine.everyone, full_batch=True):
        samples = members.samples[:, None]
        count = np.minimum(samples, most)
        column = np.arange(count.max())
        x, y = group.gather(members.rows, np.minimum(column, count - 1) * samples // count, TRAIN)
        weight = torch.from_numpy((column < count) / count).to(group.x.device, group.dtype)
        yield members, Batch(x, y, weight, members.real, mask=group.outputs(members.rows))


def affordable(engine: Engine, work: float) -> int:
    """Samples of a client, at most: those of all clients take a forward pass of so many operations."""
    return max(FEWEST, int(work / max(1, operations(engine.task)) / engine.group.population))


def operations(task: Task) -> int:
    """Of a forward pass of one sample: those of its products of matrices, and convolutions."""
    from torch.utils.flop_counter import FlopCounterMode  # slow, and only ``hpcfl theory`` needs it

    task.network.train(False)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        task.module(torch.zeros(1, *task.shape, dtype=task.dtype, device=task.device))
    return counter.get_total_flops()


def of_steps(joint: Joint, participation: float, beta: float, rho: float, *, exact: bool) -> Iterator[Prediction]:
    """Limits of the step sizes beside the job's. participation: r/I; exact: whether the heads' steps are full-batch."""
    engine = joint.engine
    samples, most = engine.group.samples, affordable(engine, FEATURES)
    L, settled = joint.curvature()
    L_W = head_curvature(engine, joint.theta, most)
    yield Prediction("L, an estimate at the start and no bound" + ("" if settled else ", not settled"), L)
    yield Prediction(f"samples that L is from, of {samples.sum():,}", counted(samples, joint.most))
    yield Prediction("Proposition 2's limit of beta, < 2/L", limit(L))
    yield Prediction("step-size limit of the server, rho < (2/L)(r/I)", limit(L) * participation)
    yield Prediction("L_W, curvature of the heads' losses at the start", L_W)
    yield Prediction(f"samples that L_W is from, of {samples.sum():,}", counted(samples, most))
    of_some = most < samples.max()
    yield Prediction("step-size limit of the heads, beta < 2/L_W" + (", an estimate" if of_some else ""), limit(L_W))
    if exact and not of_some:
        yield Prediction("below it no head step of round 1 increases a loss", math.nan)
    yield Prediction("step size of this job's heads, beta", beta)
    yield Prediction("step size of this job's server, rho", rho)


def counted(samples: np.ndarray, most: int) -> int:
    """How many count, of the clients' numbers of samples [N]."""
    return int(np.minimum(samples, most).sum())


def limit(smoothness: float) -> float:
    """2/L: gradient steps shorter than that decrease an L-smooth function."""
    return 2 / smoothness if smoothness > 0 else math.inf


def of_passes(tau: int, *, kept: bool) -> Iterator[Prediction]:
    """Passes through the body. kept: whether tau - 1 steps have one batch, whose features are computed once."""
    forward = min(tau, 2) if kept else tau
    yield Prediction("forward passes of the body, per client and round", forward, "forward_passes")
    yield Prediction("backward passes of the body, per client and round", 1, "backward_passes")
    yield Prediction("passes of FedPer, forward and backward alike", tau)
    yield Prediction("cost of FedPer by PFLEGO's, a backward pass as two", cost_ratio(tau, forward))


def cost_ratio(tau: int, forward: int = 2) -> float:
    """tau (1 + b)/(2 + b): tau forward and backward passes, by ``forward`` ones and a single backward pass."""
    return tau * (1 + BACKWARD) / (forward + BACKWARD)


def of_traffic(cohort: int, rounds: int, vector: int) -> Iterator[Prediction]:
    """A body down and a gradient of it up, per participant. vector: bytes of one."""
    yield Prediction("vectors of a round, up and down alike", cohort)
    yield Prediction("megabytes of a round, up and down alike", cohort * vector / 1e6)
    for way in ("up", "down"):
        yield Prediction(f"vectors {way} in {rounds:,} rounds", cohort * rounds, f"vectors_{way}")
        yield Prediction(f"megabytes {way} in {rounds:,} rounds", cohort * rounds * vector / 1e6, f"megabytes_{way}")
