"""Sums over clients whose bits depend neither on the number of ranks nor on the order of the terms.

Every value is rounded to an integer multiple of one common power of two, and integers are added: addition of integers
is associative. The grid follows from the largest weighted value of any single client, which one MAX over the ranks
finds. (Idea: Demmel and Nguyen, "Parallel reproducible summation", IEEE Trans. Comp. 2015; here with one fixed grid.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hpcfl.comm import Comm, Op
from hpcfl.errors import Diverged

BITS = 51  # of one rounded value: x + 1.5 * 2^52 grid rounds x to the grid when |x| <= 2^51 grid
SUM_BITS = 62  # of their sum in an int64
CACHE = 1 << 16  # float64 values per piece of work on the CPU: stays in the second-level cache
LARGEST = 2.0**900  # beyond it the grid's own arithmetic would overflow


class Reducer(Protocol):
    """What sums go over: a communicator, or the communicators of several clusters, one per row of the array."""

    def allreduce(self, array: np.ndarray, op: Op, phase: str = "communicate") -> None:
        """Collective: reduces a contiguous array in place."""


def magnitude(rows: Tensor) -> Tensor:
    """Largest absolute value of each row [c, P] -> float64 [c]; NaN where the row holds one."""
    if rows.device.type == "cpu" and rows.shape[1] > 4096 and len(rows):
        # row by row is ten times faster there than along a dimension
        low, high = torch.stack([torch.stack(torch.aminmax(row)) for row in rows]).unbind(1)
    else:
        low, high = torch.aminmax(rows, dim=1)
    return torch.maximum(-low, high).to(torch.float64)


@dataclass
class Terms:
    """This rank's terms of one or several sums over clients; a rank may have none."""

    rows: Sequence[Tensor]  # pieces [c, P], on the rank's device
    clients: Sequence[np.ndarray]  # pieces [c]: ids
    weights: Sequence[Tensor] | None = None  # pieces [c, 1] of float64; None: ones
    magnitudes: Sequence[Tensor] | None = None  # ``magnitude`` of each piece, where it is known already
    sums: int = 1  # S: how many sums
    into: Sequence[np.ndarray] | None = None  # pieces [c]: the sum that a row belongs to, 0..S-1; None: one sum


