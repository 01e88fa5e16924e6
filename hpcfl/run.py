"""The whole program on one screen: build, begin, then for each plan and decision: round, evaluate, save, stop."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcfl.agenda import Agenda
from hpcfl.algorithm import State
from hpcfl.build import build
from hpcfl.comm import Comm
from hpcfl.config import Job
from hpcfl.evaluate import test_of_participants
from hpcfl.record import Recorder
from hpcfl.round import Round
from hpcfl.start import Start, begin

Progress = Callable[[int, Mapping[str, float] | None], None]  # (rounds done, means of an evaluation), on rank 0


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    state: State
    status: str  # "done", "stopped:why"
    done: int  # rounds
    saved: int | None  # rounds of the last good checkpoint
    checkpoints: int  # made by this process, with the seconds that they took, and those of the whole process
    seconds: float
    elapsed: float


def run(
    job: Job,
    world: Comm,
    *,
    opened: Callable[[Start], None],
    progress: Progress,
    found: Callable[[Start], None] = lambda start: None,
    folder: Path | None = None,
    asked: Callable[[], str | None] = lambda: None,
    warn: Callable[[str], None] = lambda text: None,
    started: float | None = None,
) -> Outcome:
    """Collective over the world: runs the job to its end, or until it is asked to stop.

    opened: called on every rank before the next round. found: as soon as the run has a folder. folder: of the run to go
    on with; None: a new one. asked: why rank 0 should stop, None: it should not. warn: gets what is wrong, but does not
    end the run. started: when the process did, by ``time.monotonic``. Raises InputError before the first round,
    Diverged on all ranks when a loss or model is no longer finite.
    """
    built = build(job, world)
    engine, algorithm = built.engine, built.algorithm
    start = begin(job, built, world, folder, found)
    keeper, state, done = start.keeper, start.state, start.done
    opened(start)
    watch = test_of_participants(engine, algorithm) if job.run.protocol == "participants" else None
    splits = built.population.splits
    record = Recorder(engine, algorithm, splits, start.writer, job.run.eval_every, start.elapsed, watch)
    agenda = Agenda(
        asked,
        every=job.run.checkpoint_every,
        max_walltime=job.run.max_walltime,
        started=time.monotonic() if started is None else started,
        size=lambda: keeper.size(state),
    )
    everyone = built.coordinator.everyone

    gc.freeze()  # what is there now lives to the end: the collector need not look at it again
    pace = None
    while True:
        plan = world.bcast(built.coordinator.plan(done, pace, agenda) if world.rank == 0 else None)
        accounts, seconds = [], []
        for decision in plan.decisions(everyone):
            began = time.perf_counter()
            round = Round(engine, decision, watch)
            state = algorithm.round(state, round)
            keeper.visited[round.rows] = True
            accounts.append(round.account)
            seconds.append(time.perf_counter() - began)
        if plan.count:
            done, pace = done + plan.count, sum(seconds) / plan.count
            record.rounds(plan, accounts, seconds)
            progress(done, record.evaluation(state, done) if plan.evaluate else None)
        if plan.checkpoint and keeper.round != done:
            took, problem = keeper.save(state, done, record.elapsed)
            agenda.saved(took, good=problem is None)
            record.write_seconds += took
            if problem:
                warn(f"no checkpoint after round {done}, the run goes on without: {problem}")
        if plan.stop:
            break
    if job.run.save_models and plan.stop == "done":
        record.models(state, done)
    record.finish(plan.stop)
    start.close()
    world.barrier()  # nobody leaves before rank 0 has written it all: should it die, the others can do it
    engine.topology.free()
    return Outcome(state, plan.stop, done, keeper.round, agenda.count, agenda.seconds, agenda.elapsed)
