"""Async-L2GD as a whole: what it makes of its options, what it refuses, where it converges to, and whole jobs."""

from __future__ import annotations

import re
from itertools import count

import h5py
import numpy as np
import pytest
from helpers import decide, least_squares, least_squares_gradient, make_engine, play, ready

from hpcfl.algorithms.async_l2gd import AsyncL2GD
from hpcfl.comm import Comm
from hpcfl.config import resolve
from hpcfl.coordinator import flip_coins
from hpcfl.errors import InputError
from hpcfl.models import Spec
from hpcfl.models.dense import MLP
from hpcfl.round import CLUSTER, GLOBAL, LOCAL, Round
from hpcfl.run import run
from hpcfl.schedules import Exponential, Theory
from hpcfl.theory.async_l2gd import optimal_probabilities
from hpcfl.theory.curvature import curvature

OF = np.array([1, 0, 1, 0, 1, 2])  # cluster of each client
SIZES = np.array([4, 9, 6, 17, 5, 3])
DATA = least_squares(SIZES)
EVEN = least_squares([12] * 6)  # one block, which is quicker
GAMMA, ALPHA = (0.7, 0.2, 1.3, 0.4, 0.9, 0.5), (0.6, 0.15, 0.9)
PULL = {"gamma": GAMMA, "alpha": ALPHA}


def prepared(engine_options=None, **options):
    return ready(DATA, AsyncL2GD(**options), cluster=OF, **(engine_options or {}))[1]


def smoothness(objective="mean"):
    """L of the f_i."""
    scale = SIZES if objective == "sum" else np.ones(6)
    return max(s * np.linalg.eigvalsh(x.T @ x / len(y)).max() for (x, y), s in zip(DATA, scale, strict=True))


def minimiser(objective="mean"):
    """Of F, by dense algebra, for the clients with as many samples: [N, P]."""
    gamma, alpha, right = np.array(GAMMA), np.array(ALPHA), np.zeros((6, 3))
    towards = [(gamma * alpha[OF], 1.0), *((gamma * np.equal(OF, j), 1 - alpha[j]) for j in range(3))]
    matrix = np.kron(sum(s * (np.diag(w) - np.outer(w, w) / w.sum()) for w, s in towards), np.eye(3))
    for i, (x, y) in enumerate(EVEN):
        scale = 1 if objective == "sum" else 1 / len(y)
        matrix[3 * i : 3 * i + 3, 3 * i : 3 * i + 3] += scale * x.T @ x
        right[i] = scale * x.T @ y
    return np.linalg.solve(matrix, right.ravel()).reshape(6, 3)


@pytest.mark.parametrize("objective", ["mean", "sum"])
@pytest.mark.parametrize("tau", ["balance", "bound"])
def test_the_step_size_of_the_theory(objective, tau):
    """Absent: 1/(2 Lcal), with 2 K + 1 terms."""
    p_0, p = 0.2, np.array([0.1, 0.3, 0.6])
    found = prepared(**PULL, objective=objective, tau=tau, p_global=p_0, p_cluster=tuple(p))
    L, q, alpha = smoothness(objective), (1 - p_0) * p, np.array(ALPHA)
    gamma_max = np.array([max(np.array(GAMMA)[j == OF]) for j in range(3)])
    share = p_0 / (p_0 + (1 if tau == "balance" else 2) * q)
    terms = [
        *(L / ((1 - p_0) * (1 - p))),
        2 * (alpha * gamma_max).max() / p_0,
        *((1 - alpha) * gamma_max * (2 * share**2 / p_0 + (1 - share) ** 2 / q)),
    ]
    assert found.eta == pytest.approx(1 / (2 * max(terms)), rel=1e-12)


@pytest.mark.parametrize("objective", ["mean", "sum"])
@pytest.mark.parametrize(
    "probabilities", [{"p_global": 0.2, "p_cluster": 0.1}, dict.fromkeys(("p_global", "p_cluster"), "optimal")]
)
def test_minibatch_steps_meet_the_smoothness_of_single_samples(objective, probabilities):
    """A client's samples may be far steeper than their mean: 1/(2 Lcal) of that would diverge."""
    at = {**PULL, "objective": objective, **probabilities}
    scale = SIZES if objective == "sum" else np.ones(6)
    sample = max(s * (x**2).sum(1).max() for (x, _), s in zip(DATA, scale, strict=True))
    found = prepared(batch_size=2, **at)
    assert found.eta < prepared(**at).eta
    assert found.eta == pytest.approx(prepared(smoothness=sample, **at).eta, rel=1e-12)
    assert found.setting.p_global == pytest.approx(prepared(smoothness=sample, **at).setting.p_global, rel=1e-12)


