"""Kills jobs with SIGKILL at random moments: the results stay whole, and in the end are those of an undisturbed run.

    python tests/stress/kills.py --kills 50 --ranks 3 --seed 1            a killed job is resumed, and killed again
    python tests/stress/kills.py --kills 20 --ranks 8 --seed 1 --shrink   the surviving ranks go on by themselves

Prints a line per trial and a summary; the exit code is 0 if all trials ended well. What failed stays in the folder.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launching import Launch, kill, until
from left import damage, doing, problems, restarts, rounds_done

ROUNDS, EVAL_EVERY, CHECKPOINT_EVERY = 60, 4, 3  # so that kills hit rows and checkpoints that are being written
SHORT = {"run.rounds": ROUNDS, "run.eval_every": EVAL_EVERY, "run.checkpoint_every": CHECKPOINT_EVERY}
JOBS = {  # name -> changes to the job
    "apfl": ["run.participation=0.5"],
    "async_l2gd": [
        'algorithm={name="async_l2gd", lr=0.05, batch_size=20, p_global=0.2, p_cluster=0.4, smoothness=20.0}',
        "partition.clusters=4",
    ],
    "fedrep": ['algorithm={name="fedrep", lr=0.1, head_steps=3, body_steps=3, batch_size=20}', 'run.state="disk"'],
    "pflego": ['algorithm={name="pflego", batch_size=20, local_steps=5}', 'run.protocol="participants"'],
    "async_l2gd_vr": [
        'algorithm={name="async_l2gd_vr", lr=0.02, batch_size=20, p_global=0.2, p_cluster=0.4, smoothness=20.0, '
        "strong_convexity=0.1}",
        "partition.clusters=4",
    ],
}
VICTIMS = ("one rank", "rank 0", "all ranks", "mpirun")
MOMENTS = ("any", "row", "checkpoint", "start")
LIMIT = 10.0  # seconds in which a job has to end after a kill
HANGING = 30.0  # seconds after which it counts as hanging
LONGEST = 200.0  # seconds for a start or the rest of a run: machines may be busy


@dataclass
class Trial:
    """What one job went through. problems: what should not have been."""

    job: str
    kills: list[str] = field(default_factory=list)  # "rank 0 in a checkpoint after round 12, 0.4 s"
    doing: Counter[str] = field(default_factory=Counter)
    damaged: int = 0  # checkpoints
    recognised: int = 0  # of them, when the run went on
    hangs: int = 0
    longest: float = 0.0  # seconds between a kill and the end of the job, or until the survivors went on
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        end = "; ".join(self.problems) or "same bits"
        damaged = f"; {self.damaged} checkpoints damaged, {self.recognised} recognised" if self.damaged else ""
        return f"{self.job}: {', '.join(self.kills)}{damaged}: {end}"


class Bench:
    """The folder of the trials, with an undisturbed run of each job, and the dice."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.dice, self.number = folder, random.Random(seed), 0

    def reference(self, job: str) -> Path:
        """Results of the undisturbed run on one process."""
        results = self.folder / job / "apfl-001/results.h5"
        if not results.exists():
            launch = Launch(self.folder, job, self.changes(job), 0)
            if not launch.wait(LONGEST) or launch.process.returncode:
                raise SystemExit(f"the undisturbed run of {job} failed:\n{launch.output}")
        return results

    def changes(self, job: str) -> list[str]:
        return [*JOBS[job], *(f"{name}={value}" for name, value in SHORT.items()), "run.save_models=true"]

    def next(self, job: str) -> tuple[str, Path]:
        """Name and folder of the next trial's run."""
        self.number += 1
        name = f"trial{self.number:03d}-{job}"
        return name, self.folder / name / "apfl-001"

    def wait_for_moment(self, launch: Launch, folder: Path, moment: str) -> None:
        """Until a random moment of the run, or its end."""
        if moment == "start":
            until(launch.over, self.dice.uniform(0, 8))
            return
        results, before = folder / "results.h5", 0
        goal = self.dice.randint(max(rounds_done(results), 0) + 1, max(rounds_done(results), 0) + ROUNDS // 3)
        until(lambda: launch.over() or rounds_done(results) >= min(goal, ROUNDS - 2), LONGEST)
        if moment == "any":
            time.sleep(self.dice.uniform(0, 0.3))
        elif moment == "checkpoint":
            until(lambda: launch.over() or [*folder.glob("checkpoints/.round-*")], 5, pause=0.0)
            time.sleep(self.dice.uniform(0, 0.03))
        elif results.exists():
            before = results.stat().st_mtime_ns
            until(lambda: launch.over() or results.stat().st_mtime_ns != before, 5, pause=0.0)

    def strike(self, launch: Launch, victim: str) -> bool:
        """Kills; whether there was anything to kill."""
        ranks = launch.ranks()
        if victim == "mpirun" or not ranks:
            pids = [launch.process.pid]
        elif victim == "all ranks":
            pids = list(ranks.values())
        else:
            pids = [ranks[0] if victim == "rank 0" and 0 in ranks else self.dice.choice([*ranks.values()])]
        alive = launch.process.poll() is None
        for pid in pids:
            kill(pid)
        return alive


def kill_trial(bench: Bench, job: str, ranks: int, kills: int, victim: str | None = None) -> Trial:
    """A job that is killed so many times, each time resumed on another number of ranks, until it is done.

    victim: of the first kill; absent: by chance, as of all others.
    """
    trial, reference, dice = Trial(job), bench.reference(job), bench.dice
    name, folder = bench.next(job)
    results, number, counted = folder / "results.h5", ranks, -1
    for k in range(kills):
        launch = Launch(bench.folder, name, bench.changes(job), number, *(["--resume"] if k else []))
        whom = victim if victim and not k else dice.choice(VICTIMS)
        bench.wait_for_moment(launch, folder, dice.choices(MOMENTS, (3, 3, 3, 1))[0])
        struck = bench.strike(launch, whom)
        start = time.monotonic()
        if not launch.wait(HANGING):
            trial.hangs += 1
            trial.problems.append(f"hangs {HANGING} s after the kill of {whom}")
        took = time.monotonic() - start
        if struck:
            what = doing(folder)
            trial.doing[what] += 1
            trial.longest = max(trial.longest, took)
            trial.kills.append(f"{whom} of {number or 1} in {what} after round {rounds_done(results)}, {took:.1f} s")
            if took > LIMIT:
                trial.problems.append(f"took {took:.1f} s to end")
        trial.recognised += launch.output.count("damaged checkpoint, not used")
        trial.problems += problems(results, reference, counted)
        counted = max(counted, rounds_done(results))
        number = dice.choice([n for n in range(ranks + 1) if n != number])
        if dice.random() < 0.3:
            trial.damaged += damage(folder, dice)
    launch = Launch(bench.folder, name, bench.changes(job), number, "--resume")
    ended = launch.wait(LONGEST)
    trial.recognised += launch.output.count("damaged checkpoint, not used")
    if not ended or launch.process.returncode:
        trial.problems.append(f"the resumed run did not end well: {launch.output[-500:]}")
    trial.problems += problems(results, reference, counted, done=ROUNDS)
    return trial


def shrink_trial(bench: Bench, job: str, ranks: int, kills: int, *, zero: bool = False) -> Trial:
    """A job that loses one or two ranks so many times, and ends by itself. zero: rank 0 is among the first to die."""
    trial, reference, dice = Trial(job), bench.reference(job), bench.dice
    name, folder = bench.next(job)
    results = folder / "results.h5"
    changes = [*bench.changes(job), 'run.on_rank_loss="shrink"']
    launch = Launch(bench.folder, name, changes, ranks, mpirun=("--with-ft", "ulfm"))
    for k, goal in enumerate(sorted(dice.randint(0, ROUNDS - 2) for _ in range(kills))):
        until(lambda goal=goal: launch.over() or rounds_done(results) >= goal, LONGEST)
        time.sleep(dice.uniform(0, 0.3))
        alive = launch.ranks()
        if len(alive) < 2 or not results.exists():
            break
        first = [0] if zero and not k and 0 in alive else [dice.choice(sorted(alive))]
        others = dice.sample(sorted(alive.keys() - set(first)), dice.choice([0, 1]) if len(alive) > 2 else 0)
        for rank in first + others:
            kill(alive[rank])
        start, before = time.monotonic(), restarts(results)
        if not until(lambda before=before: launch.over() or restarts(results) > before, HANGING):
            trial.hangs += 1
            trial.problems.append(f"no new start {HANGING} s after the kill")
        took = time.monotonic() - start
        trial.longest = max(trial.longest, took)
        whom = " and ".join(str(rank) for rank in first + others)
        trial.kills.append(f"rank {whom} of {len(alive)} after round {rounds_done(results)}, {took:.1f} s")
        trial.doing[f"{1 + len(others)} at once"] += 1
    if not launch.wait(LONGEST):
        trial.hangs += 1
        trial.problems.append("hangs")
    trial.problems += problems(results, reference, -1, done=ROUNDS)
    if trial.problems:
        trial.problems.append(launch.output[-1000:])
    return trial


def summary(trials: Sequence[Trial]) -> str:
    """A table of lines."""
    did = sum((trial.doing for trial in trials), Counter())
    bad = sum(bool(trial.problems) for trial in trials)
    return "\n".join(
        [
            f"{len(trials)} trials, {did.total()} kills",
            f"checkpoints damaged: {sum(t.damaged for t in trials)}, recognised: {sum(t.recognised for t in trials)}",
            "moments: " + ", ".join(f"{what} {count}" for what, count in did.most_common()),
            f"hangs: {sum(trial.hangs for trial in trials)}",
            f"longest time between a kill and the end or a new start: {max(t.longest for t in trials):.1f} s",
            f"trials with problems: {bad}",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="kills in all; with --shrink trials")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--job", action="append", choices=JOBS, help="jobs to take in turn; absent: all")
    parser.add_argument("--shrink", action="store_true", help="needs mpirun --with-ft ulfm")
    parser.add_argument("--folder", type=Path, help="for the runs; absent: a new temporary one")
    given = parser.parse_args()
    bench = Bench(Path(given.folder or tempfile.mkdtemp(prefix="hpcfl-kills-")), given.seed)
    bench.folder.mkdir(parents=True, exist_ok=True)
    trials: list[Trial] = []
    jobs = given.job or [*JOBS]
    while (len(trials) if given.shrink else sum(len(trial.kills) for trial in trials)) < given.kills:
        job, times = jobs[len(trials) % len(jobs)], bench.dice.choice([1, 2, 3])
        if given.shrink:
            trials.append(shrink_trial(bench, job, given.ranks, times, zero=bench.dice.random() < 0.4))
        else:
            trials.append(kill_trial(bench, job, given.ranks, times))
        print(f"{len(trials)}. {trials[-1]}", flush=True)
    print(summary(trials))
    print(f"folder: {bench.folder}")
    return int(any(trial.problems for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
