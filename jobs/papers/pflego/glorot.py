"""A plug-in: the mlp whose body starts as in PFLEGO's released code (stax), to see what the start is worth.

hpcfl run jobs/papers/pflego/mnist.toml --plugin jobs/papers/pflego/glorot.py \
    --set 'model={name="mlp-glorot", head_init="uniform"}' --set 'partition.degree="none"' \
    --set 'algorithm={name="fedavg", local_steps=50, lr=0.007}'
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from torch import nn

from hpcfl.dense import Dense
from hpcfl.models import Spec
from hpcfl.models.dense import MLP
from hpcfl.registry import register


@register("model", "mlp-glorot")
@dataclass(frozen=True)
class Glorot(MLP):
    """As mlp, but hidden layers start with Glorot-normal weights, and biases from N(0, 0.01^2)."""

    def build(self, spec: Spec) -> Dense:
        module = super().build(spec)
        for layer in islice(module.layers, len(self.hidden)):
            nn.init.xavier_normal_(layer.weight)
            if layer.bias is not None:
                nn.init.normal_(layer.bias, std=0.01)
        return module
