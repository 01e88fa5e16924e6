"""Runs of job files with changes, each made once.

A study that is started again takes the results that are there, and goes on with the run that was killed or stopped.
"""

from __future__ import annotations

import json
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hpcfl.analysis.reader import Run
from hpcfl.comm import Comm
from hpcfl.config import Job, load, resolve, toml_value
from hpcfl.errors import STOPPED, Diverged, HpcflError, InputError
from hpcfl.results import FORMAT_VERSION
from hpcfl.run import run
from hpcfl.start import Start


class Stopped(HpcflError):
    """A run was asked to stop. The study ends, on all ranks."""

    exit_code = STOPPED


@dataclass
class Runs:
    """The runs of a study, of job files of the folder ``jobs``, with their results below the folder ``out``.

    rounds: at most so many in a run; None: as many as its job file says. asked: why rank 0 should stop, None: it should
    not.
    """

    comm: Comm
    jobs: Path
    out: Path
    rounds: int | None = None
    asked: Callable[[], str | None] = lambda: None
    made: int = 0
    found: int = 0
    # experiment -> folder, on rank 0
    _known: dict[str, str] = field(default_factory=dict)  # of its results
    _begun: dict[str, str] = field(default_factory=dict)  # of a run that did not come to its end

    def __post_init__(self) -> None:
        """Collective over the world."""
        self.comm.from_root(self._look_around)

    def run(self, job_file: str, folder: str, *changes: str) -> Path:
        """Collective over the world: the run folder of a job file with changes "part.key=value".

        job_file: relative to ``jobs``. folder: below ``out``, for the results. Raises InputError, Stopped, and
        Diverged with the folder.
        """
        job, _ = self.job(job_file, folder, *changes)
        there = self._find(job)
        if there is not None:
            return there
        start = time.perf_counter()
        begun = self.comm.bcast(self._begun.get(experiment(job.text)))
        opened: list[Start] = []

        def tell(start: Start) -> None:
            opened.append(start)
            if begun:
                self.say("\n".join([f"{begun}: going on after round {start.done}", *start.warnings]))

        try:
            outcome = run(
                job,
                self.comm,
                opened=tell,
                progress=lambda *_: None,
                folder=Path(begun) if begun else None,
                asked=self.asked,
            )
        except Exception as error:
            for one in opened:
                if one.writer:
                    one.writer.status(f"failed:{' '.join(str(error).split())}")
                one.close()
            if isinstance(error, Diverged) and opened:
                raise Diverged(f"{opened[0].folder}: {error}") from None
            raise
        made = opened[0].folder
        if outcome.status != "done":
            raise Stopped(f"{made}: {outcome.status} after round {outcome.done}; start the study again to go on")
        self.made += 1
        self._known[experiment(job.text)] = str(made)
        self.say(f"{made}: {time.perf_counter() - start:.1f} s")
        return made

    def find(self, job_file: str, folder: str, *changes: str) -> Path | None:
        """Collective over the world: as ``run``, but None where the results are not there."""
        return self._find(self.job(job_file, folder, *changes)[0])

    def job(self, job_file: str, folder: str, *changes: str) -> tuple[Job, tuple[str, ...]]:
        """The job that ``run`` would run, and all changes that make it of the job file."""
        changes = (*changes, f"run.out={toml_value(str(self.out / folder))}")
        job = load(self.jobs / job_file, changes)
        if self.rounds is not None and job.run.rounds > self.rounds:
            changes = (*changes, f"run.rounds={self.rounds}")
            job = load(self.jobs / job_file, changes)
        return job, changes

    def say(self, line: str) -> None:
        """On rank 0, apart from the tables on standard output."""
        if self.comm.rank == 0:
            print(line, file=sys.stderr, flush=True)

    def _find(self, job: Job) -> Path | None:
        known = self.comm.bcast(self._known.get(experiment(job.text), ""))
        self.found += bool(known)
        return Path(known) if known else None

    def _look_around(self) -> None:
        for file in sorted(self.out.rglob("results.h5")):
            try:
                with Run(file) as result:
                    done = result.status == "done"
                    current = tuple(result.attributes["format_version"]) == FORMAT_VERSION
                    if done or (current and not result.status.startswith("failed")):
                        # options that are newer than the results have their defaults
                        job = resolve(tomllib.loads(result.text("/config/toml")), file.parent.name, str(file))
                        (self._known if done else self._begun)[experiment(job.text)] = str(file.parent)
            except InputError as error:
                self.say(f"{str(error).splitlines()[0]}; its run will be made again")


def experiment(config: str) -> str:
    """What a configuration says of an experiment: all but where its data and its results lie."""
    tables = tomllib.loads(config)
    del tables["run"]["out"]
    tables["data"].pop("root", None)
    return json.dumps(tables, sort_keys=True)


def last(folder: Path, dataset: str) -> np.ndarray:
    """The last row of a dataset of /evaluations or /per_client: a number, or [clients]."""
    with Run(folder) as result:
        row = result.last(dataset)
    assert row is not None  # the last round is always evaluated
    return row


def whole(folder: Path, dataset: str) -> np.ndarray:
    with Run(folder) as result:
        return result.read(dataset)
