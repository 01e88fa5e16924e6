"""Async-L2GD with variance reduction against its formulas in NumPy: steps, means over all coins, accounts."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from dense_example import Dense
from helpers import decide, drawn, least_squares, least_squares_gradient, minibatch, on_ranks, ready

from hpcfl.algorithm import State
from hpcfl.algorithms.async_l2gd_vr import AsyncL2GDVR
from hpcfl.models.dense import Linear
from hpcfl.round import CLUSTER, GLOBAL, LOCAL, Round

OF = np.array([1, 0, 1, 0, 1, 2])  # cluster of each client
SIZES = np.array([4, 9, 6, 7, 5, 3])
DATA = least_squares(SIZES)
L2 = 0.2
MODEL = Linear(bias=False, l2=L2)
GAMMA, ALPHA, P_CLUSTER, TAU = (0.7, 0.2, 1.3, 0.4, 0.9, 0.5), (0.6, 0.15, 1.0), (0.3, 0.2, 0.4), (0.3, 0.8, 0.0)
OPTIONS = {"gamma": GAMMA, "alpha": ALPHA, "p_global": 0.25, "p_cluster": P_CLUSTER, "tau": TAU}
NAMES = ("y", "z", "w", "grad_F", "u_w", "v_w")


def dense(objective="mean", alpha=ALPHA):
    return Dense(DATA, OF, GAMMA, alpha, objective=objective, l2=L2)


def prepared(world=None, **options):
    return ready(DATA, AsyncL2GDVR(**{**OPTIONS, **options}), cluster=OF, model=MODEL, world=world)


def by_client(engine, state):
    """Name -> [N, P]."""
    return {name: rows.numpy()[np.argsort(engine.group.ids)] for name, rows in state.local.items()}


def at(w, objective="mean", alpha=ALPHA):
    """What is known of a reference point w [N, P]."""
    f = dense(objective, alpha)
    u, v = f.deviations(w)
    return {"w": w, "grad_F": f.gradient(w), "u_w": u, "v_w": v}


def scattered(seed=0, objective="mean"):
    """A state [N, P] with y, z and w apart from each other."""
    y, z, w = np.random.default_rng(seed).normal(size=(3, 6, 3))
    return {"y": y, "z": z, **at(w, objective)}


def state_of(engine, own):
    return State(local={name: torch.tensor(own[name][engine.group.ids]) for name in NAMES})


def mixed(k, own):
    """x."""
    return k.theta1 * own["z"] + k.theta2 * own["w"] + (1 - k.theta1 - k.theta2) * own["y"]


def estimate(o, s, own, x, between, within, index):
    """g at x [N, P], by the coins; s: the setting's numbers."""
    f, g = dense(o.objective, s.alpha), own["grad_F"].copy()
    u, v = (here - there for here, there in zip(f.deviations(x), (own["u_w"], own["v_w"]), strict=True))
    for i, j in enumerate(OF):
        gamma, alpha, tau, p_0, p = GAMMA[i], s.alpha[j], s.tau[j], s.p_global, s.p_cluster[j]
        if between:
            g[i] += gamma / p_0 * (alpha * u[i] + tau * (1 - alpha) * v[i])
        elif within[j]:
            g[i] += gamma * (1 - tau) * (1 - alpha) / ((1 - p_0) * p) * v[i]
        else:
            batch = minibatch(DATA, i, index, 0, o.batch_size)
            slopes = [least_squares_gradient(w, *batch, L2) for w in (x[i], own["w"][i])]
            g[i] += (SIZES[i] if o.objective == "sum" else 1) * (slopes[0] - slopes[1]) / ((1 - p_0) * (1 - p))
    return g


def iterated(o, s, k, own, between, within, refresh, index):
    """The state after an iteration, by client."""
    x = mixed(k, own)
    y = x - k.eta * estimate(o, s, own, x, between, within, index)
    z = k.beta * own["z"] + (1 - k.beta) * x + k.gamma / k.eta * (y - x)
    return own | {"y": y, "z": z} | (at(own["y"], o.objective, s.alpha) if refresh else {})


