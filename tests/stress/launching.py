"""Jobs that are started to be killed: which processes they have, and whether they have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "jobs/quickstart/apfl.toml"


class Launch:
    """A job that runs, on some ranks (0: one process without a launcher), its output in a file."""

    def __init__(self, folder: Path, name: str, changes: Sequence[str], ranks: int, *options: str, mpirun: tuple = ()):
        """folder: for results and output."""
        self.log = folder / f"{name}.txt"
        sets = [word for change in changes for word in ("--set", change)]
        command = [sys.executable, "-m", "hpcfl", "run", str(JOB), "--out", str(folder / name), *sets, *options]
        if ranks:
            command = ["bash", str(ROOT / "jobs/mpirun.sh"), *mpirun, "-n", str(ranks), *command]
        self.before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, start_new_session=True
            )

    @property
    def output(self) -> str:
        return self.log.read_bytes()[self.before :].decode(errors="replace")

    def ranks(self) -> dict[int, int]:
        """Rank -> process id, of those that live."""
        found = {}
        for pid in self.session():
            for rank in _ranks_of(pid):
                found[rank] = pid
        return found

    def session(self) -> list[int]:
        """Process ids of all that lives of this launch."""
        return [pid for pid in _processes() if pid != self.process.pid and _session(pid) == self.process.pid]

    def over(self) -> bool:
        return self.process.poll() is not None and not self.session()

    def wait(self, seconds: float) -> bool:
        """Whether all of it ends in time; else it is ended by force."""
        if until(self.over, seconds):
            return True
        for pid in [self.process.pid, *self.session()]:
            kill(pid)
        self.process.wait()
        return False


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # ended meanwhile
        return


def until(what: Callable[[], object], seconds: float, pause: float = 0.02) -> bool:
    """Whether something becomes true in time."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _session(pid: int) -> int | None:
    """The session of a process; None where it has ended, also if nobody has waited for it yet."""
    try:
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(session)


def _ranks_of(pid: int) -> Iterator[int]:
    try:
        command, variables = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
    except (FileNotFoundError, ProcessLookupError):
        return
    if b"-m\0hpcfl\0run" in command:
        for variable in variables.split(b"\0"):
            name, _, value = variable.partition(b"=")
            if name in (b"OMPI_COMM_WORLD_RANK", b"PMI_RANK"):
                yield int(value)
