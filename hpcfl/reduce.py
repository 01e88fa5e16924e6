"""Sums over clients whose bits depend neither on the number of ranks nor on the order of the terms.

Every value is rounded to an integer multiple of one common power of two, and integers are added: addition of integers
is associative. The grid follows from the largest weighted value of any single client, which one MAX over the ranks
finds. (Idea: Demmel and Nguyen, "Parallel reproducible summation", IEEE Trans. Comp. 2015; here with one fixed grid.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hpcfl.comm import Comm, Op
from hpcfl.errors import Diverged

BITS = 51  # of one rounded value: x + 1.5 * 2^52 grid rounds x to the grid when |x| <= 2^51 grid
SUM_BITS = 62  # of their sum in an int64
CACHE = 1 << 18  # float64 values per piece of work on the CPU: stays in the last-level cache
LARGEST = 2.0**900  # beyond it the grid's own arithmetic would overflow

Array = Tensor | np.ndarray


class Reducer(Protocol):
    """What sums go over: a communicator, or the communicators of several clusters, one per row of the array."""

    @property
    def size(self) -> int:
        """Ranks; 1: nothing needs to be exchanged."""

    def allreduce(self, array: np.ndarray, op: Op, phase: str = "communicate") -> None:
        """Collective: reduces a contiguous array in place."""


def magnitude(rows: Tensor) -> Tensor:
    """Largest absolute value of each row [c, P] -> float64 [c]; NaN where the row holds one."""
    if rows.shape[1] == 0:
        return rows.new_zeros(len(rows), dtype=torch.float64)
    if rows.device.type == "cpu" and rows.shape[1] > 4096 and len(rows):
        # row by row is ten times faster there than along a dimension
        low, high = torch.stack([torch.stack(torch.aminmax(row)) for row in rows]).unbind(1)
    else:
        low, high = torch.aminmax(rows, dim=1)
    return torch.maximum(-low, high).to(torch.float64)


class Segments:
    """Which of S sums each row of a piece belongs to: the rows of one sum lie together."""

    def __init__(self, into: np.ndarray):
        """into [c]: the number of each row's sum, 0..S-1, ascending."""
        self.into = into
        self.starts = np.flatnonzero(np.concatenate([into[:1] > -1, into[1:] != into[:-1]]))
        self.sums = into[self.starts]  # of the rows from starts[k] on
        self.counts = np.bincount(into)[self.sums]  # rows of each


