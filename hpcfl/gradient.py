"""The gradient of a block's losses, written out with the factor that an algorithm gives it.

``w - lr * g`` is most of what algorithms do with a gradient, and memory traffic is most of what it costs. So a gradient
takes factors before it is written out, and is added to ``w`` on the way: half of the traffic. For everything else it is
a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Factor = float | Tensor  # a number, or one per client: [C, 1]
Write = Callable[[Factor, Tensor | None], Tensor]  # factor times a gradient [C, P], or with a base, base minus that


class Gradient:
    """[C, P], equal to ``write(factor, None)``."""

    def __init__(self, write: Write, factor: Factor = 1.0):
        """write(factor, base): factor times the gradient in a new tensor, or with a base, base minus that."""
        self._write, self._factor = write, factor
        self._written: Tensor | None = None

    def tensor(self) -> Tensor:
        """[C, P], as an ordinary tensor."""
        if self._written is None:
            self._written = self._write(self._factor, None)
        return self._written

    @property
    def _unscaled(self) -> bool:
        return isinstance(self._factor, float) and self._factor == 1.0

    def __mul__(self, factor: Any) -> Any:
        per_client = isinstance(factor, Tensor) and (factor.dim() == 0 or factor.shape[1:] == (1,))
        if self._written is None and (per_client or isinstance(factor, int | float)):
            return Gradient(self._write, factor if self._unscaled else self._factor * factor)
        return self.tensor() * factor

    __rmul__ = __mul__

    def __neg__(self) -> Any:
        return self * -1.0

    def __rsub__(self, base: Any) -> Tensor:
        """base - self."""
        if self._written is not None or not isinstance(base, Tensor):
            return base - self.tensor()
        return self._write(self._factor, base)

    def __add__(self, other: Any) -> Tensor:
        return self.tensor() + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Tensor:
        return self.tensor() - other

    def __truediv__(self, other: Any) -> Tensor:
        return self.tensor() / other

    def __pow__(self, other: Any) -> Tensor:
        return self.tensor() ** other

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor()[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in REFLECTED and len(args) == 2 and isinstance(args[1], Gradient) and not kwargs:
            return REFLECTED[func](args[1], args[0])  # an operator with a tensor on its left
        return func(*written(args), **(kwargs or {}))


REFLECTED = {Tensor.sub: Gradient.__rsub__, Tensor.mul: Gradient.__rmul__}


def written(value: Any) -> Any:
    """The value with every Gradient in lists and tuples as a tensor."""
    if isinstance(value, Gradient):
        return value.tensor()
    return type(value)(map(written, value)) if type(value) in (list, tuple) else value


def penalty(w: Tensor, l2: float, dtype: torch.dtype | None = None) -> Tensor:
    """l2/2 ||w||^2 of each client's vector: [C, P] -> [C]. Without a penalty 0, however long the vector is."""
    if not l2:
        return torch.zeros(len(w), dtype=dtype or w.dtype, device=w.device)
    w = w.to(dtype or w.dtype)
    return 0.5 * l2 * (w * w).sum(1)


def penalised(write: Write, w: Tensor, l2: float) -> Write:
    """The gradient with that of the penalty l2/2 ||w||^2."""

    def with_penalty(factor: Factor, base: Tensor | None) -> Tensor:
        return write(factor, base).add_((factor if base is None else -factor) * l2 * w)

    return with_penalty