def test_smoothness_takes_the_place_of_what_the_data_say():
    at = {"p_global": 0.2, "p_cluster": 0.1, **PULL}
    assert prepared(smoothness=50.0, **at).eta == pytest.approx(0.8 * 0.9 / 100)
    assert prepared(smoothness=50.0, lr=0.01, **at).eta == 0.01
    network = {"model": MLP(hidden=(4,))}
    assert prepared(network, smoothness=50.0, **at).eta == pytest.approx(0.8 * 0.9 / 100)
    assert prepared(network, lr=0.01, **at).eta == 0.01


@pytest.mark.parametrize("alpha", [0.1, 0.9])
@pytest.mark.parametrize("objective", ["mean", "sum"])
def test_optimal_probabilities_are_those_of_the_data(alpha, objective):
    s = prepared(gamma=GAMMA, alpha=alpha, objective=objective, p_global="optimal", p_cluster="optimal").setting
    p_0, p = optimal_probabilities(smoothness(objective), alpha * max(GAMMA), (1 - alpha) * max(GAMMA))
    assert s.p_global == pytest.approx(p_0, rel=1e-12)
    np.testing.assert_allclose(s.p_cluster, p, rtol=1e-12)
    assert (p > 0) == (alpha < 0.5)
    np.testing.assert_allclose(s.tau, p_0 / (p_0 + (1 - p_0) * p), rtol=1e-12)


def test_options_for_all_and_for_each():
    s = prepared(lr=0.01, gamma=0.5, lam=2.0, p_cluster=0.2, tau=0.4).setting
    np.testing.assert_array_equal(s.gamma, np.full(6, 0.5))
    np.testing.assert_allclose(s.alpha, 2 / (2 + 0.5 * np.array([2, 3, 1])))
    np.testing.assert_array_equal((s.p_cluster, s.tau), ([0.2] * 3, [0.4] * 3))
    np.testing.assert_allclose(prepared(lr=0.01, gamma=GAMMA, lam=(0.0, 1.0, 2.0)).setting.alpha, [0, 1 / 3.9, 2 / 2.5])
    np.testing.assert_allclose(prepared(lr=0.01).setting.alpha, [1 / 3, 1 / 4, 1 / 2])  # lam = gamma = 1
    np.testing.assert_array_equal(prepared(lr=0.01, alpha=0.3).setting.alpha, [0.3] * 3)


@pytest.mark.parametrize("tau", ["balance", 0.0, 0.9])
def test_the_largest_step_size_is_named_and_accepted(tau):
    options = PULL | {"p_global": 0.2, "p_cluster": 0.1, "tau": tau}
    with pytest.raises(InputError) as error:
        prepared(lr=30.0, **options)
    line = str(error.value)
    assert line.startswith("algorithm.lr = 30: averaging would overshoot")
    named = float(re.search(r"the largest admissible lr is (\S+)$", line)[1])
    share = np.ones(3) / 2.8 * 2 if tau == "balance" else np.full(3, tau)  # 0.2/(0.2 + 0.08)
    alpha, gamma = np.array(ALPHA)[OF], np.array(GAMMA)
    pulls = gamma * (alpha + share[OF] * (1 - alpha)) / 0.2, gamma * (1 - share[OF]) * (1 - alpha) / 0.08
    largest = prepared(lr=1e-3, **options).setting.largest_lr()
    assert largest == pytest.approx(1 / np.max(pulls), rel=1e-12)
    assert named == pytest.approx(largest, rel=1e-5)
    assert prepared(lr=named, **options).eta == named
    assert prepared(lr=largest, **options).eta == largest
    with pytest.raises(InputError, match="overshoot"):
        prepared(lr=largest * (1 + 1e-5), **options)


def test_a_schedule_starts_within_the_largest_step_size():
    largest = prepared(lr=1e-3, **PULL).setting.largest_lr()
    with pytest.raises(InputError, match="overshoot"):
        prepared(lr=largest * 1.1, lr_schedule=Exponential(decay=0.5), **PULL)
    with pytest.raises(InputError, match="overshoot"):
        prepared(lr=1e-3, lr_schedule=Theory(mu=16 / largest, a=0.9), **PULL)
    prepared(lr=1e3, lr_schedule=Theory(mu=16 / largest, a=1.1), **PULL)  # starts with largest/1.1


