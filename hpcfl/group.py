"""The clients of one rank and their samples, flat: no padding to the largest client, the storage type of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hpcfl.on_demand import OnDemand, picked
from hpcfl.splits import TRAIN


@dataclass(frozen=True)
class Group:
    """A rank's clients, in placement order. Samples of one client are contiguous: train, validation, test.

    Where samples are made or read on demand, x and y are empty: they have a type and the shape of a sample only.
    """

    population: int  # N, number of clients of all ranks
    ids: np.ndarray  # [C] client ids
    cluster: np.ndarray  # [C] cluster of each client
    count: np.ndarray  # [C, 3] samples per split
    x: Tensor  # [samples, ...] in the storage type (uint8 images)
    y: Tensor  # [samples] class labels, or targets in the run's dtype
    scale: float  # the model sees x * scale + shift
    shift: float
    dtype: torch.dtype
    truth: Tensor | None = None  # [C, P] float64 on the host: the clients' true parameters, where they are known
    seed: int = 0  # of the run
    mask: Tensor | None = None  # [C, O] as in Batch, where clients have heads of their own with fewer outputs
    source: OnDemand | None = None  # where samples come from that are not held
    offsets: np.ndarray | None = None  # [C, 3] what ``start`` gives; None: the clients' samples follow one another

    def outputs(self, rows: np.ndarray) -> Tensor | None:
        """The mask [c, 1, O] of a batch of the clients at these positions."""
        return None if self.mask is None else self.mask[torch.from_numpy(rows).to(self.mask.device)].unsqueeze(1)

    @cached_property
    def start(self) -> np.ndarray:
        """[C, 3] flat position of the first sample of each split."""
        if self.offsets is not None:
            return self.offsets
        ends = self.count.reshape(-1).cumsum()
        return (ends - self.count.reshape(-1)).reshape(self.count.shape)

    @cached_property
    def clusters(self) -> np.ndarray:
        """[H] the clusters of these clients, ascending."""
        return np.unique(self.cluster)

    @property
    def clients(self) -> int:
        return len(self.ids)

    @property
    def samples(self) -> np.ndarray:
        """[C] number of training samples."""
        return self.count[:, TRAIN]

    def gather(self, rows: np.ndarray, index: np.ndarray, split: int) -> tuple[Tensor, Tensor]:
        """x [c, B, ...] in the run's dtype, normalised, and y [c, B] of samples of the clients at these positions.

        index: [c, B], numbered within each client's split.
        """
        if self.source is None:
            flat = torch.from_numpy(index + self.start[rows, split, None]).to(self.x.device)
            x, y = picked(self.x, flat), picked(self.y, flat)
        else:
            x, y = self.source.gather(self.ids[rows], self.count[rows], index, split)
        x = x.to(self.dtype)
        return x if self.scale == 1.0 and self.shift == 0.0 else x.mul_(self.scale).add_(self.shift), y

    @property
    def held(self) -> bool:
        """Whether all samples are in memory, and batches of them need no conversion."""
        return self.source is None and self.x.dtype == self.dtype

    def some(self, rows: np.ndarray) -> Group:
        """The clients at these positions alone, with the samples of all: nothing large is copied."""
        return replace(
            self,
            ids=self.ids[rows],
            cluster=self.cluster[rows],
            count=self.count[rows],
            truth=None if self.truth is None else self.truth[rows],
            mask=None if self.mask is None else self.mask[torch.from_numpy(rows).to(self.mask.device)],
            offsets=None if self.source else self.start[rows],
        )


def pack(
    x: np.ndarray,
    y: np.ndarray,
    client: np.ndarray,
    split: np.ndarray,
    ids: np.ndarray,
    truth: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """The samples of the given clients in group order: {"x", "y", "count" [C, 3]}, with ``truth`` also "truth" [C, P].

    x, y, client, split: [n, ...] over all samples, client[k] the owner of sample k. truth: [N, P] true parameters.
    """
    position = np.full(int(client.max()) + 1, -1)
    position[ids] = np.arange(len(ids))
    row = position[client]
    mine = np.flatnonzero(row >= 0)
    key = row[mine] * 3 + split[mine]
    mine = mine[np.argsort(key, kind="stable")]
    packed = {"x": x[mine], "y": y[mine], "count": np.bincount(key, minlength=3 * len(ids)).reshape(-1, 3)}
    return packed if truth is None else packed | {"truth": truth[ids]}


def bucket(n: np.ndarray, sizes: int = 8) -> np.ndarray:
    """Padded length for n samples, which depends on n alone.

    sizes: per power of two, itself one: with eight at most an eighth more than n, with four a quarter.
    """
    n = np.asarray(n, np.int64)
    step = 2 ** np.maximum(np.frexp(np.maximum(n - 1, 1).astype(float))[1] - sizes.bit_length(), 0)
    return -(-n // step) * step


def cut(keys: Sequence[np.ndarray], limit: int, least: int) -> list[tuple[np.ndarray, int]]:
    """Positions 0..n-1 into blocks of equal keys with at most ``limit`` members, nearly equal in size.

    keys: arrays [n]. Returns (positions, real): a block smaller than ``least`` repeats its last member, whose further
    results are dropped: only the first ``real`` positions count. In ascending order of the keys and positions.
    """
    if len(keys[0]) == 0:
        return []
    order = np.lexsort((np.arange(len(keys[0])), *reversed(keys)))
    table = np.stack([k[order] for k in keys])
    edges = [0, *(np.flatnonzero((table[:, 1:] != table[:, :-1]).any(0)) + 1).tolist(), len(order)]
    blocks = []
    for a, b in pairwise(edges):
        for part in np.array_split(order[a:b], -(-(b - a) // limit)):
            padding = np.repeat(part[-1:], max(0, least - len(part)))
            blocks.append((np.concatenate([part, padding]), len(part)))
    return blocks
