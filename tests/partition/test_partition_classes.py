"""The partition by classes: each client owns k classes, each class is owned, its samples are dealt evenly."""

import numpy as np
import pytest

from hpcfl.data import TEST, TRAIN, Dataset
from hpcfl.errors import InputError
from hpcfl.partition import deal
from hpcfl.partition.classes import Classes


def dataset(n=2000, classes=10, seed=0, test=0):
    y = np.random.default_rng(seed).integers(classes, size=n)
    split = np.where(np.arange(n) < n - test, TRAIN, TEST).astype(np.uint8) if test else None
    return Dataset(np.zeros((n, 1), np.uint8), y, classes, split=split)


def table(data, shares, part=None):
    """Samples of each client and class: [N, classes]."""
    keep = slice(None) if part is None else shares.split == part
    counts = np.zeros((shares.n_clients, data.classes), int)
    np.add.at(counts, (shares.client[keep], data.y[keep]), 1)
    return counts


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("clients", "k"), [(5, 2), (10, 1), (12, 2), (30, 5), (3, 10), (100, 2)])
def test_every_client_owns_k_classes_and_every_class_is_owned(seed, clients, k):
    data = dataset(seed=seed)
    counts = table(data, deal(Classes(clients=clients, classes_per_client=k), data, seed))
    assert ((counts > 0).sum(1) == k).all()
    assert (counts > 0).any(0).all()
    for column in counts.T:
        assert np.ptp(column[column > 0]) <= 1  # dealt in turn among the owners


@pytest.mark.parametrize("seed", range(50))
def test_repair_where_draws_leave_classes_unowned(seed):
    """As few draws as there are classes: nearly every draw has to be repaired, and each class ends with one owner."""
    owned = Classes(clients=5, classes_per_client=4).ownership(20, seed)
    assert (owned.sum(0) == 1).all()
    assert (owned.sum(1) == 4).all()
    np.testing.assert_array_equal(owned, Classes(clients=5, classes_per_client=4).ownership(20, seed))


def test_draws_are_uniform():
    owned = np.array([Classes(clients=4, classes_per_client=3).ownership(4, seed)[0] for seed in range(2000)])
    np.testing.assert_allclose(owned.mean(0), 0.75, atol=0.04)


@pytest.mark.parametrize("seed", range(5))
def test_test_samples_follow_the_same_ownership(seed):
    data = dataset(3000, seed=seed, test=500)
    shares = deal(Classes(clients=20, classes_per_client=2), data, seed)
    train, test = table(data, shares, TRAIN), table(data, shares, TEST)
    np.testing.assert_array_equal(train > 0, test > 0)
    np.testing.assert_array_equal(shares.split, data.split)


def test_samples_of_a_class_are_shuffled():
    data = dataset()
    a, b = (deal(Classes(clients=4, classes_per_client=10), data, seed).client for seed in (0, 1))
    assert (a != b).mean() > 0.6


def test_scarce_classes_go_to_those_who_have_least():
    """40 clients draw 2 of 4 classes of 18 samples each: some classes have more owners than samples."""
    data = Dataset(np.zeros((72, 1), np.uint8), np.arange(72) % 4, 4)
    for seed in range(10):
        sizes = np.bincount(deal(Classes(clients=40), data, seed).client, minlength=40)
        assert 1 <= sizes.min() <= sizes.max() <= 3


def test_absent_classes_are_not_drawn():
    data = Dataset(np.zeros((90, 1), np.uint8), np.array([1, 4, 7] * 30), 10)
    counts = table(data, deal(Classes(clients=6, classes_per_client=2), data, 0))
    assert ((counts > 0).sum(1) == 2).all()
    with pytest.raises(InputError, match=r"classes_per_client = 4: the data have samples of 3 classes only"):
        deal(Classes(clients=6, classes_per_client=4), data, 0)


def test_impossible_options():
    with pytest.raises(InputError, match=r"classes_per_client = 11: the data have samples of 10 classes only"):
        deal(Classes(clients=5, classes_per_client=11), dataset(), 0)
    with pytest.raises(InputError) as error:
        deal(Classes(clients=4, classes_per_client=2), dataset(), 0)
    for part in ("partition.clients = 4", "classes_per_client = 2", "at least 5 clients or 3 classes per client"):
        assert part in str(error.value)


def test_a_client_that_would_stay_empty_is_named():
    """A class of one sample that three of four clients own, and nothing else."""
    data = Dataset(np.zeros((12, 1), np.uint8), np.array([1] + [0] * 11), 2)
    partition = Classes(clients=4, classes_per_client=1)
    seed = next(seed for seed in range(100) if partition.ownership(2, seed)[:, 1].tolist() == [False, True, True, True])
    with pytest.raises(InputError, match=r"client 2 has no sample at all \(and so for 1 other client\); use fewer"):
        deal(partition, data, seed)
