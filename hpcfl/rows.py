"""Rows of arrays with one row per client, copied only where they are not consecutive."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from hpcfl.reduce import to_device

Index = slice | np.ndarray


class Kept(ABC):
    """Rows that lie elsewhere than on the rank's device: what stands for an array [C, ...] in the local state."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device  # to which they are taken

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def take(self, rows: Index) -> Tensor:
        """A copy of these rows on the device."""

    @abstractmethod
    def put(self, rows: Index, new: Tensor) -> None:
        """Writes these rows, each of them once."""


def compact(rows: np.ndarray) -> Index:
    """The rows as a slice where they are consecutive."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def take(values: Tensor | Kept, rows: Index) -> Tensor:
    """These rows: the array itself or a view for a slice (nobody writes into it)."""
    if isinstance(values, Kept):
        return values.take(rows)
    if isinstance(rows, slice) and rows.stop - rows.start == values.shape[0]:
        return values
    return values[rows] if isinstance(rows, slice) else values.index_select(0, to_device(rows, values.device))


def put(values: Tensor | Kept, rows: Index, new: Tensor) -> None:
    """Writes these rows in place."""
    if isinstance(values, Kept):
        values.put(rows, new)
    elif isinstance(rows, slice):
        take(values, rows).copy_(new)
    else:
        values.index_copy_(0, to_device(rows, values.device), new)
