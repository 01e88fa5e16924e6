"""Mean and second moment of Algorithm 1, over every toss of its coins, against what theory says."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from async_l2gd_example import (
    CLUSTERS,
    RULES,
    P,
    Quadratic,
    check_unbiased,
    deviations,
    draw,
    expected,
    regulariser,
    regulariser_gradient,
    second_moment,
    setting,
)

from hpcfl.errors import InputError
from hpcfl.theory.async_l2gd import Setting, optimal_probabilities

pytestmark = pytest.mark.filterwarnings("error")

GRID = np.linspace(0, 1, 501)


def best_tau(s, j, value):
    """The tau_j of the grid with the least value(setting)."""

    def at(tau):
        return value(replace(s, tau=np.where(np.arange(s.clusters) == j, tau, s.tau)))

    return GRID[np.argmin([at(tau) for tau in GRID])]


@pytest.mark.parametrize("j", range(2))
def test_what_each_rule_minimises(j):
    def moment(s):
        return second_moment(s, np.zeros_like(x), x)

    for seed in range(3):
        x = draw(seed).standard_normal((5, P))
        s = setting(seed, 2, "balance", alpha=np.zeros(2))  # the estimate of the psi_j alone
        assert s.tau[j] == pytest.approx(best_tau(s, j, moment), abs=1.01e-3)
        s = setting(seed, 2, "bound")
        bracket = best_tau(s, j, lambda s: s.smoothness_terms(1.0)["within"][j])
        assert s.tau[j] == pytest.approx(bracket, abs=1.01e-3)
        s = setting(seed, 2, "exact")
        assert s.tau[j] == pytest.approx(best_tau(s, j, moment), abs=1.01e-3)


def test_exact_tau_is_cut():
    s = setting(0, 2, "exact", alpha=np.array([0.95, 1.0]))
    x = draw(0).standard_normal((5, P))
    assert s.tau.tolist() == [0, 1]
    assert best_tau(s, 0, lambda s: second_moment(s, np.zeros_like(x), x)) == 0
    assert setting(0, 2, "exact", alpha=np.array([0.2, 0.0])).tau[1] == setting(0, 2).tau[1]


@pytest.mark.parametrize("k", CLUSTERS)
@pytest.mark.parametrize("tau", [0.0, 0.35, 0.8, 1.0, *RULES])
def test_unbiased(k, tau):
    for seed in range(3):
        check_unbiased(setting(seed, k, tau), seed)
        check_unbiased(setting(seed, k, tau, alpha=np.linspace(0, 1, k)), seed)
        if tau in (1.0, *RULES):
            check_unbiased(setting(seed, k, tau, p_cluster=np.linspace(0, 0.7, k)), seed)
        if tau in (0.0, *RULES):
            check_unbiased(setting(seed, k, tau, alpha=np.zeros(k), p_global=0.0), seed)


@pytest.mark.parametrize("tau", [0.0, 0.35, 1.0, *RULES])
def test_noise_is_the_second_moment_at_the_optimum(tau):
    for seed in range(5):
        cases = [setting(seed, tau=tau)]
        if tau in (0.0, *RULES):
            cases.append(setting(seed, tau=tau, p_global=0.0, alpha=np.zeros(3)))
        if tau in (1.0, *RULES):
            cases.append(setting(seed, tau=tau, p_cluster=np.linspace(0, 0.7, 3)))
        for s in cases:
            q = Quadratic(s, seed)
            gradients = q.gradients(q.optimum)
            found = s.noise((gradients**2).sum(1), *deviations(s, q.optimum))
            assert found == pytest.approx(second_moment(s, gradients, q.optimum), rel=1e-12)
            np.testing.assert_allclose(expected(s, gradients, q.optimum), 0, atol=1e-12)


@pytest.mark.parametrize("tau", [0.0, 0.35, 1.0, *RULES])
def test_expected_smoothness_holds(tau):
    for seed in range(6):
        s = setting(seed, 2 + seed % 2, tau)
        q, g = Quadratic(s, seed), draw(seed)
        most = s.expected_smoothness(q.L)
        terms = s.smoothness_terms(q.L)
        assert [len(terms[kind]) for kind in ("local", "between", "within")] == [s.clusters, 1, s.clusters]
        assert most == max(np.concatenate(list(terms.values())))
        for scale in (1e-2, 1, 100):
            together = np.ones((len(s.gamma), 1)) * g.standard_normal(P)  # the same for all: gradients of f_i alone
            for x in (g.standard_normal((len(s.gamma), P)), together):
                assert q.smoothness(q.optimum + scale * x) <= most * (1 + 1e-9)


def test_terms_of_expected_smoothness_are_tight():
    """Each is reached, up to the factor of ||a + b||^2 <= 2 ||a||^2 + 2 ||b||^2."""
    s = setting(0, 2)
    q = Quadratic(replace(s, gamma=1e-9 * s.gamma), 0)
    for i, j in enumerate(s.cluster):  # local: one client moves, along the largest curvature
        values, vectors = np.linalg.eigh(q.H[i])
        x = q.optimum.copy()
        x[i] += 10 * vectors[:, -1]
        assert q.smoothness(x) == pytest.approx(s.smoothness_terms(values[-1])["local"][j], rel=1e-6)

    flat = {"gamma": np.ones(5), "alpha": np.ones(2)}
    for fixed, kind, tau, factor in (
        (flat, "between", 0.3, 2),  # two equal clients apart
        (flat | {"alpha": np.zeros(2)}, "within", 1.0, 2),
        (flat | {"alpha": np.zeros(2)}, "within", 0.0, 1),
        (flat | {"alpha": np.zeros(2), "p_global": 0.0}, "within", "balance", 1),
    ):
        s, d = setting(0, 2, tau, **fixed), np.zeros((5, P))
        d[0], d[1] = 1, -1
        bound = s.smoothness_terms(0.0)[kind][0]
        assert second_moment(s, np.zeros_like(d), d) / (2 * regulariser(s, d)) == pytest.approx(bound / factor)


def test_the_bracket_at_the_rules():
    for seed in range(5):
        s = setting(seed)
        scale = (1 - s.alpha) * s.gamma_max
        q = (1 - s.p_global) * s.p_cluster
        within = s.smoothness_terms(1.0)["within"]
        np.testing.assert_allclose(within, scale * (2 * s.p_global + q) / (s.p_global + q) ** 2)
        within = setting(seed, tau="bound").smoothness_terms(1.0)["within"]
        np.testing.assert_allclose(within, scale * 2 / (s.p_global + 2 * q))
    s = setting(0, p_cluster=np.zeros(3))  # the synchronous algorithm
    np.testing.assert_allclose(s.smoothness_terms(1.0)["within"], (1 - s.alpha) * s.gamma_max * 2 / s.p_global)


def test_optimal_probabilities_make_a_setting():
    s = setting(0)
    p0, p = optimal_probabilities(4.0, s.c1, s.c2)
    best = setting(0, tau="bound", p_global=p0, p_cluster=np.full(3, p))
    assert best.expected_smoothness(4.0) <= (4 + 2 * max(s.c1, s.c2)) * (1 + 1e-12)
    check_unbiased(best, 0)


BIASED = {
    "no global rounds": (
        {"p_global": 0.0, "tau": np.zeros(2)},
        [r"algorithm.p_global = 0: .*cluster 0 \(and 1 other\) has alpha > 0; give p_global > 0, or alpha = 0"],
    ),
    "no rounds at all": (
        {"p_global": 0.0, "alpha": np.zeros(2), "p_cluster": np.array([0.3, 0.0]), "tau": np.array([0.0, 1.0])},
        [r"algorithm.p_global = 0: cluster 1 has p_cluster = 0, .*ignored; give p_cluster > 0"],
    ),
    "a share for rounds between": (
        {"p_global": 0.0, "alpha": np.zeros(2), "tau": np.array([0.0, 0.4])},
        [r"algorithm.tau = 0.4: for cluster 1, with p_global = 0, .*; give tau = 0 there, or p_global > 0"],
    ),
    "a share for rounds within": (
        {"p_cluster": np.array([0.0, 0.3]), "tau": np.array([0.9, 0.2])},
        [r"algorithm.tau = 0.9: for cluster 0, with p_cluster = 0, .*; give tau = 1 there, or p_cluster > 0"],
    ),
    "two mistakes": (
        {"p_global": 0.0, "alpha": np.zeros(2), "p_cluster": np.array([0.0, 0.2]), "tau": np.array([1.0, 0.5])},
        ["algorithm.p_global = 0: cluster 0 has", "algorithm.tau = 0.5: for cluster 1, with"],
    ),
}


@pytest.mark.parametrize("case", BIASED)
def test_what_is_refused_is_biased(case):
    fields, lines = BIASED[case]
    s = vars(setting(0, 2)) | fields
    x, gradients = draw(0).standard_normal((2, 5, P))
    bias = expected(SimpleNamespace(**s), gradients, x) - gradients - regulariser_gradient(SimpleNamespace(**s), x)
    assert abs(bias).max() > 0.01
    with pytest.raises(InputError) as error:
        Setting(**s)
    found = str(error.value).split("\n")
    assert len(found) == len(lines)
    for line, expression in zip(found, lines, strict=True):
        assert re.match(expression, line), line
