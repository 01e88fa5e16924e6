"""Communicators: MPI where there is one, a single process without any MPI library. The only module that imports mpi4py,
but for the script in probe.py that hpcfl doctor runs apart.

Arrays travel as contiguous NumPy buffers (not pickled, in pieces of at most 2^30 elements), small objects pickled.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from hpcfl.errors import HpcflError, InputError
from hpcfl.launcher import launched_tasks

T = TypeVar("T")
Op = Literal["sum", "max", "min"]
PIECE = 2**30  # elements per message: MPI counts are 32-bit integers

FAULT_TOLERANT = "OMPI_MCA_mpi_ft_enable"  # set to 1 by mpirun --with-ft ulfm
PATIENCE = 2.0  # seconds to wait for the other ranks before the job is aborted
NOTICE = 3.0  # seconds until a rank that died is known to have


class Comm:
    """One process alone; ``MpiComm`` overrides every operation. Both count seconds of waiting and communicating."""

    rank = 0
    size = 1

    def __init__(self, seconds: dict[str, float] | None = None):
        self.seconds = {"wait": 0.0, "communicate": 0.0} if seconds is None else seconds

    def allreduce(self, array: np.ndarray, op: Op, phase: str = "communicate") -> None:
        """Collective: reduces a contiguous array in place over all ranks. phase: the account its seconds go to."""

    def bcast(self, value: T | None) -> T:
        """Collective: the value of rank 0 on every rank (pickled: for small objects); the others give None."""
        return value  # type: ignore[return-value]  # this is rank 0

    def gather(self, value: T) -> list[T] | None:
        """Collective: the values of all ranks on rank 0, None elsewhere (pickled: for small objects)."""
        return [value]

    def gather_rows(self, rows: np.ndarray) -> list[np.ndarray] | None:
        """Collective: every rank's array [c_r, ...] on rank 0, in rank order, None elsewhere."""
        return [rows]

    def scatter_arrays(self, parts: Sequence[Mapping[str, np.ndarray]] | None) -> dict[str, np.ndarray]:
        """Collective: part r of rank 0's list (named arrays) on rank r."""
        assert parts is not None
        return dict(parts[0])

    def barrier(self) -> None:
        """Collective: returns when all ranks are here."""

    def group(self, ranks: Sequence[int]) -> Comm:
        """Communicator of these ranks. Collective over them alone; all must create their groups in the same order."""
        return Comm(self.seconds)

    def node(self) -> Comm:
        """Collective: communicator of the ranks that share this one's memory."""
        return Comm(self.seconds)

    def free(self) -> None:
        """Collective: gives the communicator back, of which an MPI library has some thousands."""

    def arrive(self, seconds: float = PATIENCE) -> bool:
        """Collective: true when all ranks got here within that time, so that the job can end in order."""
        return True

    def abort(self, code: int) -> None:
        """Ends the process (under MPI: all ranks of the job) at once with this exit code."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def from_root(self, action: Callable[[], T]) -> T:
        """Collective: rank 0 runs the action; all ranks get its (small) value, or raise its HpcflError."""
        return self.bcast(self.together(lambda: action() if self.rank == 0 else None))

    def together(self, action: Callable[[], T]) -> T:
        """Collective: the action's value on each rank; the HpcflError of any rank is raised on all."""
        outcome: list[T] = []
        failure = None
        try:
            outcome.append(action())
        except HpcflError as error:
            failure = error
        self.raise_together(failure)
        return outcome[0]

    def raise_together(self, error: HpcflError | None) -> None:
        """Collective: raises the error of the lowest rank that has one, on all ranks."""
        errors = self.gather(error)
        first = self.bcast(next((e for e in errors if e is not None), None) if errors else None)
        if first is not None:
            raise first

    def check_fault_tolerance(self) -> None:
        """Raises InputError where this launch cannot go on without a rank that died."""
        raise InputError(
            'run.on_rank_loss = "shrink": there are no other ranks; start it as mpirun --with-ft ulfm -n RANKS ...'
        )

    def lost(self, error: BaseException) -> bool:
        """Whether the error says that a rank died, or that another rank found so."""
        return False

    def survivors(self) -> Comm:
        """Collective over the ranks that are left, after a loss: their world, in the same order."""
        return self

    def settle(self) -> None:
        """Collective: makes what the job will need to end in order."""

    def mpi(self) -> str:
        """Name and version of the MPI library."""
        return "none (one process)"


