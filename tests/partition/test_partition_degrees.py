"""The partition by degree of personalisation: classes per client, owners of classes, messages."""

import numpy as np
import pytest

from hpcfl.data import Dataset
from hpcfl.errors import InputError
from hpcfl.partition import deal
from hpcfl.partition.classes import draw_classes
from hpcfl.partition.degrees import Degrees
from hpcfl.registry import build
from hpcfl.splits import TEST, TRAIN

DEGREES = ("high", "medium", "none", "diverse")


def dataset(n=3000, classes=10, test=600, seed=0):
    g = np.random.default_rng(seed)
    split = g.permutation(np.where(np.arange(n) < n - test, TRAIN, TEST)).astype(np.uint8)
    return Dataset(np.zeros((n, 1), np.uint8), g.integers(classes, size=n), classes, split=split)


def table(data, shares, part):
    """Samples of each client and class in one part: [N, classes]."""
    keep = shares.split == part
    counts = np.zeros((shares.n_clients, data.classes), int)
    np.add.at(counts, (shares.client[keep], data.y[keep]), 1)
    return counts


def allowed(degree, classes):
    """Numbers of classes that a client can have, of the specification."""
    return {
        "high": {2},
        "medium": {max(1, classes // 2)},
        "none": {classes},
        "diverse": {k for k in (2, 3, 4, 5) if k <= classes},
    }[degree]


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize(("clients", "classes"), [(20, 10), (20, 7), (31, 62), (5, 2), (8, 3), (12, 5)])
def test_classes_per_client_and_owners_of_classes(degree, clients, classes):
    for seed in range(5):
        owned = Degrees(clients=clients, degree=degree).ownership(classes, seed)
        assert owned.shape == (clients, classes)
        assert set(owned.sum(1).tolist()) <= allowed(degree, classes)
        assert owned.any(0).all()


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("classes", [10, 7])
def test_samples_follow_the_ownership(degree, seed, classes):
    partition, data = Degrees(clients=12, degree=degree), dataset(classes=classes, seed=seed)
    owned = partition.ownership(classes, seed)
    shares = deal(partition, data, seed)
    np.testing.assert_array_equal(shares.split, data.split)
    for part in (TRAIN, TEST):
        counts = table(data, shares, part)
        np.testing.assert_array_equal(counts > 0, owned)
        for column, owners in zip(counts.T, owned.T, strict=True):
            assert np.ptp(column[owners]) <= 1  # dealt in turn


def test_diverse_sizes_are_uniform():
    sizes = Degrees(clients=4000, degree="diverse").ownership(10, 0).sum(1)
    np.testing.assert_allclose(np.bincount(sizes)[2:] / 4000, [0.25] * 4, atol=0.03)
    few = Degrees(clients=4000, degree="diverse").ownership(3, 0).sum(1)
    np.testing.assert_allclose(np.bincount(few)[2:] / 4000, [0.5] * 2, atol=0.03)


@pytest.mark.parametrize("degree", DEGREES)
def test_classes_are_drawn_uniformly(degree):
    owned = Degrees(clients=4000, degree=degree).ownership(5, 1)
    np.testing.assert_allclose(owned.mean(0), owned.mean(), atol=0.03)


@pytest.mark.parametrize("seed", range(100))
def test_repair_where_sizes_differ(seed):
    """As few draws as there are classes, or hardly more: each client keeps its number, and each class has an owner."""
    g = np.random.default_rng(seed)
    sizes = g.integers(0, 6, size=8)
    classes = max(sizes.sum() - g.integers(3), sizes.max())
    owned = draw_classes(sizes, classes, seed)
    np.testing.assert_array_equal(owned.sum(1), sizes)
    assert owned.any(0).all()


def test_diverse_with_as_few_draws_as_possible():
    """Seeds where the clients draw exactly as many classes as there are: each class then has one owner."""
    tight = 0
    for seed in range(200):
        try:
            owned = Degrees(clients=3, degree="diverse").ownership(10, seed)
        except InputError:
            continue
        assert owned.any(0).all()
        assert set(owned.sum(1).tolist()) <= {2, 3, 4, 5}
        tight += owned.sum() == 10
    assert tight > 10


@pytest.mark.parametrize("degree", DEGREES)
def test_a_function_of_the_seed(degree):
    partition, data = Degrees(clients=12, degree=degree), dataset()
    a, again, b = (deal(partition, data, seed).client for seed in (0, 0, 1))
    np.testing.assert_array_equal(a, again)
    assert (a != b).mean() > 0.5
    if degree != "none":
        assert (partition.ownership(10, 0) != partition.ownership(10, 1)).any()


def test_one_client():
    assert (deal(Degrees(clients=1, degree="none"), dataset(), 0).client == 0).all()
    assert (deal(Degrees(clients=1), dataset(classes=2), 0).client == 0).all()
    for degree, least in [("high", 5), ("medium", 2), ("diverse", 5)]:
        with pytest.raises(InputError, match=f"use at least {least} clients"):
            deal(Degrees(clients=1, degree=degree), dataset(), 0)


@pytest.mark.parametrize("degree", ["medium", "none", "diverse"])
def test_one_class(degree):
    assert Degrees(clients=3, degree=degree).ownership(1, 0).tolist() == [[True]] * 3


def test_absent_classes_do_not_count():
    data = Dataset(np.zeros((90, 1), np.uint8), np.array([1, 4, 7, 8, 9] * 18), 10)
    counts = table(data, deal(Degrees(clients=6, degree="medium", test_share=0), data, 0), TRAIN)
    assert ((counts > 0).sum(1) == 2).all()
    assert counts.sum(0).tolist() == [0, 18, 0, 0, 18, 0, 0, 18, 18, 18]


@pytest.mark.parametrize(
    ("degree", "clients", "classes", "message"),
    [
        ("high", 4, 10, "the clients draw 8 classes in all, but there are 10; use at least 5 clients"),
        ("high", 5, 11, "the clients draw 10 classes in all, but there are 11; use at least 6 clients"),
        ("medium", 2, 11, "the clients draw 10 classes in all, but there are 11; use at least 3 clients"),
    ],
)
def test_too_few_clients(degree, clients, classes, message):
    with pytest.raises(InputError) as error:
        deal(Degrees(clients=clients, degree=degree), dataset(classes=classes), 0)
    assert str(error.value) == (
        f'partition.clients = {clients}, partition.degree = "{degree}": {message} or partition.degree = "none"'
    )
    enough = int(message.split()[-2])
    assert Degrees(clients=enough, degree=degree).ownership(classes, 0).any(0).all()


def test_too_few_classes():
    with pytest.raises(InputError) as error:
        deal(Degrees(clients=3), dataset(classes=1), 0)
    assert str(error.value) == (
        'partition.degree = "high": 2 classes per client, but the data have samples of 1 only; '
        'use partition.degree = "none"'
    )


def test_a_regression_has_no_classes():
    data = Dataset(np.zeros((9, 1), np.uint8), np.arange(9.0), None)
    with pytest.raises(InputError, match=r'partition.name = "degrees": deals by class, and a regression set has none'):
        deal(Degrees(clients=3), data, 0)


def test_options():
    assert build("partition", {"name": "degrees", "clients": 3}).degree == "high"
    with pytest.raises(InputError, match=r"expected 'high', 'medium', 'none' or 'diverse'"):
        build("partition", {"name": "degrees", "clients": 3, "degree": "low"})
