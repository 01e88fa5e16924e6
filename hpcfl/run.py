"""The whole program on one screen: build, then for each plan and decision: round, evaluate, record, stop."""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hpcfl.algorithm import State
from hpcfl.build import Built, build
from hpcfl.comm import Comm
from hpcfl.config import Job
from hpcfl.engine import Engine
from hpcfl.evaluate import test_of_participants
from hpcfl.record import Recorder, run_attributes
from hpcfl.results import ResultsWriter, Schema, new_run_folder
from hpcfl.round import Round
from hpcfl.splits import SPLITS

Progress = Callable[[int, Mapping[str, float] | None], None]  # (rounds done, means of an evaluation), on rank 0


def run(
    job: Job, world: Comm, *, opened: Callable[[Path, ResultsWriter | None, Engine], None], progress: Progress
) -> State:
    """Collective over the world: runs the job and returns its final state.

    opened: called on every rank before the first round, with the run's folder, rank 0's writer, and the engine. Raises
    InputError before the first round, Diverged on all ranks when a loss or model is no longer finite.
    """
    built = build(job, world)
    engine, algorithm = built.engine, built.algorithm
    state = algorithm.init(engine.task, engine.group)
    folder = world.from_root(lambda: new_run_folder(Path(job.run.out), job.name))
    writer = create_results(job, built, folder)
    opened(folder, writer, engine)
    watch = test_of_participants(engine, algorithm) if job.run.protocol == "participants" else None
    record = Recorder(engine, algorithm, built.population.splits, writer, watched=watch is not None)
    everyone = built.coordinator.everyone

    gc.freeze()  # what is there now lives to the end: the collector need not look at it again
    done, pace = 0, None
    while True:
        plan = world.bcast(built.coordinator.plan(done, pace) if world.rank == 0 else None)
        accounts, seconds = [], []
        for decision in plan.decisions(everyone):
            start = time.perf_counter()
            round = Round(engine, decision, watch)
            state = algorithm.round(state, round)
            accounts.append(round.account)
            seconds.append(time.perf_counter() - start)
        done, pace = done + plan.count, sum(seconds) / plan.count
        record.rounds(plan, accounts, seconds)
        means = record.evaluation(state, done) if plan.evaluate else None
        progress(done, means)
        if plan.stop:
            break
    if job.run.save_models:
        record.models(state, done)
    record.finish(plan.stop)
    return state


def create_results(job: Job, built: Built, folder: Path) -> ResultsWriter | None:
    """Collective over the world: the results file at full size, on rank 0; None elsewhere."""
    engine, population = built.engine, built.population
    world, layout = engine.topology.world, engine.task.layout
    hosts = world.gather(platform.node())
    writer: list[ResultsWriter] = []

    def create() -> None:
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
        )
        clients = {"id": built.coordinator.everyone, "cluster": population.cluster}
        clients |= {f"n_{split}": population.count[:, SPLITS.index(split)] for split in population.splits}
        if population.class_counts is not None:
            clients["class_counts"] = population.class_counts
        if population.own_classes is not None:
            clients["n_classes"] = population.own_classes
        attributes = run_attributes(engine, hosts or [], job.run.seed, job.algorithm_name)
        attributes |= {"protocol": job.run.protocol, "labels": job.partition.labels}
        writer.append(
            ResultsWriter.create(folder / "results.h5", schema, clients=clients, config=job.text, attributes=attributes)
        )

    world.from_root(create)
    return writer[0] if writer else None
