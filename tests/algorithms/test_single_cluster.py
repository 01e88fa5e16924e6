"""L2GD against its formulas in NumPy, against Async-L2GD with one mean, and what it makes of its options."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from dense_example import Dense
from helpers import decide, least_squares, least_squares_gradient, minibatch, on_ranks, ready, same_bits

from hpcfl.algorithm import State
from hpcfl.algorithms.async_l2gd import AsyncL2GD
from hpcfl.algorithms.single_cluster import SingleCluster
from hpcfl.coordinator import flip_coins
from hpcfl.errors import InputError
from hpcfl.round import GLOBAL, LOCAL, Round
from hpcfl.schedules import Exponential

OF = np.array([1, 0, 1, 0, 1, 2])  # clusters, which make no difference
SIZES = np.array([4, 9, 6, 17, 5, 3])
DATA = least_squares(SIZES)
GAMMA = (0.7, 0.2, 1.3, 0.4, 0.9, 0.5)
TOSSES = [False, True, True, False, False, True, False, True, False, False]


def theta_0():
    return np.random.default_rng(0).normal(size=(6, 3))


def start(engine):
    return State(local={"theta": torch.tensor(theta_0()[engine.group.ids])})


def by_client(engine, state):
    return state.local["theta"].numpy()[np.argsort(engine.group.ids)]


def course(engine, algorithm, tosses, participants=None, **more):
    """The models [N, P] after every round with these coins."""
    state, models = start(engine), []
    for index, toss in enumerate(tosses):
        state = algorithm.round(state, Round(engine, decide(engine, index, participants, **{"global": [toss], **more})))
        models.append(by_client(engine, state).copy())
    return models


def gradient(theta, i, objective="mean", size=None, index=0):
    """Of f_i at theta_i."""
    scale = 1 if objective == "mean" else SIZES[i]
    return scale * least_squares_gradient(theta[i], *minibatch(DATA, i, index, 0, size))


@pytest.mark.parametrize("objective", ["mean", "sum"])
@pytest.mark.parametrize("size", [None, 1, 4])
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_step_by_step(objective, size, decay):
    """The published step a and weight lam of n clients are n eta and gamma: by Hanzely and Richtarik, 2020."""
    n, p, lam, a = 6, 0.3, 0.8, 0.06
    options = {"objective": objective, "batch_size": size, "lr_schedule": Exponential(decay=decay)}
    o = SingleCluster(lr=a / n, gamma=lam, p_global=p, **options)
    x = theta_0()
    for index, found in enumerate(course(*ready(DATA, o, cluster=OF), TOSSES)):
        a_k = a * decay**index
        if TOSSES[index]:
            x = (1 - a_k * lam / (n * p)) * x + a_k * lam / (n * p) * x.mean(0)
        else:
            x = x - a_k / (n * (1 - p)) * np.array([gradient(x, i, objective, size, index) for i in range(n)])
        np.testing.assert_allclose(found, x, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("participants", [None, [0, 1, 4]])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_gamma_of_each_client(participants, ranks):
    """The mean is theirs who are there, weighted by gamma; the others keep their models."""
    p, eta, gamma, there = 0.3, 0.02, np.array(GAMMA), list(range(6)) if participants is None else participants

    def rank(comm):
        engine, algorithm = ready(DATA, SingleCluster(lr=eta, gamma=GAMMA, p_global=p), cluster=OF, world=comm)
        state = start(engine)
        for index, toss in enumerate(TOSSES):
            decision = decide(engine, index, participants, **{"global": [toss]})
            state = algorithm.round(state, Round(engine, decision))
        return dict(zip(engine.group.ids.tolist(), state.local["theta"].numpy(), strict=True))

    x = theta_0()
    for toss in TOSSES:
        new = x.copy()
        mean = np.average(x[there], axis=0, weights=gamma[there])
        for i in there:
            new[i] -= eta * gamma[i] / p * (x[i] - mean) if toss else eta / (1 - p) * gradient(x, i)
        x = new
    found = {i: row for part in on_ranks(ranks, rank) for i, row in part.items()}
    np.testing.assert_allclose([found[i] for i in range(6)], x, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("objective", ["mean", "sum"])
@pytest.mark.parametrize("gamma", [0.8, GAMMA])
def test_is_async_l2gd_with_one_mean(gamma, objective):
    options = {"gamma": gamma, "p_global": 0.3, "objective": objective, "batch_size": 2}
    one, many = SingleCluster(**options), AsyncL2GD(alpha=1.0, p_cluster=0.0, **options)
    (engine, algorithm), (other, limit) = (ready(DATA, o, cluster=OF) for o in (one, many))
    assert algorithm.eta == limit.eta  # both from theory
    tosses = flip_coins(0, 0, 60, algorithm.coins(3))["global"][:, 0]
    assert 10 < tosses.sum() < 30
    pairs = zip(course(engine, algorithm, tosses), course(other, limit, tosses, cluster=[False] * 3), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def test_clusters_make_no_difference():
    o = SingleCluster(lr=0.02, gamma=GAMMA, batch_size=2)
    (engine, algorithm), (other, same) = ready(DATA, o, cluster=OF), ready(DATA, o)
    assert algorithm.coins(3).keys() == {"global"}
    for a, b in zip(course(engine, algorithm, TOSSES), course(other, same, TOSSES), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("objective", ["mean", "sum"])
def test_the_expected_step_is_along_the_gradient_of_F(objective):
    o, theta = SingleCluster(lr=0.01, gamma=GAMMA, p_global=0.35, objective=objective), theta_0()
    engine, algorithm = ready(DATA, o, cluster=OF)
    (averaged,), (local,) = (course(engine, algorithm, [toss]) for toss in (True, False))
    moved = 0.35 * (averaged - theta) + 0.65 * (local - theta)
    full = Dense(DATA, np.zeros(6, int), GAMMA, [1.0], objective=objective).gradient(theta)
    np.testing.assert_allclose(moved / -0.01, full, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("toss", "participants", "kind", "vectors"),
    [(True, None, GLOBAL, 6), (True, [1, 3], GLOBAL, 2), (False, None, LOCAL, 0), (False, [1, 3], LOCAL, 0)],
)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_what_is_sent(toss, participants, kind, vectors, ranks):
    """When it averages, one vector of every client up, and one down."""

    def rank(comm):
        engine, algorithm = ready(DATA, SingleCluster(lr=0.02), cluster=OF, world=comm)
        r = Round(engine, decide(engine, 0, participants, **{"global": [toss]}))
        algorithm.round(start(engine), r)
        return r.account

    accounts = on_ranks(ranks, rank)
    assert {account.kind for account in accounts} == {kind}
    for way in ("up", "down"):
        sent = np.array([v for account in accounts for v in getattr(account, way)]).reshape(-1, 2)
        np.testing.assert_array_equal(sent.sum(0), [vectors, vectors * 3 * 8])


def smoothness(objective):
    """L of the f_i."""
    scale = SIZES if objective == "sum" else np.ones(6)
    return max(s * np.linalg.eigvalsh(x.T @ x / len(y)).max() for (x, y), s in zip(DATA, scale, strict=True))


@pytest.mark.parametrize("objective", ["mean", "sum"])
def test_probability_and_step_size_of_the_theory(objective):
    """p = 2 gamma/(L + 2 gamma), where Lcal = max{L/(1 - p), 2 gamma/p} is least; eta = 1/(2 Lcal)."""
    L, gamma = smoothness(objective), max(GAMMA)
    best = ready(DATA, SingleCluster(gamma=GAMMA, objective=objective, p_global="optimal"), cluster=OF)[1]
    p = best.setting.p_global
    assert p == pytest.approx(2 * gamma / (L + 2 * gamma), rel=1e-12)
    assert best.eta == pytest.approx(0.5 / (L + 2 * gamma), rel=1e-12)
    grid = np.linspace(0.001, 0.999, 999)
    assert p == pytest.approx(grid[np.argmin(np.maximum(L / (1 - grid), 2 * gamma / grid))], abs=1e-3)
    for p in (0.1, 0.9):
        found = ready(DATA, SingleCluster(gamma=GAMMA, objective=objective, p_global=p), cluster=OF)[1]
        assert found.eta == pytest.approx(0.5 / max(L / (1 - p), 2 * gamma / p), rel=1e-12)
    given = ready(DATA, SingleCluster(gamma=2.0, smoothness=50.0, p_global="optimal"))[1]
    assert given.setting.p_global == pytest.approx(4 / 54)


def test_the_largest_step_size():
    """Where eta gamma_i/p = 1: a round then replaces that model by the mean."""
    with pytest.raises(InputError) as error:
        ready(DATA, SingleCluster(lr=3.0, gamma=GAMMA, p_global=0.2))
    named = float(re.search(r"the largest admissible lr is (\S+)$", str(error.value))[1])
    largest = 0.2 / max(GAMMA)
    assert named == pytest.approx(largest, rel=1e-5)
    with pytest.raises(InputError, match="overshoot"):
        ready(DATA, SingleCluster(lr=largest * (1 + 1e-5), gamma=GAMMA, p_global=0.2))
    (found,) = course(*ready(DATA, SingleCluster(lr=largest, gamma=GAMMA, p_global=0.2)), [True])
    np.testing.assert_allclose(found[2], np.average(theta_0(), axis=0, weights=GAMMA), rtol=1e-10)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"p_global": 0.0}, r"^algorithm.p_global = 0: nothing would be averaged, .*; give p_global > 0$"),
        ({"gamma": (1.0, 2.0)}, r"^algorithm.gamma: 2 values, expected one, or one per client \(6\)$"),
    ],
)
def test_what_is_refused(options, line):
    with pytest.raises(InputError, match=line):
        ready(DATA, SingleCluster(lr=0.01, **options))


def test_decaying_steps_end_at_the_minimiser_of_F():
    data = least_squares([12] * 6)
    o = SingleCluster(lr=0.1, lr_schedule=Exponential(decay=0.996), gamma=GAMMA, p_global=0.4)
    engine, algorithm = ready(data, o)
    state, optimum = algorithm.init(engine.task, engine.group), Dense(data, np.zeros(6, int), GAMMA, [1.0]).minimiser()
    for index, toss in enumerate(flip_coins(0, 0, 1500, algorithm.coins(1))["global"]):
        state = algorithm.round(state, Round(engine, decide(engine, index, **{"global": toss})))
    assert ((by_client(engine, state) - optimum) ** 2).sum() < 1e-3 * (optimum**2).sum()
