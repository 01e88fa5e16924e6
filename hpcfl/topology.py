"""Communicators: the world, one per cluster that spans several ranks, and the ranks of this node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hpcfl.comm import Comm, Op
from hpcfl.placement import Placement


class ClusterComm:
    """Some of the clusters that this rank hosts, as one communicator: each reduces a row of its own."""

    def __init__(self, spanning: Sequence[tuple[int, Comm]]):
        """spanning: row and communicator of those on several ranks, by cluster id: so nothing can deadlock."""
        self._spanning = spanning
        self.size = max((comm.size for _, comm in spanning), default=1)

    def allreduce(self, array: np.ndarray, op: Op, phase: str = "communicate") -> None:
        """Collective over each cluster's ranks: reduces its row [...] of a contiguous array [H, ...] in place."""
        for row, comm in self._spanning:
            comm.allreduce(array[row : row + 1], op, phase)


@dataclass(frozen=True)
class Topology:
    """Who talks to whom. Built once, collectively."""

    world: Comm
    node: Comm
    placement: Placement
    clusters: dict[int, Comm]  # the clusters that this rank hosts, ascending

    @classmethod
    def build(cls, world: Comm, node: Comm, placement: Placement) -> Topology:
        """Collective over the world. A cluster that lives on one rank gets no MPI communicator."""
        hosted = np.unique(placement.cluster[placement.rank == world.rank])
        clusters = {int(c): world.group(placement.hosts(c).tolist()) for c in hosted}
        return cls(world, node, placement, clusters)

    def free(self) -> None:
        """Collective over the world, at the end of a run: gives all communicators but the world's back."""
        for comm in (*self.clusters.values(), self.node):
            comm.free()

    @cached_property
    def hosted(self) -> np.ndarray:
        """[H] ids of the clusters that this rank hosts, ascending."""
        return np.array(list(self.clusters), np.int64)

    @cached_property
    def leads(self) -> np.ndarray:
        """[H] bool: the hosted clusters whose first rank this is."""
        return np.array([comm.rank == 0 for comm in self.clusters.values()], bool)

    @cached_property
    def _spanning(self) -> list[tuple[int, Comm]]:
        return [(row, comm) for row, comm in enumerate(self.clusters.values()) if comm.size > 1]

    def communicator(self, chosen: np.ndarray) -> ClusterComm:
        """Of some of the hosted clusters: bool [H]."""
        return ClusterComm([(row, comm) for row, comm in self._spanning if chosen[row]])
