"""The clients' losses of a linear regression as quadratics: f_i(w) = 1/2 w^T A_i w - b_i^T w + constant."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcfl.block import Block
from hpcfl.engine import Engine
from hpcfl.errors import Diverged, InputError
from hpcfl.theory.curvature import is_linear

LONG = 2.0**40  # of vectors that are long beside any model; division by a power of two rounds nothing


def is_quadratic(engine: Engine) -> bool:
    return engine.task.classes is None and is_linear(engine)


def need_quadratics(engine: Engine, name: str) -> None:
    """Raises InputError where the losses are not quadratic, or the numbers too short to solve with."""
    if not is_quadratic(engine):
        raise InputError(
            f'algorithm.name = "{name}": solves linear regressions only; give model.name = "linear" and data for it'
        )
    if engine.task.dtype != torch.float64:
        raise InputError(f'algorithm.name = "{name}": solves exactly, which needs run.dtype = "float64"')


def quadratics(b: Block) -> tuple[Tensor, Tensor]:
    """A_i [C, P, P] and b_i [C, P] of the mean losses.

    By P + 1 gradients, which are affine: b_i = -grad f_i(0), A_i u = grad f_i(u) + b_i for vectors u so long that a
    large b_i costs no digits of A_i u.
    """
    batch = b.batch(0)
    identity = torch.eye(b.parameters, dtype=batch.x.dtype, device=batch.x.device)
    at_zero = 0.0 + b.grad(b.stack(torch.zeros_like(identity[0])), batch)
    A = torch.stack([(b.grad(b.stack(LONG * e), batch) - at_zero) / LONG for e in identity], 2)
    if not A.isfinite().all():
        raise Diverged(f"client {b.ids[int((~A.flatten(1).isfinite()).any(1).nonzero()[0])]}: its data are too large")
    return (A + A.transpose(1, 2)) / 2, -at_zero


def pseudo_inverse(matrix: Tensor, least: float) -> Tensor:
    """[..., P, P] of symmetric matrices, one by one: the bits must not depend on their number.

    least: eigenvalues up to this share of the largest are roundings of zero.
    """
    flat = matrix.reshape(-1, *matrix.shape[-2:])
    flat = (flat + flat.transpose(1, 2)) / 2
    if not len(flat):
        return matrix
    return torch.stack([torch.linalg.pinv(m, hermitian=True, rtol=least) for m in flat]).reshape(matrix.shape)


def products(a: Tensor, b: Tensor) -> Tensor:
    """[H, P, P] times [H, P, Q], one by one: the bits must not depend on their number."""
    return torch.stack([x @ y for x, y in zip(a, b, strict=True)]) if len(a) else a @ b
