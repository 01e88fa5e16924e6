"""Async-L2GD against its formulas, client by client in NumPy: every kind of round, and what is sent in it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from helpers import cloned, decide, least_squares, least_squares_gradient, minibatch, on_ranks, play, ready

from hpcfl.algorithm import State
from hpcfl.algorithms.async_l2gd import AsyncL2GD
from hpcfl.coordinator import Plan, flip_coins
from hpcfl.record import Recorder
from hpcfl.round import CLUSTER, GLOBAL, LOCAL, Round
from hpcfl.schedules import Exponential

OF = np.array([1, 0, 1, 0, 1, 2])  # cluster of each client
MINE = [np.flatnonzero(np.equal(OF, j)) for j in range(3)]
SIZES = [4, 9, 6, 17, 5, 3]
DATA = least_squares(SIZES)
GAMMA, ALPHA, P_CLUSTER, TAU = (0.7, 0.2, 1.3, 0.4, 0.9, 0.5), (0.6, 0.15, 1.0), (0.3, 0.2, 0.4), (0.3, 0.8, 0.0)
OPTIONS = AsyncL2GD(lr=0.05, gamma=GAMMA, alpha=ALPHA, p_global=0.25, p_cluster=P_CLUSTER, tau=TAU)
TOSSES = [  # between all clusters, within each
    (False, (False, False, False)),
    (False, (True, False, False)),
    (False, (False, True, True)),
    (False, (True, True, True)),
    (True, (False, False, False)),
    (True, (True, False, True)),
]


def changed(**options):
    return AsyncL2GD(**{**vars(OPTIONS), **options})


def theta_0(seed=0):
    return np.random.default_rng(seed).normal(size=(6, 3))


def means(theta, gamma, alpha):
    """thetabar [P], thetabar_j [K, P]."""
    within = [np.average(theta[mine], axis=0, weights=gamma[mine]) for mine in MINE]
    return np.average(theta, axis=0, weights=gamma * alpha[OF]), within


def gradient(theta, i, objective="mean", size=None, index=0):
    """Of f_i at theta_i."""
    scale = 1 if objective == "mean" else SIZES[i]
    return scale * least_squares_gradient(theta[i], *minibatch(DATA, i, index, 0, size))


def iterated(o, theta, between, within, index=0, eta=None):
    """theta after an iteration of Algorithm 1; o: options that give every number."""
    gamma, alpha, p, tau = (np.array(values) for values in (o.gamma, o.alpha, o.p_cluster, o.tau))
    eta, p_0, new = o.lr if eta is None else eta, o.p_global, theta.copy()
    thetabar, thetabar_j = means(theta, gamma, alpha)
    for i, j in enumerate(OF):
        u, v = theta[i] - thetabar, theta[i] - thetabar_j[j]
        if between:
            new[i] -= eta * gamma[i] / p_0 * (alpha[j] * u + tau[j] * (1 - alpha[j]) * v)
        elif within[j]:
            new[i] -= eta * gamma[i] * (1 - tau[j]) * (1 - alpha[j]) / ((1 - p_0) * p[j]) * v
        else:
            new[i] -= eta / ((1 - p_0) * (1 - p[j])) * gradient(theta, i, o.objective, o.batch_size, index)
    return new


def state_of(engine, theta):
    return State(local={"theta": torch.tensor(theta[engine.group.ids], dtype=engine.task.dtype)})


def by_client(engine, state):
    return state.local["theta"].numpy()[np.argsort(engine.group.ids)]


def one_round(engine, algorithm, state, between, within, *, index=0, participants=None):
    """(the state after a round with these coins, its account); the given state is left as it is."""
    coins = {"global": [between], "cluster": within}
    r = Round(engine, decide(engine, index, participants, **coins))
    return algorithm.round(cloned(state), r), r.account


def test_small_numbers_by_hand():
    data = least_squares([4, 5, 6], features=1)
    o = AsyncL2GD(lr=0.1, gamma=(1.0, 1.0, 2.0), alpha=(0.5, 0.25), p_global=0.2, p_cluster=(0.3, 0.0))
    engine, algorithm = ready(data, o, cluster=[0, 0, 1])
    np.testing.assert_allclose(algorithm.setting.tau, [5 / 11, 1])
    start = state_of(engine, np.array([[1.0], [3.0], [-2.0]]))
    new, _ = one_round(engine, algorithm, start, True, [False, False])
    np.testing.assert_allclose(new.local["theta"], [[1.030303], [2.303030], [-1.333333]], atol=1e-6)
    new, _ = one_round(engine, algorithm, start, False, [True, False])
    np.testing.assert_allclose(new.local["theta"][:2], [[1.113636], [2.886364]], atol=1e-6)
    slope = least_squares_gradient(np.array([-2.0]), *data[2])
    np.testing.assert_allclose(new.local["theta"][2], -2 - 0.1 / 0.8 * slope)


@pytest.mark.parametrize(("between", "within"), TOSSES)
@pytest.mark.parametrize("objective", ["mean", "sum"])
@pytest.mark.parametrize("size", [None, 1, 4])
def test_an_iteration(between, within, objective, size):
    o, theta = changed(objective=objective, batch_size=size), theta_0()
    engine, algorithm = ready(DATA, o, cluster=OF)
    for index in (0, 5):
        new, _ = one_round(engine, algorithm, state_of(engine, theta), between, within, index=index)
        expected = iterated(o, theta, between, within, index)
        np.testing.assert_allclose(by_client(engine, new), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(("between", "within"), TOSSES)
def test_an_iteration_on_ranks(between, within, ranks):
    def rank(comm):
        engine, algorithm = ready(DATA, OPTIONS, cluster=OF, world=comm)
        new, _ = one_round(engine, algorithm, state_of(engine, theta_0()), between, within)
        return dict(zip(engine.group.ids.tolist(), new.local["theta"].numpy(), strict=True))

    found = {i: row for part in on_ranks(ranks, rank) for i, row in part.items()}
    expected = iterated(OPTIONS, theta_0(), between, within)
    np.testing.assert_allclose([found[i] for i in range(6)], expected, rtol=1e-12, atol=1e-14)


def test_a_schedule_counts_iterations():
    o, theta = changed(lr_schedule=Exponential(decay=0.9)), theta_0()
    engine, algorithm = ready(DATA, o, cluster=OF)
    for index, (between, within) in enumerate(TOSSES):
        new, _ = one_round(engine, algorithm, state_of(engine, theta), between, within, index=index)
        expected = iterated(o, theta, between, within, eta=0.05 * 0.9**index)
        np.testing.assert_allclose(by_client(engine, new), expected, rtol=1e-12)


@pytest.mark.parametrize(("between", "within"), TOSSES)
def test_clients_that_sit_out(between, within):
    """They keep their models; all means are those of the clients who are there, with their weights."""
    participants, theta = [0, 1, 3, 4], theta_0()
    engine, algorithm = ready(DATA, OPTIONS, cluster=OF)
    new, _ = one_round(engine, algorithm, state_of(engine, theta), between, within, participants=participants)
    gamma, alpha = np.array(GAMMA), np.array(ALPHA)
    there = [[i for i in mine if i in participants] for mine in MINE]
    mean_of = [np.average(theta[ids], axis=0, weights=gamma[ids]) if ids else None for ids in there]
    weight = [alpha[j] * gamma[there[j]].sum() for j in (0, 1)]
    thetabar = np.average(mean_of[:2], axis=0, weights=weight)
    for i, j in enumerate(OF):
        expected = theta[i]
        if i in participants:
            v, pull = theta[i] - mean_of[j], 0.05 * gamma[i] * (1 - alpha[j])
            if between:
                expected = theta[i] - 0.05 / 0.25 * gamma[i] * alpha[j] * (theta[i] - thetabar)
                expected = expected - pull * TAU[j] / 0.25 * v
            elif within[j]:
                expected = theta[i] - pull * (1 - TAU[j]) / (0.75 * P_CLUSTER[j]) * v
            else:
                expected = theta[i] - 0.05 / (0.75 * (1 - P_CLUSTER[j])) * gradient(theta, i)
        np.testing.assert_allclose(by_client(engine, new)[i], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("between", "within"), TOSSES[:4])
def test_clusters_that_never_meet(between, within):
    """p_0 = 0 where no cluster is pulled towards the others: tau_j = 0."""
    engine, algorithm = ready(DATA, changed(alpha=0.0, p_global=0.0, tau="balance"), cluster=OF)
    theta, gamma = theta_0(), np.array(GAMMA)
    new, _ = one_round(engine, algorithm, state_of(engine, theta), between, within)
    thetabar_j = means(theta, gamma, np.ones(3))[1]
    for i, (j, found) in enumerate(zip(OF, by_client(engine, new), strict=True)):
        pull, step = 0.05 * gamma[i] / P_CLUSTER[j], 0.05 / (1 - P_CLUSTER[j])
        expected = theta[i] - (pull * (theta[i] - thetabar_j[j]) if within[j] else step * gradient(theta, i))
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("tau", [0.0, 0.35, 0.8, 1.0, "balance", "bound", "exact"])
@pytest.mark.parametrize("objective", ["mean", "sum"])
def test_the_expected_step_is_along_the_gradient_of_F(tau, objective):
    """Over every toss of the coins, by the rounds themselves."""
    gamma = np.array([0.4, 0.7, 0.4, 0.7, 0.4, 0.5]) if tau == "exact" else np.array(GAMMA)
    o, theta = changed(lr=0.01, gamma=tuple(gamma), tau=tau, objective=objective), theta_0()
    engine, algorithm = ready(DATA, o, cluster=OF)
    start, moved, total = state_of(engine, theta), np.zeros_like(theta), 0.0
    probabilities = np.concatenate(list(algorithm.coins(3).values()))
    for fell in product((False, True), repeat=4):
        chance = np.where(fell, probabilities, 1 - probabilities).prod()
        new, _ = one_round(engine, algorithm, start, fell[0], fell[1:])
        moved, total = moved + chance * (by_client(engine, new) - theta), total + chance
    assert total == pytest.approx(1)
    alpha = np.array(ALPHA)
    thetabar, thetabar_j = means(theta, gamma, alpha)
    full = [
        gradient(theta, i, objective) + gamma[i] * (theta[i] - alpha[j] * thetabar - (1 - alpha[j]) * thetabar_j[j])
        for i, j in enumerate(OF)
    ]
    np.testing.assert_allclose(moved / -0.01, full, rtol=1e-10, atol=1e-12)


def test_one_mean_and_one_coin_is_l2gd():
    """Coin p; for n clients a = n eta, lambda = gamma: Hanzely and Richtarik, 2020."""
    n, p, lam, eta = 6, 0.3, 0.8, 0.05
    engine, algorithm = ready(DATA, AsyncL2GD(lr=eta, gamma=lam, alpha=1.0, p_global=p, p_cluster=0.0), cluster=OF)
    coins = flip_coins(0, 0, 30, algorithm.coins(3))
    assert 0 < coins["global"].sum() < 30
    assert not coins["cluster"].any()
    x, a, state = theta_0(), n * eta, state_of(engine, theta_0())
    for index, (toss,) in enumerate(coins["global"]):
        state = play(engine, algorithm, 1, state, first=index)
        if toss:
            x = (1 - a * lam / (n * p)) * x + a * lam / (n * p) * x.mean(0)
        else:
            x = x - a / (n * (1 - p)) * np.array([gradient(x, i) for i in range(n)])
        np.testing.assert_allclose(by_client(engine, state), x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tau", ["balance", "bound", "exact", 1.0])
def test_one_coin_is_the_synchronous_variant(tau):
    """A step towards alpha_j thetabar + (1 - alpha_j) thetabar_j, or a gradient step of all clients."""
    p, eta, gamma, alpha = 0.3, 0.05, np.array(GAMMA), np.array(ALPHA)
    engine, algorithm = ready(DATA, changed(p_global=p, p_cluster=0.0, tau=tau), cluster=OF)
    coins = flip_coins(0, 0, 30, algorithm.coins(3))
    assert 0 < coins["global"].sum() < 30
    theta, state = theta_0(), state_of(engine, theta_0())
    for index, (toss,) in enumerate(coins["global"]):
        state = play(engine, algorithm, 1, state, first=index)
        if toss:
            thetabar, thetabar_j = means(theta, gamma, alpha)
            target = alpha[OF, None] * thetabar + (1 - alpha[OF, None]) * np.array(thetabar_j)[OF]
            theta = (1 - eta * gamma[:, None] / p) * theta + eta * gamma[:, None] / p * target
        else:
            theta = theta - eta / (1 - p) * np.array([gradient(theta, i) for i in range(6)])
        np.testing.assert_allclose(by_client(engine, state), theta, rtol=1e-10, atol=1e-12)


class Kept:
    """What a results file would get of a round."""

    def rounds(self, first, columns):
        self.columns = {name: values[0] for name, values in columns.items()}


def recorded(o, toss, participants=None, ranks=1, **engine_options):
    """The row of a round with these coins, from theta_0."""
    kept = Kept()

    def rank(comm):
        engine, algorithm = ready(DATA, o, cluster=OF, world=comm, **engine_options)
        _, account = one_round(engine, algorithm, state_of(engine, theta_0()), *toss, participants=participants)
        plan = Plan(0, 1, None if participants is None else [np.array(participants)], {}, False, False, None)
        Recorder(engine, algorithm, ("train",), kept if comm.rank == 0 else None, 1).rounds(plan, [account], [0.0])

    on_ranks(ranks, rank)
    return kept.columns


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("toss", "participants", "kind", "up", "down"),
    [  # vectors; between clusters a cluster's mean goes up and the global one comes down, once per cluster
        ((True, (False, True, False)), None, GLOBAL, 6 + 3, 3 + 6 * 2),
        ((True, (False, False, False)), [0, 1, 3], GLOBAL, 3 + 2, 2 + 3 * 2),
        ((False, (True, False, False)), None, CLUSTER, 2, 2),
        ((False, (False, True, True)), None, CLUSTER, 4, 4),
        ((False, (True, True, True)), [2, 3], CLUSTER, 2, 2),
        ((False, (True, False, True)), [0, 2, 4], LOCAL, 0, 0),  # nobody of the clusters that would average
        ((False, (False, False, False)), None, LOCAL, 0, 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_sent(toss, participants, kind, up, down, ranks, dtype):
    row = recorded(OPTIONS, toss, participants, ranks, dtype=dtype)
    assert row["kind"] == kind
    assert (row["vectors_up"], row["vectors_down"]) == (up, down)
    assert (row["bytes_up"], row["bytes_down"]) == (up * 3 * dtype.itemsize, down * 3 * dtype.itemsize)
    assert row["n_participants"] == len(participants or OF)


@pytest.mark.parametrize(("between", "within"), TOSSES)
@pytest.mark.parametrize("objective", ["mean", "sum"])
@pytest.mark.parametrize(("ranks", "participants"), [(1, None), (3, None), (1, [0, 1, 5]), (3, [0, 1, 5])])
@pytest.mark.parametrize("size", [None, 2])
def test_the_training_loss_is_that_of_the_gradient_steps(between, within, objective, ranks, participants, size):
    """In the mean over the clients that took one, before it; NaN where all averaged."""
    o, theta = changed(objective=objective, batch_size=size), theta_0()
    losses = []
    for i in range(6) if participants is None else participants:
        if not (between or within[OF[i]]):
            x, y = minibatch(DATA, i, 0, 0, size)
            losses.append(((x @ theta[i] - y) ** 2).mean() / 2)
    found = recorded(o, (between, within), participants, ranks, block=4)["train_loss"]
    assert found == pytest.approx(np.mean(losses) if losses else np.nan, nan_ok=True)
