"""What a client computes: its model's loss and gradient, for many clients at once.

A loss f_i(w) is the weighted mean over a batch, plus l2/2 ||w||^2.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hpcfl.batch import Batch
from hpcfl.dropout import replace_dropout
from hpcfl.errors import InputError
from hpcfl.gradient import Gradient, Write, penalised, penalty
from hpcfl.losses import loss_and_slope, masked, sample_losses
from hpcfl.network import Network, choose_backend, has_convolutions
from hpcfl.split import Split
from hpcfl.vectors import Layout


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
        dropout_keys = replace_dropout(module)
        check_module(module, shape, classes or 1)
        self.module = module.to(device=device, dtype=dtype)
        self.layout = Layout.of(self.module)
        self.shape, self.classes, self.l2, self.device, self.dtype = shape, classes, l2, device, dtype
        self.backend = choose_backend(module, backend, device)
        self.network = Network(self.module, self.layout, self.backend, dropout_keys)
        self.own_loss = self.module if self.backend == "model" and isinstance(self.module, OwnLoss) else None
        self.metrics = ("loss", "accuracy" if classes else "squared_error")

    @cached_property
    def split(self) -> Split:
        """The model as a body and a head. Raises InputError where the head is not the last thing that it applies."""
        return Split(self.network, self.shape, self.classes, self.l2)

    @property
    def dropout_keys(self) -> list[str]:
        return self.network.dropout_keys

    @property
    def bytes(self) -> int:
        """Of one model."""
        return self.layout.size * self.item

    @property
    def item(self) -> int:
        """Bytes of one number."""
        return torch.finfo(self.dtype).bits // 8

    @property
    def least(self) -> int:
        """Smallest block whose arithmetic has the same bits as a larger one's (held by tests)."""
        return 4 if self.backend == "vmap" and has_convolutions(self.module) else 2

    def start(self) -> Tensor:
        """The initial model [P]."""
        values = dict(self.module.named_parameters())
        with torch.no_grad():
            return self.layout.flat([values[name] for name in self.layout.names])

    def gradient(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss [C] and gradient [C, P] of every client's f_i at its own w [C, P], on its own batch.

        The gradient is a ``Gradient``, which acts as a tensor.
        """
        self.network.train()
        found = self.own_loss.batched_loss(w, batch) if self.own_loss is not None else None
        if found is None:
            outputs, pull = self.network.forward(w, batch)
            loss, slope = loss_and_slope(outputs, batch, self.classes)
            found = loss, pull(slope)
        loss, write = found
        if not self.l2:
            return loss, cast(Tensor, Gradient(write))
        return loss + penalty(w, self.l2), cast(Tensor, Gradient(penalised(write, w, self.l2)))

    @torch.no_grad()
    def evaluate(self, w: Tensor, batch: Batch) -> Tensor:
        """Sums over real samples [C, 2], float64: per-sample loss, and correct predictions or squared errors."""
        self.network.train(False)
        outputs = self.network.outputs(w, batch)
        loss = sample_losses(outputs, batch, self.classes)
        score = (masked(outputs, batch).argmax(-1) == batch.y).to(loss.dtype) if self.classes else 2.0 * loss
        real = batch.weight > 0
        return torch.stack([(loss * real).sum(1, dtype=torch.float64), (score * real).sum(1, dtype=torch.float64)], 1)

    def penalty(self, w: Tensor) -> Tensor:
        """l2/2 ||w||^2 of each client's model: [C, P] -> [C] float64."""
        return penalty(w, self.l2, torch.float64)

    def hessian_product(self, w: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Hessian of every client's f_i at its own w [C, P], times its own v [C, P]: [C, P]. Client by client."""
        self.network.train(False)
        rows = []
        for k in range(batch.real):
            at = w[k].detach().clone().requires_grad_()
            row, mask = slice(k, k + 1), None if batch.mask is None else batch.mask[k : k + 1]
            one = Batch(batch.x[row], batch.y[row], batch.weight[row], 1, mask=mask)
            values = dict(zip(self.layout.names, self.layout.views(at), strict=True))
            outputs = functional_call(self.module, values, (batch.x[k],)).view(1, len(batch.x[k]), -1)
            losses = sample_losses(outputs, one, self.classes)
            (slope,) = torch.autograd.grad((losses * one.weight).sum(), at, create_graph=True, materialize_grads=True)
            (product,) = torch.autograd.grad(slope @ v[k], at, materialize_grads=True)
            rows.append(product + self.l2 * v[k])
        return torch.stack(rows + rows[-1:] * (len(w) - batch.real))


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
    if not _alone(module, example, first):
        raise InputError(
            f"model {name}: its output for a sample depends on the other samples of the batch (as BatchNorm's does); "
            "batches are padded here, and a client may have one sample: use GroupNorm instead"
        )
    got = tuple(first.shape[1:])
    if got != (outputs,) and not (outputs == 1 and got == ()):
        raise InputError(f"model {name}: outputs have shape {got} per sample, expected ({outputs},)")
    if not any(p.requires_grad for p in module.parameters()):
        raise InputError(f"model {name}: has no trainable parameters")


@torch.no_grad()
def _alone(module: nn.Module, batch: Tensor, outputs: Tensor) -> bool:
    """Whether the first sample has the same outputs without the others. outputs: those of the batch."""
    try:
        alone = module(batch[:1])
    except (RuntimeError, ValueError):
        return False
    return alone.shape[1:] == outputs.shape[1:] and torch.allclose(alone, outputs[:1], 1e-3, 1e-4, equal_nan=True)
