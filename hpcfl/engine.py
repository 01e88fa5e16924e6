"""What all rounds of a run share: the rank's clients and task, the topology, and how clients are cut into blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
from torch import Tensor

from hpcfl import rng
from hpcfl.algorithm import Weighting, Work
from hpcfl.block import Block
from hpcfl.group import Group, cut
from hpcfl.members import Members, block_size, padded_batch
from hpcfl.reduce import Segments, float64_sum, grid_bits, reproducible_sum, to_device
from hpcfl.task import Task
from hpcfl.topology import Topology

T = TypeVar("T")
Weights = Weighting | np.ndarray  # of the clients in a mean: by name, or one per client of the run [N]
MOST_KEPT = 32  # arrays: an algorithm may make its weights anew every round
REDUCTIONS = {"reproducible": reproducible_sum, "float64": float64_sum}


class Census:
    """The participants of a round by cluster, and their weights."""

    def __init__(self, topology: Topology, group: Group, participants: np.ndarray):
        self.participants, self._topology, self._group = participants, topology, group
        self._cluster = topology.placement.cluster[participants]
        self.present = np.bincount(self._cluster, minlength=topology.placement.clusters)  # [K]
        self.bits = grid_bits(self.present[topology.hosted])  # [H]
        self.somewhere = self.present > 0  # [K]
        self.hosted = self.present[topology.hosted] > 0  # [H]
        self._kept: dict[tuple[str, int], tuple[object, Any]] = {}

    def total(self, by: Weights) -> Tensor:
        """[H, 1] float64: the weight of the participants of each cluster that this rank hosts."""
        return self._totals(by)[0]

    def totals(self, by: Weights) -> np.ndarray:
        """[K] float64: the weight of the participants of each cluster."""
        return self._totals(by)[1]

    def _totals(self, by: Weights) -> tuple[Tensor, np.ndarray]:
        weight = self._each(by)

        def of() -> tuple[Tensor, np.ndarray]:
            totals = np.bincount(self._cluster, weight[self.participants].astype(np.float64), len(self.present))
            return to_device(totals[self._topology.hosted, None], self._group.x.device), totals

        return self._keep("total", weight, of)

    def weights(self, by: Weights, ids: np.ndarray) -> Tensor | None:
        """[c, 1] float64 of these clients; None where all weigh the same."""
        if isinstance(by, str) and by == "client":
            return None
        weight = self._each(by)

        def of() -> Tensor:
            return to_device(weight[ids, None].astype(np.float64), self._group.x.device)

        return self._keep("weights", weight, of) if ids is self._group.ids else of()

    def segments(self, ids: np.ndarray) -> Segments:
        """By the place of each client's cluster among those that this rank hosts."""

        def of() -> Segments:
            return Segments(np.searchsorted(self._topology.hosted, self._topology.placement.cluster[ids]))

        return self._keep("segments", ids, of) if ids is self._group.ids else of()

    def _each(self, by: Weights) -> np.ndarray:
        placement = self._topology.placement
        return by if isinstance(by, np.ndarray) else placement.samples if by == "sample" else placement.ones

    def _keep(self, name: str, of: np.ndarray, make: Callable[[], T]) -> T:
        """What was made before of the same array, which never changes."""
        key = name, id(of)
        if key not in self._kept:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[key] = of, make()  # with the array, so that its id stays its own
        return cast(T, self._kept[key][1])


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
        eval_clients: int | None = None,
    ):
        """work: the algorithm's options of local work. block: clients per block; None: the rule of ``block_size``.

        eval_clients: evaluations cover a random sample of so many clients of the run; None: all.
        """
        self.task, self.group, self.topology, self.work, self.seed = task, group, topology, work, seed
        self.reduce = REDUCTIONS[reduction]
        self.limit, self._eval_clients = block, eval_clients
        self.seconds = {"compute": 0.0, "evaluate": 0.0}
        self._census: Census | None = None
        self._cuts: dict[tuple[bool, bool], tuple[np.ndarray, list[Members]]] = {}

    def members(self, rows: np.ndarray, *, full_batch: bool = False) -> list[Members]:
        """The clients at these positions of the group, cut into blocks for minibatches, or for full ones."""
        key = full_batch, rows is self.evaluated  # beside the last round's participants
        cut = self._cuts.get(key)
        if cut is None or cut[0] is not rows:
            batch = None if full_batch else self.work.minibatch
            cut = self._cuts[key] = rows, list(self._cut(rows, batch))
        return cut[1]

    def blocks(
        self, rows: np.ndarray, shared: Mapping[str, Tensor], round: int, *, full_batch: bool = False
    ) -> Iterator[Block]:
        """The clients at these positions of the group, block by block."""
        for members in self.members(rows, full_batch=full_batch):
            yield Block(members, shared, seed=self.seed, round=round)

    def _cut(self, rows: np.ndarray, batch: int | None) -> Iterator[Members]:
        samples = self.group.samples[rows]
        steps, length = self.work.local_work(samples), padded_batch(self.task, samples, batch)
        features = int(np.prod(self.group.x.shape[1:]))
        for width in np.unique(length):
            mine = np.flatnonzero(length == width)
            limit = self.limit or block_size(self.task, int(width), features)
            for block, real in cut([steps[mine]], limit, self.task.least):
                count = int(steps[mine[block[0]]])
                yield Members(
                    self.task,
                    self.group,
                    self.work,
                    rows[mine[block]],
                    real,
                    steps=count,
                    batch=batch,
                    population_samples=self.topology.placement.all_samples,
                )

    def census(self, participants: np.ndarray) -> Census:
        """The participants' clusters; those of everyone are counted once."""
        if self._census is None or self._census.participants is not participants:
            self._census = Census(self.topology, self.group, participants)
        return self._census

    def hosted(self, clients: np.ndarray) -> np.ndarray:
        """Positions in the group of those of the clients that this rank hosts, ascending."""
        if len(clients) == self.group.population:
            return self.everyone
        places = self._place[clients]
        return np.sort(places[places >= 0])

    @cached_property
    def everyone(self) -> np.ndarray:
        """Positions of all clients of the group."""
        return np.arange(self.group.clients)

    @cached_property
    def evaluated(self) -> np.ndarray:
        """Positions of the clients of the group that evaluations cover, ascending."""
        return self.everyone if self.eval_sample is None else self.hosted(self.eval_sample)

    @cached_property
    def eval_sample(self) -> np.ndarray | None:
        """Ids of the clients of the run that evaluations cover, ascending; None: all."""
        if self._eval_clients is None or self._eval_clients >= self.group.population:
            return None
        draw = rng.stream(self.seed, rng.Purpose.EVALUATION)
        return np.sort(draw.choice(self.group.population, self._eval_clients, replace=False, shuffle=False))

    @cached_property
    def _place(self) -> np.ndarray:
        """[N] position of each client of the run in the group; -1: another rank hosts it."""
        place = np.full(self.group.population, -1)
        place[self.group.ids] = np.arange(self.group.clients)
        return place
