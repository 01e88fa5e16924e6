"""Where the clients' rows of the local state live: on the device, in the host's memory, or in a file of slots.

Rounds fetch the rows of a block of clients and write them back (rows.py), so that beyond "device" only the rows of a
block are on the device at a time, and with "disk" in memory at all.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from hpcfl.algorithm import Algorithm, Rows, State, Work
from hpcfl.engine import Engine
from hpcfl.errors import InputError, RunError
from hpcfl.options import user_path
from hpcfl.reduce import to_device, to_host
from hpcfl.rows import Index, Kept, put, take

Place = Literal["device", "host", "disk"]
AT_ONCE = 4096  # clients whose first rows are made together


def check_place(where: Place, work: Work, device: torch.device) -> None:
    """Raises InputError where an algorithm computes with the rows of all clients at once, which must be on its device.

    where: ``run.state``.
    """
    if work.whole_cohort and _elsewhere(where, device):
        raise InputError(
            f'run.state = "{where}": this algorithm computes with the rows of all clients at once, so they must lie on '
            'the device; leave run.state out, or set it to "device"'
        )


def check_scratch(where: Place, scratch: str | None) -> None:
    """Raises InputError where ``run.scratch`` is needed and is no folder in which this process can make a file."""
    if where == "disk" and scratch is not None:
        try:
            _anonymous(user_path(scratch)).close()
        except OSError as error:
            raise InputError(
                f'run.scratch = "{scratch}": cannot make a file there: {error.strerror}; give a folder that every '
                "node has, or leave run.scratch out"
            ) from None


def first_state(algorithm: Algorithm, engine: Engine, where: Place, scratch: Path) -> State:
    """Collective over the world: the state before the first round, its local rows where ``run.state`` says.

    Rows that do not lie on the device are ``Kept`` instead of tensors; rounds and evaluations read both by ``take``.
    scratch: an existing folder for the file of "disk"; it is not seen there, and is gone with the process. Raises
    RunError, on all ranks alike, where it cannot be made.
    """
    task, group = engine.task, engine.group
    if not _elsewhere(where, task.device):
        return algorithm.init(task, group)

    def first_rows(rows: np.ndarray) -> Rows:
        return algorithm.init(task, group.some(rows)).local

    nobody = algorithm.init(task, group.some(np.zeros(0, np.int64)))
    local: Mapping[str, Kept] = {}
    if where == "host":
        local = {name: HostRows(group.clients, rows) for name, rows in nobody.local.items()}
        for first in range(0, group.clients, AT_ONCE):
            piece = slice(first, min(first + AT_ONCE, group.clients))
            for name, rows in first_rows(np.arange(group.clients)[piece]).items():
                local[name].put(piece, rows)
    elif nobody.local:
        file = engine.topology.world.together(lambda: SlotFile(scratch, group.clients, nobody.local, first_rows))
        local = {name: DiskRows(file, name, rows) for name, rows in nobody.local.items()}
    return State(nobody.shared, cast(Rows, local))  # they act as tensors do in rounds


def fetch(local: Rows, rows: Index) -> dict[str, np.ndarray]:
    """Name -> these rows [c, ...], for a checkpoint."""
    return {name: to_host(take(values, rows)) for name, values in local.items()}


def restore(local: Rows, rows: np.ndarray, new: Mapping[str, np.ndarray]) -> None:
    """Writes such rows in place; rows: positions in the group [c], each of them once."""
    for name, values in new.items():
        put(local[name], rows, torch.from_numpy(values).to(local[name].device))


class HostRows(Kept):
    """In the host's memory, for a device with its own."""

    def __init__(self, clients: int, like: Tensor):
        """like: rows of the same shape and type, any number of them, on the device."""
        self.shape, self.dtype, self.device = (clients, *like.shape[1:]), like.dtype, like.device
        self._values = torch.empty(self.shape, dtype=self.dtype)

    def take(self, rows: Index) -> Tensor:
        chosen = take(self._values, rows)
        return chosen.to(self.device, copy=True)

    def put(self, rows: Index, new: Tensor) -> None:
        put(self._values, rows, new.to(self._values.device))


