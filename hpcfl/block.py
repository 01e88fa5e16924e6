"""A block: a few clients of one rank during the local phase. It has no collectives, so nothing can deadlock there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hpcfl import rng
from hpcfl.algorithm import Descent, Rows
from hpcfl.batch import Batch
from hpcfl.members import MOST_KEPT, Given, Members, Received
from hpcfl.reduce import to_device
from hpcfl.rows import Index, take
from hpcfl.split import Features
from hpcfl.splits import TRAIN

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
        self._counted = True  # whether the last minibatch's loss is
        self._whole: Batch | None = None
        self._features: tuple[Tensor, Batch, Features] | None = None  # of which body and batch, and they
        self.passes = [0, 0]  # forward and backward through the model's body, over all clients
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
    def share(self) -> Tensor:
        """[C, 1] each client's share of the run's training samples, n_i / sum_j n_j."""
        share = self.samples[:, None] / self._members.population_samples
        return to_device(share, self._task.device).to(self._task.dtype)

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
        self._counted = False
        if members.batch is None:
            return self._full_batch(t)
        self._shuffle(t // members.per_epoch)
        first = t % members.per_epoch * members.batch
        column = first[:, None] + np.arange(members.length)
        index = self._order[np.arange(len(column))[:, None], np.minimum(column, samples[:, None] - 1)]
        return self._gather(index, np.minimum(members.batch, samples - first), t)

    def _full_batch(self, t: int) -> Batch:
        members = self._members
        whole = members.full_batch or self._whole
        if whole is None:
            index = np.minimum(np.arange(members.length), self.samples[:, None] - 1)
            whole = self._whole = self._gather(index, self.samples, t)
            if self._group.held:
                members.full_batch = whole
        return whole if whole.key is None else replace(whole, key=self._keys(t))

    def grad(self, w: Tensor, batch: Batch) -> Tensor:
        """Gradient [C, P] of every client's loss at its own w [C, P] on its own minibatch.

        The loss at the first gradient taken on a minibatch counts as the training loss of that step.
        """
        self._pass(1, 1)
        loss, gradient = self._task.gradient(w, batch)
        self._count(loss)
        return gradient

    def features(self, theta: Tensor, batch: Batch) -> Features:
        """The features [C, B, M] of every client's minibatch at its own body theta [C, P_body].

        Asked again for the same batch and theta, it gives them again: those of a full batch are computed once.
        """
        if self._features is None or self._features[0] is not theta or self._features[1] is not batch:
            self._pass(1, 0)
            self._features = theta, batch, self._task.split.features(theta, batch)
        return self._features[2]

    def grad_head(self, W: Tensor, features: Features) -> Tensor:
        """Gradient [C, P_head] by every client's own head W [C, P_head], the features as they are."""
        loss, gradient = self._task.split.head_gradient(W, features)
        self._count(loss)
        return gradient

    def grads(self, theta: Tensor, W: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Gradients [C, P_body], [C, P_head] by body and head at one point. What is not used is never computed."""
        self._pass(1, 1)
        loss, by_theta, by_W = self._task.split.gradients(theta, W, batch)
        self._count(loss)
        return by_theta, by_W

    def join(self, theta: Tensor, W: Tensor) -> Tensor:
        """[C, P_body], [C, P_head] -> the clients' whole models [C, P]."""
        return self._task.split.join(theta, W)

    def new_heads(self) -> Tensor:
        """[C, P_head] heads drawn anew for this round."""
        heads = self._task.split.drawn_heads(self._seed, self.ids, self._round).to(self._task.device, self._task.dtype)
        return self._task.split.own_outputs(heads, self._group.outputs(self.rows))

    def _pass(self, forward: int, backward: int) -> None:
        clients = self.shared.readers[1]
        self.passes[0] += forward * clients
        self.passes[1] += backward * clients

    def _count(self, loss: Tensor) -> None:
        """The loss at the first gradient taken on a minibatch is the training loss of that step."""
        if not self._counted:
            self._losses.append((loss, self._counting))
            self._counted = True

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
        new = epoch != self._epoch
        for e in np.unique(epoch[new]) if new.any() else ():
            mine = np.flatnonzero(new & (epoch == e))
            orders = rng.permutations(self._seed, self.ids[mine], self.samples[mine], self._round, int(e))
            for k, order in zip(mine, orders, strict=True):
                self._order[k, : len(order)] = order
        self._epoch = epoch

    def _gather(self, index: np.ndarray, real: np.ndarray, t: int) -> Batch:
        """Batch of the samples index [C, B] (numbered within each client), of which the first real [C] count."""
        device = self._group.x.device
        if self._weights is None or self._weights[0] != real.tobytes():
            weight = (np.arange(index.shape[1]) < real[:, None]) / real[:, None]
            self._weights = (real.tobytes(), torch.from_numpy(weight).to(device=device, dtype=self._group.dtype))
        x, y = self._group.gather(self.rows, index, TRAIN)
        return Batch(x, y, self._weights[1], self.real, self._keys(t), self._group.outputs(self.rows))

    def _keys(self, t: int) -> Tensor | None:
        if not self._task.dropout_keys:
            return None
        keys = [
            rng.seed_for(self._seed, rng.Purpose.DROPOUT, client=int(i), round=self._round, step=t) for i in self.ids
        ]
        return torch.tensor(keys, device=self._group.x.device)
