"""The clients of a block, what of them does not change between rounds, and what they receive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hpcfl.algorithm import Work
from hpcfl.batch import Batch
from hpcfl.group import Group, bucket
from hpcfl.reduce import to_device
from hpcfl.rows import Index, compact
from hpcfl.task import Task

BUDGET = {
    "cpu": 4 << 20,
    "cuda": 1 << 30,
}  # bytes of models and batches per block: the caches' size, a part of a GPU's memory
LARGEST_BLOCK = 8192
TINY = 64  # parameters
MOST_KEPT = 32  # arrays of clients' constants


def block_size(task: Task, batch: int, features: int) -> int:
    """Clients per block: a function of model, batch and device, never of the number of ranks.

    batch: samples per client and step; features: numbers per sample.
    """
    item = torch.finfo(task.dtype).bits // 8
    budget = BUDGET.get(task.device.type, BUDGET["cuda"])
    return int(np.clip(budget // (item * (task.layout.size + batch * features)), task.least, LARGEST_BLOCK))


def padded_batch(task: Task, samples: np.ndarray, batch_size: int | None) -> np.ndarray:
    """Length to which a client's minibatches are padded, from its number of samples [C] and the model alone.

    Of a tiny model the calls for a block cost more than its padding: fewer sizes make fewer blocks.
    """
    length = bucket(samples, sizes=4 if task.layout.size <= TINY else 8)
    return length if batch_size is None else np.minimum(length, batch_size)


@dataclass(frozen=True)
class ClusterMeans:
    """The means that clusters formed in a round. Given to clients, each reads that of its cluster."""

    clusters: np.ndarray  # [H] ids of the clusters that this rank hosts, ascending
    formed: np.ndarray  # [H] bool
    values: Tensor  # [H, P], anything where none was formed


Given = Mapping[str, Tensor | ClusterMeans]  # what clients read: [P], or one per cluster


class Received(Mapping[str, Tensor]):
    """The shared state as a block's clients see it; notes what they read: that is what a server would have sent."""

    def __init__(self, shared: Given, members: Members):
        self._shared, self._members = shared, members
        self._read: dict[tuple[str, str], tuple[int, int]] = {}  # name and readers -> vectors, bytes
        self.readers = "all", members.real  # who reads now, and their number

    def __getitem__(self, name: str) -> Tensor:
        value = self._shared[name]
        vector = value.values[:1] if isinstance(value, ClusterMeans) else value
        who, number = self.readers
        self._read[name, who] = number, number * vector.numel() * vector.element_size()
        if isinstance(value, ClusterMeans):
            return value.values.index_select(0, self._members.cluster_place)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._shared)

    def __len__(self) -> int:
        return len(self._shared)

    def received(self) -> list[tuple[int, int]]:
        """(vectors, bytes) of everything that was read."""
        return list(self._read.values())


class Members:
    """The clients of a block, and what about them does not change from round to round."""

    def __init__(
        self,
        task: Task,
        group: Group,
        work: Work,
        rows: np.ndarray,
        real: int,
        *,
        steps: int,
        batch: int | None,
        population_samples: int,
    ):
        """rows: positions of the clients in the group; the last of the ``real`` ones is repeated to fill the block.

        batch: samples of a minibatch; None: full batch. population_samples: training samples of the whole run.
        """
        self.task, self.group, self.work, self.rows, self.real = task, group, work, rows, real
        self.steps, self.batch, self.population_samples = steps, batch, population_samples
        self.constants: dict[int, tuple[np.ndarray, Tensor]] = {}
        self.full_batch: Batch | None = None  # where it costs no more memory than the data themselves

    @cached_property
    def place(self) -> Index:
        """Positions in the group of all rows, repeated ones included."""
        return compact(self.rows)

    @cached_property
    def real_place(self) -> Index:
        """Positions in the group without the repeated rows."""
        return compact(self.rows[: self.real])

    @cached_property
    def ids(self) -> np.ndarray:
        return self.group.ids[self.rows]

    @cached_property
    def cluster(self) -> np.ndarray:
        return self.group.cluster[self.rows]

    @cached_property
    def cluster_place(self) -> Tensor:
        """[C] place of each client's cluster among those of the group."""
        return to_device(np.searchsorted(self.group.clusters, self.cluster), self.task.device)

    @cached_property
    def samples(self) -> np.ndarray:
        return self.group.samples[self.rows]

    @cached_property
    def length(self) -> int:
        """Of the padded minibatches: the same for all clients of a block."""
        return int(padded_batch(self.task, self.samples[:1], self.batch)[0])

    @cached_property
    def per_epoch(self) -> np.ndarray:
        """[C] minibatches of an epoch."""
        return -(-self.samples // (self.batch or self.samples))
