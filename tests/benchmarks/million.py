"""Few and very many clients, the same number of whom take part in a round: seconds per round, memory of every rank.

    python tests/benchmarks/million.py [--clients 10000 1000000] [--ranks 2] [--rounds 40] [--turns 3]

The job is jobs/examples/million.toml. The sizes take turns: what else the machine does hits all of them. Printed
for each size: the median of /rounds/seconds after the first rounds; seconds per round of everything between the first
and the last evaluation (records, plans, evaluations, too); seconds from the start of the program to the first round;
and of every rank the resident memory at its peak (VmHWM) and at the end (VmRSS), the largest of the turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hpcfl.analysis.reader import Run
from hpcfl.cli import main
from hpcfl.launcher import launched_rank

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "jobs/examples/million.toml"
FIRST = 5  # rounds that do not count: memory is touched for the first time, nobody has a slot yet


@dataclass(frozen=True)
class Measured:
    """One run, memory in MB of each rank."""

    round: float  # median seconds
    whole: float  # seconds per round of everything
    start: float  # seconds to the first round
    peak: list[float]
    end: list[float]

    def __str__(self) -> str:
        memory = ", ".join(f"{peak:.0f} (at the end {end:.0f})" for peak, end in zip(self.peak, self.end, strict=True))
        return (
            f"{self.round:.3f} s a round, with everything {self.whole:.3f} s; start {self.start:.1f} s; "
            f"resident MB of the ranks at their peak {memory}"
        )


def measure(clients: int, ranks: int, rounds: int, changes: Sequence[str] = ()) -> Measured:
    """Run the job with so many clients. changes: further ones, "part.key=value"."""
    options = [f"data.clients={clients}", f"run.rounds={rounds}", f"run.eval_every={max(1, rounds // 2)}", *changes]
    with tempfile.TemporaryDirectory() as out:
        command = ["bash", ROOT / "jobs/mpirun.sh", "-n", str(ranks), sys.executable, __file__, "rank", out]
        command += ["run", JOB, "--out", out, *(word for option in options for word in ("--set", option))]
        started = time.time()
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        memory = [json.loads((Path(out) / f"rank-{r}.json").read_text()) for r in range(ranks)]
        with Run(next(Path(out).glob("*/results.h5"))) as run:
            seconds = run.read("/rounds/seconds")[min(FIRST, rounds - 1) :]
            at, when = run.read("/evaluations/round"), run.read("/evaluations/seconds")
            first = datetime.fromisoformat(run.attributes["start"]).timestamp()
        whole = (when[-1] - when[0]) / (at[-1] - at[0])
        peak, end = ([values[name] / 1024 for values in memory] for name in ("VmHWM", "VmRSS"))
        return Measured(statistics.median(seconds.tolist()), whole, first - started, peak, end)


def memory() -> dict[str, int]:
    """kB of this process: resident at its peak and now."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if words and words[0] in ("VmHWM:", "VmRSS:")}


def rank(folder: str, *arguments: str) -> int:
    """A rank of a run: what ``hpcfl`` does with these arguments, and its memory in a file."""
    code = main(list(arguments))
    (Path(folder) / f"rank-{launched_rank()}.json").write_text(json.dumps(memory()))
    return code


def summary(runs: Sequence[Measured]) -> Measured:
    """The median of the times, the largest of the memory."""
    times = (statistics.median(getattr(run, name) for run in runs) for name in ("round", "whole", "start"))
    return Measured(
        *times, *([max(x) for x in zip(*(getattr(r, n) for r in runs), strict=True)] for n in ("peak", "end"))
    )


def compare() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="part.key=value", help="more changes of the job")
    options = parser.parse_args()
    runs: dict[int, list[Measured]] = {clients: [] for clients in options.clients}
    for turn in range(options.turns):
        for clients, found in runs.items():
            found.append(measure(clients, options.ranks, options.rounds, options.set))
            print(f"turn {turn}: {clients:,} clients: {found[-1]}", flush=True)
    few, *_ = totals = {clients: summary(found) for clients, found in runs.items()}
    for clients, total in totals.items():
        ratio = f"{total.round / totals[few].round:.2f}, with everything {total.whole / totals[few].whole:.2f}"
        print(f"{clients:,} clients: {total}; times those of {few:,} clients: {ratio}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        sys.exit(rank(*sys.argv[2:]))
    compare()
