"""Parameters of the accelerated, variance-reduced steps (loopless Katyusha) of Async-L2GD's stochastic variant.

Reference: Lyu, Hanzely, Kolar 2022, arXiv 2204.13619, Section 4; the parameters are those of AL2SGD+ (Hanzely, Hanzely,
Horvath, Richtarik 2020, arXiv 2010.02372), with the expected smoothness of theory/async_l2gd.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Katyusha:
    """The scheme's numbers. mu: strong convexity of F; rho: probability that the reference point moves."""

    eta: float
    mu: float
    rho: float

    theta2 = 0.5

    @property
    def theta1(self) -> float:
        """min{1/2, sqrt(eta mu max(1/2, theta2/rho))}."""
        return min(0.5, math.sqrt(self.eta * self.mu * max(0.5, self.theta2 / self.rho)))

    @property
    def gamma(self) -> float:
        """1/max(2 mu, 4 theta1/eta): the step of z."""
        return 1.0 / max(2.0 * self.mu, 4.0 * self.theta1 / self.eta)

    @property
    def beta(self) -> float:
        """1 - gamma mu."""
        return 1.0 - self.gamma * self.mu


def largest_eta(smoothness: float, expected_smoothness: float) -> float:
    """eta = 1/(4 max{L_F, Lcal}), L_F the smoothness of F."""
    return 0.25 / max(smoothness, expected_smoothness)
