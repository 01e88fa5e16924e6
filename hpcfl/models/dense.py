"""Fully connected networks: linear and logistic regression, and the multi-layer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from hpcfl.errors import InputError
from hpcfl.models import Penalised, Spec, need
from hpcfl.options import Counts
from hpcfl.registry import register
from hpcfl.vectors import Layout


SMALL = 8192  # elements of a matrix


class Dense(nn.Module):
    """Linear layers with ReLU between them, on flattened samples.

    Brings its own arithmetic for C clients at once (``hpcfl.task.BatchedModel``): batched matrix products that read the
    weights out of the flat vectors and write the gradient into one, without the copies that automatic differentiation
    needs. Tests hold that it agrees with it.
    """

    def __init__(
        self, inputs: int, hidden: Sequence[int], outputs: int, bias: bool = True, *, reference: bool = False
    ):
        """reference: the first output is always 0 and has no parameters."""
        super().__init__()
        self.reference = reference
        widths = [inputs, *hidden, outputs - reference]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in pairwise(widths))
        self.bias = bias
        self.layout = Layout.of(self)

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(1)
        for layer in self.layers[:-1]:
            h = torch.relu(layer(h))
        return self._with_reference(self.layers[-1](h))

    def batched_outputs(self, w: Tensor, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """w [C, P], x [C, B, ...] -> outputs [C, B, O], and the input of every layer with the weight it meets."""
        h = x.flatten(2)
        saved = []
        for k, (weight, bias) in enumerate(self._pairs(w)):
            if k > 0:
                h = h.relu_()
            saved += [h, weight]
            h = _product(h, weight.transpose(1, 2), bias)
        return self._with_reference(h), saved

    def batched_gradient(self, w: Tensor, saved: list[Tensor], slope: Tensor) -> Tensor:
        """Back-propagation: slope [C, B, O] of the loss by the outputs -> gradient [C, P]."""
        slope = slope[..., 1:] if self.reference else slope
        gradient = w.new_empty(w.shape)
        targets = self._pairs(gradient)
        for k in reversed(range(len(targets))):
            h, weight = saved[2 * k : 2 * k + 2]
            into_weight, into_bias = targets[k]
            _product(slope.transpose(1, 2), h, out=into_weight)
            if into_bias is not None:
                torch.sum(slope, 1, out=into_bias)
            if k > 0:
                slope = torch.bmm(slope, weight).mul_(h > 0)
        return gradient

    def _with_reference(self, h: Tensor) -> Tensor:
        """Outputs [..., O], with the 0 of the reference class in front."""
        return nn.functional.pad(h, (1, 0)) if self.reference else h

    def _pairs(self, flat: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """(weight [C, out, in], bias [C, out] or None) of every layer, as views of [C, P]."""
        views = self.layout.views(flat)
        if self.bias:
            return list(zip(views[0::2], views[1::2], strict=True))
        return [(weight, None) for weight in views]


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """a [C, m, k] times b [C, k, n], plus bias [C, n].

    On the CPU a small matrix times a vector goes through NumPy, whose loop over the C products takes a half to a
    quarter of torch's time. (Not a large one: its library would share that among threads, with other last bits.)
    """
    vector = (a.shape[1] == 1 and b[0].numel() <= SMALL) or (b.shape[2] == 1 and a[0].numel() <= SMALL)
    if vector and a.device.type == "cpu":
        into = None if out is None else out.numpy()
        product = torch.from_numpy(np.matmul(a.numpy(), b.numpy(), out=into))
        return product if bias is None else product.add_(bias.unsqueeze(1))
    if bias is None:
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
    return torch.baddbmm(bias.unsqueeze(1), a, b)


def _zeroed(module: Dense) -> Dense:
    """A convex problem starts at zero."""
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


@register("model", "logistic")
@dataclass(frozen=True)
class Logistic(Penalised):
    """Multinomial logistic regression; starts at zero.

    reference: the first class is the reference, whose logit is 0: one weight per feature for two classes, as
    statisticians write it, instead of two.
    """

    bias: bool = True
    reference: bool = False

    def build(self, spec: Spec) -> nn.Module:
        need(spec, "logistic", classification=True)
        if self.reference and spec.outputs < 2:
            raise InputError("model.reference = true: needs at least two classes, but the data have one")
        return _zeroed(Dense(math.prod(spec.shape), (), spec.outputs, self.bias, reference=self.reference))


@register("model", "linear")
@dataclass(frozen=True)
class Linear(Penalised):
    """Linear regression, half the squared error; starts at zero."""

    bias: bool = True

    def build(self, spec: Spec) -> nn.Module:
        need(spec, "linear", classification=False)
        return _zeroed(Dense(math.prod(spec.shape), (), 1, self.bias))


@register("model", "mlp")
@dataclass(frozen=True)
class MLP(Penalised):
    """Fully connected network with ReLU, torch's default initialisation; classification or regression."""

    hidden: Counts = (200,)
    bias: bool = True

    def build(self, spec: Spec) -> nn.Module:
        return Dense(math.prod(spec.shape), self.hidden, spec.outputs, self.bias)
