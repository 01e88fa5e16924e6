"""What theory says of Async-L2GD, against small numbers, dense solutions, grids and simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from async_l2gd_example import (
    RULES,
    P,
    Quadratic,
    columns,
    deviations,
    draw,
    means,
    oracle,
    psi,
    regulariser,
    setting,
    varphi,
)

from hpcfl.errors import InputError
from hpcfl.rng import Purpose, stream
from hpcfl.theory.async_l2gd import (
    Setting,
    alpha_of,
    cluster_weights,
    iterations_to,
    optimal_probabilities,
    tau_of,
)

pytestmark = pytest.mark.filterwarnings("error")

VECTOR = Setting(
    gamma=np.array([1.0, 1.0, 2.0]),
    cluster=np.array([0, 0, 1]),
    alpha=np.array([0.5, 0.25]),
    p_global=0.2,
    p_cluster=np.array([0.3, 0.0]),
    tau=np.array([5 / 11, 1.0]),
)
X = np.array([[1.0], [3.0], [-2.0]])


def test_small_numbers_by_hand():
    s = VECTOR
    between, within = means(s, X)
    np.testing.assert_allclose(between, [2 / 3])
    np.testing.assert_allclose(within, [[2], [-2]])
    np.testing.assert_allclose(psi(s, X), [1, 0])
    assert varphi(s, X) == pytest.approx(19 / 6)
    np.testing.assert_allclose(cluster_weights(s.gamma, s.cluster, 2), [2, 2])
    np.testing.assert_allclose(s.weights, [2, 2])
    assert (s.clusters, s.c1, s.c2) == (2, 0.5, 1.5)
    np.testing.assert_allclose(s.gamma_max, [1, 2])
    found = tau_of("balance", s.p_global, s.p_cluster, s.alpha, s.gamma, s.cluster)
    np.testing.assert_allclose(found, [5 / 11, 1], rtol=1e-15)
    tosses = list(oracle(s, np.zeros((3, 1)), X))
    assert [chance for chance, _ in tosses] == pytest.approx([0.2, 0.8 * 0.7, 0.8 * 0.3])
    np.testing.assert_allclose(X - 0.1 * tosses[0][1], [[1.030303], [2.303030], [-1.333333]], atol=1e-6)
    np.testing.assert_allclose(X - 0.1 * tosses[2][1], [[1.113636], [2.886364], [-2]], atol=1e-6)
    between_steps, within_steps = s.averaging_steps(0.1)
    np.testing.assert_allclose(between_steps, [0.5 * (0.5 + 5 / 22), 0.5 * (0.5 + 5 / 22), 1])
    np.testing.assert_allclose(within_steps, [0.1 * 6 / 22 / 0.24] * 2 + [0])


def test_alpha_is_the_hierarchical_objective_with_the_best_centres():
    for seed in range(5):
        s, g = setting(seed), draw(seed)
        lam, x = g.uniform(0.1, 4, 3), g.standard_normal((6, P))
        s = replace(s, alpha=alpha_of(lam, s.weights))
        # the centres c_1..c_k, c: (Gamma + lambda) c_j - lambda c = sum gamma x, and sum lambda (c - c_j) = 0
        system = np.zeros((4, 4))
        system[:3, :3], system[:3, 3], system[3, :3], system[3, 3] = np.diag(s.weights + lam), -lam, -lam, lam.sum()
        sums = np.array([(s.gamma[:, None] * x)[s.cluster == j].sum(0) for j in range(3)] + [np.zeros(P)])
        *centres, c = np.linalg.solve(system, sums)
        to_centre = (s.gamma * ((x - np.array(centres)[s.cluster]) ** 2).sum(1)).sum()
        assert (to_centre + (lam * ((centres - c) ** 2).sum(1)).sum()) / 2 == pytest.approx(
            regulariser(s, x), rel=1e-12
        )
        between, within = means(s, x)
        np.testing.assert_allclose(c, between, rtol=1e-10)
        mixed = s.alpha[:, None] * between + (1 - s.alpha[:, None]) * within
        np.testing.assert_allclose(centres, mixed, rtol=1e-10)


def test_alpha_at_the_ends():
    np.testing.assert_array_equal(alpha_of(np.array([0, math.inf, 3.0]), np.array([2.0, 2.0, 1.0])), [0, 1, 0.75])
    np.testing.assert_array_equal(alpha_of(np.zeros(1), np.zeros(1)), [0])


def test_gradients_by_finite_differences():
    s = setting(3)
    q, x, h = Quadratic(s, 3), draw(3).standard_normal((6, P)), 1e-5

    def slopes(f):
        shifts = h * np.eye(x.size).reshape(-1, *x.shape)
        return np.array([(f(x + e) - f(x - e)) / (2 * h) for e in shifts]).reshape(*x.shape, *np.shape(f(x)))

    (u, v), (gamma, alpha, *_) = deviations(s, x), columns(s)
    by_cluster = slopes(lambda y: psi(s, y))  # [N, P, K]
    for j in range(3):
        np.testing.assert_allclose(by_cluster[:, :, j], gamma * v * (s.cluster == j)[:, None], atol=1e-8)
    np.testing.assert_allclose(slopes(lambda y: varphi(s, y)), alpha * gamma * u, atol=1e-8)
    np.testing.assert_allclose(slopes(q.F), q.gradient(x), atol=1e-7)
    np.testing.assert_allclose(q.gradient(q.optimum), 0, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_tau_is_one_without_within_cluster_rounds(rule):
    gamma, cluster = np.array([1.0, 2.0, 3.0]), np.array([0, 0, 1])  # unequal, but without effect
    for p_global, alpha in [(0.3, [0.4, 1.0]), (0.3, [0.0, 0.0]), (0.0, [0.0, 0.0]), (0.99, [1.0, 0.2])]:
        np.testing.assert_array_equal(tau_of(rule, p_global, np.zeros(2), np.array(alpha), gamma, cluster), [1, 1])
    found = tau_of(rule, 0.3, np.array([0.0, 0.5]), np.array([0.4, 0.1]), gamma, cluster)
    assert found[0] == 1 > found[1] > 0
    np.testing.assert_array_equal(tau_of(rule, 0.0, np.full(2, 0.5), np.zeros(2), gamma, cluster), [0, 0])


@pytest.mark.parametrize("rule", ["balance", "bound"])
def test_averaging_steps(rule):
    """Of one cluster both means are one, and an averaging round moves a client by its step's share of the way."""
    for seed in range(4):
        s = setting(seed, tau=rule)
        lr = 1 / (2 * s.expected_smoothness(0.1))
        between, within = s.averaging_steps(lr)
        if rule == "balance":
            assert between.max() <= 3 / 4
            assert within.max() <= 1 / 2
            psi_steps = between - lr * (s.alpha[s.cluster] * s.gamma) / s.p_global
            np.testing.assert_allclose(psi_steps, within, rtol=1e-10)
        one = Setting(s.gamma, 0 * s.cluster, s.alpha[:1], s.p_global, s.p_cluster[:1], s.tau[:1])
        x = draw(seed).standard_normal((len(s.gamma), P))
        (_, global_round), _, (_, cluster_round) = oracle(one, np.zeros_like(x), x)
        to_mean = deviations(one, x)[0]
        for G, share in zip((global_round, cluster_round), one.averaging_steps(lr), strict=True):
            np.testing.assert_allclose(lr * G, share[:, None] * to_mean, rtol=1e-9)


