"""Smoothness and strong convexity of the clients' losses, exactly for linear and logistic models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import Linear

from hpcfl.dense import Dense
from hpcfl.engine import Engine
from hpcfl.errors import InputError


@dataclass(frozen=True)
class Curvature:
    """Over all clients: f_i is L-smooth and mu-strongly convex, each of its samples' losses L_sample-smooth."""

    L: float
    mu: float
    L_sample: float

    def of_steps(self, batch_size: int | None) -> float:
        """The smoothness that gradient steps meet: with minibatches (None: full batches) that of single samples."""
        return self.L if batch_size is None else self.L_sample


def curvature(engine: Engine, *, objective: str, L: float | None = None, mu: float | None = None) -> Curvature:
    """Collective over the world. objective: f_i as the "mean" or the "sum" over the client's samples.

    L (also of single samples), mu: known values, which are taken as they are.

    The Hessian of client i's mean loss is X^T D X / n_i + l2 I, where D is 1 for half the squared error; for logistic
    models 0 <= D <= 1/4 (a single output) or 1/2 (softmax; Boehning 1992). Raises InputError for other models.
    """
    if L is not None and mu is not None:
        return Curvature(L, mu, L)
    task, bound = engine.task, _slope_bound(engine)
    found = np.array([0.0, -np.inf, 0.0])  # L, -mu, L_sample
    for block in engine.blocks(engine.everyone, {}, 0, full_batch=True):
        batch = block.batch(0)
        x = _design(engine, batch.x)[: block.real].to(torch.float64)
        scale = np.ones(block.real) if objective == "mean" else block.samples[: block.real].astype(np.float64)
        low, high = _extreme_eigenvalues(x * batch.weight[: block.real, :, None].to(x.dtype).sqrt())
        low = low if task.classes is None else np.zeros_like(low)
        norms = (x**2).sum(2).amax(1).cpu().numpy()
        candidates = [high * bound + task.l2, -(low * bound + task.l2), norms * bound + task.l2]
        found = np.maximum(found, [(scale * values).max() for values in candidates])
    engine.topology.world.allreduce(found, "max")
    if not np.isfinite(found).all():
        raise InputError("algorithm.smoothness: the data are too large to find it; scale them, or give it")
    most, least, single = float(found[0]), float(-found[1]), float(found[2])
    return Curvature(L or most, least if mu is None else mu, L or single)


def is_linear(engine: Engine) -> bool:
    """Whether the model's outputs are linear in its parameters."""
    return _layer(engine) is not None


def _layer(engine: Engine) -> Linear | None:
    """The only layer of a linear model."""
    module = engine.task.module
    return cast(Linear, module.layers[0]) if isinstance(module, Dense) and len(module.layers) == 1 else None


def _slope_bound(engine: Engine) -> float:
    """Bound of the second derivative of a sample's loss by its outputs."""
    layer = _layer(engine)
    if layer is None:
        raise InputError(
            "algorithm.smoothness: can be found for linear and logistic models only; give it for this model "
            "(and algorithm.lr, algorithm.p_global, algorithm.p_cluster as numbers)"
        )
    if engine.task.classes is None:
        return 1.0
    return 0.25 if layer.out_features == 1 else 0.5


def _design(engine: Engine, x: Tensor) -> Tensor:
    """[C, B, ...] -> [C, B, features], with a one for the bias."""
    x = x.flatten(2)
    return x if cast(Linear, _layer(engine)).bias is None else torch.cat([x, torch.ones_like(x[..., :1])], 2)


def _extreme_eigenvalues(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Of X^T X, smallest and largest: [C, B, d] -> [C], [C]. By X X^T where there are fewer rows than columns."""
    few = x.shape[1] < x.shape[2]
    products = x @ x.transpose(1, 2) if few else x.transpose(1, 2) @ x
    if not products.isfinite().all():
        return np.zeros(len(x)), np.full(len(x), np.inf)
    values = torch.linalg.eigvalsh(products).cpu().numpy()
    return np.zeros(len(x)) if few else np.maximum(values[:, 0], 0.0), values[:, -1]
