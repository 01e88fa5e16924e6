"""``iid``: every client gets a random sample of the same distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcfl.data import Dataset
from hpcfl.partition import Dealt, shuffled
from hpcfl.registry import register


@register("partition", "iid")
@dataclass(frozen=True, kw_only=True)
class Iid(Dealt):
    """Shuffled, then dealt in turn: sizes differ by one at most, in each part of a set's own split."""

    def owners(self, data: Dataset, part: np.ndarray, seed: int) -> np.ndarray:
        owner = np.empty(len(data), np.int64)
        for samples in shuffled(part, seed).values():
            owner[samples] = np.arange(len(samples)) % self.clients
        return owner