@pytest.mark.parametrize(
    "options", [{}, {"tau": "balance", "p_refresh": 0.5}, {"alpha": 1.0, "p_cluster": 0.0, "tau": 1.0}]
)
@pytest.mark.parametrize("objective", ["mean", "sum"])
@pytest.mark.parametrize("size", [None, 1, 4])
def test_step_by_step(options, objective, size):
    engine, algorithm = prepared(objective=objective, batch_size=size, **options)
    o, s, k = algorithm.options, algorithm.setting, algorithm.katyusha
    zero = np.zeros((6, 3))
    own, state = {"y": zero, "z": zero, **at(zero, objective, s.alpha)}, algorithm.init(engine.task, engine.group)
    seen = set()
    for index, decision in enumerate(drawn(engine, algorithm, [None] * 40)):
        (between,), within, (refresh,) = (decision.coins[name] for name in ("global", "cluster", "refresh"))
        seen |= {("between", bool(between)), ("refresh", bool(refresh))}
        state = algorithm.round(state, Round(engine, decision))
        own = iterated(o, s, k, own, between, within, refresh, index)
        for name, rows in by_client(engine, state).items():
            np.testing.assert_allclose(rows, own[name], rtol=1e-9, atol=1e-11, err_msg=f"{name} of round {index}")
    assert len(seen) == 4
    assert state.local.keys() == set(NAMES)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_round_on_ranks(ranks):
    tosses = [(True, (False,) * 3, True), (False, (True, False, True), False), (False, (False,) * 3, True)]

    def rank(comm):
        engine, algorithm = prepared(comm)
        state = state_of(engine, scattered())
        for index, (between, within, refresh) in enumerate(tosses, 1):
            coins = {"global": [between], "cluster": within, "refresh": [refresh]}
            state = algorithm.round(state, Round(engine, decide(engine, index, **coins)))
        rows = zip(*(state.local[name].numpy() for name in NAMES), strict=True)
        return dict(zip(engine.group.ids.tolist(), rows, strict=True)), algorithm

    parts = on_ranks(ranks, rank)
    algorithm, own = parts[0][1], scattered()
    for index, toss in enumerate(tosses, 1):
        own = iterated(algorithm.options, algorithm.setting, algorithm.katyusha, own, *toss, index)
    found = {i: rows for part, _ in parts for i, rows in part.items()}
    for k, name in enumerate(NAMES):
        np.testing.assert_allclose([found[i][k] for i in range(6)], own[name], rtol=1e-10, atol=1e-12)


def found_estimate(engine, algorithm, own, between, within, index=1):
    """g = (x - y+)/eta of a real round, by client."""
    coins = {"global": [between], "cluster": within, "refresh": [False]}
    new = algorithm.round(state_of(engine, own), Round(engine, decide(engine, index, **coins)))
    return (mixed(algorithm.katyusha, own) - by_client(engine, new)["y"]) / algorithm.katyusha.eta


def tossed(algorithm):
    """Every toss of the coins with its probability."""
    s = algorithm.setting
    chances = np.array([s.p_global, *s.p_cluster])
    for fell in product((False, True), repeat=4):
        yield np.where(fell, chances, 1 - chances).prod(), fell[0], fell[1:]


@pytest.mark.parametrize("tau", [0.0, 0.35, 1.0, "balance", "bound"])
@pytest.mark.parametrize("objective", ["mean", "sum"])
def test_the_expected_step_is_along_the_gradient_of_F(tau, objective):
    """Over every toss of the coins, by the rounds themselves."""
    engine, algorithm = prepared(tau=tau, objective=objective)
    own = scattered(objective=objective)
    g = sum(chance * found_estimate(engine, algorithm, own, *toss) for chance, *toss in tossed(algorithm))
    full = dense(objective).gradient(mixed(algorithm.katyusha, own))
    np.testing.assert_allclose(g, full, rtol=0, atol=1e-10 * abs(full).max())


@pytest.mark.parametrize("objective", ["mean", "sum"])
def test_the_expected_step_over_every_sample(objective):
    """Over every toss and, in local steps, every minibatch of one sample: rounds in which each was drawn."""
    engine, algorithm = prepared(batch_size=1, objective=objective)
    own, locally = scattered(objective=objective), [{} for _ in SIZES]
    for index in range(1, 80):
        g = found_estimate(engine, algorithm, own, False, (False,) * 3, index)
        for i, n in enumerate(SIZES):
            x, _ = minibatch(DATA, i, index, 0, 1)
            drawn_now = int(np.flatnonzero((DATA[i][0] == x).all(1))[0])
            np.testing.assert_allclose(locally[i].setdefault(drawn_now, g[i]), g[i])
            assert drawn_now < n
    assert [len(samples) for samples in locally] == SIZES.tolist()
    local = np.array([np.mean(list(samples.values()), 0) for samples in locally])
    total = 0.0
    for chance, between, within in tossed(algorithm):
        g = found_estimate(engine, algorithm, own, between, within)
        steps = ~np.array(within)[OF] & (not between)
        total = total + chance * np.where(steps[:, None], local, g)
    full = dense(objective).gradient(mixed(algorithm.katyusha, own))
    np.testing.assert_allclose(total, full, rtol=0, atol=1e-10 * abs(full).max())


