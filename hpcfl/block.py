"""A block: a few clients of one rank during the local phase. It has no collectives, so nothing can deadlock there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hpcfl import rng
from hpcfl.algorithm import Descent
from hpcfl.group import Group, bucket
from hpcfl.splits import TRAIN
from hpcfl.task import Batch, Task

BUDGET = {
    "cpu": 4 << 20,
    "cuda": 1 << 30,
}  # bytes of models and batches per block: the caches' size, a part of a GPU's memory
LARGEST_BLOCK = 8192


def block_size(task: Task, batch: int, features: int) -> int:
    """Clients per block: a function of model, batch and device, never of the number of ranks.

    batch: samples per client and step; features: numbers per sample.
    """
    item = torch.finfo(task.dtype).bits // 8
    budget = BUDGET.get(task.device.type, BUDGET["cuda"])
    return int(np.clip(budget // (item * (task.layout.size + batch * features)), task.least, LARGEST_BLOCK))


def padded_batch(samples: np.ndarray, batch_size: int | None) -> np.ndarray:
    """Length to which a client's minibatches are padded, from its number of samples [C] alone."""
    return bucket(samples) if batch_size is None else np.minimum(bucket(samples), batch_size)


class Received(Mapping[str, Tensor]):
    """The shared state as clients see it; notes what they read, since that is what a server would have sent."""

    def __init__(self, shared: Mapping[str, Tensor]):
        self._shared = shared
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.names.add(name)
        return self._shared[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shared)

    def __len__(self) -> int:
        return len(self._shared)


class Block:
    """C clients with the same number of local steps. Arrays have one row per client.

    ids, cluster, samples: numpy [C]; steps: the local steps of a round, 0..tau-1; shared: the shared state.
    """

    def __init__(
        self,
        task: Task,
        group: Group,
        work: Descent,
        shared: Mapping[str, Tensor],
        rows: np.ndarray,
        real: int,
        *,
        seed: int,
        round: int,
        steps: int,
    ):
        """rows: positions of the clients in the group; the last of the ``real`` ones is repeated to fill the block."""
        self._task, self._group, self._work, self._seed, self._round = task, group, work, seed, round
        self.rows, self.real = rows, real
        self.ids, self.cluster, self.samples = group.ids[rows], group.cluster[rows], group.samples[rows]
        self.steps = range(steps)
        self.shared = shared
        self.losses: list[Tensor] = []
        self._everything: Batch | None = None
        self._counted: Batch | None = None
        self._length = int(padded_batch(self.samples[:1], work.batch_size)[0])  # the same for all clients of a block
        self._per_epoch = -(-self.samples // (work.batch_size or self.samples))
        self._weights: tuple[bytes, Tensor] | None = None  # of the last batch: most have the same
        self._epoch = np.full(len(rows), -1)
        self._order = np.zeros((len(rows), int(self.samples.max()) if work.batch_size else 0), np.int64)

    def lr(self, t: int) -> float:
        """Step size of local step t of this round, by the algorithm's schedule."""
        return self._work.lr_schedule.at(self._work.lr, self._round, self.iteration(t))

    def iteration(self, t: int) -> int:
        """Local step t of this round, counted from 0 over the whole run."""
        return self._round * len(self.steps) + t

    def stack(self, w: Tensor) -> Tensor:
        """[P] -> [C, P], one and the same model for every client (a view: assign, do not write into it)."""
        return w.expand(len(self.rows), -1)

    def batch(self, t: int) -> Batch:
        """The minibatch of local step t: drawn without replacement inside an epoch; every round starts a new epoch.

        Keyed (client, round, epoch). The short last batch of an epoch keeps its true size.
        """
        size = self._work.batch_size
        if size is None:
            return self._full_batch(t)
        self._shuffle(t // self._per_epoch)
        first = t % self._per_epoch * size
        column = first[:, None] + np.arange(self._length)
        index = np.take_along_axis(self._order, np.minimum(column, self.samples[:, None] - 1), 1)
        return self._gather(index, np.minimum(size, self.samples - first), t)

    def _full_batch(self, t: int) -> Batch:
        if self._everything is None:
            index = np.minimum(np.arange(self._length), self.samples[:, None] - 1)
            self._everything = self._gather(index, self.samples, t)
        return replace(self._everything, key=self._keys(t))

    def grad(self, w: Tensor, batch: Batch) -> Tensor:
        """Gradient [C, P] of every client's loss at its own w [C, P] on its own minibatch.

        The loss at the first gradient taken on a minibatch counts as the training loss of that step.
        """
        loss, gradient = self._task.gradient(w, batch)
        if batch is not self._counted:
            self.losses.append(loss)
            self._counted = batch
        return gradient

    def train_loss(self) -> Tensor:
        """[C] float64: mean over the steps whose gradient was taken."""
        total = torch.zeros(len(self.rows), dtype=torch.float64, device=self.losses[0].device)
        for loss in self.losses:  # one by one: the order of torch's own sum over the steps may depend on C
            total += loss
        return total / len(self.losses)

    def _shuffle(self, epoch: np.ndarray) -> None:
        """Brings the order of every client's samples up to its epoch [C]."""
        for e in np.unique(epoch[epoch != self._epoch]):
            mine = np.flatnonzero((epoch == e) & (epoch != self._epoch))
            orders = rng.permutations(self._seed, self.ids[mine], self.samples[mine], self._round, int(e))
            for k, order in zip(mine, orders, strict=True):
                self._order[k, : len(order)] = order
        self._epoch = epoch

    def _gather(self, index: np.ndarray, real: np.ndarray, t: int) -> Batch:
        """Batch of the samples index [C, B] (numbered within each client), of which the first real [C] count."""
        device = self._group.x.device
        flat = torch.from_numpy(index + self._group.start[self.rows, TRAIN, None]).to(device)
        if self._weights is None or self._weights[0] != real.tobytes():
            weight = (np.arange(index.shape[1]) < real[:, None]) / real[:, None]
            self._weights = (real.tobytes(), torch.from_numpy(weight).to(device=device, dtype=self._group.dtype))
        return Batch(self._group.inputs(flat), self._group.y[flat], self._weights[1], self.real, self._keys(t))

    def _keys(self, t: int) -> Tensor | None:
        if not self._task.dropout_keys:
            return None
        keys = [
            rng.seed_for(self._seed, rng.Purpose.DROPOUT, client=int(i), round=self._round, step=t) for i in self.ids
        ]
        return torch.tensor(keys, device=self._group.x.device)
