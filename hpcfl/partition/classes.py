"""``classes``: every client owns samples of a few random classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hpcfl.data import Dataset
from hpcfl.errors import InputError
from hpcfl.options import Count
from hpcfl.partition import NO_SAMPLES, Dealt, labels, shuffled
from hpcfl.registry import register
from hpcfl.rng import Purpose, stream
from hpcfl.splits import TEST


@dataclass(frozen=True, kw_only=True)
class ByOwnership(Dealt, ABC):
    """A class's samples are dealt in turn among the clients that own the class."""

    name: ClassVar[str]  # of the partition

    def owners(self, data: Dataset, part: np.ndarray, seed: int) -> np.ndarray:
        y = labels(data, self.name)
        return deal_classes(y, part, self.ownership(len(np.unique(y)), seed), seed)

    @abstractmethod
    def ownership(self, classes: int, seed: int) -> np.ndarray:
        """Who owns which of the classes that have samples: [N, classes] bool, each column with an owner."""


@register("partition", "classes")
@dataclass(frozen=True, kw_only=True)
class Classes(ByOwnership):
    """Each client draws classes without replacement; a class's samples are dealt in turn among its owners.

    classes_per_client: classes that each client draws. Every class of the data has an owner, so clients times
    classes_per_client must reach the number of classes. Owners who have the fewest samples so far come first in a
    class's turn. The training and the test samples of a set's own split are dealt by the same ownership.
    """

    name = "classes"

    classes_per_client: Count = 2

    def ownership(self, classes: int, seed: int) -> np.ndarray:
        """Each row with classes_per_client."""
        k, wanted = self.classes_per_client, f"partition.classes_per_client = {self.classes_per_client}"
        if k > classes:
            raise InputError(f"{wanted}: the data have samples of {classes} classes only")
        if self.clients * k < classes:
            raise InputError(
                f"partition.clients = {self.clients}, {wanted}: cannot own all of {classes} classes; "
                f"use at least {-(-classes // k)} clients or {-(-classes // self.clients)} classes per client"
            )
        return draw_classes(np.full(self.clients, k), classes, seed)


def draw_classes(sizes: np.ndarray, classes: int, seed: int) -> np.ndarray:
    """Random ownership: [N, classes] bool, row i with sizes[i] classes, each column with an owner.

    sizes: [N] integers in 0..classes, whose sum is at least ``classes``. Classes that nobody drew are swapped for
    those that have the most owners.
    """
    draws = stream(seed, Purpose.PARTITION, step=1).random((len(sizes), classes))
    owned = np.zeros(draws.shape, bool)
    np.put_along_axis(owned, np.argsort(draws, axis=1), np.arange(classes) < sizes[:, None], axis=1)
    for orphan in np.flatnonzero(~owned.any(0)):
        common = owned.sum(0).argmax()  # it has two owners at least: more draws than classes that are owned
        client = owned[:, common].argmax()
        owned[client, [common, orphan]] = False, True
    return owned


def deal_classes(y: np.ndarray, part: np.ndarray, owned: np.ndarray, seed: int) -> np.ndarray:
    """Owner of each sample: [n] int64; a class's samples of each part are dealt in turn among its owners.

    y, part: [n] class and part of each sample. owned: [N, classes that have samples] bool, as by ``draw_classes``.
    """
    groups = shuffled(y * (TEST + 1) + part, seed)
    owner = np.empty(len(y), np.int64)
    for p in np.unique(part).tolist():
        sizes = np.zeros(len(owned), np.int64)
        for i, c in enumerate(np.unique(y).tolist()):
            samples = groups.get(c * (TEST + 1) + p, NO_SAMPLES)
            clients = np.flatnonzero(owned[:, i])
            clients = clients[np.argsort(sizes[clients], kind="stable")]
            owner[samples] = np.resize(clients, len(samples))
            sizes += np.bincount(owner[samples], minlength=len(owned))
    return owner
