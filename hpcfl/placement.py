"""Which rank hosts which client: a pure function, so that every rank knows it without communication."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Placement:
    """The population of clients and the rank that hosts each; equal on all ranks."""

    rank: np.ndarray  # [N] rank that hosts the client
    cluster: np.ndarray  # [N] cluster of the client, 0..K-1
    samples: np.ndarray  # [N] number of its training samples

    @cached_property
    def ones(self) -> np.ndarray:
        """[N] equal weights."""
        return np.ones(len(self.rank))

    @property
    def clients(self) -> int:
        return len(self.rank)

    @cached_property
    def clusters(self) -> int:
        return int(self.cluster.max()) + 1

    @cached_property
    def all_samples(self) -> int:
        """Training samples of all clients together."""
        return int(self.samples.sum())

    def hosted(self, rank: int) -> np.ndarray:
        """Ids of the rank's clients, cluster by cluster, ascending inside a cluster."""
        ids = np.flatnonzero(self.rank == rank)
        return ids[np.argsort(self.cluster[ids], kind="stable")]

    def hosts(self, cluster: int) -> np.ndarray:
        """Ranks that host clients of the cluster, ascending."""
        return np.unique(self.rank[self.cluster == cluster])


def place(cluster: np.ndarray, samples: np.ndarray, ranks: int) -> Placement:
    """Clients to ranks: cluster by cluster, in contiguous stretches with nearly equal numbers of training samples.

    cluster [N], samples [N]. A client goes to the rank into whose share of the samples its middle falls, so a rank's
    load is off by at most one client. A cluster lies on one rank or on neighbouring ones. Where there are at
    least as many clients as ranks, every rank gets one.
    """
    order = np.lexsort((np.arange(len(cluster)), cluster))
    weight = samples[order].astype(np.float64)
    middle = np.cumsum(weight) - weight / 2
    share = np.minimum((middle / weight.sum() * ranks).astype(np.int64), ranks - 1)
    n = len(order)
    if (
        n >= ranks
    ):  # no rank empty: at least as many clients before and after a rank as there are ranks before and after it
        first = np.arange(n)
        share = np.clip(share, ranks - (n - first), first)
        for r in range(1, ranks):  # and no gap between neighbours
            if not (share == r).any():
                k = int(np.searchsorted(share, r))
                share[min(k, n - 1)] = r
    rank = np.empty(n, np.int64)
    rank[order] = share
    return Placement(rank, cluster, samples)
