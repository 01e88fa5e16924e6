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

from hpcfl.batch import Batch
from hpcfl.dense import Dense
from hpcfl.errors import InputError
from hpcfl.gradient import Factor, Gradient, Write, penalised, penalty
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
        self.layer = None if name is None else cast(nn.Linear, network.module.get_submodule(name))
        body = _body(network.module, name)
        _check(network.module, body, self.layer, shape)
        layout = network.layout
        keys = [key for key in network.dropout_keys if name is None or not key.startswith(f"{name}.")]
        device = next(network.module.parameters()).device
        brings_own = network.backend == "model" and isinstance(body, Dense)
        backend = network.backend if network.backend != "model" or brings_own else choose_backend(body, "auto", device)
        self.body = Network(body, layout.body, backend, keys)
        self.head = None
        if self.layer is not None:
            head = Dense(self.layer.in_features, (), self.layer.out_features, self.layer.bias is not None)
            self.head = Network(head.to(self.layer.weight), head.layout, "model", [])
        self.body_size, self.head_size = layout.body.size, layout.size - layout.body.size

    def parts(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """[..., P] -> theta [..., P_body], W [..., P_head]; views."""
        return w[..., : self.body_size], w[..., self.body_size :]

    def join(self, theta: Tensor, W: Tensor) -> Tensor:
        """[C, P_body], [C, P_head] -> whole models [C, P]."""
        return torch.cat([theta, W], -1)

    def features(self, theta: Tensor, batch: Batch) -> Features:
        """The features of a batch's samples at theta: a forward pass of the body."""
        self.body.module.train()
        phi = self.body.outputs(theta, batch)
        return Features(phi, batch.y, batch.weight, batch.real, None, batch.mask, self._penalty(theta))

    def head_gradient(self, W: Tensor, features: Features) -> tuple[Tensor, Tensor]:
        """Loss [C], and the gradient by W [C, P_head] on features: ``[phi, 1]^T (softmax - Y)`` weighted by sample."""
        outputs, pull = self._outputs(W, features)
        loss, slope = loss_and_slope(outputs, features, self.classes)
        return loss + features.penalty + self._penalty(W), self._gradient(pull(slope), W)

    def gradients(self, theta: Tensor, W: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Loss [C], and its gradients by theta [C, P_body] and W [C, P_head] at one point.

        What is not used of them is never computed.
        """
        self.body.module.train()
        phi, pull_body = self.body.forward(theta, batch)
        outputs, pull_head = self._outputs(W, replace(batch, x=phi))
        loss, slope = loss_and_slope(outputs, batch, self.classes)
        by_theta = _later(lambda: pull_body(self._slope_by_features(W, slope)))
        loss = loss + self._penalty(theta) + self._penalty(W)
        return loss, self._gradient(by_theta, theta), self._gradient(pull_head(slope), W)

    def orthogonal(self, W: Tensor) -> Tensor:
        """[P_head] -> the nearest head [P_head] whose rows (outputs by features, and the bias) are orthonormal: U V^T.

        From the singular value decomposition U S V^T.
        """
        if self.head is None:
            return W
        weight, *bias = self.head.layout.views(W)
        u, _, v = torch.linalg.svd(torch.cat([weight, *(b[:, None] for b in bias)], 1), full_matrices=False)
        product = u @ v
        return torch.cat([product[:, : weight.shape[1]].reshape(-1), product[:, weight.shape[1] :].reshape(-1)])

    def drawn_heads(self, seed: int, clients: np.ndarray, round: int) -> Tensor:
        """[C, P_head] a new head of every client for this round: uniform, as torch's linear layers start.

        Between +-1/sqrt(M), or between the layer's ``bounds`` where it has such an attribute.
        """
        if self.layer is None:
            return torch.zeros(len(clients), 0)
        reach = self.layer.in_features**-0.5
        low, high = getattr(self.layer, "bounds", (-reach, reach))
        draws = [stream(seed, Purpose.HEAD, client=k, round=round).random(self.head_size) for k in clients.tolist()]
        return torch.from_numpy(low + (high - low) * np.stack(draws))

    def _outputs(self, W: Tensor, batch: Batch) -> tuple[Tensor, Callable[[Tensor], Write]]:
        if self.head is None:
            return batch.x, lambda slope: _nothing(W)
        return self.head.forward(W, batch)

    def _slope_by_features(self, W: Tensor, slope: Tensor) -> Tensor:
        """The chain rule through the head: slope [C, B, O] -> [C, B, M]."""
        return slope if self.head is None else torch.bmm(slope, self.head.layout.views(W)[0])

    def _penalty(self, w: Tensor) -> Tensor | float:
        return penalty(w, self.l2) if self.l2 else 0.0

    def _gradient(self, write: Write, w: Tensor) -> Tensor:
        return cast(Tensor, Gradient(penalised(write, w, self.l2) if self.l2 else write))


def _body(module: nn.Module, head: str | None) -> nn.Module:
    """The module without its head, with parameters of its own."""
    if isinstance(module, Dense):
        return module.body()
    if head is None:
        return module
    if head == "":
        return nn.Flatten()
    body = deepcopy(module)
    parent, _, attribute = head.rpartition(".")
    setattr(body.get_submodule(parent), attribute, nn.Identity())
    return body


def _check(module: nn.Module, body: nn.Module, head: nn.Linear | None, shape: tuple[int, ...]) -> None:
    """Raises InputError where the module is not the head after the body."""
    if head is None:
        return
    example = torch.linspace(-1, 1, 2 * math.prod(shape)).view(2, *shape).to(head.weight)
    module.eval()
    copied = {k: v for k, v in module.state_dict().items() if k in body.state_dict()}
    body.load_state_dict(copied, strict=False)
    body.eval()
    with torch.no_grad():
        features, outputs = body(example), module(example)
    fits = features.shape == (2, head.in_features)
    if not fits or not torch.allclose(head(features).view(2, -1), outputs.view(2, -1), rtol=1e-4, atol=1e-5):
        raise InputError(
            f"model {type(module).__name__}: cannot be split into a body and a head, since its last step is not its "
            "last linear layer; call that layer `head` and apply it last, to one vector per sample"
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
