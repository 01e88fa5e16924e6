"""Models: one file each, a frozen dataclass with the options and ``build(spec) -> torch.nn.Module``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from hpcfl.errors import InputError
from hpcfl.options import NonNegative


@dataclass(frozen=True)
class Spec:
    """What a model is built for."""

    shape: tuple[int, ...]  # of one sample
    classes: int | None  # None: regression

    @property
    def outputs(self) -> int:
        return self.classes or 1


@dataclass(frozen=True, kw_only=True)
class Penalised:
    """The option that all built-in models share: l2/2 ||w||^2 is added to every client's loss."""

    l2: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class Headed(Penalised):
    """Options of the models whose last layer may be a personal head.

    head_bias: whether it has a bias; absent: as the other layers. head_init: "standard" is torch's, "uniform" the
    numbers in [0, 1) of PFLEGO's experiments.
    """

    head_bias: bool | None = None
    head_init: Literal["standard", "uniform"] = "standard"

    def head(self, features: int, outputs: int, bias: bool = True) -> nn.Linear:
        """The last layer. bias: of the other layers."""
        kind = nn.Linear if self.head_init == "standard" else UniformLinear
        return kind(features, outputs, bias=bias if self.head_bias is None else self.head_bias)


class UniformLinear(nn.Linear):
    """A linear layer that starts at random numbers in [0, 1)."""

    bounds = 0.0, 1.0

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.uniform_(parameter, *self.bounds)


def need(spec: Spec, name: str, *, classification: bool) -> None:
    """Raises InputError where the data ask for the other kind of model."""
    if classification and spec.classes is None:
        raise InputError(
            f'model.name = "{name}": classifies, but the data are a regression; use "linear" or "mlp", or store labels '
            "as integers"
        )
    if not classification and spec.classes is not None:
        raise InputError(
            f'model.name = "{name}": is a regression, but the data have {spec.classes} classes; use "logistic"'
        )