@dataclass
class Piece:
    """Rows of one or several sums over clients, on this rank."""

    rows: Tensor  # [c, P], on the rank's device
    clients: np.ndarray  # [c] ids
    weights: Tensor | None = None  # [c, 1] of float64; None: ones
    segments: Segments | None = None  # None: all rows belong to one sum
    magnitudes: Tensor | None = None  # ``magnitude`` of the rows, where it is known already

    def count(self, only: np.ndarray | None) -> int:
        """Number of rows, of those that belong to some of the sums, only [S] bool."""
        return len(self.clients) if only is None else int(self.counts(len(only)) @ only)

    def counts(self, sums: int) -> np.ndarray:
        """[S] number of rows in each sum."""
        if self.segments is None:
            return np.array([len(self.clients)])
        if len(self.segments.counts) == sums:
            return self.segments.counts
        counts = np.zeros(sums, np.int64)
        counts[self.segments.sums] = self.segments.counts
        return counts

    def weighted(self, columns: slice = slice(None)) -> Array:
        """[c, p] float64, a copy; on the CPU a NumPy array, whose operations cost less to call."""
        rows = _array(self.rows if columns == slice(None) else self.rows[:, columns])
        if self.weights is not None:
            return rows * _array(self.weights)
        return rows.to(torch.float64, copy=True) if isinstance(rows, Tensor) else rows.astype(np.float64)

    @property
    def small(self) -> bool:
        """Whether it is one part as a whole, and its magnitudes are not known."""
        return self.magnitudes is None and self.rows.is_cpu and self.rows.numel() <= CACHE

    def parts(self) -> Iterator[tuple[slice, Array]]:
        """Columns and their weighted values [c, p]; on the CPU in parts that stay in the cache."""
        clients, columns = self.rows.shape
        width = max(1, CACHE // max(1, clients)) if self.rows.is_cpu else columns
        for first in range(0, max(1, columns), width):
            part = slice(first, first + width)
            yield part, self.weighted(part)

    def magnitude(self) -> np.ndarray:
        """The largest absolute value of each weighted row [c]; NaN or inf where one is not finite."""
        known = magnitude(self.rows) if self.magnitudes is None else self.magnitudes
        return to_host(known if self.weights is None else known * self.weights.squeeze(1).abs())

    def top(self, magnitudes: np.ndarray, sums: int) -> np.ndarray:
        """The largest of magnitudes [c, ...] in each sum [S]."""
        if self.segments is None:
            return np.array([magnitudes.max(initial=0.0)])
        found = np.maximum.reduceat(magnitudes.reshape(-1), self.segments.starts * (magnitudes.size // len(magnitudes)))
        if len(found) == sums:
            return found
        top = np.zeros(sums)
        top[self.segments.sums] = found
        return top

    def summed(self, values: Array, sums: int) -> Array:
        """Values [c, p] added up in their sums: [S, p]."""
        if self.segments is None:
            return values.sum(0)[None]
        if isinstance(values, Tensor):
            zeros = values.new_zeros(sums, values.shape[1])
            return zeros.index_add_(0, to_device(self.segments.into, values.device), values)
        found = np.add.reduceat(values, self.segments.starts, axis=0)
        if len(found) == sums:
            return found
        total = np.zeros((sums, values.shape[1]), values.dtype)
        total[self.segments.sums] = found
        return total


def grid_bits(participants: np.ndarray | int) -> np.ndarray:
    """[S] bits of a value on the grid of a sum over so many participants: the sum itself must fit an int64."""
    headroom = np.frexp(np.maximum(np.atleast_1d(participants), 1) - 1)[1]  # ceil(log2(participants))
    return np.minimum(BITS, SUM_BITS - np.maximum(1, headroom))


def reproducible_sum(
    comm: Reducer, pieces: Sequence[Piece], bits: np.ndarray, device: torch.device, only: np.ndarray | None = None
) -> Tensor:
    """Collective over comm: sums over all participants of weight * row, the same bits for any layout.

    pieces: those of this rank's participants, none where it has none; bits: ``grid_bits`` of each sum [S]; only: [S]
    bool, the sums that are wanted (None: all): the others may come out as anything.
    Returns float64 [S, P]; the error of a term is at most 2^-51 of its sum's largest term (up to 2048 participants).
    Raises Diverged on all ranks, with the lowest client id, when a value is not finite.
    """
    sums, pieces = len(bits), [piece for piece in pieces if len(piece.clients)]
    whole = [piece.weighted() if piece.small else None for piece in pieces]  # once, for the maximum and for the sum
    tops = [
        piece.top(piece.magnitude() if values is None else np.abs(values), sums)
        for piece, values in zip(pieces, whole, strict=True)
    ]
    top, columns = _agree(comm, pieces, tops, sums, only)
    grid = np.ldexp(1.0, np.maximum(np.frexp(top)[1], -900) - bits)[:, None]
    magic = 1.5 * 2.0**52 * grid  # adding it rounds to the grid; the bit pattern of the sum counts grid units
    total = _zeros(pieces, (sums, columns))
    counts = np.zeros(sums, np.int64)
    for piece, values in zip(pieces, whole, strict=True):
        shift = magic if piece.segments is None else magic[piece.segments.into]
        for part, weighted in piece.parts() if values is None else [(slice(None), values)]:
            into = total[:, part]
            into += _counted(piece, weighted, shift, sums)
        counts += piece.counts(sums)
    total -= _like(total, counts[:, None] * magic.view(np.int64))  # modulo 2^64, like the sums
    host = to_host(total) if isinstance(total, Tensor) else total
    comm.allreduce(host, "sum")
    return to_device(host * grid, device)


def _counted(piece: Piece, values: Array, shift: np.ndarray, sums: int) -> Array:
    """Sums [S, p] of the values [c, p] in units of the grid, and of the shift's bit pattern for each.

    Writes into the values.
    """
    values += _like(values, shift)
    return piece.summed(values.view(torch.int64) if isinstance(values, Tensor) else values.view(np.int64), sums)


def _zeros(pieces: Sequence[Piece], shape: tuple[int, int]) -> Array:
    """int64, where the pieces' weighted values are."""
    if all(piece.rows.is_cpu for piece in pieces):
        return np.zeros(shape, np.int64)
    return torch.zeros(shape, dtype=torch.int64, device=pieces[0].rows.device)


def float64_sum(
    comm: Reducer, pieces: Sequence[Piece], bits: np.ndarray, device: torch.device, only: np.ndarray | None = None
) -> Tensor:
    """Collective over comm: as ``reproducible_sum``, but plain addition: faster, the last bits depend on the layout."""
    pieces = [piece for piece in pieces if len(piece.clients)]
    _, columns = _agree(comm, pieces, [], len(bits), only)
    total = torch.zeros(len(bits), columns, dtype=torch.float64, device=device)
    for piece in pieces:
        if piece.weights is None and piece.segments is None:
            total += piece.rows.sum(0, keepdim=True, dtype=torch.float64)
        else:
            total += torch.as_tensor(piece.summed(piece.weighted(), len(bits)))
    host = to_host(total)
    comm.allreduce(host, "sum")
    if not np.isfinite(host if only is None else host[only]).all():
        _agree(comm, pieces, [piece.top(piece.magnitude(), len(bits)) for piece in pieces], len(bits), only)
    return to_device(host, device)


def column_sums(comm: Comm, values: np.ndarray, participants: int) -> np.ndarray:
    """Collective over comm: reproducible sums over clients of many scalars, each with a grid of its own.

    values [c, Q] float64: rows of this rank's clients, 0 where a client does not count; participants: at most that many
    rows on all ranks together. Returns [Q]; a column with a value that is not finite gives inf, on all ranks.
    """
    top = np.abs(values).max(0, initial=0.0)
    top = np.where(np.isfinite(top) & (top < LARGEST), top, np.inf)
    comm.allreduce(top, "max", "wait")
    bad = np.isinf(top)
    grid = np.ldexp(1.0, np.maximum(np.frexp(np.where(bad, 1.0, top))[1], -900) - grid_bits(participants))
    total = np.rint(np.where(bad, 0.0, values) / grid).astype(np.int64).sum(0)
    comm.allreduce(total, "sum")
    return np.where(bad, np.inf, total * grid)


def to_device(host: np.ndarray, device: torch.device) -> Tensor:
    """The one way from a host buffer to the rank's device."""
    tensor = torch.from_numpy(host)
    return tensor if device.type == "cpu" else tensor.to(device)


def to_host(tensor: Tensor) -> np.ndarray:
    """The one way from the rank's device to a host buffer that MPI and HDF5 may read (waits for the device)."""
    return tensor.detach().contiguous().cpu().numpy()


def _agree(
    comm: Reducer, pieces: Sequence[Piece], tops: Sequence[np.ndarray], sums: int, only: np.ndarray | None
) -> tuple[np.ndarray, int]:
    """Collective: each sum's largest magnitude [S], and the number of columns; some ranks may have no pieces.

    What is not finite travels apart, since MPI.MAX may lose a NaN.
    """
    top = tops[0] if len(tops) == 1 else np.max([np.zeros(sums), *tops], axis=0)
    bad = None if (top < LARGEST).all() else np.full(sums, -np.inf)  # minus the lowest client with such a value
    if bad is not None:
        top = np.where(top < LARGEST, top, 0.0)
        for piece in pieces:
            into = np.zeros(len(piece.clients), np.int64) if piece.segments is None else piece.segments.into
            wrong = ~(piece.magnitude() < LARGEST) & (True if only is None else only[into])
            np.maximum.at(bad, into[wrong], -piece.clients[wrong].astype(np.float64))
    columns = pieces[0].rows.shape[1] if pieces else 0
    if comm.size > 1:
        most = np.stack([top, np.full(sums, -np.inf) if bad is None else bad, np.full(sums, float(columns))], axis=1)
        comm.allreduce(most, "max", "wait")
        top, bad, columns = most[:, 0].copy(), most[:, 1], int(most[:, 2].max(initial=0.0))
    if bad is not None and np.isfinite(bad).any():
        raise Diverged(f"client {-bad.max():.0f}: what it sends is not finite")
    return top, columns


def _array(tensor: Tensor) -> Array:
    """On the CPU the same memory as a NumPy array."""
    return tensor.numpy() if tensor.is_cpu else tensor


def _like(array: Array, values: Array) -> Array:
    """The values where the array lives."""
    if isinstance(array, Tensor):
        return torch.as_tensor(values).to(array.device)
    return values.numpy() if isinstance(values, Tensor) else values
