"""Learning-rate schedules, shared by all algorithms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from hpcfl.errors import InputError
from hpcfl.options import Positive, PositiveShare, options


@options
@dataclass(frozen=True)
class Constant:
    """The learning rate as given."""

    name: Literal["constant"] = "constant"

    def at(self, lr: float, round: int, t: int) -> float:
        """Step size of local step t (counted over the whole run, from 0) in a round (from 0)."""
        return lr


@options
@dataclass(frozen=True)
class Exponential:
    """lr * decay^round: exponential decay per round."""

    name: Literal["exponential"] = "exponential"
    decay: PositiveShare = 0.99

    def at(self, lr: float, round: int, t: int) -> float:
        """Step size of local step t in a round."""
        return lr * self.decay**round


@options
@dataclass(frozen=True)
class Theory:
    """16 / (mu (t + a)): the step size of APFL's strongly convex analysis; lr is not used.

    mu: strong convexity, e.g. the model's l2; a: the theory wants max(128 L/mu, tau).
    """

    mu: Positive
    a: Positive
    name: Literal["theory"] = "theory"

    def __post_init__(self) -> None:
        if not 0 < self.mu * self.a < math.inf or 16.0 / (self.mu * self.a) == math.inf:
            raise InputError(f"lr_schedule: mu = {self.mu}, a = {self.a}: 16/(mu a) is no number to work with")

    def at(self, lr: float, round: int, t: int) -> float:
        """Step size of local step t, counted from 0 over the whole run."""
        return 16.0 / (self.mu * (t + self.a))


CONSTANT = Constant()

Schedule = Annotated[Constant | Exponential | Theory, Field(discriminator="name")]
