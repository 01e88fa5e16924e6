"""Which rank hosts which client: pure, contiguous by cluster, balanced, no idle rank where clients suffice."""

from __future__ import annotations

import numpy as np
import pytest

from hpcfl.placement import place


def check(cluster, samples, ranks):
    """The properties that hold for every population."""
    placement = place(cluster, samples, ranks)
    n, load = len(cluster), np.bincount(placement.rank, weights=samples, minlength=ranks)
    assert len(load) == ranks  # no rank beyond the last
    assert placement.rank.min() >= 0

    order = np.lexsort((np.arange(n), cluster))  # cluster by cluster, ascending ids inside one
    steps = np.diff(placement.rank[order])
    assert (steps >= 0).all()
    for c in np.unique(cluster):
        hosts = placement.hosts(c)
        assert np.array_equal(hosts, np.unique(placement.rank[cluster == c]))
        if n >= ranks:
            assert np.array_equal(hosts, np.arange(hosts[0], hosts[-1] + 1))  # neighbours

    hosted = [placement.hosted(r) for r in range(ranks)]
    assert np.array_equal(np.concatenate(hosted), order)
    assert placement.clients == n
    assert placement.clusters == cluster.max() + 1
    if n >= ranks:
        assert all(len(ids) > 0 for ids in hosted)
    # balanced within one client
    assert load.max() <= samples.sum() / ranks + samples.max()
    assert load.min() >= samples.sum() / ranks - samples.max()
    return placement


def test_random_populations():
    g = np.random.default_rng(0)
    for _ in range(400):
        n, ranks = int(g.integers(1, 40)), int(g.integers(1, 12))
        cluster = g.integers(int(g.integers(1, 5)), size=n)
        samples = [np.full(n, 7), g.integers(1, 100, n), np.maximum(1, g.lognormal(2, 2, n)).astype(int)][g.integers(3)]
        first, second = (check(cluster, samples, ranks) for _ in range(2))
        assert np.array_equal(first.rank, second.rank)


@pytest.mark.parametrize("where", [0, 3, 9])
@pytest.mark.parametrize("ranks", [2, 4, 9, 10])
def test_one_giant_client(where, ranks):
    samples = np.ones(10, int)
    samples[where] = 10**6
    check(np.zeros(10, int), samples, ranks)


@pytest.mark.parametrize(("clients", "ranks"), [(1, 1), (1, 5), (3, 8), (4, 5)])
def test_more_ranks_than_clients(clients, ranks):
    placement = check(np.arange(clients) % 2, np.full(clients, 3), ranks)
    assert len(np.unique(placement.rank)) == clients  # no rank hosts two while others have none


def test_equal_clients_are_dealt_evenly():
    placement = check(np.zeros(12, int), np.full(12, 5), 4)
    assert np.array_equal(placement.rank, np.repeat(np.arange(4), 3))


def test_clusters_are_kept_together():
    cluster = np.array([2, 0, 1, 0, 2, 1])
    placement = check(cluster, np.full(6, 5), 3)
    assert [placement.hosted(r).tolist() for r in range(3)] == [[1, 3], [2, 5], [0, 4]]
    assert [placement.hosts(c).tolist() for c in range(3)] == [[0], [1], [2]]