def reproducible_sum(comm: Reducer, terms: Terms, participants: np.ndarray | int, device: torch.device) -> Tensor:
    """Collective over comm: sums over all participants of weight * row, the same bits for any layout.

    participants: number over all ranks, of each sum [S] (sets the headroom of the integers).
    Returns float64 [S, P]; the error of a term is at most 2^-51 of its sum's largest term (up to 2048 participants).
    Raises Diverged on all ranks, with the lowest client id, when a value is not finite.
    """
    magnitudes = [magnitude(piece) for piece in terms.rows] if terms.magnitudes is None else terms.magnitudes
    if terms.weights is not None:
        magnitudes = [m * w.squeeze(1).abs() for m, w in zip(magnitudes, terms.weights, strict=True)]
    top, columns = _agree(comm, terms, magnitudes)
    grid = _grid(top, participants)
    magic = 1.5 * 2.0**52 * grid  # adding it rounds to the grid; the bit pattern of the sum counts grid units
    total = torch.zeros(terms.sums, columns, dtype=torch.int64, device=device)
    most = max((len(piece) for piece in terms.rows), default=0)
    width = max(1, columns if device.type != "cpu" else min(columns, CACHE // max(1, most)))
    scratch = torch.empty(most * width, dtype=torch.float64, device=device)
    for k, piece in enumerate(terms.rows):
        into = None if terms.into is None else to_device(terms.into[k], device)
        shift = float(magic[0]) if terms.into is None else to_device(magic[terms.into[k], None], device)
        for a in range(0, columns, width):
            part = piece[:, a : a + width]
            values = scratch[: part.numel()].view(part.shape).copy_(part)
            if terms.weights is not None:
                values *= terms.weights[k]
            values += shift
            if into is None:
                total[0, a : a + width] += values.view(torch.int64).sum(0)
            else:
                total[:, a : a + width].index_add_(0, into, values.view(torch.int64))
    with np.errstate(over="ignore"):  # modulo 2^64, like the sums
        excess = _counts(terms) * magic.view(np.int64)
    total -= to_device(excess[:, None], device)
    return to_device(_allreduced(comm, total), device).to(torch.float64) * to_device(grid[:, None], device)


def float64_sum(comm: Reducer, terms: Terms, participants: np.ndarray | int, device: torch.device) -> Tensor:
    """Collective over comm: as ``reproducible_sum``, but plain addition: faster, the last bits depend on the layout."""
    _, columns = _agree(comm, terms, [])
    total = torch.zeros(terms.sums, columns, dtype=torch.float64, device=device)
    for k, piece in enumerate(terms.rows):
        values = piece if terms.weights is None else piece * terms.weights[k]
        if terms.into is None:
            total[0] += values.sum(0, dtype=torch.float64)
        else:
            total.index_add_(0, to_device(terms.into[k], device), values.to(torch.float64))
    host = _allreduced(comm, total)
    if not np.isfinite(host).all():
        _agree(comm, terms, [magnitude(piece) for piece in terms.rows])
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
    grid = _grid(np.where(bad, 1.0, top), participants)
    total = np.rint(np.where(bad, 0.0, values) / grid).astype(np.int64).sum(0)
    comm.allreduce(total, "sum")
    return np.where(bad, np.inf, total * grid)


def to_device(host: np.ndarray, device: torch.device) -> Tensor:
    """The one way from a host buffer to the rank's device."""
    return torch.from_numpy(host).to(device)


def to_host(tensor: Tensor) -> np.ndarray:
    """The one way from the rank's device to a host buffer that MPI and HDF5 may read (waits for the device)."""
    return tensor.detach().contiguous().cpu().numpy()


def _allreduced(comm: Reducer, total: Tensor) -> np.ndarray:
    host = to_host(total)
    comm.allreduce(host, "sum")
    return host


def _agree(comm: Reducer, terms: Terms, magnitudes: Sequence[Tensor]) -> tuple[np.ndarray, int]:
    """Collective: each sum's largest magnitude [S], and the number of columns; some ranks may have no rows.

    A NaN becomes inf first, since MPI.MAX may lose it.
    """
    most = np.zeros((terms.sums, 3))  # magnitude, columns, minus the lowest client with a value that is not finite
    most[:, 1] = terms.rows[0].shape[1] if terms.rows else 0
    most[:, 2] = -np.inf
    if magnitudes:
        mine = to_host(torch.cat(list(magnitudes)) if len(magnitudes) > 1 else magnitudes[0])
        fine = np.abs(mine) < LARGEST
        into = np.zeros(len(mine), np.int64) if terms.into is None else np.concatenate(terms.into)
        np.maximum.at(most[:, 0], into[fine], mine[fine])
        if not fine.all():
            np.maximum.at(most[:, 2], into[~fine], -np.concatenate(terms.clients)[~fine].astype(np.float64))
    comm.allreduce(most, "max", "wait")
    lowest = -most[:, 2].max(initial=-np.inf)
    if np.isfinite(lowest):
        raise Diverged(f"client {lowest:.0f}: what it sends is not finite")
    return most[:, 0], int(most[:, 1].max(initial=0))


def _counts(terms: Terms) -> np.ndarray:
    """[S] number of this rank's rows in each sum."""
    if terms.into is None:
        return np.array([sum(len(piece) for piece in terms.rows)])
    into = np.concatenate(terms.into) if terms.into else np.zeros(0, np.int64)
    return np.bincount(into, minlength=terms.sums)


def _grid(top: np.ndarray, participants: np.ndarray | int) -> np.ndarray:
    """The power of two that values up to ``top`` are rounded to; leaves headroom for the sum over the participants."""
    headroom = np.maximum(1, np.frexp(np.maximum(np.asarray(participants), 1) - 1)[1])  # ceil(log2(participants))
    return np.ldexp(1.0, np.maximum(np.frexp(top)[1], -900) - np.minimum(BITS, SUM_BITS - headroom))
