"""The numbers of the accelerated steps against their formulas, and the steps' convergence without any noise."""

from __future__ import annotations

import numpy as np
import pytest

from hpcfl.rng import Purpose, stream
from hpcfl.theory.katyusha import Katyusha, largest_eta


@pytest.mark.parametrize(
    ("eta", "mu", "rho", "theta1", "gamma", "beta"),
    [  # by hand
        (0.01, 1.0, 1.0, 0.01**0.5 * 0.5**0.5, 0.01 / (4 * 0.01**0.5 * 0.5**0.5), None),
        (0.01, 1.0, 0.5, 0.1, 0.025, 0.975),
        (0.01, 1.0, 0.125, 0.2, 0.0125, 0.9875),  # sqrt(0.01 * 4)
        (0.25, 1.0, 0.1, 0.5, 0.125, 0.875),  # theta1 is cut
        (0.02, 0.5, 0.005, 0.5, 0.01, 0.995),  # sqrt(0.02 * 0.5 * 100) is cut
        (1.0, 4.0, 1.0, 0.5, 0.125, 0.5),  # gamma = 1/(2 mu)
    ],
)
def test_by_hand(eta, mu, rho, theta1, gamma, beta):
    k = Katyusha(eta, mu, rho)
    assert k.theta2 == 0.5
    assert k.theta1 == pytest.approx(theta1, rel=1e-14)
    assert k.gamma == pytest.approx(gamma, rel=1e-14)
    assert k.beta == pytest.approx(1 - gamma * mu if beta is None else beta, rel=1e-14)


def test_ranges():
    """The weights of x are those of a mean, and z is drawn towards x, by at most a half."""
    g = stream(0, Purpose.DATA)
    for eta, mu, rho in zip(
        10 ** g.uniform(-6, 0, 200), 10 ** g.uniform(-4, 0, 200), g.uniform(0, 1, 200), strict=True
    ):
        k = Katyusha(eta, mu, rho)
        assert 0 < k.theta1 <= 0.5
        assert 0.5 <= k.beta < 1
        assert k.beta == pytest.approx(1 - mu * min(1 / (2 * mu), eta / (4 * k.theta1)), rel=1e-12)


def test_largest_eta():
    assert largest_eta(8.0, 5.0) == 1 / 32
    assert largest_eta(5.0, 8.0) == 1 / 32


def test_faster_than_gradient_descent():
    """On a quadratic with exact gradients: for the same accuracy O(sqrt(L/mu)) steps instead of O(L/mu)."""
    g = stream(1, Purpose.DATA)
    for condition in (30, 3000):
        curvature, optimum = np.geomspace(1, condition, 12), g.normal(size=12)
        k, steps = Katyusha(largest_eta(condition, 0.0), 1.0, 0.5), int(90 * condition**0.5)
        y = z = w = plain = np.zeros(12)
        for moves in g.random(steps) < k.rho:
            x = k.theta1 * z + k.theta2 * w + (1 - k.theta1 - k.theta2) * y
            new = x - k.eta * curvature * (x - optimum)
            z = k.beta * z + (1 - k.beta) * x + k.gamma / k.eta * (new - x)
            y, w = new, y if moves else w
            plain = plain - curvature * (plain - optimum) / condition
        assert abs(y - optimum).max() < 1e-3 * abs(optimum).max()
    assert abs(plain - optimum).max() > 1e-2 * abs(optimum).max()
