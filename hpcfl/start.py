"""The beginning of a run: a new folder and results file, or those of a run that goes on from its newest checkpoint."""

from __future__ import annotations

import hashlib
import json
import platform
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from hpcfl.algorithm import State
from hpcfl.build import Built
from hpcfl.comm import Comm
from hpcfl.config import Job
from hpcfl.engine import Engine
from hpcfl.errors import InputError
from hpcfl.keeper import CHECKPOINTS, Keeper
from hpcfl.options import user_path
from hpcfl.record import run_attributes
from hpcfl.results import ResultsWriter, Schema, lock, new_run_folder, newest_run_folder
from hpcfl.results_open import read_attributes, read_config
from hpcfl.splits import SPLITS
from hpcfl.store import first_state

# What may change on a run's way: rounds upwards, and where files lie, but not what is in them.
FREE = {
    "run": ("rounds", "out", "max_walltime", "checkpoint_every", "state", "scratch", "on_rank_loss"),
    "data": ("root", "path"),
    "partition": ("cluster_file",),
}
RESULTS = "results.h5"


@dataclass
class Start:
    """A run before its next round, on this rank."""

    folder: Path
    keeper: Keeper
    state: State
    done: int = 0  # rounds
    elapsed: float = 0.0  # seconds that they took, with those between the last of them and their checkpoint
    resumed: bool = False
    warnings: list[str] = field(default_factory=list)
    writer: ResultsWriter | None = None  # rank 0's
    lock: TextIO | None = None  # likewise

    def take_lock(self) -> None:
        """Raises RunError where another process has the folder."""
        self.lock = lock(self.folder)

    def close(self) -> None:
        """Lets go of the results file and the folder."""
        if self.writer:
            self.writer.close()
        if self.lock:
            self.lock.close()


def to_continue(job: Job) -> tuple[Path | None, bool]:
    """The folder of the newest run of the job, None where there is none; and whether that run is done already.

    Raises InputError where it was started from another configuration: each option that differs, a line each; and where
    it has checkpoints, but no results.
    """
    folder = newest_run_folder(user_path(job.run.out), job.name)
    path = folder / RESULTS if folder else None
    if folder is None or path is None or not path.exists():
        if folder and any((folder / CHECKPOINTS).glob("round-*")):
            raise InputError(
                f"--resume: {folder} has checkpoints, but no {RESULTS}; put that back, or run without --resume for a "
                "new one"
            )
        return folder, False
    before, after = (tomllib.loads(text) for text in (read_config(path), job.text))
    attributes = read_attributes(path)
    different = differences(before, after, int(attributes["rounds_done"]))
    if different:
        raise InputError(
            "\n".join(
                [f"--resume: {folder} was started from another configuration; run without --resume for a new one"]
                + [f"  {line}" for line in different]
            )
        )
    return folder, attributes["status"] == "done" and attributes["rounds_done"] == job.run.rounds


def differences(before: Mapping[str, Any], after: Mapping[str, Any], done: int) -> list[str]:
    """What a run cannot change on its way, one line per option. done: rounds."""
    lines = []
    for part in sorted(before.keys() | after.keys()):
        old, new = before.get(part, {}), after.get(part, {})
        for key in sorted(old.keys() | new.keys()):
            name, was, now = f"{part}.{key}", old.get(key), new.get(key)
            if name == "run.rounds" and now < was:
                lines.append(f"run.rounds: was {was} ({done} are done), is {now} now; it may only be raised")
            elif was != now and key not in FREE.get(part, ()):
                lines.append(f"{name}: was {_shown(was)}, is {_shown(now)} now")
    return lines


def origin(job: Job, engine: Engine) -> str:
    """SHA-256 of what makes the state of a run and stays on its way: the options that cannot change, and the model."""
    tables, layout = tomllib.loads(job.text), engine.task.layout
    options = [(part, key, value) for part, table in tables.items() for key, value in table.items()]
    fixed = {f"{part}.{key}": value for part, key, value in options if key not in FREE.get(part, ())}
    text = json.dumps([fixed, list(layout.names), list(layout.shapes)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _shown(value: Any) -> str:
    return "not given" if value is None else repr(value)


def begin(job: Job, built: Built, world: Comm, folder: Path | None, found: Callable[[Start], None]) -> Start:
    """Collective over the world: folder and results file, and the state to start from.

    folder: of the run to go on with; None: a new one. found: called as soon as the folder is there. Raises InputError
    on all ranks alike.
    """
    engine, resumed = built.engine, folder is not None
    folder = folder or world.from_root(lambda: new_run_folder(user_path(job.run.out), job.name))
    start = Start(folder, Keeper(folder, engine, origin(job, engine)), State(), resumed=resumed)
    found(start)
    try:
        world.from_root(lambda: start.take_lock())
        counted = world.from_root(lambda: _counted(folder / RESULTS, job.run.eval_every))
        start.writer = open_results(job, built, folder, new=counted is None)
        scratch = user_path(job.run.scratch) if job.run.scratch else folder
        start.state = first_state(built.algorithm, engine, job.run.state, scratch)
        if resumed:
            start.state, start.done, start.elapsed, start.warnings = start.keeper.newest(start.state, counted or 0)
    except BaseException as error:
        if start.writer:
            start.writer.status(f"failed:{' '.join(str(error).split())}")
        start.close()
        raise
    return start


def _counted(path: Path, eval_every: int) -> int | None:
    """Rounds of which a results file has all rows; None where there is no file."""
    if not path.exists():
        return None
    attributes = read_attributes(path)
    return min(int(attributes["rounds_done"]), (int(attributes["evaluations_done"]) + 1) * eval_every - 1)


def open_results(job: Job, built: Built, folder: Path, *, new: bool) -> ResultsWriter | None:
    """Collective over the world: the results file at full size, on rank 0; None elsewhere. new: there is none yet."""
    engine, population = built.engine, built.population
    world, layout = engine.topology.world, engine.task.layout
    hosts = world.gather(platform.node())
    writer: list[ResultsWriter] = []

    def open_it() -> None:
        schema = Schema(
            clients=len(population.cluster),
            rounds=job.run.rounds,
            evaluations=-(-job.run.rounds // job.run.eval_every),
            ranks=world.size,
            clusters=engine.topology.placement.clusters,
            classes=None if population.class_counts is None else population.class_counts.shape[1],
            models=built.algorithm.evaluated,
            splits=population.splits,
            metrics=engine.task.metrics,
            exposed=built.algorithm.exposed,
            coins={name: len(p) for name, p in built.coordinator.coins.items()},
            truth=engine.group.truth is not None,
            participants=job.run.protocol == "participants",
            own_classes=population.own_classes is not None,
            dtype=job.run.dtype,
            parameters=list(zip(layout.names, layout.shapes, strict=True)) if job.run.save_models else None,
            evaluated=engine.eval_sample,
        )
        clients = {"id": built.coordinator.everyone, "cluster": population.cluster}
        clients |= {f"n_{split}": population.count[:, SPLITS.index(split)] for split in population.splits}
        if population.class_counts is not None:
            clients["class_counts"] = population.class_counts
        if population.own_classes is not None:
            clients["n_classes"] = population.own_classes
        attributes = run_attributes(engine, hosts or [], job.run.seed, job.algorithm_name)
        attributes |= {"protocol": job.run.protocol, "labels": job.partition.labels, "data_sha256": built.data}
        make: Callable[..., ResultsWriter] = ResultsWriter.create if new else ResultsWriter.resume
        writer.append(make(folder / RESULTS, schema, clients=clients, config=job.text, attributes=attributes))

    world.from_root(open_it)
    return writer[0] if writer else None
