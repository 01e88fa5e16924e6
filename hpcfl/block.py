"""A block: a few clients of one rank during the local phase. It has no collectives, so nothing can deadlock there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hpcfl import rng
from hpcfl.algorithm import Descent, Work
from hpcfl.group import Group, bucket
from hpcfl.rows import Index, compact
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


@dataclass(frozen=True)
class ClusterMeans:
    """The means that this rank's clusters formed in a round. Given to clients, each reads that of its cluster."""

    clusters: np.ndarray  # [H] ids, ascending
    values: Tensor  # [H, P]

    def rows(self, cluster: np.ndarray) -> Tensor:
        """[C, P]: the mean of cluster[i] in row i. Raises KeyError for a cluster that formed none."""
        place = np.searchsorted(self.clusters, cluster)
        if len(place) and (place[-1] >= len(self.clusters) or (self.clusters.take(place, mode="clip") != cluster).any()):
            missing = np.setdiff1d(cluster, self.clusters)
            raise KeyError(f"no mean was formed by cluster {', '.join(map(str, missing))}")
        return self.values.index_select(0, torch.from_numpy(place).to(self.values.device))


Given = Mapping[str, Tensor | ClusterMeans]  # what clients read: [P], or one per cluster


class Received(Mapping[str, Tensor]):
    """The shared state as the clients of a block see it; notes what they read: that is what a server would have sent."""

    def __init__(self, shared: Given, cluster: np.ndarray, names: set[str]):
        """cluster: of the block's clients [C]. names: where the names of what is read are noted."""
        self._shared, self._cluster, self._names = shared, cluster, names

    def __getitem__(self, name: str) -> Tensor:
        value = self._shared[name]
        self._names.add(name)
        return value.rows(self._cluster) if isinstance(value, ClusterMeans) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._shared)

    def __len__(self) -> int:
        return len(self._shared)


class Members:
    """The clients of a block, and what about them does not change from round to round."""

    def __init__(
        self, task: Task, group: Group, work: Work, rows: np.ndarray, real: int, *, steps: int, batch: int | None
    ):
        """rows: positions of the clients in the group; the last of the ``real`` ones is repeated to fill the block.

        batch: samples of a minibatch; None: full batch.
        """
        self.task, self.group, self.work, self.rows, self.real = task, group, work, rows, real
        self.steps, self.batch = steps, batch
        self.constants: dict[int, tuple[np.ndarray, Tensor]] = {}
        self.full_batch: Batch | None = None  # where it costs no more memory than the data themselves

    @cached_property
    def place(self) -> Index:
        """Positions in the group of all rows, repeated ones included."""
        return compact(self.rows)

    @cached_property
    def _real(self) -> Index:
        return compact(self.rows[: self.real])

    def positions(self, chosen: Index) -> Index:
        """Positions in the group of some of the members."""
        return self._real if isinstance(chosen, slice) else self.rows[chosen]

    @cached_property
    def ids(self) -> np.ndarray:
        return self.group.ids[self.rows]

    @cached_property
    def cluster(self) -> np.ndarray:
        return self.group.cluster[self.rows]

    @cached_property
    def samples(self) -> np.ndarray:
        return self.group.samples[self.rows]

    @cached_property
    def length(self) -> int:
        """Of the padded minibatches: the same for all clients of a block."""
        return int(padded_batch(self.samples[:1], self.batch)[0])

    @cached_property
    def per_epoch(self) -> np.ndarray:
        """[C] minibatches of an epoch."""
        return -(-self.samples // (self.batch or self.samples))

    def part(self, chosen: np.ndarray) -> Members:
        """A block of these members alone, given by their positions in this one, ascending."""
        padding = np.repeat(chosen[-1:], max(0, self.task.least - len(chosen)))
        rows = self.rows[np.concatenate([chosen, padding])]
        return Members(self.task, self.group, self.work, rows, len(chosen), steps=self.steps, batch=self.batch)


class Block:
    """C clients with the same number of local steps. Arrays have one row per client.

    ids, cluster, samples: numpy [C]; steps: the local steps of a round, 0..tau-1; shared: the shared state, and what
    the round gave the clients to read.
    """

    def __init__(self, members: Members, shared: Given, names: set[str], *, seed: int, round: int):
        """names: as for ``Received``."""
        self._members, self._seed, self._round = members, seed, round
        self._task, self._group = members.task, members.group
        self.rows, self.real = members.rows, members.real
        self.shared = Received(shared, members.cluster, names)
        self.steps = range(members.steps)
        self.losses: list[Tensor] = []
        self._counted: Batch | None = None
        self._weights: tuple[bytes, Tensor] | None = None  # of the last batch: most have the same
        self._epoch: np.ndarray | None = None
        self._order = np.zeros((0, 0), np.int64)

    @property
    def ids(self) -> np.ndarray:
        return self._members.ids

    @property
    def cluster(self) -> np.ndarray:
        return self._members.cluster

    @property
    def samples(self) -> np.ndarray:
        return self._members.samples

    def each(self, values: np.ndarray, of: np.ndarray) -> Tensor:
        """[C, 1] every client's entry of values [n], which never change; of: ids, cluster, or numbers 0..n-1 [C]."""
        kept = self._members.constants
        if id(values) not in kept:
            mine = torch.from_numpy(values[of])[:, None].to(self._task.device, self._task.dtype)
            kept[id(values)] = values, mine  # with the values, so that their id stays theirs
        return kept[id(values)][1]

    def lr(self, t: int) -> float:
        """Step size of local step t of this round, by the algorithm's schedule."""
        work = self._members.work
        assert isinstance(work, Descent)
        return work.lr_schedule.at(work.lr, self._round, self.iteration(t))

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
        members, samples = self._members, self.samples
        if members.batch is None:
            return self._full_batch(t)
        self._shuffle(t // members.per_epoch)
        first = t % members.per_epoch * members.batch
        column = first[:, None] + np.arange(members.length)
        index = np.take_along_axis(self._order, np.minimum(column, samples[:, None] - 1), 1)
        return self._gather(index, np.minimum(members.batch, samples - first), t)

    def _full_batch(self, t: int) -> Batch:
        members = self._members
        whole = members.full_batch
        if whole is None:
            index = np.minimum(np.arange(members.length), self.samples[:, None] - 1)
            whole = self._gather(index, self.samples, t)
            if self._group.x.dtype == self._group.dtype:
                members.full_batch = whole
        return whole if whole.key is None else replace(whole, key=self._keys(t))

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
        total = self.losses[0].to(torch.float64, copy=len(self.losses) > 1)
        for loss in self.losses[1:]:  # one by one: the order of torch's own sum over the steps may depend on C
            total += loss
        return total if len(self.losses) == 1 else total / len(self.losses)

    def _shuffle(self, epoch: np.ndarray) -> None:
        """Brings the order of every client's samples up to its epoch [C]."""
        if self._epoch is None:
            self._epoch = np.full(len(self.rows), -1)
            self._order = np.zeros((len(self.rows), int(self.samples.max())), np.int64)
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
