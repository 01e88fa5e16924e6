"""A linear head for many clients at once, in closed form: logits W phi + b of features phi.

Outputs lie [C, O, B], samples last: with few outputs, matrix products and softmax take half the time of [C, B, O].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpcfl.batch import Batch
from hpcfl.gradient import Factor, Write
from hpcfl.losses import loss_and_slope
from hpcfl.vectors import Layout


class Head:
    """The last layer of a model; W [C, P_head]: flat, the weight [O, M] before the bias [O]."""

    def __init__(self, layer: nn.Linear, classes: int | None):
        self.layer, self.classes, self.layout = layer, classes, Layout.of(layer)
        self.features = layer.in_features

    def loss_and_slope(self, W: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss [C] on a batch whose x are features [C, B, M], and its slope [C, O, B] by the outputs."""
        weight, bias = self._parts(W)
        phi = batch.x.transpose(1, 2)
        outputs = torch.bmm(weight, phi) if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, phi)
        return loss_and_slope(outputs, batch, self.classes, dim=1)

    def gradient(self, W: Tensor, phi: Tensor, slope: Tensor) -> Write:
        """The loss's gradient by W, [C, P_head]: slope [phi, 1]^T, of slope [C, O, B] = (softmax - Y) w."""

        def write(factor: Factor, base: Tensor | None) -> Tensor:
            per_client = factor.unsqueeze(-1) if isinstance(factor, Tensor) and factor.dim() else factor
            scaled, gradient = slope * per_client, W.new_empty(W.shape)
            into_weight, into_bias = self._parts(gradient)
            torch.bmm(scaled, phi, out=into_weight)
            if into_bias is not None:
                torch.sum(scaled, 2, out=into_bias)
            return gradient if base is None else torch.sub(base, gradient, out=gradient)

        return write

    def slope_by_features(self, W: Tensor, slope: Tensor) -> Tensor:
        """The chain rule: slope [C, O, B] by the outputs -> [C, B, M] by the features."""
        return torch.bmm(slope.transpose(1, 2), self._parts(W)[0])

    def orthogonal(self, W: Tensor) -> Tensor:
        """[P_head] -> the nearest head with orthonormal rows (weight and bias of an output): U V^T of its SVD."""
        weight, bias = self._parts(W)
        rows = weight if bias is None else torch.cat([weight, bias[:, None]], 1)
        u, _, v = torch.linalg.svd(rows, full_matrices=False)
        return torch.cat([(u @ v)[:, : self.features].reshape(-1), (u @ v)[:, self.features :].reshape(-1)])

    def zeroed(self, W: Tensor, absent: Tensor) -> Tensor:
        """A copy of W with zeros for the outputs that a client does not have, absent [C, O] bool."""
        W = W.clone()
        weight, bias = self._parts(W)
        weight[absent] = 0.0
        if bias is not None:
            bias[absent] = 0.0
        return W

    def bounds(self) -> tuple[float, float]:
        """Between which a new head is drawn: the layer's attribute ``bounds``, or +-1/sqrt(M) as nn.Linear starts."""
        reach = self.features**-0.5
        return getattr(self.layer, "bounds", (-reach, reach))

    def _parts(self, W: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight [..., O, M] and bias [..., O], as views."""
        weight, *bias = self.layout.views(W)
        return weight, bias[0] if bias else None
