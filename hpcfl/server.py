"""Steps of a server along a gradient that its clients sent: SGD or Adam, whose state is the server's alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hpcfl.options import Positive

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # Kingma, Ba 2015, arXiv 1412.6980


@dataclass(frozen=True, kw_only=True)
class ServerStep:
    """Options of the algorithms whose server descends along a gradient: a mixin. What descends is ``theta``."""

    server_lr: Positive = 0.001  # rho
    server_optimizer: Literal["sgd", "adam"] = "adam"

    def server_start(self, theta: Tensor) -> dict[str, Tensor]:
        """The shared state before the first step."""
        if self.server_optimizer == "sgd":
            return {"theta": theta}
        return {"theta": theta, "m": torch.zeros_like(theta), "v": torch.zeros_like(theta)}

    def server_step(self, shared: Mapping[str, Tensor], g: Tensor, t: int) -> dict[str, Tensor]:
        """The shared state after step t = 1, 2, ... along the gradient g [P_body].

        SGD: theta - rho g. Adam: m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2,
        theta - rho (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps).
        """
        theta = shared["theta"]
        if self.server_optimizer == "sgd":
            return {"theta": theta - self.server_lr * g}
        m = BETA1 * shared["m"] + (1 - BETA1) * g
        v = BETA2 * shared["v"] + (1 - BETA2) * g**2
        step = (m / (1 - BETA1**t)) / ((v / (1 - BETA2**t)).sqrt() + EPSILON)
        return {"theta": theta - self.server_lr * step, "m": m, "v": v}
