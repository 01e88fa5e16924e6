"""A round: the local phase over blocks of clients, and the collectives. What an algorithm's ``round`` gets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hpcfl.algorithm import Descent, RoundDecision, Rows, State, Weighting
from hpcfl.block import Block, Received, block_size, padded_batch
from hpcfl.comm import Comm
from hpcfl.errors import Diverged
from hpcfl.group import Group, cut
from hpcfl.reduce import float64_sum, magnitude, reproducible_sum
from hpcfl.task import Task
from hpcfl.topology import Topology

LOCAL, CLUSTER, GLOBAL = 0, 1, 2  # kinds of rounds, by the widest average they formed
REDUCTIONS = {"reproducible": reproducible_sum, "float64": float64_sum}


@dataclass
class Sent:
    """What this rank's participants send under one name: rows in pieces, one piece per block."""

    rows: list[Tensor] = field(default_factory=list)  # [c, P] each
    clients: list[np.ndarray] = field(default_factory=list)  # [c] each: ids
    magnitudes: list[Tensor] = field(
        default_factory=list
    )  # [c] each: largest absolute value; taken while the rows are in cache


class Sendings(dict[str, Sent]):
    """Name -> Sent. A rank without participants has sent nothing under any name."""

    def __missing__(self, name: str) -> Sent:
        if self:
            raise KeyError(f'"{name}" was not sent; sent: {", ".join(self)}')
        return Sent()


@dataclass
class ClusterMeans:
    """The means that this rank's clusters formed in a round."""

    means: dict[int, Tensor]  # cluster -> [P]

    def rows(self, cluster: np.ndarray, otherwise: Tensor) -> Tensor:
        """[C, P]: the mean of cluster[i] in row i; the row of ``otherwise`` [C, P] where its cluster formed none."""
        out = otherwise.clone()
        for c, mean in self.means.items():
            out[torch.from_numpy(cluster == c).to(out.device)] = mean
        return out


@dataclass
class Account:
    """What a real federation would have sent in one round, and the training losses of this rank's participants."""

    kind: int = LOCAL
    up: list[tuple[int, int]] = field(default_factory=list)  # (vectors, bytes), of all participants together
    down: dict[str, int] = field(default_factory=dict)  # shared array that a participant received -> its bytes
    losses: list[tuple[np.ndarray, Tensor]] = field(default_factory=list)  # positions in the group, mean loss


class Engine:
    """What all rounds share: the rank's clients and task, the topology, and how clients are cut into blocks."""

    def __init__(
        self,
        task: Task,
        group: Group,
        topology: Topology,
        work: Descent,
        *,
        seed: int,
        reduction: str = "reproducible",
        block: int | None = None,
    ):
        """work: the algorithm's options of local work. block: clients per block; None: the rule of ``block_size``."""
        self.task, self.group, self.topology, self.work, self.seed = task, group, topology, work, seed
        self.reduce = REDUCTIONS[reduction]
        self.limit = block
        self.seconds = {"compute": 0.0, "evaluate": 0.0}
        self._cuts: tuple[np.ndarray | None, list[tuple[np.ndarray, int, int]]] = (None, [])

    def blocks(self, rows: np.ndarray, shared: Mapping[str, Tensor], round: int) -> Iterator[Block]:
        """The clients at these positions of the group, block by block."""
        if self._cuts[0] is not rows:
            self._cuts = (rows, list(self._cut(rows)))
        for positions, real, steps in self._cuts[1]:
            yield Block(
                self.task, self.group, self.work, shared, positions, real, seed=self.seed, round=round, steps=steps
            )

    def _cut(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, int, int]]:
        samples = self.group.samples[rows]
        steps, length = self.work.local_work(samples), padded_batch(samples, self.work.batch_size)
        features = int(np.prod(self.group.x.shape[1:]))
        for width in np.unique(length):
            mine = np.flatnonzero(length == width)
            limit = self.limit or block_size(self.task, int(width), features)
            for block, real in cut([steps[mine]], limit, self.task.least):
                yield rows[mine[block]], real, int(steps[mine[block[0]]])

    def hosted(self, clients: np.ndarray) -> np.ndarray:
        """Positions in the group of those of the clients that this rank hosts, ascending."""
        if len(clients) == self.group.population:
            return self.everyone
        return np.flatnonzero(np.isin(self.group.ids, clients, assume_unique=True))

    @cached_property
    def everyone(self) -> np.ndarray:
        """Positions of all clients of the group."""
        return np.arange(self.group.clients)


