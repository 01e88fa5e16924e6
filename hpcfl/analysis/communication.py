"""What averaging by coins costs, every averaging by itself or merged with the one before it.

For runs in which a coin "global" and a coin "cluster" of each cluster say who averages. With the n_j clients of cluster
j, N in all, in K clusters:

    cluster j forms its mean thetabar_j            n_j vectors up, n_j down (thetabar_j)
    the clusters form the mean thetabar of these   K up, K down; and N down, to the clients (thetabar)

where a global round needs both, of all clusters: N + K up, 2 N + K down.

Merged: a cluster that averages in consecutive rounds forms its mean once, at the first of them, and consecutive global
rounds form thetabar once. That is enough where the pull towards the mean, gamma, is the same for all clients of a
cluster: averaging within the cluster then leaves thetabar_j where it is, and every client's distance from it shrinks by
a known factor; global rounds move the means by known maps, so where thetabar_j comes to lie in the end is one vector,
too, that a client gets instead of thetabar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpcfl.analysis.reader import COINS, Run
from hpcfl.errors import InputError


@dataclass(frozen=True, eq=False)
class Communication:
    """Of the counted rounds of a run."""

    global_rounds: int  # in which all clusters averaged
    mean_rounds: np.ndarray  # [K] in which a cluster averaged, alone or with all
    vectors_up: int
    vectors_down: int
    bytes_up: int
    bytes_down: int


def communication(run: Run, *, merged: bool = False) -> Communication:
    """What the run's averagings cost. merged: consecutive ones count once.

    Raises InputError for a run without such coins, for rounds that cost something else (with partial participation, or
    of an algorithm with coins of another meaning) and, merged, for a gamma that differs inside a cluster.
    """
    if not run.averages_by_coins:
        raise InputError(
            f'{run.path}: no coins "global" and "cluster" that say who averages; expected those of Async-L2GD'
        )
    cluster = run.read("/clients/cluster")
    members = np.bincount(cluster, minlength=run.clusters)  # [K]
    everyone, own = (run.read(f"/rounds/coins_{name}") == 1 for name in COINS)  # [rounds, 1], [rounds, K]
    averaging = everyone | own
    sizes = _vector_sizes(run, members, everyone, averaging)
    if merged:
        _check_gamma(run, cluster)
        everyone, averaging = first(everyone), first(averaging)
    up, down = (int(column.sum()) for column in _vectors(members, everyone, averaging))
    return Communication(int(everyone.sum()), averaging.sum(0), up, down, up * sizes[0], down * sizes[1])


def first(rounds: np.ndarray) -> np.ndarray:
    """bool [rounds, k], the first of consecutive rounds."""
    return rounds & ~np.concatenate([np.zeros_like(rounds[:1]), rounds[:-1]])


def _vectors(members: np.ndarray, everyone: np.ndarray, averaging: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vectors up, down of every round [rounds]. everyone [rounds, 1], averaging [rounds, K]: which means are formed."""
    within, between = averaging @ members, everyone[:, 0].astype(np.int64)
    return within + len(members) * between, within + (members.sum() + len(members)) * between


def _vector_sizes(run: Run, members: np.ndarray, everyone: np.ndarray, averaging: np.ndarray) -> list[int]:
    """Bytes of a vector up, and down: from what the run recorded, which must be what its coins say."""
    if (run.read("/rounds/n_participants") < run.clients).any():
        raise InputError(
            f"{run.path}: rounds with partial participation; what their averagings cost does not follow from the coins"
        )
    sizes = []
    for way, expected in zip(("up", "down"), _vectors(members, everyone, averaging), strict=True):
        vectors, sent = run.read(f"/rounds/vectors_{way}"), run.read(f"/rounds/bytes_{way}")
        size = int(sent.sum()) // max(1, int(vectors.sum()))
        wrong = np.flatnonzero((vectors != expected) | (sent != size * vectors))
        if len(wrong):
            r = wrong[0]
            raise InputError(
                f"{run.path}: round {r} took {vectors[r]} vectors ({sent[r]} bytes) {way}, but its coins say "
                f"{expected[r]} vectors of {size} bytes; its algorithm does not average as Async-L2GD does"
            )
        sizes.append(size)
    return sizes


def _check_gamma(run: Run, cluster: np.ndarray) -> None:
    gamma = run.config.get("algorithm", {}).get("gamma")
    if not isinstance(gamma, Sequence):
        return
    for j in range(run.clusters):
        if len(set(np.asarray(gamma)[cluster == j])) > 1:
            raise InputError(
                f"{run.path}: algorithm.gamma differs between the clients of cluster {j}, so averaging moves its mean, "
                "and consecutive averagings cannot be merged"
            )
