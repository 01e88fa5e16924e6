"""Requests to stop: signals that are noted at once and obeyed by rank 0 between two plans. Nothing here imports torch.

An unhandled SIGUSR1 would end a process, and torch takes seconds to load: so ``listen`` comes first of all. A handler
only notes the signal, since Python runs it when the current call into MPI or torch returns.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping

from hpcfl.errors import InputError

STOP_SIGNALS = ("USR1", "USR2", "HUP")
PR_SET_PDEATHSIG = 1


class StopNow(KeyboardInterrupt):
    """The second request to stop: raised wherever rank 0 is. The last checkpoint counts."""


class StopRequest:
    """The signals that ask a run to stop.

    name: "USR1", ...; asks for a checkpoint and a stop everywhere. SIGTERM and Ctrl-C do so too where there is time for
    it: without a launcher and under MPICH's mpirun. Open MPI's kills the ranks a quarter of a second later.
    """

    def __init__(self, name: str = "USR1", environment: Mapping[str, str] = os.environ):
        if name not in STOP_SIGNALS:
            raise InputError(f'--stop-signal "{name}": expected one of {", ".join(STOP_SIGNALS)}')
        self.name = name
        self.started = time.monotonic()
        self.launched = any(key in environment for key in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID"))
        patient = "HYDI_CONTROL_FD" in environment or not self.launched
        self.signals = {signal.Signals[f"SIG{name}"], *((signal.SIGTERM, signal.SIGINT) if patient else ())}
        self.received: list[signal.Signals] = []
        self.ending = False
        self._parent = os.getppid()

    def listen(self) -> None:
        """From now on the signals are noted. To be called from the main thread."""
        for number in self.signals:
            signal.signal(number, self._note)

    def follow(self, rank: int, told: Callable[[signal.Signals], None]) -> None:
        """Only rank 0 obeys; the others ignore the signals that a launcher passes on to all.

        told: called on rank 0 for each of the signals and for SIGTERM, in a thread of its own, and so while the main
        thread is in a call.
        """
        if self.launched:
            self._end_with_parent()
        if rank != 0:
            for number in self.signals:
                signal.signal(number, signal.SIG_IGN)
            return
        self.listen()
        if signal.SIGTERM not in self.signals:
            signal.signal(signal.SIGTERM, lambda number, frame: None)
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

        def watch() -> None:
            while True:
                number = signal.Signals(os.read(read, 1)[0])
                if number in self.signals or number == signal.SIGTERM:
                    told(number)

        threading.Thread(target=watch, name="signals", daemon=True).start()

    def end(self) -> None:
        """From now on the signals change nothing: the run ends, and its exit code counts. Ctrl-C still stops."""
        self.ending = True
        for number in self.signals:  # their defaults, which they get back when the interpreter shuts down, would kill
            atexit.register(signal.signal, number, signal.SIG_IGN)
        if signal.SIGINT in self.signals:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @property
    def reason(self) -> str | None:
        """Why to stop, "signal SIGUSR1"; None when nobody asked."""
        return f"signal {self.received[0].name}" if self.received else None

    def _note(self, number: int, frame: object) -> None:
        self.received.append(signal.Signals(number))
        if len(self.received) > 1 and not self.ending:
            self.end()
            raise StopNow(self.received[0].name)

    def _end_with_parent(self) -> None:
        """The kernel ends this process when its launcher dies: orphans would go on and hold the results file."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._parent:  # it died before
                os.kill(os.getpid(), signal.SIGKILL)
