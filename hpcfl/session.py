"""One ``hpcfl run``: loads the job, runs it, and ends it in order whatever happens.

A mistake of the user and a diverged run are raised on all ranks alike: rank 0 says it once and all leave. Any other
exception ends the job within seconds: the rank that has it tells what, where and with which clients, leaves the
traceback in a file of the run's folder, and aborts; rank 0 still marks the results as failed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hpcfl.comm import Comm, world
from hpcfl.config import Job, load
from hpcfl.errors import HpcflError
from hpcfl.registry import load_plugins
from hpcfl.results import ResultsWriter
from hpcfl.run import run

PATIENCE = 2.0  # seconds to wait for the other ranks before the job is aborted


class Session:
    """A run from the command line to its exit code."""

    def __init__(self, job: Path, changes: Sequence[str], plugins: Sequence[Path]):
        self.job_file, self.changes, self.plugins = job, changes, plugins
        self.folder: Path | None = None
        self.writer: ResultsWriter | None = None
        self.comm = Comm()

    def run(self) -> int:
        """Collective over the world. Returns the exit code: 0 done, 1 failure, 2 wrong input."""
        try:
            self.comm = world()
            load_plugins(list(self.plugins))
            job = load(self.job_file, self.changes)
            self._watch_for_the_end()
            with Report(job, self.comm) as report:
                run(job, self.comm, opened=self._opened, progress=report.update)
            if self.comm.rank == 0:
                print(f"done: {self.folder}/results.h5", flush=True)
            return 0
        except HpcflError as error:
            return self._leave(error, error.exit_code, orderly=error.everywhere)
        except KeyboardInterrupt as error:
            return self._leave(error, 1, orderly=False)
        except Exception as error:
            return self._leave(error, 1, orderly=False)

    def _opened(self, folder: Path, writer: ResultsWriter | None, engine: object) -> None:
        self.folder, self.writer = folder, writer
        if self.comm.rank == 0:
            print(f"results: {folder}/results.h5", flush=True)

    def _leave(self, error: BaseException, code: int, *, orderly: bool) -> int:
        """Says what happened, marks the results, and ends: in order when all ranks are here, else by abort."""
        together = self.comm.arrive(PATIENCE)
        if self.comm.rank == 0 or not together:
            text = self._describe(error)
            print(text, file=sys.stderr, flush=True)
            reason = " ".join(text.removeprefix("hpcfl: ").split())
            if not isinstance(error, HpcflError) and self.folder:
                (self.folder / f"error-rank{self.comm.rank}.txt").write_text(
                    f"{reason}\n\n" + "".join(traceback.format_exception(error))
                )
            self._mark(f"failed:{reason}")
        if not together:
            self.comm.abort(code)
        return code

    def _describe(self, error: BaseException) -> str:
        if isinstance(error, HpcflError):
            return "\n".join(f"hpcfl: {line}" for line in str(error).splitlines())
        if isinstance(error, KeyboardInterrupt):
            return "hpcfl: interrupted"
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = "; ".join([*getattr(error, "__notes__", []), f"{Path(last.filename).name} line {last.lineno}"])
        traced = f"; traceback in {self.folder}/error-rank{self.comm.rank}.txt" if self.folder else ""
        return f"hpcfl: rank {self.comm.rank}: {type(error).__name__}: {error} ({where}){traced}"

    def _mark(self, status: str) -> None:
        if self.writer:
            writer, self.writer = self.writer, None
            writer.status(status)
            writer.close()

    def _watch_for_the_end(self) -> None:
        """On rank 0: marks the results when a SIGTERM comes while the main thread waits in an MPI call.

        That is how a launcher ends the ranks after an abort, some tenths of a second before SIGKILL. Python runs no
        signal handler during such a call, but it writes the signal's number to a pipe at once.
        """
        if self.comm.rank != 0:
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

        def watch() -> None:
            while os.read(read, 1)[0] != signal.SIGTERM:
                pass
            self._mark(f"failed:{self._cause()}")
            os._exit(128 + signal.SIGTERM)

        threading.Thread(target=watch, name="end", daemon=True).start()

    def _cause(self) -> str:
        """What another rank left in the run's folder before it aborted the job."""
        for file in sorted(self.folder.glob("error-rank*.txt")) if self.folder else []:
            return file.read_text().partition("\n")[0]
        return "terminated by SIGTERM: the launcher, the batch system or a person ended the job"


class Report:
    """What rank 0 prints while a run goes on: a bar on a terminal, a line per evaluation in a log."""

    def __init__(self, job: Job, comm: Comm):
        self.rounds, self.root = job.run.rounds, comm.rank == 0
        console = Console()
        self.bar = None
        if self.root and console.is_terminal and not console.is_dumb_terminal:
            columns = (
                TextColumn("round"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )
            self.bar = Progress(*columns, console=console)
            self.task = self.bar.add_task("", total=self.rounds)

    def __enter__(self) -> Report:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def update(self, done: int, means: Mapping[str, float] | None) -> None:
        """done: rounds; means: of an evaluation that has just been made."""
        text = "  ".join(
            f"{name.replace('_', ' ')} {value:.4f}" if abs(value) < 1e6 else f"{name.replace('_', ' ')} {value:.4g}"
            for name, value in (means or {}).items()
            if ("test" in name and not name.endswith("sample")) or name == "personal_estimation_error"
        )
        if self.bar:
            self.bar.update(self.task, completed=done, description=text or None)
        elif self.root and text:
            print(f"round {done}/{self.rounds}  {text}", flush=True)
