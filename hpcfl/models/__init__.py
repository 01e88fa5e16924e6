"""Models: one file each, a frozen dataclass with the options and ``build(spec) -> torch.nn.Module``."""

from __future__ import annotations

from dataclasses import dataclass

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


def need(spec: Spec, name: str, *, classification: bool) -> None:
    """Raises InputError where the data ask for the other kind of model."""
    if classification and spec.classes is None:
        raise InputError(f'model.name = "{name}": classifies, but the data are a regression; use "linear" or "mlp"')
    if not classification and spec.classes is not None:
        raise InputError(
            f'model.name = "{name}": is a regression, but the data have {spec.classes} classes; use "logistic"'
        )
