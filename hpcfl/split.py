"""A model as a body and a head: features phi(x; theta), outputs W [phi; 1]. theta travels, W is a client's own.

The head is linear, so its gradient is in closed form on features that are computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from hpcfl.batch import Batch
from hpcfl.dense import Dense
from hpcfl.errors import InputError
from hpcfl.gradient import Factor, Gradient, Write, penalised, penalty
from hpcfl.head import Head
from hpcfl.losses import loss_and_slope
from hpcfl.network import Network, choose_backend
from hpcfl.rng import Purpose, stream
from hpcfl.vectors import head_of


@dataclass(frozen=True)
class Features(Batch):
    """A batch whose x are features [C, B, M] instead of samples."""

    penalty: Tensor | float = 0.0  # [C] of the body that made them


class Split:
    """Body and head of a model, and the parts of its gradient. theta [C, P_body], W [C, P_head]: flat vectors."""

    def __init__(self, network: Network, shape: tuple[int, ...], classes: int | None, l2: float):
        """network: the whole model; shape: of one sample. Raises InputError where it cannot be split."""
        name, self.classes, self.l2 = head_of(network.module), classes, l2
        if name is None and getattr(network.module, "head", network) is not None:
            raise InputError(
                f"model {type(network.module).__name__}: has no linear layer that could be a personal head; give it "
                "one, or say by `head = None` that the whole model travels"
            )
        if isinstance(network.module, Dense) and network.module.reference:
            raise InputError(
                "model.reference = true: such a model cannot be split into a body and a head; leave it out"
            )
        layer = None if name is None else cast(nn.Linear, network.module.get_submodule(name))
        body = _body(network.module, name)
        _check(network.module, body, layer, shape)
        layout = network.layout
        keys = [key for key in network.dropout_keys if name is None or not key.startswith(f"{name}.")]
        device = next(network.module.parameters()).device
        brings_own = network.backend == "model" and isinstance(body, Dense)
        backend = network.backend if network.backend != "model" or brings_own else choose_backend(body, "auto", device)
        self.body = Network(body, layout.body, backend, keys)
        self.head = None if layer is None else Head(layer, classes)
        self.body_size, self.head_size = layout.body.size, layout.size - layout.body.size

    @property
    def layer(self) -> nn.Linear | None:
        """The head's layer; None where the model has no head."""
        return None if self.head is None else self.head.layer

    def parts(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """[..., P] -> theta [..., P_body], W [..., P_head]; views."""
        return w[..., : self.body_size], w[..., self.body_size :]

    def join(self, theta: Tensor, W: Tensor) -> Tensor:
        """[C, P_body], [C, P_head] -> whole models [C, P]."""
        return torch.cat([theta, W], -1)

    def features(self, theta: Tensor, batch: Batch) -> Features:
        """The features of a batch's samples at theta: a forward pass of the body."""
        self.body.train()
        phi = self.body.outputs(theta, batch)
        return Features(phi, batch.y, batch.weight, batch.real, None, batch.mask, self._penalty(theta))

    def head_gradient(self, W: Tensor, features: Features) -> tuple[Tensor, Tensor]:
        """Loss [C], and the gradient by W [C, P_head] with the features as they are."""
        loss, slope = self._loss_and_slope(W, features)
        return loss + features.penalty + self._penalty(W), self._by_head(W, features.x, slope)

    def gradients(self, theta: Tensor, W: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Loss [C], and its gradients by theta [C, P_body] and W [C, P_head] at one point.

        What is not used of them is never computed.
        """
        self.body.train()
        phi, pull = self.body.forward(theta, batch)
        loss, slope = self._loss_and_slope(W, replace(batch, x=phi))
        by_theta = _later(lambda: pull(slope if self.head is None else self.head.slope_by_features(W, slope)))
        loss = loss + self._penalty(theta) + self._penalty(W)
        return loss, self._gradient(by_theta, theta), self._by_head(W, phi, slope)

    def orthogonal(self, W: Tensor) -> Tensor:
        """[P_head] -> the nearest head [P_head] with orthonormal rows."""
        return W if self.head is None else self.head.orthogonal(W)

    def own_outputs(self, W: Tensor, mask: Tensor | None) -> Tensor:
        """Heads [C, P_head], zero for the outputs that a client does not have: mask [C, 1, O] as in ``Batch``.

        They stay so: their gradient is zero. So a penalty counts a client's own outputs alone.
        """
        return W if self.head is None or mask is None else self.head.zeroed(W, mask.squeeze(1).isinf())

    def drawn_heads(self, seed: int, clients: np.ndarray, round: int) -> Tensor:
        """[C, P_head] a new head of every client for this round, whatever the model starts with.

        Uniform between the layer's attribute ``bounds`` = (low, high), absent: +-1/sqrt(features) as nn.Linear starts.
        """
        if self.head is None:
            return torch.zeros(len(clients), 0)
        low, high = self.head.bounds()
        draws = [stream(seed, Purpose.HEAD, client=k, round=round).random(self.head_size) for k in clients.tolist()]
        return torch.from_numpy(low + (high - low) * np.array(draws).reshape(len(clients), self.head_size))

    def _loss_and_slope(self, W: Tensor, features: Batch) -> tuple[Tensor, Tensor]:
        """Loss [C], and its slope by the head's outputs (by the features where there is no head)."""
        if self.head is None:
            return loss_and_slope(features.x, features, self.classes)
        return self.head.loss_and_slope(W, features)

    def _by_head(self, W: Tensor, phi: Tensor, slope: Tensor) -> Tensor:
        return self._gradient(_nothing(W) if self.head is None else self.head.gradient(W, phi, slope), W)

    def _penalty(self, w: Tensor) -> Tensor | float:
        return penalty(w, self.l2) if self.l2 else 0.0

    def _gradient(self, write: Write, w: Tensor) -> Tensor:
        return cast(Tensor, Gradient(penalised(write, w, self.l2) if self.l2 else write))


def _body(module: nn.Module, head: str | None) -> nn.Module:
    """The module without its head, with parameters of its own."""
    if head is None:
        return module
    if isinstance(module, Dense):
        return module.body()
    if head == "":
        return nn.Flatten()
    body = deepcopy(module)
    parent, _, attribute = head.rpartition(".")
    setattr(body.get_submodule(parent), attribute, nn.Identity())
    return body


def _check(module: nn.Module, body: nn.Module, head: nn.Linear | None, shape: tuple[int, ...]) -> None:
    """Raises InputError where the module is not the head after the body, for some parameters that are all different."""
    if head is None:
        return
    example = torch.linspace(-1, 1, 2 * math.prod(shape)).view(2, *shape).to(head.weight)
    values = {name: torch.linspace(-1, 1, p.numel()).view(p.shape).to(p) for name, p in module.named_parameters()}
    last = [value for name, value in values.items() if module.get_parameter(name) in set(head.parameters())]
    mine = {name: values[name] for name, _ in body.named_parameters() if name in values}
    module.train(), body.train()  # with the dropouts, whose keys are alike
    try:
        with torch.no_grad():
            features = functional_call(body, mine, (example,))
            outputs = functional_call(module, values, (example,))
            found = nn.functional.linear(features, *last).view(outputs.shape)
        fits = features.shape == (2, head.in_features) and all(p.requires_grad for p in head.parameters())
        fits = fits and torch.allclose(found, outputs, rtol=1e-4, atol=1e-5)
    except Exception:  # whatever the module does with its head, it is not what a layer does
        fits = False
    if not fits:
        raise InputError(
            f"model {type(module).__name__}: cannot be split into a body and a head, since its last step is not its "
            "last linear layer; call that layer `head`, train all of it, and apply it last, to one vector per sample"
        )


def _later(make: Callable[[], Write]) -> Write:
    """What is made when it is needed first."""
    kept: list[Write] = []

    def write(factor: Factor, base: Tensor | None) -> Tensor:
        if not kept:
            kept.append(make())
        return kept[0](factor, base)

    return write


def _nothing(w: Tensor) -> Write:
    return lambda factor, base: torch.zeros_like(w) if base is None else base.clone()
