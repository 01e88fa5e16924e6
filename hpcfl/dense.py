"""Fully connected layers that bring their own arithmetic for many clients at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from hpcfl.batch import Batch
from hpcfl.gradient import Factor, Write
from hpcfl.vectors import Layout

SMALL = 8192  # elements of a matrix


class Dense(nn.Module):
    """Linear layers with ReLU between them, on flattened samples.

    Brings its own arithmetic for C clients at once (``hpcfl.network.BatchedModel``): batched matrix products that read
    the weights out of the flat vectors and write the gradient into one, without the copies that automatic
    differentiation needs. Tests hold that it agrees with it.
    """

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        outputs: int,
        bias: bool = True,
        *,
        reference: bool = False,
        head: Callable[[int, int, bool], nn.Linear] = nn.Linear,
    ):
        """reference: the first output is always 0, without parameters. head(inputs, outputs, bias): the last layer."""
        super().__init__()
        self.reference, self.is_body = reference, False
        self.widths = [inputs, *hidden, outputs - reference]
        layers = [nn.Linear(a, b, bias=bias) for a, b in pairwise(self.widths[:-1])]
        self.layers = nn.ModuleList([*layers, head(self.widths[-2], self.widths[-1], bias)])
        self.layout = Layout.of(self)

    def body(self) -> Dense:
        """A copy without the last layer, with ReLU after what is then the last one."""
        body = deepcopy(self)
        body.layers, body.widths = body.layers[:-1], body.widths[:-1]
        body.reference, body.is_body = False, True
        body.layout = Layout.of(body)
        return body

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(1)
        for k, layer in enumerate(self.layers):
            h = layer(h) if k == len(self.layers) - 1 and not self.is_body else torch.relu(layer(h))
        return self._with_reference(h)

    def batched_outputs(self, w: Tensor, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """w [C, P], x [C, B, ...] -> outputs [C, B, O], and the input of every layer with the weight it meets."""
        h = x if x.dim() == 3 else x.flatten(2)
        saved = []
        for k, (weight, bias) in enumerate(self._pairs(w)):
            if k > 0:
                h = h.relu_()
            saved += [h, weight]
            product = weight.transpose(1, 2)
            h = torch.bmm(h, product) if bias is None else torch.baddbmm(bias.unsqueeze(1), h, product)
        if self.is_body and saved:
            saved.append(h.relu_())
        return self._with_reference(h), saved

    def batched_gradient(self, w: Tensor, saved: list[Tensor], slope: Tensor) -> Tensor:
        """Back-propagation: slope [C, B, O] of the loss by the outputs -> gradient [C, P]."""
        slope = slope[..., 1:] if self.reference else slope
        gradient = w.new_empty(w.shape)
        targets = self._pairs(gradient)
        if self.is_body and targets:
            slope = slope * (saved[-1] > 0)
        for k in reversed(range(len(targets))):
            h, weight = saved[2 * k : 2 * k + 2]
            into_weight, into_bias = targets[k]
            torch.bmm(slope.transpose(1, 2), h, out=into_weight)
            if into_bias is not None:
                torch.sum(slope, 1, out=into_bias)
            if k > 0:
                slope = torch.bmm(slope, weight).mul_(h > 0)
        return gradient

    def batched_loss(self, w: Tensor, batch: Batch) -> tuple[Tensor, Write] | None:
        """A model of one vector as a whole on the CPU: it has so little to compute that the calls cost most.

        Half the squared error, or -log sigmoid(z) for class 1 and -log sigmoid(-z) for the reference class.
        """
        if batch.mask is not None or not self._is_vector(batch.x):
            return None
        (x, weight), flat, features = batch.arrays, w.numpy(), self.widths[0]
        biased = self.layers[-1].bias is not None
        outputs = np.matmul(x, flat[:, :features, None])[..., 0]
        if biased:
            outputs += flat[:, features:]
        if self.reference:
            losses, slopes = _logistic(torch.from_numpy(outputs), batch.signs)
            loss = np.einsum("cb,cb->c", losses.numpy(), weight)
            slope = slopes.numpy()
            slope *= weight
        else:
            outputs -= batch.y.numpy()
            slope = outputs * weight
            loss = np.einsum("cb,cb->c", slope, outputs)
            loss *= 0.5

        def write(factor: Factor, base: Tensor | None) -> Tensor:
            scaled = slope * (factor.numpy() if isinstance(factor, Tensor) else factor)
            gradient = np.empty_like(flat, order="C")
            np.matmul(scaled[:, None], x, out=gradient[:, None, :features])
            if biased:
                np.sum(scaled, 1, keepdims=True, out=gradient[:, features:])
            if base is not None:
                np.subtract(base.numpy(), gradient, out=gradient)
            return torch.from_numpy(gradient)

        return torch.from_numpy(loss), write

    def _is_vector(self, x: Tensor) -> bool:
        """Whether the model is one vector, which meets small matrices on the CPU: [C, B, features].

        NumPy's loop over C products of a matrix and a vector takes a half to a quarter of the time of torch.bmm. (For
        large ones its library would use threads of its own, which give other last bits.)
        """
        return self.widths[1:] == [1] and x.is_cpu and x.dim() == 3 and x.shape[1] * x.shape[2] <= SMALL

    def _with_reference(self, h: Tensor) -> Tensor:
        """Outputs [..., O], with the 0 of the reference class in front."""
        return nn.functional.pad(h, (1, 0)) if self.reference else h

    def _pairs(self, flat: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """(weight [C, out, in], bias [C, out] or None) of every layer, as views of [C, P]."""
        views = iter(self.layout.views(flat))
        return [(next(views), None if layer.bias is None else next(views)) for layer in self.layers]


def _logistic(z: Tensor, sign: Tensor) -> tuple[Tensor, Tensor]:
    """log(1 + exp(sign z)) and its derivative by z, which is written to; sign: -1 for class 1, 1 for the reference.

    By exp and log1p: torch's own logsigmoid and sigmoid give other last bits at the end of an array than inside.
    """
    z.mul_(sign)
    small = z.abs().neg_().exp_()
    slope = torch.where(z > 0, 1.0, small).div_(1 + small).mul_(sign)
    return small.log1p_().add_(z.clamp_(min=0)), slope