class MpiComm(Comm):
    """An MPI communicator."""

    def __init__(self, handle: Any, parent: MpiComm | None = None):
        """parent: what it was made from, with which it shares its seconds and the list of all handles."""
        from mpi4py import MPI

        super().__init__(parent.seconds if parent else None)
        self._mpi = MPI
        self._family: list[Any] = parent._family if parent else []
        self._family.append(handle)
        self._handle = handle
        self._farewell: Any = None
        self._ops = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
        self.rank: int = handle.rank
        self.size: int = handle.size

    @classmethod
    def world(cls) -> MpiComm:
        """All ranks of the job. Raises ImportError or RuntimeError where there is no MPI library."""
        from mpi4py import MPI

        comm = cls(MPI.COMM_WORLD)
        comm.settle()
        return comm

    def settle(self) -> None:
        self._farewell = self._handle.Dup()
        self._family.append(self._farewell)

    def check_fault_tolerance(self) -> None:
        if "Open MPI" not in self.mpi() or os.environ.get(FAULT_TOLERANT) != "1":
            raise InputError(
                f'run.on_rank_loss = "shrink": this launch of {self.mpi()} has no fault tolerance; start it with '
                "mpirun --with-ft ulfm of Open MPI 5, or leave run.on_rank_loss out"
            )

    def lost(self, error: BaseException) -> bool:
        if not isinstance(error, self._mpi.Exception):
            return False
        signs = (self._mpi.ERR_PROC_FAILED, self._mpi.ERR_PROC_FAILED_PENDING, self._mpi.ERR_REVOKED)
        if error.Get_error_class() in signs:
            return True
        if os.environ.get(FAULT_TOLERANT) != "1":
            return False
        deadline = time.monotonic() + NOTICE  # Open MPI gives some losses as other errors, before it knows who died
        while not (self._handle.Is_revoked() or self._handle.Get_failed().size):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def survivors(self) -> MpiComm:
        for handle in self._family:  # all of them: others may wait in any
            handle.Revoke()
        return MpiComm(self._handle.Shrink())

    def allreduce(self, array: np.ndarray, op: Op, phase: str = "communicate") -> None:
        start = time.perf_counter()
        flat = array.reshape(-1, copy=False)
        for first in range(0, flat.size, PIECE):
            self._handle.Allreduce(self._mpi.IN_PLACE, flat[first : first + PIECE], self._ops[op])
        self.seconds[phase] += time.perf_counter() - start

    def bcast(self, value: T | None) -> T:
        start = time.perf_counter()
        received: T = self._handle.bcast(value)
        self.seconds["wait"] += time.perf_counter() - start
        return received

    def gather(self, value: T) -> list[T] | None:
        return self._handle.gather(value)

    def gather_rows(self, rows: np.ndarray) -> list[np.ndarray] | None:
        shapes = self._handle.gather(rows.shape)
        if self.rank != 0:
            self._send(rows, 0)
            return None
        assert shapes is not None
        return [rows, *(self._receive(shape, rows.dtype, r) for r, shape in enumerate(shapes) if r != 0)]

    def scatter_arrays(self, parts: Sequence[Mapping[str, np.ndarray]] | None) -> dict[str, np.ndarray]:
        described = None
        if parts is not None:
            described = [{name: (a.shape, a.dtype) for name, a in part.items()} for part in parts]
        mine = self._handle.scatter(described)
        if parts is None:
            return {name: self._receive(shape, dtype, 0) for name, (shape, dtype) in mine.items()}
        for r, part in enumerate(parts):
            if r != self.rank:
                for array in part.values():
                    self._send(array, r)
        return dict(parts[self.rank])

    def _send(self, array: np.ndarray, rank: int) -> None:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for first in range(0, flat.size, PIECE):
            self._handle.Send(flat[first : first + PIECE], rank)

    def _receive(self, shape: tuple[int, ...], dtype: np.dtype, rank: int) -> np.ndarray:
        array = np.empty(shape, dtype)
        flat = array.reshape(-1).view(np.uint8)
        for first in range(0, flat.size, PIECE):
            self._handle.Recv(flat[first : first + PIECE], rank)
        return array

    def barrier(self) -> None:
        self._handle.Barrier()

    def group(self, ranks: Sequence[int]) -> Comm:
        if len(ranks) == 1:
            return Comm(self.seconds)
        return MpiComm(self._handle.Create_group(self._handle.group.Incl(list(ranks))), self)

    def node(self) -> Comm:
        return MpiComm(self._handle.Split_type(self._mpi.COMM_TYPE_SHARED), self)

    def free(self) -> None:
        self._family.remove(self._handle)
        self._handle.Free()

    def arrive(self, seconds: float = PATIENCE) -> bool:
        deadline = time.monotonic() + seconds
        try:
            request = self._farewell.Ibarrier()  # apart from the collectives that others may still be in
            while not request.Test():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.01)
        except self._mpi.Exception:  # a rank died: not all can come
            return False
        return True

    def abort(self, code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._mpi.COMM_WORLD.Abort(code)

    def mpi(self) -> str:
        return " ".join(self._mpi.Get_library_version().strip("\0").splitlines()[0].split(",")[0].split())


def world() -> Comm:
    """The communicator of all ranks; without a working MPI that of this process alone.

    Raises InputError when a launcher started several tasks and each believes that it is alone: they would all do the
    same work and write the same results.
    """
    comm: Comm
    reason = "the MPI library in use does not belong to that launcher"
    if launched_tasks() == 1:  # alone, Open MPI needs no shared memory, and would leave a segment of it behind
        os.environ.setdefault("OMPI_MCA_btl", "self")
    if os.environ.get(FAULT_TOLERANT) == "1":  # the last meeting of the ranks, in MPI_Finalize, may wait for the dead
        os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")
    try:
        comm = MpiComm.world()
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError where it finds no MPI library
        comm, reason = Comm(), f"no MPI library could be loaded ({error})"
    tasks = launched_tasks()
    if comm.size == 1 and tasks > 1:
        raise InputError(
            f"a launcher started {tasks} tasks, but this process believes it is alone: {reason}. "
            "Use the mpirun of the MPI that mpi4py loads (see: hpcfl doctor), or under srun the matching --mpi type."
        )
    return comm
