"""One ``hpcfl run``: loads the job, runs it, and ends it in order whatever happens.

A mistake of the user and a diverged run are raised on all ranks alike: rank 0 says it once and all leave. Any other
exception ends the job within seconds: the rank that has it tells what, where and with which clients, leaves the
traceback in a file of the run's folder, and aborts; rank 0 still marks the results as failed. Where the job asks for it
and MPI offers it, the death of a rank is none of these: the others form a new world and go on from a checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hpcfl.comm import Comm, world
from hpcfl.config import Job, load
from hpcfl.errors import STOPPED, HpcflError, RunError, keep_traceback, place
from hpcfl.registry import load_plugins
from hpcfl.results import ResultsWriter
from hpcfl.run import Outcome, run
from hpcfl.signals import StopNow, StopRequest
from hpcfl.start import RESULTS, Start, to_continue


class Session:
    """A run from the command line to its exit code."""

    def __init__(
        self, job: Path, changes: Sequence[str], plugins: Sequence[Path], request: StopRequest, *, resume: bool = False
    ):
        """request: listens already. resume: go on with the newest run of the job, where there is one."""
        self.job_file, self.changes, self.plugins = job, changes, plugins
        self.request, self.resume = request, resume
        self.folder: Path | None = None
        self.start: Start | None = None
        self.writer: ResultsWriter | None = None
        self.earlier: Mapping[Path, int] = {}  # reports of errors that earlier starts of the run left in its folder
        self.noticed = False  # that somebody asked for a stop
        self.comm = Comm()

    def run(self) -> int:
        """Collective over the world. The exit code: 0 done, 1 failure, 2 wrong input, 75 to be gone on with.

        Where the ranks end in order only rank 0 has one: a launcher may kill the others when one rank ends with it.
        """
        code = self._code()
        return code if self.comm.rank == 0 else 0

    def _code(self) -> int:
        try:
            self.comm = world()
            self.request.follow(self.comm.rank, self._told)
            load_plugins(list(self.plugins))
            job = load(self.job_file, self.changes)
            if job.run.on_rank_loss == "shrink":
                self.comm.check_fault_tolerance()
            if self.resume:
                self.folder, done = self.comm.from_root(lambda: to_continue(job))
                if done:
                    self._say(f"done already: {self.folder}/{RESULTS}; raise run.rounds to go on")
                    return 0
                if self.folder is None:
                    self._say(f"--resume: there is no run of {job.name} in {job.run.out} yet; this is the first")
            return self._ended(self._run(job))
        except HpcflError as error:
            return self._leave(error, error.exit_code)
        except StopNow as error:
            return self._leave(error, 1 if self._saved is None else STOPPED)
        except (KeyboardInterrupt, Exception) as error:
            return self._leave(error, 1)

    def _run(self, job: Job) -> Outcome:
        """The job on all ranks; on those that are left, where one dies and the job is to go on without it."""
        while True:
            try:
                with Report(job, self.comm) as report:
                    return run(
                        job,
                        self.comm,
                        found=self._found,
                        opened=self._opened,
                        progress=report.update,
                        folder=self.folder,
                        asked=lambda: self.request.reason,
                        warn=self._warn,
                        started=self.request.started,
                    )
            except Exception as error:
                if job.run.on_rank_loss != "shrink" or not self.comm.lost(error):
                    raise
            self._survive()

    def _survive(self) -> None:
        """Collective over the ranks that are left: a world of their own; rank 0 is the lowest of them."""
        before = self.comm.size
        while True:
            if self.start:
                self.start.close()
                self.start = self.writer = None
            self.comm = self.comm.survivors()
            try:
                self.comm.settle()
                folders = self.comm.gather(self.folder)
                known = [folder for folder in folders if folder] if folders else []
                self.folder = self.comm.bcast(known[0] if known else None)  # some ranks may not have come to know it
                break
            except Exception as error:
                if not self.comm.lost(error):
                    raise
        if self.comm.rank == 0:
            self.request.follow(0, self._told)
        self._warn(f"{before - self.comm.size} of {before} ranks died; the other {self.comm.size} go on")

    @property
    def _saved(self) -> int | None:
        """Rounds of the last good checkpoint."""
        return self.start.keeper.round if self.start else None

    def _found(self, start: Start) -> None:
        self.start, self.folder = start, start.folder
        self.earlier = self._reports()

    def _opened(self, start: Start) -> None:
        self.writer = start.writer
        for warning in start.warnings:
            self._warn(warning)
        since = f", going on after round {start.done}" if start.resumed else ""
        self._say(f"results: {start.folder}/{RESULTS}{since}")

    def _ended(self, outcome: Outcome) -> int:
        """Says how the run ended."""
        self.request.end()
        self.writer = None  # is closed
        if outcome.checkpoints:
            share = 100 * outcome.seconds / max(outcome.elapsed, 1e-9)
            self._say(f"checkpoints: {outcome.checkpoints} in {outcome.seconds:.2f} s ({share:.1f} % of the time)")
        if outcome.status == "done":
            self._say(f"done: {self.folder}/{RESULTS}")
            return 0
        why = outcome.status.removeprefix("stopped:")
        if outcome.saved is None:
            self._say(f"stopped after round {outcome.done} ({why}), without a checkpoint: {self.folder}/{RESULTS}")
            return 1
        self._say(
            f"stopped after round {outcome.done} ({why}); checkpoint after round {outcome.saved}: go on with --resume"
        )
        return STOPPED

    def _say(self, text: str) -> None:
        if self.comm.rank == 0:
            print(text, flush=True)

    def _warn(self, text: str) -> None:
        if self.comm.rank == 0:
            print(f"hpcfl: {text}", file=sys.stderr, flush=True)

    def _leave(self, error: BaseException, code: int) -> int:
        """Says what happened, marks the results, and ends: in order when all ranks are here, else by abort."""
        self.request.end()
        together = self.comm.arrive()
        if self.comm.rank == 0 or not together:
            lost = self.comm.lost(error)
            text = self._describe(error, lost=lost)
            reason = " ".join(text.removeprefix("hpcfl: ").split())
            if not isinstance(error, HpcflError | KeyboardInterrupt) and not lost:
                file = f"error-rank{self.comm.rank}.txt"
                text += keep_traceback(error, self.folder / file if self.folder else Path(f"hpcfl-{file}"), reason)
            print(text, file=sys.stderr, flush=True)
            self._mark(f"{'stopped' if isinstance(error, StopNow) else 'failed'}:{reason}")
        if not together:
            self.comm.abort(code)
        return code

    def _describe(self, error: BaseException, *, lost: bool) -> str:
        if isinstance(error, HpcflError):
            return "\n".join(f"hpcfl: {line}" for line in str(error).splitlines())
        if isinstance(error, StopNow):
            kept = "there is no checkpoint" if self._saved is None else f"the last checkpoint is of round {self._saved}"
            return f"hpcfl: stopped at once by a second signal ({error}); {kept}"
        if isinstance(error, KeyboardInterrupt):
            return "hpcfl: interrupted"
        if lost:
            return "hpcfl: another rank died; its own messages, or the batch system's, say why (often: out of memory)"
        where = "; ".join([*getattr(error, "__notes__", []), place(error)])
        return f"hpcfl: rank {self.comm.rank}: {type(error).__name__}: {error} ({where})"

    def _mark(self, status: str) -> None:
        if self.writer:
            writer, self.writer = self.writer, None
            try:
                writer.status(status)
                writer.close()
            except RunError as error:  # a full disk, or the file was just being closed: the exit code stays what it is
                self._warn(str(error))

    def _told(self, number: signal.Signals) -> None:
        """On rank 0, in a thread of its own: a signal has come, while the main thread may wait in an MPI call.

        SIGTERM is how a launcher ends the ranks after an abort, some tenths of a second before SIGKILL.
        """
        cause = self._cause()
        if number in self.request.signals and cause is None:
            if self.noticed:
                return  # the second one: the main thread says so
            self.noticed = True
            self._warn(f"{number.name}: stopping with a checkpoint after the rounds under way; once more: at once")
        elif number == signal.SIGTERM:
            self._mark(f"failed:{cause or self._ended_from_outside()}")
            os._exit(128 + signal.SIGTERM)

    def _cause(self) -> str | None:
        """What another rank left in the run's folder before it aborted the job."""
        new = self._reports().items() - self.earlier.items()
        return min(new)[0].read_text().partition("\n")[0] if new else None

    def _reports(self) -> dict[Path, int]:
        """The reports of errors in the run's folder, with the times at which they were written."""
        return {file: file.stat().st_mtime_ns for file in self.folder.glob("error-rank*.txt")} if self.folder else {}

    def _ended_from_outside(self) -> str:
        last = "" if self._saved is None else f"; the last checkpoint is of round {self._saved}"
        return (
            f"terminated by SIGTERM: the launcher, the batch system or a person ended the job{last}; "
            f"to stop with a checkpoint: kill -{self.request.name} the mpirun process"
        )


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
