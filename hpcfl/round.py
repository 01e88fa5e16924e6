"""A round: the local phase over blocks of clients, and the collectives. What an algorithm's ``round`` gets."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hpcfl.algorithm import RoundDecision, Rows, State
from hpcfl.block import Block
from hpcfl.engine import Engine, Weights
from hpcfl.errors import Diverged
from hpcfl.gradient import written
from hpcfl.members import ClusterMeans, Given
from hpcfl.reduce import Piece, Reducer, grid_bits, magnitude, reproducible_sum, to_device, to_host
from hpcfl.rows import Index, compact, put, take

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


By = Weights | Sent  # weights of a mean


@dataclass
class Account:
    """What this rank's clients would have sent in one round of a real federation, and their training losses."""

    kind: int = LOCAL
    up: list[tuple[int, int]] = field(default_factory=list)  # (vectors, bytes) towards servers
    down: list[tuple[int, int]] = field(default_factory=list)
    losses: list[tuple[Index, Tensor, np.ndarray | None]] = field(default_factory=list)  # Block.train_losses
    passes: list[tuple[int, int]] = field(default_factory=list)  # forward and backward, of each block
    scores: list[tuple[Index, np.ndarray]] = field(default_factory=list)  # of what watched the clients, [c, metrics]


Watch = Callable[[Block, Rows, Rows], np.ndarray]  # (block, own rows, sent) -> [real clients, metrics]


