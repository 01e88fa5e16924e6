"""One model is one flat vector [P]; a layout says which slice is which parameter: first the body's, then the head's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn


def head_of(module: nn.Module) -> str | None:
    """Name of a model's head: of the linear layer ``head`` if it has one, else of its last linear layer.

    None where there is no linear layer, or the module says so by ``head = None``.
    """
    if getattr(module, "head", module) is None:
        return None
    names = [name for name, m in module.named_modules() if isinstance(m, nn.Linear)]
    return "head" if "head" in names else names[-1] if names else None


@dataclass(frozen=True)
class Layout:
    """Names and shapes of a model's parameters, in the order of the flat vector: the last ``heads`` are the head's."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    heads: int = 0

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """The layout of a module's trainable parameters: in its own order, but the head's last."""
        named = [(n, tuple(p.shape)) for n, p in module.named_parameters() if p.requires_grad]
        head = head_of(module)
        mine = [n for n, _ in named if n.rpartition(".")[0] == head]
        named.sort(key=lambda pair: pair[0] in mine)
        return cls(tuple(n for n, _ in named), tuple(s for _, s in named), len(mine))

    @cached_property
    def body(self) -> Layout:
        """Of the body alone."""
        n = len(self.names) - self.heads
        return Layout(self.names[:n], self.shapes[:n])

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
        pieces = flat.split_with_sizes(self.sizes, dim=-1)  # torch.split takes longer
        return [p.view(*flat.shape[:-1], *shape) for p, shape in zip(pieces, self.shapes, strict=True)]

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """One tensor per parameter -> [P], a copy."""
        return torch.cat([t.reshape(-1) for t in tensors])
