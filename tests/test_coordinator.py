"""Rank 0's decisions: fair, and independent of how rounds are cut into plans."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from hpcfl.config import RunOptions
from hpcfl.coordinator import Coordinator, draw_participants, flip_coins
from hpcfl.errors import InputError

COINS = {"global": np.array([0.1]), "cluster": np.array([0.0, 0.5, 1.0, 0.3])}


@pytest.mark.parametrize(("clients", "cohort"), [(5, 1), (5, 2), (4, 3), (6, 5)])
def test_cohorts_are_uniform(clients, cohort):
    """Chi-square over all cohorts of that size."""
    rounds = 6000
    found = Counter(tuple(draw_participants(3, r, clients, cohort).tolist()) for r in range(rounds))
    possible = list(itertools.combinations(range(clients), cohort))
    assert set(found) <= set(possible)  # sorted, without repetition
    expected, freedom = rounds / len(possible), len(possible) - 1
    square = sum((found[c] - expected) ** 2 / expected for c in possible)
    assert square < freedom + 4.5 * np.sqrt(2 * freedom)  # the probability of more is about 1e-4


def test_cohorts_of_successive_rounds_are_unrelated():
    rounds, clients, cohort = 4000, 20, 5
    cohorts = [set(draw_participants(0, r, clients, cohort).tolist()) for r in range(rounds)]
    again = np.array([len(a & b) for a, b in itertools.pairwise(cohorts)])
    mean, variance = cohort**2 / clients, cohort**2 * (clients - cohort) ** 2 / (clients**2 * (clients - 1))
    assert abs(again.mean() - mean) < 5 * np.sqrt(variance / rounds)


def test_cohorts_are_pure():
    assert np.array_equal(draw_participants(1, 7, 100, 10), draw_participants(1, 7, 100, 10))
    assert not np.array_equal(draw_participants(1, 7, 100, 10), draw_participants(1, 8, 100, 10))
    assert not np.array_equal(draw_participants(1, 7, 100, 10), draw_participants(2, 7, 100, 10))
    assert draw_participants(1, 7, 100, 10).dtype == np.int64
    assert np.array_equal(draw_participants(1, 0, 5, 5), np.arange(5))


def test_coins_do_not_depend_on_the_cut():
    rounds = 2600
    whole = flip_coins(5, 0, rounds, COINS)
    assert {name: fell.shape for name, fell in whole.items()} == {"global": (rounds, 1), "cluster": (rounds, 4)}
    g = np.random.default_rng(0)
    edges = np.unique([0, 1, 2, 1023, 1024, 1025, 2048, rounds, *g.integers(rounds, size=30)])
    for first, end in [*itertools.pairwise(edges), (1000, 2100), (1024, 2048)]:
        part = flip_coins(5, int(first), int(end - first), COINS)
        assert all(np.array_equal(part[name], whole[name][first:end]) for name in COINS)


def test_coins_fall_as_often_as_they_should():
    rounds = 8000
    fell = np.concatenate(list(flip_coins(0, 0, rounds, COINS).values()), 1)
    assert fell.dtype == bool
    p = np.concatenate(list(COINS.values()))
    assert (abs(fell.mean(0) - p) <= 5 * np.sqrt(p * (1 - p) / rounds)).all()  # 0 and 1 exactly


def test_different_coins_differ():
    """Fair coins agree half of the time: with each other, with their own last round, and with another seed's."""
    rounds, fair = 4000, {"a": np.full(2, 0.5), "b": np.full(2, 0.5)}
    fell = np.concatenate(list(flip_coins(0, 0, rounds, fair).values()), 1)
    other = np.concatenate(list(flip_coins(1, 0, rounds, fair).values()), 1)
    pairs = [(fell[:, i], fell[:, j]) for i, j in itertools.combinations(range(4), 2)]
    pairs += [(fell[1:, i], fell[:-1, i]) for i in range(4)] + [(fell[:, i], other[:, i]) for i in range(4)]
    for a, b in pairs:
        assert abs((a == b).mean() - 0.5) < 5 * 0.5 / np.sqrt(len(a))


def test_no_coins():
    assert flip_coins(0, 0, 10, {}) == {}


def coordinator(**options) -> Coordinator:
    return Coordinator(
        **{"seed": 1, "rounds": 23, "clients": 9, "cohort": 4, "eval_every": 5, "coins": COINS} | options
    )


def decisions(c: Coordinator, paces):
    """All plans of a run and their decisions, one pace (seconds per round) after the other."""
    done, plans, made = 0, [], []
    for pace in paces:
        if done == c.rounds:
            break
        plans.append(c.plan(done, pace))
        made += plans[-1].decisions(c.everyone)
        done += plans[-1].count
    assert done == c.rounds
    return plans, made


@pytest.mark.parametrize("pace", [None, 1e-6, 0.0, 0.3, 0.49, 7.0])
def test_plans(pace):
    c = coordinator()
    plans, made = decisions(c, [None, *[pace] * 30])
    _, single = decisions(c, [1e9] * 30)
    assert [d.index for d in made] == list(range(23))
    assert [d.index for d in made if d.evaluate] == [4, 9, 14, 19, 22]
    assert [d.stop for d in made] == [None] * 22 + ["done"]
    assert not any(d.checkpoint for d in made)
    for a, b in zip(made, single, strict=True):
        assert np.array_equal(a.participants, b.participants)
        assert a.coins.keys() == b.coins.keys()
        assert all(np.array_equal(a.coins[name], b.coins[name]) for name in a.coins)
        assert (a.evaluate, a.stop) == (b.evaluate, b.stop)
    assert plans[0].count == 1  # nothing is known of the pace yet
    for plan in plans[1:]:
        assert plan.count * (pace or 0) <= 1 or plan.count == 1
        ends = (plan.first + plan.count) % 5 == 0 or plan.first + plan.count == 23
        assert plan.evaluate == ends
        assert plan.first // 5 == (plan.first + plan.count - 1) // 5  # no evaluation inside a plan


def test_everyone_takes_part():
    _, made = decisions(coordinator(cohort=9), [None] * 30)
    assert all(np.array_equal(d.participants, np.arange(9)) for d in made)
    assert all(len(d.participants) == 4 for d in decisions(coordinator(), [None] * 30)[1])


@pytest.mark.parametrize(
    ("options", "clients", "cohort"),
    [
        ({}, 7, 7),
        ({"participation": 1.0}, 7, 7),
        ({"participation": 0.5}, 7, 4),  # rounded to the nearest, halves up
        ({"participation": 0.3}, 10, 3),
        ({"participation": 0.01}, 7, 1),  # at least one
        ({"clients_per_round": 7}, 7, 7),
        ({"clients_per_round": 2}, 7, 2),
    ],
)
def test_cohort(options, clients, cohort):
    assert RunOptions(rounds=1, **options).cohort(clients) == cohort


def test_a_cohort_larger_than_the_population():
    with pytest.raises(InputError, match=r"run.clients_per_round = 8: there are only 7 clients"):
        RunOptions(rounds=1, clients_per_round=8).cohort(7)