WRONG = [
    ({"gamma": (1.0, 2.0)}, "algorithm.gamma: 2 values, expected one, or one per client (6)"),
    ({"alpha": (0.1, 0.2)}, "algorithm.alpha: 2 values, expected one, or one per cluster (3)"),
    ({"lam": (1.0,) * 4}, "algorithm.lam: 4 values, expected one, or one per cluster (3)"),
    ({"p_cluster": (0.1,)}, "algorithm.p_cluster: 1 values, expected one, or one per cluster (3)"),
    ({"tau": (0.1,) * 6}, "algorithm.tau: 6 values, expected one, or one per cluster (3)"),
    ({"alpha": 0.5, "lam": 1.0}, "algorithm.alpha and algorithm.lam: give one of the two, not both"),
    ({"p_global": "optimal"}, 'algorithm.p_global and algorithm.p_cluster: "optimal" finds both together'),
    ({"p_cluster": "optimal"}, 'algorithm.p_global and algorithm.p_cluster: "optimal" finds both together'),
    ({"p_cluster": 0.0, "tau": 0.5}, "algorithm.tau = 0.5: for cluster 0 (and 2 others), with p_cluster = 0"),
    ({"p_global": 0.0}, "algorithm.p_global = 0: clusters would never be averaged with each other"),
    ({"p_global": 0.0, "lam": 0.0, "p_cluster": (0.2, 0.0, 0.2)}, "algorithm.p_global = 0: cluster 1 has p_cluster"),
    ({"gamma": GAMMA, "tau": "exact"}, 'algorithm.tau = "exact": gamma differs inside cluster 0 (and 1 other)'),
]


@pytest.mark.parametrize(("options", "line"), WRONG)
def test_what_is_refused(options, line):
    with pytest.raises(InputError) as error:
        prepared(lr=0.01, **options)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("options", [{}, {"lr": 0.01, "p_global": "optimal", "p_cluster": "optimal"}])
def test_a_network_s_smoothness_is_asked_for_where_it_is_needed(options):
    with pytest.raises(InputError, match=r"^algorithm.smoothness: .*; give it for this model"):
        prepared({"model": MLP(hidden=(4,)).build(Spec((3,), None))}, **options)


def noise_at(optimum, s, objective):
    """sigma^2."""
    gamma, scale = np.array(GAMMA), 12 if objective == "sum" else 1
    gradients = np.array([scale * least_squares_gradient(w, *own) for w, own in zip(optimum, EVEN, strict=True)])
    thetabar = np.average(optimum, axis=0, weights=gamma * np.array(ALPHA)[OF])
    within = np.array([np.average(optimum[j == OF], axis=0, weights=gamma[j == OF]) for j in range(3)])
    return s.noise((gradients**2).sum(1), optimum - thetabar, optimum - within[OF])


@pytest.mark.parametrize(
    ("objective", "lr", "options"),
    [
        ("mean", 0.05, {"p_global": 0.3, "p_cluster": (0.2, 0.3, 0.2)}),
        ("mean", 0.05, {"p_global": 0.3, "p_cluster": 0.0}),
        ("mean", None, {"p_global": "optimal", "p_cluster": "optimal"}),
        ("sum", 0.005, {"p_global": 0.3, "p_cluster": 0.3, "tau": "bound"}),
    ],
)
def test_towards_the_minimiser_of_F(objective, lr, options):
    """Within the theory's bound of the distance at the end, and in the mean over iterations much nearer."""
    engine, algorithm = ready(EVEN, AsyncL2GD(lr=lr, objective=objective, **PULL, **options), cluster=OF)
    optimum = minimiser(objective)
    state, models = play(engine, algorithm, 500), []
    for first in range(500, 2500, 5):
        state = play(engine, algorithm, 5, state, first)
        models.append(state.local["theta"].numpy()[np.argsort(engine.group.ids)])
    distances = ((np.array(models) - optimum) ** 2).sum((1, 2))
    mu, eta, start = curvature(engine, objective=objective).mu, algorithm.eta, (optimum**2).sum()
    bound = (1 - eta * mu) ** 500 * start + 2 * eta * noise_at(optimum, algorithm.setting, objective) / mu
    assert mu > 0.1
    assert distances.mean() <= bound
    assert distances.mean() < start / 4
    assert ((np.mean(models, 0) - optimum) ** 2).sum() < min(distances.mean() / 4, start / 500)


def test_decaying_steps_end_at_the_minimiser():
    o = AsyncL2GD(lr=0.1, lr_schedule=Exponential(decay=0.996), p_global=0.3, p_cluster=0.3, **PULL)
    engine, algorithm = ready(EVEN, o, cluster=OF)
    state = play(engine, algorithm, 1800)
    optimum = minimiser()
    assert ((state.local["theta"].numpy() - optimum[engine.group.ids]) ** 2).sum() < 1e-3 * (optimum**2).sum()


