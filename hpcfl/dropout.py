"""Dropout whose masks are a pure function of (seed, client, round, step): the same on any layout and in any backend."""

from __future__ import annotations

import torch
from torch import Tensor, nn

MULTIPLIERS = (-49064778989728563, -4265267296055464877)  # of MurmurHash3's 64-bit finaliser, as signed integers


def mix(z: Tensor) -> Tensor:
    """A bijection of int64 that spreads every input bit over all output bits (wraps modulo 2^64)."""
    z = (z ^ (z >> 33)) * MULTIPLIERS[0]
    z = (z ^ (z >> 33)) * MULTIPLIERS[1]
    return z ^ (z >> 33)


class KeyedDropout(nn.Module):
    """Stands in for torch.nn.Dropout, which draws from one global generator. The engine sets ``key`` for each step."""

    key: Tensor

    def __init__(self, p: float, place: int):
        """p: probability of dropping; place: number of this layer in its model, so that layers differ."""
        super().__init__()
        self.p, self.place = p, place
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        counter = torch.arange(x.numel(), device=x.device).view(x.shape)
        bits = mix(counter ^ mix(self.key + self.place)) & 0xFFFFFF
        return x * (bits >= self.p * 2**24) / (1.0 - self.p)


def replace_dropout(module: nn.Module) -> list[str]:
    """Puts KeyedDropout in the place of every Dropout of the module, in place; returns the names of the keys.

    One that never drops has no key, so that a model without randomness has none.
    """
    keys: list[str] = []
    for name, child in list(module.named_modules()):
        if type(child) is nn.Dropout and child.p < 1.0:
            parent, _, attribute = name.rpartition(".")
            keyed = KeyedDropout(child.p, len(keys)) if child.p > 0.0 else nn.Identity()
            setattr(module.get_submodule(parent), attribute, keyed)
            keys += [f"{name}.key"] if child.p > 0.0 else []
    return keys
