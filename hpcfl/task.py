"""What a client computes: its model's loss and gradient, for many clients at once.

Three backends give the same numbers to rounding: the model's own batched arithmetic where it brings one,
torch.func.vmap, and a loop over clients. A loss f_i(w) is the weighted mean over a batch, plus l2/2 ||w||^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from hpcfl.dropout import replace_dropout
from hpcfl.errors import InputError
from hpcfl.gradient import Factor, Gradient
from hpcfl.vectors import Layout

Write = Callable[[Factor, Tensor | None], Tensor]  # as for Gradient
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.modules.conv._ConvTransposeNd)


@dataclass(frozen=True)
class Batch:
    """Samples of C clients, padded to one length B. A padded sample has weight zero."""

    x: Tensor  # [C, B, ...]
    y: Tensor  # [C, B] labels, or targets
    weight: Tensor  # [C, B] 1 / (number of real samples), 0 for padding
    real: int  # clients before the repeated ones of a padded block
    key: Tensor | None = None  # [C] int64 of the dropout masks; None: no dropout (evaluation)

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """x and weight as NumPy arrays, on the CPU."""
        return self.x.numpy(), self.weight.numpy()

    @cached_property
    def signs(self) -> Tensor:
        """[C, B] 1 for the first class, -1 for the second."""
        return (1 - 2 * self.y).to(self.x.dtype)


@runtime_checkable
class BatchedModel(Protocol):
    """A module that brings its own arithmetic for C clients at once, [C, P] flat parameters."""

    def batched_outputs(self, w: Tensor, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """w [C, P], x [C, B, ...] -> outputs [C, B, O] and what the gradient needs."""

    def batched_gradient(self, w: Tensor, saved: list[Tensor], slope: Tensor) -> Tensor:
        """The gradient [C, P] in a new tensor, from slope [C, B, O], the loss's derivative by the outputs."""


@runtime_checkable
class OwnLoss(Protocol):
    """A batched model that brings its loss, too."""

    def batched_loss(self, w: Tensor, batch: Batch) -> tuple[Tensor, Write] | None:
        """Weighted loss [C], and its gradient as for ``Gradient``; None where the general way is the better one."""


