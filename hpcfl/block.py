"""A block: a few clients of one rank during the local phase. It has no collectives, so nothing can deadlock there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hpcfl import rng
from hpcfl.algorithm import Descent, Rows, Work
from hpcfl.group import Group, bucket
from hpcfl.reduce import to_device
from hpcfl.rows import Index, compact, take
from hpcfl.splits import TRAIN
from hpcfl.task import Batch, Task

BUDGET = {
    "cpu": 4 << 20,
    "cuda": 1 << 30,
}  # bytes of models and batches per block: the caches' size, a part of a GPU's memory
LARGEST_BLOCK = 8192
TINY = 64  # parameters
MOST_KEPT = 32  # arrays of clients' constants


def block_size(task: Task, batch: int, features: int) -> int:
    """Clients per block: a function of model, batch and device, never of the number of ranks.

    batch: samples per client and step; features: numbers per sample.
    """
    item = torch.finfo(task.dtype).bits // 8
    budget = BUDGET.get(task.device.type, BUDGET["cuda"])
    return int(np.clip(budget // (item * (task.layout.size + batch * features)), task.least, LARGEST_BLOCK))


def padded_batch(task: Task, samples: np.ndarray, batch_size: int | None) -> np.ndarray:
    """Length to which a client's minibatches are padded, from its number of samples [C] and the model alone.

    Of a tiny model the calls for a block cost more than its padding: fewer sizes make fewer blocks.
    """
    length = bucket(samples, sizes=4 if task.layout.size <= TINY else 8)
    return length if batch_size is None else np.minimum(length, batch_size)


@dataclass(frozen=True)
class ClusterMeans:
    """The means that clusters formed in a round. Given to clients, each reads that of its cluster."""

    clusters: np.ndarray  # [H] ids of the clusters that this rank hosts, ascending
    formed: np.ndarray  # [H] bool
    values: Tensor  # [H, P], anything where none was formed


Given = Mapping[str, Tensor | ClusterMeans]  # what clients read: [P], or one per cluster


class Received(Mapping[str, Tensor]):
    """The shared state as a block's clients see it; notes what they read: that is what a server would have sent."""

    def __init__(self, shared: Given, members: Members):
        self._shared, self._members = shared, members
        self._read: dict[tuple[str, str], tuple[int, int]] = {}  # name and readers -> vectors, bytes
        self.readers = "all", members.real  # who reads now, and their number

    def __getitem__(self, name: str) -> Tensor:
        value = self._shared[name]
        vector = value.values[:1] if isinstance(value, ClusterMeans) else value
        who, number = self.readers
        self._read[name, who] = number, number * vector.numel() * vector.element_size()
        if isinstance(value, ClusterMeans):
            return value.values.index_select(0, self._members.cluster_place)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._shared)

    def __len__(self) -> int:
        return len(self._shared)

    def received(self) -> list[tuple[int, int]]:
        """(vectors, bytes) of everything that was read."""
        return list(self._read.values())


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
    def real_place(self) -> Index:
        """Positions in the group without the repeated rows."""
        return compact(self.rows[: self.real])

    @cached_property
    def ids(self) -> np.ndarray:
        return self.group.ids[self.rows]

    @cached_property
    def cluster(self) -> np.ndarray:
        return self.group.cluster[self.rows]

    @cached_property
    def cluster_place(self) -> Tensor:
        """[C] place of each client's cluster among those of the group."""
        return to_device(np.searchsorted(self.group.clusters, self.cluster), self.task.device)

    @cached_property
    def samples(self) -> np.ndarray:
        return self.group.samples[self.rows]

    @cached_property
    def length(self) -> int:
        """Of the padded minibatches: the same for all clients of a block."""
        return int(padded_batch(self.task, self.samples[:1], self.batch)[0])

    @cached_property
    def per_epoch(self) -> np.ndarray:
        """[C] minibatches of an epoch."""
        return -(-self.samples // (self.batch or self.samples))


Step = Callable[["Block", Rows], Rows]


class Block:
    """C clients with the same number of local steps. Arrays have one row per client.

    ids, cluster, samples: numpy [C]; steps: the local steps of a round, 0..tau-1; shared: the shared state, and what
    the round gave the clients to read.
    """

    def __init__(self, members: Members, shared: Given, *, seed: int, round: int):
        self._members, self._seed, self._round = members, seed, round
        self._task, self._group = members.task, members.group
        self.rows, self.real = members.rows, members.real
        self.shared = Received(shared, members)
        self.steps = range(members.steps)
        self._losses: list[tuple[Tensor, np.ndarray | None]] = []  # [C], and whose count [C] (None: all)
        self._counting: np.ndarray | None = None
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

    def own(self, local: Rows) -> Rows:
        """The clients' rows of the local state [all of this rank, ...]."""
        return {name: take(values, self._members.place) for name, values in local.items()}

    @property
    def parameters(self) -> int:
        """P, of one model."""
        return self._task.layout.size

    def each(self, values: np.ndarray | float) -> Tensor | float:
        """[C, 1] every client's own of values [N], which never change; a number is the same for all."""
        if isinstance(values, float):
            return values
        kept = self._members.constants
        if id(values) not in kept:
            if len(kept) >= MOST_KEPT:
                kept.clear()
            mine = torch.from_numpy(values[self.ids, None]).to(self._task.device, self._task.dtype)
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
            self._losses.append((loss, self._counting))
            self._counted = batch
        return gradient

    def either(self, coins: np.ndarray, yes: Step, no: Step, own: Rows) -> Rows:
        """yes(block, own) for the clients whose cluster's coin [K] came up, no(block, own) for the others."""
        up = coins[self.cluster]
        count = int(np.count_nonzero(up[: self.real]))
        if count in (0, self.real):
            return yes(self, own) if count else no(self, own)
        found = []
        for step, who, mine, number in ((yes, "yes", up, count), (no, "no", ~up, self.real - count)):
            self._counting, self.shared.readers = mine, (who, number)
            found.append(step(self, own))  # for all of them, which is cheaper than copies of some
        self._counting, self.shared.readers = None, ("all", self.real)
        which = to_device(up[:, None], self._task.device)
        return {name: torch.where(which, values, found[1][name]) for name, values in found[0].items()}

    def train_losses(self) -> list[tuple[Index, Tensor, np.ndarray | None]]:
        """Positions in the group, mean losses [c] in float64, whose count [c] (None: all); [] without gradients."""
        if not self._losses:
            return []
        total = self._losses[0][0].to(torch.float64, copy=len(self._losses) > 1)
        for loss, _ in self._losses[1:]:  # one by one: the order of torch's own sum over the steps may depend on C
            total += loss
        real, mine = slice(0, self.real), self._losses[0][1]
        mean = total if len(self._losses) == 1 else total / len(self._losses)
        return [(self._members.real_place, take(mean, real), mine if mine is None else mine[real])]

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
