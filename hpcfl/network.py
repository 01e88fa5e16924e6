"""A module applied to many clients at once, each with parameters of its own, and its back-propagation.

Three backends give the same numbers to rounding: the module's own batched arithmetic where it brings one, torch.vmap,
and a loop over clients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from hpcfl.batch import Batch
from hpcfl.errors import InputError
from hpcfl.gradient import Factor, Write
from hpcfl.vectors import Layout

Pull = Callable[[Tensor], Write]  # slope [C, B, O] of a loss by the outputs -> the loss's gradient, to be written out
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.modules.conv._ConvTransposeNd)


@runtime_checkable
class BatchedModel(Protocol):
    """A module that brings its own arithmetic for C clients at once, [C, P] flat parameters."""

    def batched_outputs(self, w: Tensor, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """w [C, P], x [C, B, ...] -> outputs [C, B, O] and what the gradient needs."""

    def batched_gradient(self, w: Tensor, saved: list[Tensor], slope: Tensor) -> Tensor:
        """The gradient [C, P] in a new tensor, from slope [C, B, O], the loss's derivative by the outputs."""


class Network:
    """A module's outputs for C clients at once. Parameters are flat vectors in the order of ``layout``."""

    def __init__(self, module: nn.Module, layout: Layout, backend: str, dropout_keys: list[str]):
        """module: in its device and dtype; backend: as ``choose_backend`` says; dropout_keys: its KeyedDropouts'."""
        self.module, self.layout, self.dropout_keys, self.backend = module, layout, dropout_keys, backend
        self.batched = cast(BatchedModel, module) if backend == "model" else None

    def train(self, training: bool = True) -> None:
        """The mode of the module, whose own method visits all of its layers, at every step."""
        if self.module.training != training:
            self.module.train(training)

    @torch.no_grad()
    def outputs(self, w: Tensor, batch: Batch) -> Tensor:
        """w [C, P] -> outputs [C, B, O]."""
        if self.batched is not None:
            return self.batched.batched_outputs(w, batch.x)[0]
        keys = self._keys(w, batch)
        if self.backend == "vmap":
            return vmap(self._apply)(w, batch.x, keys)
        rows = [self._apply(w[k], _channels_last(batch.x[k]), keys[k]) for k in range(batch.real)]
        return torch.stack(rows + rows[-1:] * (len(w) - batch.real))

    def forward(self, w: Tensor, batch: Batch) -> tuple[Tensor, Pull]:
        """Outputs [C, B, O] at w [C, P], and what pulls a slope of a loss by them back to the loss's gradient."""
        if self.batched is not None:
            outputs, saved = self.batched.batched_outputs(w, batch.x)
            return outputs, partial(_pulled, self.batched, w, saved)
        if self.backend == "vmap":
            leaf = w.detach().requires_grad_()
            outputs = vmap(self._apply)(leaf, batch.x, self._keys(w, batch))
            return outputs.detach(), lambda slope: partial(_scaled, partial(_gradient, outputs, leaf, slope), [])
        return self._loop(w, batch)

    def _loop(self, w: Tensor, batch: Batch) -> tuple[Tensor, Pull]:
        """One client after the other: the outputs now, a client's gradient when it is written, while it is in cache."""
        keys = self._keys(w, batch)
        leaves = [[v.detach().requires_grad_() for v in self.layout.views(w[k])] for k in range(batch.real)]
        rows = []
        for k in range(batch.real):
            x = _channels_last(batch.x[k])
            rows.append(self._applied(leaves[k], x, keys[k]))
        detached = [row.detach() for row in rows]
        outputs = torch.stack(detached + detached[-1:] * (len(w) - batch.real))
        return outputs, lambda slope: partial(self._written, w.shape, leaves, rows, slope, [])

    def _written(
        self,
        shape: torch.Size,
        leaves: list[list[Tensor]],
        rows: list[Tensor],
        slope: Tensor,
        gradients: list[tuple[Tensor, ...]],
        factor: Factor,
        base: Tensor | None,
    ) -> Tensor:
        result = slope.new_empty(shape)
        for k in range(len(result)):
            if k == len(gradients) < len(rows) and leaves[k]:
                gradients.append(torch.autograd.grad(rows[k], leaves[k], slope[k], materialize_grads=True))
            scale = float(factor[k] if isinstance(factor, Tensor) and factor.dim() else factor)
            start = self.layout.views(base[k]) if base is not None else None
            for n, into in enumerate(self.layout.views(result[k]) if leaves[0] else []):
                gradient = gradients[min(k, len(rows) - 1)][n]
                if start is None:
                    torch.mul(gradient, scale, out=into)
                else:
                    torch.sub(start[n], gradient, alpha=scale, out=into)
        return result

    def _apply(self, flat: Tensor, x: Tensor, key: Tensor) -> Tensor:
        return self._applied(self.layout.views(flat), x, key)

    def _applied(self, parameters: list[Tensor], x: Tensor, key: Tensor) -> Tensor:
        """The outputs of one client [B, O]."""
        values = dict(zip(self.layout.names, parameters, strict=True))
        outputs = functional_call(self.module, values | dict.fromkeys(self.dropout_keys, key), (x,))
        return outputs.unsqueeze(1) if outputs.dim() == 1 else outputs

    def _keys(self, w: Tensor, batch: Batch) -> Tensor:
        return batch.key if batch.key is not None else torch.zeros(len(w), dtype=torch.int64, device=w.device)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def _pulled(model: BatchedModel, w: Tensor, saved: list[Tensor], slope: Tensor) -> Write:
    """Back-propagation when the factor is known: it scales the small slope of the outputs."""

    def write(factor: Factor, base: Tensor | None) -> Tensor:
        per_client = factor.unsqueeze(-1) if isinstance(factor, Tensor) and factor.dim() else factor
        gradient = model.batched_gradient(w, saved, slope * per_client)
        return gradient if base is None else torch.sub(base, gradient, out=gradient)

    return write


def _gradient(outputs: Tensor, leaf: Tensor, slope: Tensor) -> Tensor:
    """Zero where the outputs do not depend on the leaf: it has no parameters."""
    if not outputs.requires_grad:
        return torch.zeros_like(leaf)
    return torch.autograd.grad(outputs, leaf, slope, materialize_grads=True)[0]


def _scaled(compute: Callable[[], Tensor], kept: list[Tensor], factor: Factor, base: Tensor | None) -> Tensor:
    if not kept:
        kept.append(compute())
    return kept[0] * factor if base is None else base - factor * kept[0]


def has_convolutions(module: nn.Module) -> bool:
    return any(isinstance(m, CONVOLUTIONS) for m in module.modules())


def choose_backend(module: nn.Module, backend: str, device: torch.device) -> str:
    """For "auto": the model's own arithmetic, else a loop for convolutions on the CPU (vmap's are slow), else vmap."""
    if backend == "model" and not isinstance(module, BatchedModel):
        raise InputError(
            f'run.backend = "model": {type(module).__name__} brings no batched arithmetic; use "auto", "vmap" or "loop"'
        )
    if backend != "auto":
        return backend
    if isinstance(module, BatchedModel):
        return "model"
    return "loop" if device.type == "cpu" and has_convolutions(module) else "vmap"