def test_clusters_toss_coins_of_their_own_as_often_as_they_should():
    p_0, p, T = 0.2, (0.1, 0.3, 0.3), 20000
    algorithm = prepared(lr=0.01, p_global=p_0, p_cluster=p, **PULL)
    coins = flip_coins(5, 0, T, algorithm.coins(3))
    between = coins["global"][:, 0]
    within = coins["cluster"] & ~between[:, None]
    mean = within | between[:, None]
    found = {"global": between.sum(), "within": within.sum(0), "mean": mean.sum(0), "local": (~mean).sum(0)}
    for kind, fell in (("global", between), ("mean", mean)):
        found[f"{kind}_merged"] = (fell[1:] & ~fell[:-1]).sum(0) + fell[0]
    expected, variance = algorithm.setting.expected_rounds(T), algorithm.setting.variances(T)
    for kind in expected:
        assert (abs(found[kind] - expected[kind]) <= 4 * np.sqrt(variance[kind]) + 1).all(), kind
    same = (coins["cluster"][:, 1] == coins["cluster"][:, 2]).mean()  # independent: p^2 + (1 - p)^2
    assert abs(same - 0.58) < 4 * np.sqrt(0.58 * 0.42 / T)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job's tables: these clients and clusters, in a file."""
    folder = tmp_path_factory.mktemp("known_clusters")
    owner = np.repeat(np.arange(6), SIZES)
    x, y = (np.concatenate([client[k] for client in DATA]) for k in (0, 1))
    np.savez(folder / "data.npz", x=x, y=y, client=owner, cluster=OF[owner])
    return {
        "run": {"rounds": 60, "eval_every": 20, "dtype": "float64", "save_models": True, "out": str(folder)},
        "data": {"name": "file", "path": str(folder / "data.npz")},
        "partition": {"name": "natural", "test_share": 0.0},
        "model": {"name": "linear", "bias": False},
        "algorithm": {"name": "async_l2gd", "lr": 0.05, "gamma": list(GAMMA), "alpha": list(ALPHA), "p_global": 0.2}
        | {"p_cluster": 0.3},
    }


def test_a_whole_job(job, tmp_path):
    """Its records follow from the coins in the file: kinds of rounds, what was sent, training losses, final models."""

    def tosses(seed):
        return flip_coins(seed, 0, 60, {"global": np.array([0.2]), "cluster": np.full(3, 0.3)})

    seed = next(s for s in count() if not tosses(s)["global"][0, 0] and tosses(s)["cluster"][0].tolist() == [0, 1, 0])
    tables = job | {"run": job["run"] | {"seed": seed, "out": str(tmp_path)}}
    run(resolve(tables, "job", "job.toml"), Comm(), opened=lambda *_: None, progress=lambda *_: None)
    engine = make_engine(DATA, AsyncL2GD(lr=0.05), cluster=OF, seed=seed)
    algorithm = AsyncL2GD(lr=0.05, p_global=0.2, p_cluster=0.3, **PULL).prepare(engine)
    state, losses = algorithm.init(engine.task, engine.group), []
    with h5py.File(tmp_path / "job-001/results.h5") as file:
        rounds = {name: column[()] for name, column in file["rounds"].items()}
        models = file["final/models/personal"][()]
    between, within = rounds["coins_global"][:, 0].astype(bool), rounds["coins_cluster"].astype(bool)
    np.testing.assert_array_equal(between, tosses(seed)["global"][:, 0])
    np.testing.assert_array_equal(within, tosses(seed)["cluster"])
    local = ~between[:, None] & ~within[:, OF]  # [rounds, N]
    for index in range(60):
        theta = state.local["theta"].numpy()[np.argsort(engine.group.ids)]
        loss = np.array([((x @ w - y) ** 2).mean() / 2 for w, (x, y) in zip(theta, DATA, strict=True)])
        losses.append(loss[local[index]].mean() if local[index].any() else np.nan)
        coins = {"global": [between[index]], "cluster": within[index]}
        state = algorithm.round(state, Round(engine, decide(engine, index, **coins)))
    np.testing.assert_array_equal(models[engine.group.ids], state.local["theta"])
    np.testing.assert_allclose(rounds["train_loss"], losses, rtol=1e-12)
    assert losses[0] == pytest.approx(np.mean([(DATA[i][1] ** 2).mean() / 2 for i in (1, 3, 5)]))
    assert np.isnan(losses).any()
    averaging = (within & ~between[:, None]).any(1)
    np.testing.assert_array_equal(rounds["kind"], np.where(between, GLOBAL, np.where(averaging, CLUSTER, LOCAL)))
    clients = (within[:, OF] & ~between[:, None]).sum(1)
    np.testing.assert_array_equal(rounds["vectors_up"], np.where(between, 6 + 3, clients))
    np.testing.assert_array_equal(rounds["vectors_down"], np.where(between, 3 + 12, clients))
    np.testing.assert_array_equal(rounds["bytes_up"], 24 * rounds["vectors_up"])
    np.testing.assert_array_equal(rounds["bytes_down"], 24 * rounds["vectors_down"])