class DiskRows(Kept):
    """One name of the records of a ``SlotFile``."""

    def __init__(self, file: SlotFile, name: str, like: Tensor):
        """like: as for ``HostRows``."""
        self.shape, self.dtype, self.device = (len(file.slot), *like.shape[1:]), like.dtype, like.device
        self.file, self.name = file, name

    def take(self, rows: Index) -> Tensor:
        return to_device(self.file.read(self.name, self._positions(rows)), self.device)

    def put(self, rows: Index, new: Tensor) -> None:
        self.file.write(self.name, self._positions(rows), to_host(new))

    def _positions(self, rows: Index) -> np.ndarray:
        return np.arange(*rows.indices(len(self))) if isinstance(rows, slice) else rows


class SlotFile:
    """Records in a file without a name, one per client, with the client's rows of all names side by side.

    A client gets its slot when a row of it is first written; before that its rows are made anew whenever they are read.
    The file is read and written, not mapped: mapped pages would count as the process's memory.
    """

    def __init__(self, folder: Path, clients: int, like: Rows, first_rows: Callable[[np.ndarray], Rows]):
        """like: name -> rows of the same shape and type. first_rows: of the clients at some positions, [c, ...] each.

        Raises RunError where the file cannot be made.
        """
        columns = [(name, to_host(rows[:0]).dtype, tuple(rows.shape[1:])) for name, rows in like.items()]
        self.record = np.dtype(columns)
        self.slot = np.full(clients, -1, np.int64)  # [C] of each client; -1: none yet
        self._used, self._first_rows, self._folder = 0, first_rows, folder
        try:
            self._file = _anonymous(folder)
        except OSError as error:
            raise self._failed(error) from error

    def read(self, name: str, positions: np.ndarray) -> np.ndarray:
        """The rows [c, ...] of the clients at these positions."""
        dtype, offset = self._column(name)
        out, slots = np.empty(len(positions), dtype), self.slot[positions]
        for k, row in zip(slots.tolist(), _bytes(out, dtype), strict=True):
            if k >= 0:
                self._move(_read, row, k * self.record.itemsize + offset)
        new = np.flatnonzero(slots < 0)
        if len(new):
            out[new] = to_host(self._first_rows(positions[new])[name])
        return out

    def write(self, name: str, positions: np.ndarray, rows: np.ndarray) -> None:
        """Overwrites the rows [c, ...] of the clients at these positions, each of them once."""
        new = positions[self.slot[positions] < 0]
        if len(new):
            self._add(new)
        dtype, offset = self._column(name)
        for k, row in zip(self.slot[positions].tolist(), _bytes(rows, dtype), strict=True):
            self._move(_write, row, k * self.record.itemsize + offset)

    def _add(self, positions: np.ndarray) -> None:
        """Slots for these clients, with their first rows."""
        records = np.empty(len(positions), self.record)
        for name, rows in self._first_rows(positions).items():
            records[name] = to_host(rows)
        self._move(_write, records.view(np.uint8), self._used * self.record.itemsize)
        self.slot[positions] = np.arange(self._used, self._used + len(positions))
        self._used += len(positions)

    def _column(self, name: str) -> tuple[np.dtype, int]:
        """Type of a row, and its place in a record."""
        fields = self.record.fields
        assert fields is not None
        return fields[name][0], fields[name][1]

    def _move(self, call: Callable[[int, Any, int], int], memory: np.ndarray, offset: int) -> None:
        """All of the memory [bytes] from or to the file: one call may move a part."""
        moved = 0
        try:
            while moved < len(memory):
                moved += call(self._file.fileno(), memory[moved:], offset + moved)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> RunError:
        return RunError(
            f"{self._folder}: cannot keep the clients' rows there: {error.strerror}; set run.scratch to a folder on a "
            'disk with more room, or run.state to "host"'
        )


def _read(file: int, memory: Any, offset: int) -> int:
    return os.preadv(file, [memory], offset)


def _write(file: int, memory: Any, offset: int) -> int:
    return os.pwrite(file, memory, offset)


def _anonymous(folder: Path) -> IO[bytes]:
    """A new file that no name leads to."""
    return tempfile.TemporaryFile(dir=folder, buffering=0)


def _bytes(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """[c, bytes of a row] the memory of rows [c, ...]."""
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), dtype.itemsize)


def _elsewhere(where: Place, device: torch.device) -> bool:
    """Whether rows do not lie on the device; on the CPU the host's memory is the device's."""
    return where == "disk" or (where == "host" and device.type != "cpu")
