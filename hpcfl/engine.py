"""What all rounds of a run share: the rank's clients and task, the topology, and how clients are cut into blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np
from torch import Tensor

from hpcfl.algorithm import Work
from hpcfl.block import Block, Members, block_size, padded_batch
from hpcfl.group import Group, cut
from hpcfl.reduce import float64_sum, reproducible_sum
from hpcfl.task import Task
from hpcfl.topology import Topology

REDUCTIONS = {"reproducible": reproducible_sum, "float64": float64_sum}


class Engine:
    """What all rounds share: the rank's clients and task, the topology, and how clients are cut into blocks."""

    def __init__(
        self,
        task: Task,
        group: Group,
        topology: Topology,
        work: Work,
        *,
        seed: int,
        reduction: str = "reproducible",
        block: int | None = None,
    ):
        """work: the algorithm's options of local work. block: clients per block; None: the rule of ``block_size``."""
        self.task, self.group, self.topology, self.work, self.seed = task, group, topology, work, seed
        self.reduce = REDUCTIONS[reduction]
        self.limit = block
        self.seconds = {"compute": 0.0, "evaluate": 0.0}
        self._cuts: dict[bool, tuple[np.ndarray, list[Members]]] = {}

    def members(self, rows: np.ndarray, *, full_batch: bool = False) -> list[Members]:
        """The clients at these positions of the group, cut into blocks for minibatches, or for full ones."""
        cut = self._cuts.get(full_batch)
        if cut is None or cut[0] is not rows:
            batch = None if full_batch else self.work.minibatch
            cut = self._cuts[full_batch] = rows, list(self._cut(rows, batch))
        return cut[1]

    def blocks(
        self, rows: np.ndarray, shared: Mapping[str, Tensor], round: int, *, full_batch: bool = False
    ) -> Iterator[Block]:
        """The clients at these positions of the group, block by block."""
        for members in self.members(rows, full_batch=full_batch):
            yield Block(members, shared, set(), seed=self.seed, round=round)

    def _cut(self, rows: np.ndarray, batch: int | None) -> Iterator[Members]:
        samples = self.group.samples[rows]
        steps, length = self.work.local_work(samples), padded_batch(samples, batch)
        features = int(np.prod(self.group.x.shape[1:]))
        for width in np.unique(length):
            mine = np.flatnonzero(length == width)
            limit = self.limit or block_size(self.task, int(width), features)
            for block, real in cut([steps[mine]], limit, self.task.least):
                count = int(steps[mine[block[0]]])
                yield Members(self.task, self.group, self.work, rows[mine[block]], real, steps=count, batch=batch)

    def hosted(self, clients: np.ndarray) -> np.ndarray:
        """Positions in the group of those of the clients that this rank hosts, ascending."""
        if len(clients) == self.group.population:
            return self.everyone
        return np.flatnonzero(np.isin(self.group.ids, clients, assume_unique=True))

    @cached_property
    def everyone(self) -> np.ndarray:
        """Positions of all clients of the group."""
        return np.arange(self.group.clients)