def test_largest_lr_is_the_edge():
    for seed in range(20):
        s = setting(seed, tau=[0.0, 0.9, "balance"][seed % 3])
        lr = s.largest_lr()
        assert max(steps.max() for steps in s.averaging_steps(lr)) == pytest.approx(1, rel=1e-15)
        assert max(steps.max() for steps in s.averaging_steps(lr)) <= 1  # for whoever checks it
        assert max(steps.max() for steps in s.averaging_steps(lr * (1 + 1e-12))) > 1
    nothing = setting(0, gamma=np.zeros(6))
    assert nothing.largest_lr() == math.inf
    s = setting(0, p_cluster=np.zeros(3))
    np.testing.assert_array_equal(s.averaging_steps(1.0)[1], 0)
    s = setting(0, alpha=np.zeros(3), p_global=0.0)
    np.testing.assert_array_equal(s.averaging_steps(1.0)[0], 0)
    np.testing.assert_allclose(s.averaging_steps(1.0)[1], s.gamma / s.p_cluster[s.cluster])


@pytest.mark.parametrize(
    ("L", "c1", "c2"), [(1.0, 0.7, 0.2), (5.0, 0.3, 0.3), (2.0, 0.1, 0.9), (0.5, 0.0, 2.0), (30, 1, 4)]
)
def test_optimal_probabilities(L, c1, c2):
    def value(p0, p):
        with np.errstate(divide="ignore", invalid="ignore"):
            terms = L / ((1 - p0) * (1 - p)), 2 * c1 / p0, 2 * c2 / (p0 + (1 - p0) * p)
        return np.nanmax(terms, axis=0)  # C_1 = 0 needs no global rounds: 0 / 0

    p0, p = optimal_probabilities(L, c1, c2)
    least = L + 2 * max(c1, c2)
    assert value(np.float64(p0), np.float64(p)) == pytest.approx(least, rel=1e-12)
    grid = np.meshgrid(np.linspace(0, 0.999, 1200), np.linspace(0, 0.999, 1200))
    with np.errstate(all="ignore"):
        found = value(*grid)
    assert least <= found.min() * (1 + 1e-12) <= least * 1.01
    near = grid[0][found <= least * 1.003]
    assert near.size == 0 or near.min() >= p0 * 0.99  # no minimiser with fewer between-cluster rounds
    if c1 >= c2:
        assert p == 0