class Round:
    """One round. ``decision`` is the only thing an algorithm may branch on."""

    def __init__(self, engine: Engine, decision: RoundDecision, watch: Watch | None = None):
        """watch: measures each block's clients after their local work."""
        self._engine, self._watch = engine, watch
        self.decision = decision
        self.account = Account()
        self.rows = engine.hosted(decision.participants)  # positions of this rank's participants in its group
        self._census = engine.census(decision.participants)

    def clients(
        self,
        work: Callable[[Block, Rows], tuple[Rows, Rows]],
        state: State,
        *,
        given: Given | None = None,
        full_batch: bool = False,
    ) -> tuple[Rows, Mapping[str, Sent]]:
        """Local phase: runs work(block, own rows) -> (own rows, sent) over this rank's participants, block by block.

        given: what they may read as ``block.shared`` beside the shared state. full_batch: whatever the algorithm's
        batch size. Returns the local state with the clients' new rows, and what was sent, for the collectives.
        """
        start = time.perf_counter()
        sent = Sendings()
        shared = state.shared if given is None else {**state.shared, **given}
        for members in self._engine.members(self.rows, full_batch=full_batch):
            block = Block(members, shared, seed=self._engine.seed, round=self.decision.index)
            real = slice(0, members.real)
            try:
                own = block.own(state.local)
                new, out = work(block, own)
            except Exception as error:
                error.add_note(f"round {self.decision.index}, clients {_listed(members.ids[real])}")
                raise
            for name, values in out.items():
                piece = sent.setdefault(name, Sent())
                piece.rows.append(_apart(take(written(values), real), state.local))
                piece.clients.append(members.ids[real])
                if self._engine.reduce is reproducible_sum:
                    piece.magnitudes.append(magnitude(piece.rows[-1]))
            if len(new) > 1:  # one may be a view of another's memory
                new = {name: _apart(values, state.local) for name, values in new.items()}
            for name, values in new.items():
                put(state.local[name], members.real_place, take(values, real))
            if self._watch:
                self.account.scores.append((members.real_place, self._watch(block, {**own, **new}, out)))
            self.account.losses += block.train_losses()
            self.account.passes.append((block.passes[0], block.passes[1]))
            self.account.down += block.shared.received()
        self._engine.seconds["compute"] += time.perf_counter() - start
        return state.local, sent

    @property
    def inverse_share(self) -> float:
        """N / r: clients of the run by participants of the round."""
        return self._engine.group.population / len(self.decision.participants)

    def mean(self, x: Sent | Tensor, by: By = "client", unchanged: Tensor | None = None) -> Tensor:
        """Collective over the world: mean of what the participants sent, [P], the same bits on every rank.

        x: what they sent, or local state [C, P] of which they send their rows. by: "client" (plain), "sample" (by
        training samples), a weight per client of the run [N], or one [C, 1] that the clients sent. unchanged: the
        result where the total weight is zero; without it that raises Diverged on all ranks.
        """
        x = self._sent(x)
        total = float(self._sum(by, "client")) if isinstance(by, Sent) else float(self._census.totals(by).sum())
        if total == 0.0:
            if unchanged is None:
                raise Diverged(f"round {self.decision.index}: the participants' weights sum to zero")
            return unchanged
        self.account.kind = GLOBAL
        self._count_up(self._pieces(x, "client"))
        return (self._sum(x, by) / total).to(self._engine.task.dtype)

    def sum(self, x: Sent | Tensor) -> Tensor:
        """Collective over the world: sum of what the participants sent, [P], the same bits on every rank."""
        x = self._sent(x)
        self.account.kind = GLOBAL
        self._count_up(self._pieces(x, "client"))
        return self._sum(x, "client").to(self._engine.task.dtype)

    def cluster_mean(self, x: Sent | Tensor, by: By = "client", only: np.ndarray | None = None) -> ClusterMeans:
        """Collective over each cluster's ranks: mean of what the cluster's participants sent.

        x, by: as in ``mean``. only: bool [K], the clusters that communicate (None: all). A cluster without
        participants, or with a total weight of zero, forms no mean.
        """
        topology, census = self._engine.topology, self._census
        chosen = census.hosted if only is None else census.hosted & only[topology.hosted]
        if only is None or (only & census.somewhere).any():
            self.account.kind = max(self.account.kind, CLUSTER)
        comm, pieces = topology.communicator(chosen), self._pieces(self._sent(x), by, clusters=True)
        self._count_up(pieces, chosen)
        if isinstance(by, Sent):
            total = self._reduced(comm, self._pieces(by, "client", clusters=True), census.bits, chosen)
        else:
            total = census.total(by)
        means = self._reduced(comm, pieces, census.bits, chosen) / total
        if isinstance(by, Sent):
            chosen = chosen & (to_host(total) > 0.0).any(1)  # one column
        return ClusterMeans(topology.hosted, chosen, means.to(self._engine.task.dtype))

    def cluster_weights(self, by: Weights) -> np.ndarray:
        """[K]: the weight of each cluster's participants in the mean that it forms."""
        return self._census.totals(by)

    def mean_over_clusters(self, means: ClusterMeans, by: np.ndarray) -> Tensor:
        """Collective over the world: mean of the clusters' means [P], the same bits on every rank.

        by: weight per cluster of the run [K]. A cluster's first rank sends for it. Zeros where no cluster has a weight.
        """
        mine = np.flatnonzero(means.formed & self._engine.topology.leads)
        clusters = means.clusters[mine]
        weights = to_device(by[clusters, None], self._engine.task.device)
        pieces = [Piece(take(means.values, compact(mine)), clusters, weights)]
        self.account.kind = GLOBAL
        self._count_up(pieces)
        self.account.down += self.account.up[-1:]
        total = float(by[self._census.somewhere].sum())
        sums = self._reduced(self._engine.topology.world, pieces, grid_bits(len(by)))
        return (sums[0] / (total or 1.0)).to(self._engine.task.dtype)

    def _sent(self, x: Sent | Tensor) -> Sent:
        if isinstance(x, Sent):
            return x
        group = self._engine.group
        if self.rows is self._engine.everyone:
            return Sent([take(x, slice(0, group.clients))], [group.ids])
        return Sent([take(x, compact(self.rows))], [group.ids[self.rows]])

    def _pieces(self, x: Sent, by: By, *, clusters: bool = False) -> list[Piece]:
        """What was sent, with its weights. clusters: for sums of the clusters that this rank hosts, not for one sum."""
        census, pieces = self._census, []
        for k, (rows, ids) in enumerate(zip(x.rows, x.clients, strict=True)):
            weights = by.rows[k].to(torch.float64) if isinstance(by, Sent) else census.weights(by, ids)
            segments = census.segments(ids) if clusters else None
            pieces.append(Piece(rows, ids, weights, segments, x.magnitudes[k] if x.magnitudes else None))
        return pieces

    def _sum(self, x: Sent, by: By) -> Tensor:
        """Collective over the world: weighted sum over the participants, [P] float64."""
        bits = grid_bits(len(self.decision.participants))
        return self._reduced(self._engine.topology.world, self._pieces(x, by), bits)[0]

    def _reduced(
        self, comm: Reducer, pieces: Sequence[Piece], bits: np.ndarray, only: np.ndarray | None = None
    ) -> Tensor:
        try:
            return self._engine.reduce(comm, pieces, bits, self._engine.task.device, only)
        except Diverged as error:
            raise Diverged(f"round {self.decision.index}, {error}") from None

    def _count_up(self, pieces: Sequence[Piece], only: np.ndarray | None = None) -> None:
        """Every row, of these sums [S] only, is a vector that its client sends to a server."""
        vectors = sum(piece.count(only) for piece in pieces)
        row = pieces[0].rows.shape[1] * pieces[0].rows.element_size() if pieces else 0
        self.account.up.append((vectors, vectors * row))


def _apart(values: Tensor, local: Rows) -> Tensor:
    """The values, copied where they are a view of the local state, which is about to change."""
    place = values.untyped_storage().data_ptr()
    shared = (isinstance(v, Tensor) and place == v.untyped_storage().data_ptr() for v in local.values())
    return values.clone() if any(shared) else values


def _listed(ids: np.ndarray) -> str:
    return ", ".join(map(str, ids[:5])) + (" ..." if len(ids) > 5 else "")
