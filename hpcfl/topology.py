"""Communicators: the world, one per cluster that spans several ranks, and the ranks of this node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hpcfl.comm import Comm
from hpcfl.placement import Placement


@dataclass(frozen=True)
class Topology:
    """Who talks to whom. Built once, collectively; ranks enter cluster collectives in the order of cluster ids."""

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

    def cluster_collectives(self, only: np.ndarray | None) -> Iterator[tuple[int, Comm]]:
        """The hosted clusters whose entry of only [K] is true (None: all), in the order that avoids a deadlock."""
        for cluster, comm in self.clusters.items():
            if only is None or only[cluster]:
                yield cluster, comm