def test_nothing_to_average_needs_no_averages():
    assert optimal_probabilities(3.0, 0.0, 0.0) == (0, 0)


@pytest.mark.parametrize("p_global", [0.0, 0.15, 0.8])
def test_counts_of_rounds_by_simulation(p_global):
    T, runs, p = 60, 4000, np.array([0.05, 0.3, 0.9])
    alpha = np.zeros(3) if p_global == 0 else np.array([0.2, 0.4, 0.6])
    s = setting(0, alpha=alpha, p_global=p_global, p_cluster=p)
    tosses = stream(7, Purpose.COINS).random((runs, T + 1, 4))
    between = tosses[:, :, 0] < p_global
    within = ~between[:, :, None] & (tosses[:, :, 1:] < p)
    mean = within | between[:, :, None]
    counts = {
        "global": between[:, 1:].sum(1),
        "within": within[:, 1:].sum(1),
        "mean": mean[:, 1:].sum(1),
        "local": (~mean)[:, 1:].sum(1),
        "global_merged": (between[:, 1:] & ~between[:, :-1]).sum(1),
        "mean_merged": (mean[:, 1:] & ~mean[:, :-1]).sum(1),
    }
    expectation, variance = s.expected_rounds(T), s.variances(T)
    assert set(expectation) == set(variance) == set(counts)
    for kind, found in counts.items():
        assert np.shape(expectation[kind]) == np.shape(variance[kind]) == found.shape[1:]
        deviation = np.sqrt(variance[kind] / runs)
        assert (abs(found.mean(0) - expectation[kind]) <= 4 * deviation).all(), kind
        np.testing.assert_allclose(found.var(0), variance[kind], rtol=0.15)
    assert isinstance(expectation["global"], float)
    assert isinstance(expectation["global_merged"], float)


@pytest.mark.parametrize("T", [1, 2, 5])
def test_merged_counts_by_every_toss(T):
    tosses = np.array(list(product((False, True), repeat=T + 1)))
    p = VECTOR.p_global
    chance = np.where(tosses, p, 1 - p).prod(1)
    found = (tosses[:, 1:] & ~tosses[:, :-1]).sum(1)
    mean = chance @ found
    assert VECTOR.expected_rounds(T)["global_merged"] == pytest.approx(mean, rel=1e-12)
    assert VECTOR.variances(T)["global_merged"] == pytest.approx(chance @ (found - mean) ** 2, rel=1e-12)


def test_no_iterations_no_rounds():
    for counts in (VECTOR.expected_rounds(0), VECTOR.variances(0)):
        assert all(np.all(value == 0) for value in counts.values())


def test_iterations_to_accuracy():
    t = iterations_to(1e-3, 8.0, 0.5)
    assert t == pytest.approx(32 * math.log(1000))
    assert (1 - 0.5 / 16) ** t <= 1e-3 <= (1 - 0.5 / 16) ** (0.95 * t)
    assert iterations_to(1e-3, 8.0, 0.0) == math.inf
    assert iterations_to(1.0, 8.0, 1.0) == 0


def test_exact_tau_needs_equal_gamma():
    p, alpha = np.array([0.2, 0.3]), np.array([0.2, 0.3])
    gamma, cluster = np.array([1.0, 2.0, 2.0, 3.0]), np.array([0, 1, 1, 1])
    with pytest.raises(InputError, match=r'^algorithm.tau = "exact": gamma differs inside cluster 1, .*"balance"'):
        tau_of("exact", 0.3, p, alpha, gamma, cluster)
    without_models = [(0.0, 0.3, 1), (0.3, 0.0, 0.3 / (0.3 + 0.7 * 0.3)), (0.3, 1.0, 1)]
    for p_1, alpha_1, tau in without_models:
        found = tau_of("exact", 0.3, np.array([0.2, p_1]), np.array([0.2, alpha_1]), gamma, cluster)
        assert found[1] == pytest.approx(tau)


def test_shapes():
    with pytest.raises(AssertionError):
        replace(VECTOR, tau=np.ones(3))
    with pytest.raises(AssertionError):
        replace(VECTOR, cluster=np.array([0, 1]))
    with pytest.raises(AssertionError):
        replace(VECTOR, cluster=np.array([0, 1, 2]))
