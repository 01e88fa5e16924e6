"""Fully connected networks: linear and logistic regression, and the multi-layer perceptron."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from hpcfl.dense import Dense
from hpcfl.errors import InputError
from hpcfl.models import Headed, Penalised, Spec, need
from hpcfl.options import Counts
from hpcfl.registry import register


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
class MLP(Headed):
    """Fully connected network with ReLU, torch's default initialisation; classification or regression."""

    hidden: Counts = (200,)
    bias: bool = True

    def build(self, spec: Spec) -> Dense:
        return Dense(math.prod(spec.shape), self.hidden, spec.outputs, self.bias, head=self.head)
