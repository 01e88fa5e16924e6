"""The Dirichlet partition: it always ends, every client has what it needs, alpha sets how uneven it is."""

import time

import numpy as np
import pytest

from hpcfl.data import TEST, TRAIN, Dataset
from hpcfl.partition import deal
from hpcfl.partition.dirichlet import Dirichlet, proportions, top_up
from hpcfl.rng import Purpose, stream


def dataset(n=1000, classes=10, seed=0, test=0):
    y = np.random.default_rng(seed).integers(classes, size=n)
    split = np.where(np.arange(n) < n - test, TRAIN, TEST).astype(np.uint8) if test else None
    return Dataset(np.zeros((n, 1), np.uint8), y, classes, split=split)


@pytest.mark.parametrize("alpha", [1e-308, 1e-9, 0.01, 0.1, 1.0, 100.0, 1e12, 1e300])
@pytest.mark.parametrize("clients", [1, 2, 30])
@pytest.mark.parametrize("seed", range(3))
def test_every_alpha_ends_with_everybody_served(alpha, clients, seed):
    data = dataset(seed=seed)
    shares = deal(Dirichlet(clients=clients, alpha=alpha, min_samples=5), data, seed)
    assert shares.counts(TRAIN).min() >= 5
    assert shares.counts(TEST).min() >= 1
    assert np.bincount(shares.client).sum() == 1000


@pytest.mark.parametrize("seed", range(5))
def test_the_least_that_is_feasible(seed):
    """Exactly clients * min_samples samples: everybody gets min_samples, and there is nothing left for a test."""
    shares = deal(Dirichlet(clients=50, alpha=0.05, min_samples=20), dataset(seed=seed), seed)
    assert shares.counts(TRAIN).tolist() == [20] * 50
    shares = deal(Dirichlet(clients=1000, alpha=0.05), dataset(seed=seed), seed)
    assert shares.counts(TRAIN).tolist() == [1] * 1000


@pytest.mark.parametrize("seed", range(5))
def test_own_split_is_dealt_in_the_same_proportions(seed):
    data = dataset(12000, seed=seed, test=6000)
    shares = deal(Dirichlet(clients=10, alpha=0.3), data, seed)
    np.testing.assert_array_equal(shares.split, data.split)
    assert shares.counts(TEST).min() >= 1
    counts = np.zeros((2, 10, 10))
    np.add.at(counts, ((shares.split == TEST).astype(int), shares.client, data.y), 1)
    shares_of_class = counts / counts.sum(1, keepdims=True)
    np.testing.assert_allclose(shares_of_class[0], shares_of_class[1], atol=0.01)


def test_small_own_test_sets_are_spread():
    shares = deal(Dirichlet(clients=30, alpha=0.05), dataset(1000, test=30), 0)
    assert shares.counts(TEST).tolist() == [1] * 30


def test_alpha_sets_the_unevenness():
    data = dataset(20000)

    def largest_share(alpha):
        client = deal(Dirichlet(clients=10, alpha=alpha, test_share=0.0), data, 0).client
        counts = np.zeros((10, 10))
        np.add.at(counts, (data.y, client), 1)
        return (counts.max(1) / counts.sum(1)).mean()

    shares = [largest_share(alpha) for alpha in (0.01, 0.5, 1e6)]
    assert shares[0] > 0.85 > shares[1] > 0.15 > shares[2]


def test_remainders_do_not_always_go_to_the_same_clients():
    """15 samples of each class over 10 clients at alpha = infinity: sizes near 1.5 per class, not 1 or 2 in all."""
    data = Dataset(np.zeros((1500, 1), np.uint8), np.repeat(np.arange(100), 15), 100)
    sizes = np.bincount(deal(Dirichlet(clients=10, alpha=1e12), data, 0).client)
    assert 110 < sizes.min() <= sizes.max() < 190


@pytest.mark.parametrize("alpha", [1e-308, 1e-3, 0.05, 2.0, 1e300])
def test_proportions_sum_to_one(alpha):
    for seed in range(20):
        p = proportions(alpha, 50, stream(seed, Purpose.PARTITION))
        assert p.sum() == pytest.approx(1)
        assert (p >= 0).all()


@pytest.mark.parametrize("alpha", [0.05, 0.5, 3.0])
def test_proportions_have_the_dirichlet_moments(alpha):
    n = 4
    p = np.array([proportions(alpha, n, stream(seed, Purpose.PARTITION)) for seed in range(4000)])
    np.testing.assert_allclose(p.mean(0), 1 / n, atol=0.03)
    np.testing.assert_allclose(p.var(0), (n - 1) / n**2 / (n * alpha + 1), rtol=0.12)


def by_hand(owner, clients, least):
    """top_up by its definition: one sample at a time, the last one of the largest client."""
    owner = owner.tolist()
    for k in range(clients):
        while owner.count(k) < least:
            sizes = [owner.count(c) for c in range(clients)]
            largest = [c for c in range(clients) if sizes[c] == max(sizes)]
            last = min(max(i for i, c in enumerate(owner) if c == donor) for donor in largest)
            owner[last] = k
    return np.bincount(owner, minlength=clients)


@pytest.mark.parametrize("seed", range(30))
def test_top_up_takes_from_the_largest(seed):
    rng = np.random.default_rng(seed)
    clients, least = int(rng.integers(1, 8)), int(rng.integers(0, 4))
    n = clients * least + int(rng.integers(1, 30))
    owner = np.minimum(rng.geometric(0.4, n) - 1, clients - 1)
    before = owner.copy()
    after = top_up(owner, clients, least)
    np.testing.assert_array_equal(owner, before)
    sizes = np.bincount(after, minlength=clients)
    assert sizes.min() >= least
    assert sizes.sum() == n
    np.testing.assert_array_equal(np.sort(sizes), np.sort(by_hand(before, clients, least)))
    moved = (after != before).sum()
    assert moved == np.maximum(least - np.bincount(before, minlength=clients), 0).sum()


def test_a_hundred_thousand_clients_take_seconds():
    """A loop over samples or an open loop of draws would take minutes."""
    n = 300_000
    data = Dataset(np.zeros((n, 1), np.uint8), np.arange(n) % 10, 10)
    start = time.perf_counter()
    shares = deal(Dirichlet(clients=100_000, alpha=0.1), data, 0)
    assert time.perf_counter() - start < 60
    assert shares.counts(TRAIN).min() >= 1