class Task:
    """Loss and gradient of a model, [C, P] flat parameters against batches of C clients."""

    def __init__(
        self,
        module: nn.Module,
        shape: tuple[int, ...],
        classes: int | None,
        *,
        l2: float = 0.0,
        backend: str = "auto",
        device: torch.device,
        dtype: torch.dtype,
    ):
        """module: maps x [B, *shape] to [B, classes], or to [B] or [B, 1] for a regression (classes None).

        Raises InputError for a model with running buffers and for a backend that the model cannot use.
        """
        self.dropout_keys = replace_dropout(module)
        check_module(module, shape, classes or 1)
        self.module = module.to(device=device, dtype=dtype)
        self.layout = Layout.of(module)
        self.classes, self.l2, self.device, self.dtype = classes, l2, device, dtype
        self.backend = _choose_backend(module, backend, device)
        self.batched = cast(BatchedModel, self.module) if self.backend == "model" else None
        self.own_loss = self.module if self.batched is not None and isinstance(self.module, OwnLoss) else None
        self.metrics = ("loss", "accuracy" if classes else "squared_error")

    @property
    def bytes(self) -> int:
        """Of one model."""
        return self.layout.size * torch.finfo(self.dtype).bits // 8

    @property
    def least(self) -> int:
        """Smallest block whose arithmetic has the same bits as a larger one's (held by tests)."""
        has_convolutions = any(isinstance(m, CONVOLUTIONS) for m in self.module.modules())
        return 4 if self.backend == "vmap" and has_convolutions else 2

    def start(self) -> Tensor:
        """The initial model [P]."""
        with torch.no_grad():
            return self.layout.flat([p for p in self.module.parameters() if p.requires_grad])

    def gradient(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss [C] and gradient [C, P] of every client's f_i at its own w [C, P], on its own batch.

        The gradient is a ``Gradient``, which acts as a tensor.
        """
        if not self.module.training:
            self.module.train()
        write: Write
        if self.batched is not None:
            loss, write = self._own_arithmetic(self.batched, w, batch)
        elif self.backend == "vmap":
            keys = self._keys(batch, len(w))
            gradient, loss = vmap(grad_and_value(self._objective))(w, batch.x, batch.y, batch.weight, keys)
            write = partial(_scaled, gradient)
        else:
            loss, write = self._loop(w, batch)
        if not self.l2:
            return loss, cast(Tensor, Gradient(write))

        def with_penalty(factor: Factor, base: Tensor | None) -> Tensor:
            return write(factor, base).add_((factor if base is None else -factor) * self.l2 * w)

        return loss + 0.5 * self.l2 * (w * w).sum(1), cast(Tensor, Gradient(with_penalty))

    def _own_arithmetic(self, model: BatchedModel, w: Tensor, batch: Batch) -> tuple[Tensor, Write]:
        """The loss now, back-propagation when the factor is known: it scales the small slope of the outputs."""
        found = self.own_loss.batched_loss(w, batch) if self.own_loss is not None else None
        if found is not None:
            return found
        outputs, saved = model.batched_outputs(w, batch.x)
        loss, slope = self._loss_and_slope(outputs, batch)

        def write(factor: Factor, base: Tensor | None) -> Tensor:
            per_client = factor.unsqueeze(-1) if isinstance(factor, Tensor) and factor.dim() else factor
            gradient = model.batched_gradient(w, saved, slope * per_client)
            return gradient if base is None else torch.sub(base, gradient, out=gradient)

        return loss, write

    @torch.no_grad()
    def evaluate(self, w: Tensor, batch: Batch) -> Tensor:
        """Sums over real samples [C, 2], float64: per-sample loss, and correct predictions or squared errors."""
        self.module.eval()
        if self.batched is not None:
            outputs, _ = self.batched.batched_outputs(w, batch.x)
        elif self.backend == "vmap":
            outputs = vmap(self._outputs)(w, batch.x)
        else:
            rows = [self._outputs(w[k], batch.x[k]) for k in range(batch.real)]
            outputs = torch.stack(rows + rows[-1:] * (len(w) - batch.real))
        loss = self._sample_losses(outputs, batch.y)
        score = (outputs.argmax(-1) == batch.y).to(loss.dtype) if self.classes else 2.0 * loss
        mask = batch.weight > 0
        return torch.stack([(loss * mask).sum(1, dtype=torch.float64), (score * mask).sum(1, dtype=torch.float64)], 1)

    def penalty(self, w: Tensor) -> Tensor:
        """l2/2 ||w||^2 of each client's model: [C, P] -> [C] float64."""
        return 0.5 * self.l2 * (w * w).sum(1, dtype=torch.float64)

    # --- one client -------------------------------------------------------------------------------------------------

    def _outputs(self, flat: Tensor, x: Tensor, key: Tensor | None = None) -> Tensor:
        return self._apply(self.layout.views(flat), x, key)

    def _apply(self, parameters: Sequence[Tensor], x: Tensor, key: Tensor | None) -> Tensor:
        values = dict(zip(self.layout.names, parameters, strict=True))
        if key is not None:
            values |= dict.fromkeys(self.dropout_keys, key)
        return functional_call(self.module, values, (x,))

    def _objective(self, flat: Tensor, x: Tensor, y: Tensor, weight: Tensor, key: Tensor) -> Tensor:
        return (self._sample_losses(self._outputs(flat, x, key), y) * weight).sum()

    def _loop(self, w: Tensor, batch: Batch) -> tuple[Tensor, Write]:
        """One client after the other: the losses now, a client's gradient when it is written, while it is in cache."""
        loss, keys = w.new_empty(len(w)), self._keys(batch, len(w))
        leaves = [[v.detach().requires_grad_() for v in self.layout.views(w[k])] for k in range(batch.real)]
        values = []
        for k in range(batch.real):
            x = batch.x[k].contiguous(memory_format=torch.channels_last) if batch.x.dim() == 5 else batch.x[k]
            samples = self._sample_losses(self._apply(leaves[k], x, keys[k]), batch.y[k])
            values.append((samples * batch.weight[k]).sum())
            loss[k] = values[k].detach()
        loss[batch.real :] = loss[batch.real - 1]
        gradients: list[tuple[Tensor, ...]] = []

        def write(factor: Factor, base: Tensor | None) -> Tensor:
            result = w.new_empty(w.shape)
            for k in range(len(w)):
                if k == len(gradients) < batch.real:
                    gradients.append(torch.autograd.grad(values[k], leaves[k], materialize_grads=True))
                scale = float(factor[k] if isinstance(factor, Tensor) and factor.dim() else factor)
                start = self.layout.views(base[k]) if base is not None else None
                for n, into in enumerate(self.layout.views(result[k])):
                    gradient = gradients[min(k, batch.real - 1)][n]
                    if start is None:
                        torch.mul(gradient, scale, out=into)
                    else:
                        torch.sub(start[n], gradient, alpha=scale, out=into)
            return result

        return loss, write

    def _keys(self, batch: Batch, clients: int) -> Tensor:
        return batch.key if batch.key is not None else torch.zeros(clients, dtype=torch.int64, device=self.device)

    # --- losses -----------------------------------------------------------------------------------------------------

    def _sample_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Per sample, [..., B, O] -> [..., B]: softmax cross entropy, or half the squared error."""
        if self.classes:
            return torch.logsumexp(outputs, -1) - outputs.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return 0.5 * (outputs.reshape(y.shape) - y) ** 2

    def _loss_and_slope(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Weighted loss [C] and its derivative by the outputs [C, B, O], in closed form."""
        if self.classes:
            logs = torch.log_softmax(outputs, -1)
            label = batch.y.unsqueeze(-1)
            loss = -(logs.gather(-1, label).squeeze(-1) * batch.weight).sum(1)
            slope = logs.exp_().scatter_add_(-1, label, torch.full_like(label, -1, dtype=logs.dtype))
        else:
            slope = outputs - batch.y.unsqueeze(-1)
            loss = 0.5 * (slope.squeeze(-1) ** 2 * batch.weight).sum(1)
        return loss, slope.mul_(batch.weight.unsqueeze(-1))


def _scaled(gradient: Tensor, factor: Factor, base: Tensor | None) -> Tensor:
    return gradient * factor if base is None else base - factor * gradient


def _choose_backend(module: nn.Module, backend: str, device: torch.device) -> str:
    """For "auto": the model's own arithmetic, else a loop for convolutions on the CPU (vmap's are slow), else vmap."""
    if backend == "model" and not isinstance(module, BatchedModel):
        raise InputError(
            f'run.backend = "model": {type(module).__name__} brings no batched arithmetic; use "auto", "vmap" or "loop"'
        )
    if backend != "auto":
        return backend
    if isinstance(module, BatchedModel):
        return "model"
    has_convolutions = any(isinstance(m, CONVOLUTIONS) for m in module.modules())
    return "loop" if device.type == "cpu" and has_convolutions else "vmap"


def check_module(module: nn.Module, shape: tuple[int, ...], outputs: int) -> None:
    """Refuses what cannot be one flat vector per client: running buffers, unkeyed randomness, a wrong output shape.

    module: after ``replace_dropout``; shape: of one sample. Raises InputError that says what to use instead.
    """
    name = type(module).__name__
    example = torch.linspace(-1, 1, 2 * math.prod(shape)).view(2, *shape)
    before = {n: b.clone() for n, b in module.named_buffers()}
    module.train()
    try:
        with torch.no_grad():
            generator = torch.get_rng_state()
            first = module(example)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise InputError(f"model {name}: cannot be applied to inputs of shape {shape}: {error}") from None
    changed = [n for n, b in module.named_buffers() if not torch.equal(b, before[n])]
    if changed:
        raise InputError(
            f"model {name}: buffer {changed[0]} changes during training (running statistics as in BatchNorm); "
            "they are not part of the model that clients exchange: use GroupNorm instead"
        )
    if not torch.equal(generator, torch.get_rng_state()):
        raise InputError(
            f"model {name}: draws from torch's global random numbers; use torch.nn.Dropout, which gets keyed ones here"
        )
    got = tuple(first.shape[1:])
    if got != (outputs,) and not (outputs == 1 and got == ()):
        raise InputError(f"model {name}: outputs have shape {got} per sample, expected ({outputs},)")
    if not any(p.requires_grad for p in module.parameters()):
        raise InputError(f"model {name}: has no trainable parameters")
