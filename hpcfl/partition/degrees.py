"""``degrees``: every client owns samples of two, half or all of the classes (PFLEGO's degrees of personalisation)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hpcfl.errors import InputError
from hpcfl.partition.classes import ByOwnership, draw_classes
from hpcfl.registry import register
from hpcfl.rng import Purpose, stream

FEWEST, MOST = 2, 5  # classes of a client: of "high", and the range of "diverse"


@register("partition", "degrees")
@dataclass(frozen=True, kw_only=True)
class Degrees(ByOwnership):
    """As the partition classes, with PFLEGO's degree of personalisation for the number of classes per client.

    degree: of C classes that have samples, each client draws 2 ("high"), C/2 rounded down ("medium"), all ("none"), or
    a number of its own, uniform in 2..5 and at most C ("diverse"; the released code's "divpers"). Every class has an
    owner. The training and the test samples of a set's own split are dealt by the same ownership.
    """

    name = "degrees"

    degree: Literal["high", "medium", "none", "diverse"] = "high"

    def ownership(self, classes: int, seed: int) -> np.ndarray:
        wanted = f'partition.degree = "{self.degree}"'
        least, most = self.sizes(classes)
        if least > classes:
            raise InputError(
                f"{wanted}: {least} classes per client, but the data have samples of {classes} only; "
                'use partition.degree = "none"'
            )
        sizes = stream(seed, Purpose.PARTITION, step=2).integers(least, most, self.clients, endpoint=True)
        if sizes.sum() < classes:
            raise InputError(
                f"partition.clients = {self.clients}, {wanted}: the clients draw {sizes.sum()} classes in all, but "
                f'there are {classes}; use at least {-(-classes // least)} clients or partition.degree = "none"'
            )
        return draw_classes(sizes, classes, seed)

    def sizes(self, classes: int) -> tuple[int, int]:
        """Fewest and most classes that a client draws."""
        if self.degree == "high":
            return FEWEST, FEWEST
        if self.degree == "diverse":
            return min(FEWEST, classes), min(MOST, classes)
        k = classes if self.degree == "none" else max(1, classes // 2)
        return k, k
