"""One model is one flat vector [P]; a layout says which slice is which parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Names and shapes of a model's parameters, in the order of the flat vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """The layout of a module's trainable parameters, in its own order."""
        named = [(n, tuple(p.shape)) for n, p in module.named_parameters() if p.requires_grad]
        return cls(tuple(n for n, _ in named), tuple(s for _, s in named))

    @cached_property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @cached_property
    def size(self) -> int:
        """P, the number of parameters."""
        return sum(self.sizes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """[..., P] -> one view [..., *shape] per parameter, sharing memory."""
        if len(self.shapes) == 1:
            return [flat.view(*flat.shape[:-1], *self.shapes[0])]
        pieces = torch.split(flat, self.sizes, dim=-1)
        return [p.view(*flat.shape[:-1], *shape) for p, shape in zip(pieces, self.shapes, strict=True)]

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """One tensor per parameter -> [P], a copy."""
        return torch.cat([t.reshape(-1) for t in tensors])
