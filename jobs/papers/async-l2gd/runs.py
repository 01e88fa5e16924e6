"""Runs of job files with changes, each made once: a study that is started again takes the results that are there."""

from __future__ import annotations

import json
import sys
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hpcfl.analysis.reader import Run
from hpcfl.comm import Comm
from hpcfl.config import load
from hpcfl.errors import InputError
from hpcfl.run import run

JOBS = Path(__file__).resolve().parent


@dataclass
class Runs:
    """The runs of a study below the folder ``out``.

    rounds: at most so many in a run; None: as many as its job file says.
    """

    comm: Comm
    out: Path
    rounds: int | None = None
    made: int = 0
    found: int = 0
    _known: dict[str, str] = field(default_factory=dict)  # experiment -> folder of its results; on rank 0

    def __post_init__(self) -> None:
        """Collective over the world."""
        self.comm.from_root(self._look_around)

    def run(self, job_file: str, folder: str, *changes: str) -> Path:
        """Collective over the world: the run folder of a job file with changes "part.key=value".

        job_file: relative to this file's folder. folder: below ``out``, for the results. Raises InputError.
        """
        changes = (*changes, f"run.out={json.dumps(str(self.out / folder))}")
        job = load(JOBS / job_file, changes)
        if self.rounds is not None and job.run.rounds > self.rounds:
            job = load(JOBS / job_file, (*changes, f"run.rounds={self.rounds}"))
        known = self.comm.bcast(self._known.get(experiment(job.text), ""))
        if known:
            self.found += 1
            return Path(known)
        start = time.perf_counter()
        opened: list[Path] = []
        run(job, self.comm, opened=lambda path, *_: opened.append(path), progress=lambda *_: None)
        self.made += 1
        self._known[experiment(job.text)] = str(opened[0])
        self.say(f"{opened[0]}: {time.perf_counter() - start:.1f} s")
        return opened[0]

    def say(self, line: str) -> None:
        """On rank 0, apart from the tables on standard output."""
        if self.comm.rank == 0:
            print(line, file=sys.stderr, flush=True)

    def _look_around(self) -> None:
        for file in sorted(self.out.rglob("results.h5")):
            try:
                with Run(file) as result:
                    if result.status == "done":
                        self._known[experiment(result.text("/config/toml"))] = str(file.parent)
            except InputError as error:
                self.say(f"{error}; its run will be made again")


def experiment(config: str) -> str:
    """What a configuration says of an experiment: all but where its results lie."""
    tables = tomllib.loads(config)
    del tables["run"]["out"]
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
