"""A round: the local phase over blocks of clients, and the collectives. What an algorithm's ``round`` gets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hpcfl.algorithm import RoundDecision, Rows, State, Weighting
from hpcfl.block import Block, ClusterMeans, Given, Members
from hpcfl.engine import Engine
from hpcfl.errors import Diverged
from hpcfl.reduce import Reducer, Terms, magnitude, reproducible_sum, to_host
from hpcfl.rows import Index, compact, put, take
from hpcfl.topology import ClusterComm

LOCAL, CLUSTER, GLOBAL = 0, 1, 2  # kinds of rounds, by the widest average they formed


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


By = Weighting | np.ndarray | Sent  # weights of a mean


@dataclass
class Account:
    """What this rank's clients would have sent in one round of a real federation, and their training losses."""

    kind: int = LOCAL
    up: list[tuple[int, int]] = field(default_factory=list)  # (vectors, bytes) towards servers
    down: list[tuple[int, int]] = field(default_factory=list)
    losses: list[tuple[Index, Tensor]] = field(default_factory=list)  # positions in the group, mean loss


class Round:
    """One round. ``decision`` is the only thing an algorithm may branch on."""

    def __init__(self, engine: Engine, decision: RoundDecision):
        self._engine = engine
        self.decision = decision
        self.account = Account()
        self._rows = engine.hosted(decision.participants)

    def clients(
        self,
        work: Callable[[Block, Rows], tuple[Rows, Rows]],
        state: State,
        *,
        only: np.ndarray | None = None,
        given: Given | None = None,
        full_batch: bool = False,
    ) -> tuple[Rows, Mapping[str, Sent]]:
        """Local phase: runs work(block, own rows) -> (own rows, sent) over this rank's participants, block by block.

        only: bool [K], work for the clients of these clusters. given: what they may read as ``block.shared`` beside the
        shared state. full_batch: whatever the algorithm's batch size. Returns the local state with the clients' new
        rows, and what was sent, for the collectives.
        """
        start = time.perf_counter()
        sent, names = Sendings(), set[str]()
        shared = state.shared if given is None else {**state.shared, **given}
        clients = 0
        for members, chosen in self._chosen(only, full_batch):
            block = Block(members, shared, names, seed=self._engine.seed, round=self.decision.index)
            rows, mine = members.positions(chosen), members.ids[chosen]
            own = {name: take(values, members.place) for name, values in state.local.items()}
            try:
                new, out = work(block, own)
            except Exception as error:
                error.add_note(f"round {self.decision.index}, clients {_listed(members.ids[: members.real])}")
                raise
            for name, values in out.items():
                piece = sent.setdefault(name, Sent())
                piece.rows.append(_apart(take(values, chosen), state.local))
                piece.clients.append(mine)
                if self._engine.reduce is reproducible_sum:
                    piece.magnitudes.append(magnitude(piece.rows[-1]))
            for name, values in new.items():
                put(state.local[name], rows, take(values, chosen))
            if block.losses:
                self.account.losses.append((rows, take(block.train_loss(), chosen)))
            clients += len(mine)
        for name in names:
            value = shared[name]
            vector = value.values[0] if isinstance(value, ClusterMeans) else value
            self.account.down.append((clients, clients * _bytes(vector)))
        self._engine.seconds["compute"] += time.perf_counter() - start
        return state.local, sent

    def _chosen(self, only: np.ndarray | None, full_batch: bool) -> Iterator[tuple[Members, Index]]:
        """The blocks to work on, and which of their rows count.

        Where most clients of a block are chosen, the others are computed with them and dropped: that is cheaper than a
        copy of all data but theirs.
        """
        for members in self._engine.members(self._rows, full_batch=full_batch):
            everyone = slice(0, members.real)
            if only is None:
                yield members, everyone
                continue
            chosen = np.flatnonzero(only[members.cluster[everyone]])
            if len(chosen) == members.real:
                yield members, everyone
            elif 2 * len(chosen) >= members.real:
                yield members, chosen
            elif len(chosen):
                yield members.part(chosen), slice(0, len(chosen))

    def mean(self, x: Sent | Tensor, by: By = "client", unchanged: Tensor | None = None) -> Tensor:
        """Collective over the world: mean of what the participants sent, [P], the same bits on every rank.

        x: what they sent, or local state [C, P] of which they send their rows. by: "client" (plain), "sample" (by
        training samples), a weight per client of the run [N], or one [C, 1] that the clients sent. unchanged: the
        result where the total weight is zero; without it that raises Diverged on all ranks.
        """
        x = self._sent(x)
        if isinstance(by, Sent):
            total = float(self._sum(by, None))  # one column
        else:
            total = float(self._weight_of_each(by).sum())
        if total == 0.0:
            if unchanged is None:
                raise Diverged(f"round {self.decision.index}: the participants' weights sum to zero")
            return unchanged
        self._widest(GLOBAL)
        self._count_up(x)
        return (self._sum(x, self._weights(x, by)) / total).to(self._engine.task.dtype)

    def sum(self, x: Sent | Tensor) -> Tensor:
        """Collective over the world: sum of what the participants sent, [P], the same bits on every rank."""
        x = self._sent(x)
        self._widest(GLOBAL)
        self._count_up(x)
        return self._sum(x, None).to(self._engine.task.dtype)

    def cluster_mean(self, x: Sent | Tensor, by: By = "client", only: np.ndarray | None = None) -> ClusterMeans:
        """Collective over each cluster's ranks: mean of what the cluster's participants sent.

        x, by: as in ``mean``. only: bool [K], the clusters that communicate (None: all). A cluster without
        participants, or with a total weight of zero, forms no mean.
        """
        engine, placement = self._engine, self._engine.topology.placement
        cluster = placement.cluster[self.decision.participants]
        present = np.bincount(cluster, minlength=placement.clusters)
        active = present > 0 if only is None else (present > 0) & only
        if active.any():
            self._widest(CLUSTER)
        hosted = engine.topology.hosted
        hosted = hosted[active[hosted]]
        x, into = self._of_clusters(self._sent(x), hosted)
        self._count_up(x)
        comm = engine.topology.communicator(hosted)
        if isinstance(by, Sent):
            total = self._sums(self._of_clusters(by, hosted)[0], None, into, present[hosted], comm).sum(1)  # one column
        else:
            weight = self._weight_of_each(by)
            total = torch.from_numpy(np.bincount(cluster, weight, placement.clusters)[hosted]).to(engine.task.device)
        sums = self._sums(x, self._weights(x, by), into, present[hosted], comm)
        formed = to_host(total) > 0.0
        if not formed.all():
            hosted, keep = hosted[formed], torch.from_numpy(np.flatnonzero(formed)).to(engine.task.device)
            sums, total = sums[keep], total[keep]
        return ClusterMeans(hosted, (sums / total[:, None]).to(engine.task.dtype))

    def mean_over_clusters(self, means: ClusterMeans, by: np.ndarray) -> Tensor:
        """Collective over the world: mean of the clusters' means [P], the same bits on every rank.

        by: weight per cluster of the run [K]. A cluster's first rank sends for it. Zeros where no cluster has a weight.
        """
        topology = self._engine.topology
        first = np.array([topology.clusters[c].rank == 0 for c in means.clusters.tolist()], bool)
        mine = means.clusters[first]
        rows = take(means.values, np.flatnonzero(first)) if not first.all() else means.values
        x = Sent([rows], [mine]) if len(mine) else Sent()
        cluster = topology.placement.cluster[self.decision.participants]
        total = float(by[np.unique(cluster)].sum())
        self._widest(GLOBAL)
        self._count_up(x)
        self.account.down += self.account.up[-1:]
        weights = [torch.from_numpy(by[mine, None]).to(rows.device)] if len(mine) else []
        return (self._sum(x, weights, len(by)) / (total or 1.0)).to(self._engine.task.dtype)

    def _sent(self, x: Sent | Tensor) -> Sent:
        if isinstance(x, Sent):
            return x
        return Sent([take(x, compact(self._rows))], [self._engine.group.ids[self._rows]]) if len(self._rows) else Sent()

    def _of_clusters(self, x: Sent, clusters: np.ndarray) -> tuple[Sent, list[np.ndarray]]:
        """What clients of these clusters sent, and for each row the position of its cluster."""
        of = self._engine.topology.placement.cluster
        into = [np.searchsorted(clusters, of[ids]) for ids in x.clients]
        if len(clusters) == len(self._engine.topology.hosted):
            return x, into
        mine = [np.flatnonzero(np.isin(of[ids], clusters)) for ids in x.clients]
        part = Sent(
            [take(rows, m) for rows, m in zip(x.rows, mine, strict=True)],
            [ids[m] for ids, m in zip(x.clients, mine, strict=True)],
            [take(top, m) for top, m in zip(x.magnitudes, mine, strict=False)],
        )
        return part, [place[m] for place, m in zip(into, mine, strict=True)]

    def _sum(self, x: Sent, weights: Sequence[Tensor] | None, n: int | None = None) -> Tensor:
        """Collective over the world: weighted sum over n terms (None: all participants), [P] float64."""
        n = len(self.decision.participants) if n is None else n
        return self._reduced(self._engine.topology.world, Terms(x.rows, x.clients, weights, x.magnitudes or None), n)[0]

    def _sums(
        self, x: Sent, weights: Sequence[Tensor] | None, into: list[np.ndarray], n: np.ndarray, comm: ClusterComm
    ) -> Tensor:
        """Collective over the clusters' ranks: weighted sums over each cluster's n participants, [H, P] float64."""
        return self._reduced(comm, Terms(x.rows, x.clients, weights, x.magnitudes or None, len(n), into), n)

    def _reduced(self, comm: Reducer, terms: Terms, n: np.ndarray | int) -> Tensor:
        try:
            return self._engine.reduce(comm, terms, n, self._engine.task.device)
        except Diverged as error:
            raise Diverged(f"round {self.decision.index}, {error}") from None

    def _weight_of_each(self, by: Weighting | np.ndarray) -> np.ndarray:
        """[participants] float64."""
        participants = self.decision.participants
        if isinstance(by, np.ndarray):
            return by[participants]
        if by == "client":
            return np.ones(len(participants))
        return self._engine.topology.placement.samples[participants].astype(np.float64)

    def _weights(self, x: Sent, by: By) -> list[Tensor] | None:
        """[c, 1] float64 per piece; None for equal weights."""
        if isinstance(by, Sent):
            return [w.to(torch.float64) for w in by.rows]
        if isinstance(by, str) and by == "client":
            return None
        weight = by if isinstance(by, np.ndarray) else self._engine.topology.placement.samples
        return [torch.from_numpy(weight[ids, None]).to(self._engine.task.device, torch.float64) for ids in x.clients]

    def _widest(self, kind: int) -> None:
        self.account.kind = max(self.account.kind, kind)

    def _count_up(self, x: Sent) -> None:
        clients = sum(map(len, x.clients))
        self.account.up.append((clients, clients * (_bytes(x.rows[0][0]) if clients else 0)))


def _apart(values: Tensor, local: Rows) -> Tensor:
    """The values, copied where they are a view of the local state, which is about to change."""
    place = values.untyped_storage().data_ptr()
    return values.clone() if any(place == v.untyped_storage().data_ptr() for v in local.values()) else values


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _listed(ids: np.ndarray) -> str:
    return ", ".join(map(str, ids[:5])) + (" ..." if len(ids) > 5 else "")
