"""Sums over clients whose bits depend neither on the number of ranks nor on the order of the terms.

Every value is rounded to an integer multiple of one common power of two, and integers are added: addition of integers
is associative. The grid follows from the largest weighted value of any single client, which one MAX over the ranks
finds. (Idea: Demmel and Nguyen, "Parallel reproducible summation", IEEE Trans. Comp. 2015; here with one fixed grid.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcfl.comm import Comm
from hpcfl.errors import Diverged

BITS = 51  # of one rounded value: x + 1.5 * 2^52 grid rounds x to the grid when |x| <= 2^51 grid
SUM_BITS = 62  # of their sum in an int64
CACHE = 1 << 16  # float64 values per piece of work on the CPU: stays in the second-level cache
LARGEST = 2.0**900  # beyond it the grid's own arithmetic would overflow


def magnitude(rows: Tensor) -> Tensor:
    """Largest absolute value of each row [c, P] -> float64 [c]; NaN where the row holds one."""
    if rows.device.type == "cpu" and rows.shape[1] > 4096 and len(rows):
        # row by row is ten times faster there than along a dimension
        low, high = torch.stack([torch.stack(torch.aminmax(row)) for row in rows]).unbind(1)
    else:
        low, high = torch.aminmax(rows, dim=1)
    return torch.maximum(-low, high).to(torch.float64)


def reproducible_sum(
    comm: Comm,
    rows: Sequence[Tensor],
    clients: Sequence[np.ndarray],
    weights: Sequence[Tensor] | None,
    participants: int,
    device: torch.device,
    magnitudes: Sequence[Tensor] | None = None,
) -> Tensor:
    """Collective over comm: sum over all participants of weight * row, the same bits for any layout.

    rows: pieces [c, P] of this rank's participants, on its device, none where it has no participants; clients: their
    ids, piece by piece; weights: pieces [c, 1] of float64, None for ones; participants: number over all ranks (sets the
    headroom of the integers); magnitudes: ``magnitude`` of each piece where it is known already.
    Returns float64 [P]; the error of a term is at most 2^-51 of the largest term (up to 2048 participants).
    Raises Diverged on all ranks, with the lowest client id, when a value is not finite.
    """
    if magnitudes is None:
        magnitudes = [magnitude(piece) for piece in rows]
    if weights is not None:
        magnitudes = [m * w.squeeze(1).abs() for m, w in zip(magnitudes, weights, strict=True)]
    top, columns = _agree(comm, rows, magnitudes, clients)
    grid = _grid(top, participants)
    magic = 1.5 * 2.0**52 * grid  # adding it rounds to the grid; the bit pattern of the sum counts grid units
    total = torch.zeros(columns, dtype=torch.int64, device=device)
    count = sum(len(piece) for piece in rows)
    most = max((len(piece) for piece in rows), default=0)
    width = columns if device.type != "cpu" else min(columns, CACHE // max(1, most) or 1)
    scratch = torch.empty(most * width, dtype=torch.float64, device=device)
    for k, piece in enumerate(rows):
        for a in range(0, columns, width):
            part = piece[:, a : a + width]
            values = scratch[: part.numel()].view(part.shape).copy_(part)
            if weights is not None:
                values *= weights[k]
            values += magic
            total[a : a + width] += values.view(torch.int64).sum(0)
    total -= _wrap(count * int(np.float64(magic).view(np.int64)))
    return to_device(_allreduced(comm, total), device).to(torch.float64) * grid


def float64_sum(
    comm: Comm,
    rows: Sequence[Tensor],
    clients: Sequence[np.ndarray],
    weights: Sequence[Tensor] | None,
    participants: int,
    device: torch.device,
    magnitudes: Sequence[Tensor] | None = None,
) -> Tensor:
    """Collective over comm: as ``reproducible_sum``, but plain addition: faster, the last bits depend on the layout."""
    _, columns = _agree(comm, rows, [], [])
    total = torch.zeros(columns, dtype=torch.float64, device=device)
    for k, piece in enumerate(rows):
        total += piece.sum(0, dtype=torch.float64) if weights is None else (piece * weights[k]).sum(0)
    host = _allreduced(comm, total)
    if not np.isfinite(host).all():
        _agree(comm, rows, [magnitude(piece) for piece in rows], clients)
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


def _allreduced(comm: Comm, total: Tensor) -> np.ndarray:
    host = to_host(total)
    comm.allreduce(host, "sum")
    return host


def _agree(
    comm: Comm, rows: Sequence[Tensor], magnitudes: Sequence[Tensor], clients: Sequence[np.ndarray]
) -> tuple[float, int]:
    """Collective: the largest magnitude and the number of columns over all ranks, some of which may have no rows.

    A NaN becomes inf first, since MPI.MAX may lose it.
    """
    mine = to_host(torch.cat(list(magnitudes))) if magnitudes else np.zeros(0)
    mine = np.where(np.isfinite(mine) & (mine < LARGEST), mine, np.inf)
    most = np.array([mine.max(initial=0.0), rows[0].shape[1] if rows else 0])
    comm.allreduce(most, "max", "wait")
    if np.isinf(most[0]):
        ids = np.concatenate(clients) if clients else np.zeros(0, np.int64)
        first = np.array([ids[np.isinf(mine)].min(initial=np.iinfo(np.int64).max)])
        comm.allreduce(first, "min")
        raise Diverged(f"client {first[0]}: what it sends is not finite")
    return float(most[0]), int(most[1])


def _grid(top: Any, participants: int) -> Any:
    """The power of two that values up to ``top`` are rounded to; leaves headroom for the sum over the participants."""
    bits = min(BITS, SUM_BITS - max(1, math.ceil(math.log2(max(participants, 1)))))
    return np.ldexp(1.0, np.maximum(np.frexp(top)[1], -900) - bits)


def _wrap(value: int) -> int:
    """The representative of value modulo 2^64 in the range of int64."""
    return (value + 2**63) % 2**64 - 2**63
