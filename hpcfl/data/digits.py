"""``digits``: 1,797 real handwritten digits, 8 x 8 pixels, inside scikit-learn; nothing to fetch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcfl.data import Dataset
from hpcfl.registry import register


@register("data", "digits")
@dataclass(frozen=True)
class Digits:
    """Handwritten digits (Alpaydin, Kaynak 1998: the test part of their set, which is what scikit-learn ships).

    x [1797, 1, 8, 8] uint8, 0..16, seen by the model as 0..1; ten classes of 174 to 183 samples; no split of its own.
    """

    def load(self, seed: int) -> Dataset:
        """The set; the seed plays no part."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        x = digits.images.astype(np.uint8)[:, None]
        return Dataset(x, digits.target.astype(np.int64), classes=10, scale=1 / 16)
