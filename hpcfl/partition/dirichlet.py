"""``dirichlet``: each class is spread over the clients in random proportions (Hsu, Qi, Brown 2019; Li et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hpcfl.data import Dataset
from hpcfl.options import Positive
from hpcfl.partition import NO_SAMPLES, Dealt, labels, shuffled
from hpcfl.registry import register
from hpcfl.rng import Purpose, stream
from hpcfl.splits import TEST, TRAIN

TRIES = 10


@register("partition", "dirichlet")
@dataclass(frozen=True, kw_only=True)
class Dirichlet(Dealt):
    """For each class, proportions over the clients ~ Dirichlet(alpha, ..., alpha).

    A set's own test samples are dealt in the same proportions.
    alpha: small: few clients share a class; large: nearly iid. Drawn up to ten times, until every client has
    min_samples training samples (and one more for the test, where the data suffice); then repaired: clients that have
    too few get random samples of the largest ones.
    """

    alpha: Positive = 0.5

    def owners(self, data: Dataset, part: np.ndarray, seed: int) -> np.ndarray:
        groups = shuffled(labels(data, "dirichlet") * (TEST + 1) + part, seed)
        train, test = (int((part == p).sum()) for p in (TRAIN, TEST))
        need = min(self.min_samples + (self.drawn_test_share(data) > 0), train // self.clients)
        for attempt in range(TRIES):
            owner = self._draw(groups, len(data), stream(seed, Purpose.PARTITION, step=1 + attempt))
            if np.bincount(owner[part == TRAIN], minlength=self.clients).min() >= need:
                break
        order = stream(seed, Purpose.PARTITION, step=1 + TRIES).permutation(len(data))
        for p, least in ((TRAIN, need), (TEST, min(1, test // self.clients))):
            samples = order[part[order] == p]
            owner[samples] = top_up(owner[samples], self.clients, least)
        return owner

    def _draw(self, groups: Mapping[int, np.ndarray], n: int, g: np.random.Generator) -> np.ndarray:
        """One owner per sample [n], class by class."""
        owner = np.empty(n, np.int64)
        for c in sorted({key // (TEST + 1) for key in groups}):
            upto = np.cumsum(proportions(self.alpha, self.clients, g))
            for p, u in enumerate(g.random(TEST + 1)):
                samples = groups.get(c * (TEST + 1) + p, NO_SAMPLES)
                # cut at a random phase: with a fixed one the same clients would get the remainder of every class
                cuts = np.ceil(upto * len(samples) - u).clip(0, len(samples)).astype(np.int64)
                cuts[-1] = len(samples)
                owner[samples] = np.repeat(np.arange(self.clients), np.diff(cuts, prepend=0))
        return owner


def proportions(alpha: float, clients: int, g: np.random.Generator) -> np.ndarray:
    """One draw of the symmetric Dirichlet distribution: [N], sum 1.

    From gamma variates in logarithms, G(alpha) = G(alpha + 1) U^(1 / alpha): as G itself underflows for small alpha, a
    plain draw can have the sum zero.
    """
    with np.errstate(over="ignore"):  # infinite for an alpha near 1e-308: clipped
        log_gamma = np.log(g.standard_gamma(alpha + 1, clients)) - g.standard_exponential(clients) / alpha
    log_gamma = log_gamma.clip(-1e300, 1e300)
    weights = np.exp(log_gamma - log_gamma.max())
    return weights / weights.sum()


def top_up(owner: np.ndarray, clients: int, least: int) -> np.ndarray:
    """Move samples from the largest clients, one by one, until every client has ``least``.

    owner: [n] in random order, n >= clients * least. Moves the samples that come last in their client.
    """
    sizes = np.bincount(owner, minlength=clients)
    short = np.maximum(least - sizes, 0)
    if not short.any():
        return owner
    by_client = np.argsort(owner, kind="stable")
    place = np.empty(len(owner), np.int64)  # of each sample in its client
    place[by_client] = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    movable = np.flatnonzero(place >= least)
    movable = movable[np.argsort(-place[movable], kind="stable")]  # the highest place is in the largest client
    owner = owner.copy()
    owner[movable[: short.sum()]] = np.repeat(np.arange(clients), short)
    return owner
