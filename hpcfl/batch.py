"""Samples of a block's clients, padded to one length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Samples of C clients, padded to one length B. A padded sample has weight zero."""

    x: Tensor  # [C, B, ...]
    y: Tensor  # [C, B] labels, or targets
    weight: Tensor  # [C, B] 1 / (number of real samples), 0 for padding
    real: int  # clients before the repeated ones of a padded block
    key: Tensor | None = None  # [C] int64 of the dropout masks; None: no dropout (evaluation)
    mask: Tensor | None = None  # [C, 1, O] 0 for the outputs that a client has, -inf for others; None: it has all

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """x and weight as NumPy arrays, on the CPU."""
        return self.x.numpy(), self.weight.numpy()

    @cached_property
    def signs(self) -> Tensor:
        """[C, B] 1 for the first class, -1 for the second."""
        return (1 - 2 * self.y).to(self.x.dtype)
