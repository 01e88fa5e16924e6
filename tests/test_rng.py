"""Randomness without state: pure functions of (seed, purpose, client, round, step)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hpcfl.rng import Purpose, permutations, seed_for, stream

PLACES = ("client", "round", "step")


def draws(*args, n=4, **places) -> tuple[int, ...]:
    return tuple(stream(*args, **places).integers(2**63, size=n).tolist())


def test_the_numbers_of_purposes_are_part_of_the_results():
    names = ["INIT", "DATA", "PARTITION", "SPLIT", "PARTICIPATION", "COINS", "BATCHES", "DROPOUT"]
    assert {name: Purpose[name].value for name in names} == {name: k + 1 for k, name in enumerate(names)}
    assert len(set(Purpose)) == len(Purpose.__members__)


def test_documented_key_and_counter():
    bits = np.random.Philox(key=np.array([11, Purpose.SPLIT], np.uint64), counter=np.array([0, 4, 3, 2], np.uint64))
    expected = np.random.Generator(bits).integers(2**63, size=10)
    assert draws(11, Purpose.SPLIT, client=2, round=3, step=4, n=10) == tuple(expected.tolist())


def test_pure_and_different_everywhere():
    seen = {}
    for seed, purpose in itertools.product((0, 1, 2, 2**40), Purpose):
        for client, round, step in itertools.product((0, 1, 2, 10**6), repeat=3):
            where = (seed, purpose, client, round, step)
            found = draws(seed, purpose, client=client, round=round, step=step)
            assert seen.setdefault(found, where) == where
    seed, purpose, *place = where
    assert draws(seed, purpose, **dict(zip(PLACES, place, strict=True))) == found  # whatever was drawn meanwhile


def test_streams_do_not_overlap():
    """A long stream meets none of its neighbours: their first draws are not among its own."""
    long = set(draws(3, Purpose.BATCHES, n=20_000))
    for place in PLACES:
        assert long.isdisjoint(draws(3, Purpose.BATCHES, n=100, **{place: 1}))


@pytest.mark.parametrize("place", ["seed", *PLACES])
def test_the_documented_range(place):
    """Integers in [0, 2^64); neighbours differ at both ends."""
    found = []
    for value in (0, 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1):
        places = {"seed": 5} | {place: value}
        found.append(draws(places.pop("seed"), Purpose.COINS, **places))
    assert len(set(found)) == len(found)


def test_permutations_are_those_of_the_streams():
    clients, sizes = np.array([3, 0, 8, 7]), np.array([10, 1, 2, 33])
    found = permutations(4, clients, sizes, round=5, epoch=2)
    for client, size, order in zip(clients, sizes, found, strict=True):
        expected = stream(4, Purpose.BATCHES, client=int(client), round=5, step=2).permutation(int(size))
        assert np.array_equal(order, expected)
        assert np.array_equal(np.sort(order), np.arange(size))


def test_permutations_do_not_depend_on_the_company():
    clients, sizes = np.arange(6), np.full(6, 9)
    together = permutations(0, clients, sizes, 1, 0)
    alone = [permutations(0, clients[k : k + 1], sizes[k : k + 1], 1, 0)[0] for k in range(6)]
    assert np.array_equal(together, alone)
    assert len({tuple(order) for order in together}) == 6
    assert not np.array_equal(together, permutations(0, clients, sizes, 2, 0))
    assert not np.array_equal(together, permutations(0, clients, sizes, 1, 1))


def test_seeds_for_libraries():
    seeds = [
        seed_for(1, Purpose.DROPOUT, client=c, round=r, step=s) for c in range(8) for r in range(8) for s in range(8)
    ]
    assert len(set(seeds)) == 512
    assert all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in seeds)
    assert seed_for(1, Purpose.DROPOUT, client=7, round=7, step=7) == seeds[-1]
