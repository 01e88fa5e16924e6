"""What became of runs: the newest run of a job, the members of a sweep. Reads results and the queue, never torch."""

from __future__ import annotations

import csv
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import h5py
from rich import box
from rich.markup import escape
from rich.table import Table

from hpcfl.analysis.reader import Run
from hpcfl.config import read
from hpcfl.errors import STOPPED, InputError
from hpcfl.options import user_path
from hpcfl.results_folder import newest_run_folder
from hpcfl.slurm import queue
from hpcfl.sweep import Member, Sweep

UNFINISHED = ("pending", "stopped", "failed", "killed")
WAITING = ("PENDING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")  # states of a job that does not run
COLOURS = {"done": "green", "running": "cyan", "failed": "red", "killed": "red", "stopped": "yellow"}


def status(job: Path, changes: Sequence[str], out: str | None) -> tuple[int, str]:
    """Exit code (0 done, 75 stopped early, 1 else), and the status of a job's newest run with its file and time."""
    table = read(job, changes).get("run", {})
    folder = user_path(out or str(table.get("out", "results") if isinstance(table, dict) else "results"))
    path = newest_results(folder, job.stem)
    if path is None:
        return 1, f"no run of {job.stem} in {folder}"
    with Run(path) as run:
        word = "killed" if run.stale else run.status
        code = {"done": 0, "stopped": STOPPED}.get(word.partition(":")[0], 1)
        return code, f"{word} in {path}, written {run.attributes['updated']}"


def newest_results(out: Path, job: str) -> Path | None:
    """The results file of the newest run of a job; None where that run has none yet, or there is no run."""
    folder = newest_run_folder(out, job)
    path = folder / "results.h5" if folder else None
    return path if path and path.exists() else None


@dataclass(frozen=True)
class MemberState:
    """A member of a sweep as it is now. word: done, running, stopped, failed, killed or pending."""

    member: Member
    word: str
    why: str
    rounds: str = ""
    metric: str = ""
    results: Path | None = None
    queued: bool = False

    @property
    def missing(self) -> bool:
        """Not done, not running, not waiting in the queue."""
        return self.word in UNFINISHED and not self.queued


def states(sweep: Sweep) -> list[MemberState]:
    """The state of every member, from its results file and the queue of SLURM, if there is one."""
    submissions = sweep.submissions()
    waiting = queue() if submissions else None
    return [_state(sweep, member, submissions.get(member.number, []), waiting) for member in sweep.members]


def _state(sweep: Sweep, member: Member, jobs: Sequence[str], waiting: Mapping[str, str] | None) -> MemberState:
    queued = [job for job in jobs if waiting and job in waiting]
    gone = bool(jobs) and waiting is not None and not queued
    path = newest_results(sweep.folder, member.name)
    if path is None and gone:
        state = MemberState(member, "failed", f"job {jobs[-1]} left no results; see its log")
    elif path is None:
        state = MemberState(member, "pending", "")
    else:
        try:
            with Run(path) as run:
                state = _of_results(member, run, gone)
        except InputError as error:
            state = MemberState(member, "failed", str(error), results=path)
    if not (waiting and queued) or state.word in ("done", "running"):
        return state
    place = f"job {queued[-1]}, {waiting[queued[-1]]}"
    before = f"; before: {state.word} {state.why}".rstrip() if path else ""
    word = "pending" if waiting[queued[-1]] in WAITING else "running"
    return replace(state, word=word, why=place + before, queued=True)


def _of_results(member: Member, run: Run, gone: bool) -> MemberState:
    word, _, why = run.status.partition(":")
    if word == "running":
        word, why = _running(run, gone)
    name = f"{run.models[0]}_test_{run.metric}"
    value = run.last(f"/evaluations/{name}")
    metric = "" if value is None else f"{name.replace('_', ' ')} {float(value):.4f}"
    return MemberState(member, word, why, f"{run.rounds_done}/{len(run.file['/rounds/round'])}", metric, run.path)


def _running(run: Run, gone: bool) -> tuple[str, str]:
    """What a status "running" is worth: of a process on another host only the queue can tell that it is no more."""
    host, written = run.attributes["host"], run.attributes["updated"]
    if run.stale or (gone and host != socket.gethostname()):
        return "killed", f"its process on {host} is gone; last written {written}"
    return "running", f"on {host}, last written {written}"


def table(found: Sequence[MemberState]) -> Table:
    """One row per member."""
    shown = Table("member", "state", "rounds", "last evaluation", "why", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for state in found:
        colour = COLOURS.get(state.word, "default")
        cells = [state.rounds, state.metric, state.why]
        shown.add_row(escape(state.member.name), f"[{colour}]{state.word}[/]", *map(escape, cells))
    counts = {word: sum(state.word == word for state in found) for word in ("done", "running", *UNFINISHED)}
    shown.caption = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    shown.caption_justify = "left"
    return shown


def collect(found: Sequence[MemberState], file: IO[str]) -> None:
    """Writes one CSV row per member: its changes, state, and every number of /final, empty where there is none."""
    rows = []
    for state in found:
        row: dict[str, object] = {"member": state.member.name, **state.member.changes, "state": state.word}
        rows.append(row | (_final(state.results) if state.results and state.rounds else {}))
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(file, list(names), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _final(path: Path) -> dict[str, object]:
    with Run(path) as run:
        if run.read("/final/evaluation") < 0:  # nothing there yet
            return {}
        group = run.file["/final"]
        scalars = (name for name, data in group.items() if isinstance(data, h5py.Dataset) and data.shape == ())
        return {name: run.read(f"/final/{name}").item() for name in scalars}