def test_samples_are_drawn_evenly():
    """The mean of minibatch steps over many rounds is the full batch's, within what chance allows."""
    (engine, algorithm), (_, full), own = prepared(batch_size=2), prepared(), scattered()
    steps = np.array([found_estimate(engine, algorithm, own, False, (False,) * 3, index) for index in range(1, 301)])
    exact = estimate(full.options, full.setting, own, mixed(algorithm.katyusha, own), False, (False,) * 3, 1)
    error = steps.std(0) / np.sqrt(len(steps))
    assert (error > 0).all()
    assert (abs(steps.mean(0) - exact) < 4 * error).all()


def test_no_step_at_the_minimiser_and_no_noise():
    """Where x = w = theta*, every g is 0, whatever the coins and minibatches: this is what plain Async-L2GD has not."""
    optimum = dense().minimiser()
    engine, algorithm = prepared(batch_size=1)
    own = {"y": optimum, "z": optimum, **at(optimum)}
    for _, between, within in tossed(algorithm):
        assert abs(found_estimate(engine, algorithm, own, between, within)).max() < 1e-12


@pytest.mark.parametrize("objective", ["mean", "sum"])
@pytest.mark.parametrize("size", [None, 2])
def test_the_reference_point(objective, size):
    """At the start, and where w moves: to y as it was before the step, with the gradient of all samples."""
    engine, algorithm = prepared(objective=objective, batch_size=size)
    own = scattered(objective=objective)
    coins = {"global": [False], "cluster": [True, False, False]}
    for refresh in (False, True):
        decision = decide(engine, 3, refresh=[refresh], **coins)
        found = by_client(engine, algorithm.round(state_of(engine, own), Round(engine, decision)))
        for name, rows in (at(own["y"], objective) if refresh else at(own["w"], objective)).items():
            np.testing.assert_allclose(found[name], rows, rtol=1e-11, atol=1e-12)
    decision = decide(engine, 0, refresh=[False], **coins)
    first = by_client(engine, algorithm.round(algorithm.init(engine.task, engine.group), Round(engine, decision)))
    for name, rows in at(np.zeros((6, 3)), objective).items():
        np.testing.assert_allclose(first[name], rows, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize(
    ("index", "between", "within", "refresh", "kind", "up", "down"),
    [  # vectors; where w moves its means are formed like those of a round between clusters, besides the round's own
        (1, False, (False, False, False), False, LOCAL, 0, 0),
        (1, False, (False, False, False), True, GLOBAL, 6 + 3, 3 + 12),
        (1, False, (True, False, False), False, CLUSTER, 2, 2),
        (1, False, (True, False, False), True, GLOBAL, 6 + 3 + 2, 3 + 12 + 2),
        (1, True, (True, False, False), False, GLOBAL, 6 + 3, 3 + 12),
        (1, True, (False, False, False), True, GLOBAL, 2 * (6 + 3), 2 * (3 + 12)),
        (0, False, (False, False, False), False, GLOBAL, 6 + 3, 3 + 12),  # the first w
    ],
)
def test_what_is_sent(index, between, within, refresh, kind, up, down, ranks):
    def rank(comm):
        engine, algorithm = prepared(comm)
        coins = {"global": [between], "cluster": within, "refresh": [refresh]}
        r = Round(engine, decide(engine, index, **coins))
        algorithm.round(state_of(engine, scattered()), r)
        return r.account

    accounts = on_ranks(ranks, rank)
    assert {account.kind for account in accounts} == {kind}
    for way, vectors in (("up", up), ("down", down)):
        sent = np.array([v for account in accounts for v in getattr(account, way)]).reshape(-1, 2)
        np.testing.assert_array_equal(sent.sum(0), [vectors, vectors * 3 * 8])