class Round:
    """One round. ``decision`` is the only thing an algorithm may branch on."""

    def __init__(self, engine: Engine, decision: RoundDecision):
        self._engine = engine
        self.decision = decision
        self.account = Account()
        self._rows = engine.hosted(decision.participants)

    def clients(
        self, work: Callable[[Block, Rows], tuple[Rows, Rows]], state: State
    ) -> tuple[Rows, Mapping[str, Sent]]:
        """Local phase: runs work(block, own rows) -> (own rows, sent) over this rank's participants, block by block.

        Returns the local state with the participants' new rows, and what was sent, for the collectives.
        """
        start = time.perf_counter()
        sent = Sendings()
        received = Received(state.shared)
        for block in self._engine.blocks(self._rows, received, self.decision.index):
            own = {name: take(values, block.rows) for name, values in state.local.items()}
            try:
                new, out = work(block, own)
            except Exception as error:
                error.add_note(f"round {self.decision.index}, clients {_listed(block.ids[: block.real])}")
                raise
            for name, values in out.items():
                piece = sent.setdefault(name, Sent())
                piece.rows.append(_apart(values[: block.real], state.local))
                piece.clients.append(block.ids[: block.real])
                if self._engine.reduce is reproducible_sum:
                    piece.magnitudes.append(magnitude(piece.rows[-1]))
            for name, values in new.items():
                put(state.local[name], block.rows[: block.real], values[: block.real])
            if block.losses:
                self.account.losses.append((block.rows[: block.real], block.train_loss()[: block.real]))
        for name in received.names:
            self.account.down[name] = _bytes(state.shared[name])
        self._engine.seconds["compute"] += time.perf_counter() - start
        return state.local, sent

    def mean(self, x: Sent, by: Weighting | Sent = "client", unchanged: Tensor | None = None) -> Tensor:
        """Collective over the world: mean of what the participants sent, [P], the same bits on every rank.

        by: "client" (plain), "sample" (by training samples), or a weight [C, 1] that the clients sent. unchanged: the
        result where the total weight is zero; without it that raises Diverged on all ranks.
        """
        participants = self.decision.participants
        placement = self._engine.topology.placement
        if isinstance(by, Sent):
            total = float(self._sum(by, None))  # one column
        else:
            total = float(len(participants) if by == "client" else placement.samples[participants].sum())
        if total == 0.0:
            if unchanged is None:
                raise Diverged(f"round {self.decision.index}: the participants' weights sum to zero")
            return unchanged
        self._widest(GLOBAL)
        self._count_up(x, len(participants))
        return (self._sum(x, self._weights(x, by)) / total).to(self._engine.task.dtype)

    def sum(self, x: Sent) -> Tensor:
        """Collective over the world: sum of what the participants sent, [P], the same bits on every rank."""
        self._widest(GLOBAL)
        self._count_up(x, len(self.decision.participants))
        return self._sum(x, None).to(self._engine.task.dtype)

    def cluster_mean(self, x: Sent, by: Weighting | Sent = "client", only: np.ndarray | None = None) -> ClusterMeans:
        """Collective over each cluster's ranks: mean of what the cluster's participants sent.

        by: as in ``mean``. only: bool [K], the clusters that communicate (None: all). A cluster without participants,
        or with a total weight of zero, forms no mean.
        """
        placement, participants = self._engine.topology.placement, self.decision.participants
        cluster = placement.cluster[participants]
        present = np.bincount(cluster, minlength=placement.clusters)
        active = (present > 0) & (np.ones_like(present, bool) if only is None else only)
        if active.any():
            self._widest(CLUSTER)
        self._count_up(x, int(present[active].sum()))
        weights = self._weights(x, by)
        means = {}
        for c, comm in self._engine.topology.cluster_collectives(active):
            mine = [np.flatnonzero(placement.cluster[ids] == c) for ids in x.clients]
            part = _select(x, mine)
            theirs = None if weights is None else [w[m] for w, m in zip(weights, mine, strict=True)]
            n = int(present[c])
            if by == "client":
                total = float(n)
            elif by == "sample":
                total = float(placement.samples[participants[cluster == c]].sum())
            else:
                total = float(self._sum(_select(by, mine), None, comm, n))
            if total > 0.0:
                means[c] = (self._sum(part, theirs, comm, n) / total).to(self._engine.task.dtype)
        return ClusterMeans(means)

    def _sum(self, x: Sent, weights: Sequence[Tensor] | None, comm: Comm | None = None, n: int | None = None) -> Tensor:
        """Collective over comm (None: the world): weighted sum over its n participants (None: all), [P] float64."""
        comm = self._engine.topology.world if comm is None else comm
        n = len(self.decision.participants) if n is None else n
        try:
            return self._engine.reduce(
                comm, x.rows, x.clients, weights, n, self._engine.task.device, x.magnitudes or None
            )
        except Diverged as error:
            raise Diverged(f"round {self.decision.index}, {error}") from None

    def _weights(self, x: Sent, by: Weighting | Sent) -> list[Tensor] | None:
        """[c, 1] float64 per piece; None for equal weights."""
        if isinstance(by, Sent):
            return [w.to(torch.float64) for w in by.rows]
        if by == "client":
            return None
        samples = self._engine.topology.placement.samples
        return [
            torch.from_numpy(samples[ids]).to(self._engine.task.device, torch.float64)[:, None] for ids in x.clients
        ]

    def _widest(self, kind: int) -> None:
        self.account.kind = max(self.account.kind, kind)

    def _count_up(self, x: Sent, clients: int) -> None:
        self.account.up.append((clients, clients * (_bytes(x.rows[0][0]) if x.rows else 0)))


def take(values: Tensor, rows: np.ndarray) -> Tensor:
    """The rows of a state array; a view where they are consecutive (nobody writes into it)."""
    return values[_index(rows, values.device)]


def put(values: Tensor, rows: np.ndarray, new: Tensor) -> None:
    """Writes rows of a state array in place."""
    values[_index(rows, values.device)] = new


def _apart(values: Tensor, local: Rows) -> Tensor:
    """The values, copied where they are a view of the local state, which is about to change."""
    place = values.untyped_storage().data_ptr()
    return values.clone() if any(place == v.untyped_storage().data_ptr() for v in local.values()) else values


def _index(rows: np.ndarray, device: torch.device) -> Tensor | slice:
    if rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)


def _select(x: Sent, mine: Sequence[np.ndarray]) -> Sent:
    index = [torch.from_numpy(m).to(rows.device) for rows, m in zip(x.rows, mine, strict=True)]
    return Sent(
        [rows[i] for rows, i in zip(x.rows, index, strict=True)],
        [ids[m] for ids, m in zip(x.clients, mine, strict=True)],
        [top[i] for top, i in zip(x.magnitudes, index, strict=False)],
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _listed(ids: np.ndarray) -> str:
    return ", ".join(map(str, ids[:5])) + (" ..." if len(ids) > 5 else "")
