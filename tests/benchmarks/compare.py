"""hpcfl, a plain torch loop and pfl-research on the same work, in turns of a moment each, one core and one thread each:

python tests/benchmarks/compare.py [--pfl PYTHON] [--seconds 60] [--models mlp ...]
python tests/benchmarks/compare.py --ranks          two ranks of hpcfl on two cores against one rank

PYTHON: the interpreter of an environment with `pip install "pfl[pytorch]"`; without it that column is left out, with a
message. Prints the medians over the turns: client-steps per second, the ratio within a turn, and the share of an hpcfl
round outside local training with either reduction.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
CLIENT_STEPS = 250  # per round
WARM_UP = 2  # turns
TARGETS = {"logistic": 6.0, "mlp": 1.8, "cnn": 1.0}  # of pfl-research


class System:
    """A process of one system that runs rounds on demand."""

    def __init__(self, command: list[str]):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")} | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.reports: list[dict[str, float]] = []
        self.read()

    def read(self) -> dict:
        assert self.process.stdout
        line = self.process.stdout.readline()
        return json.loads(line) if line else sys.exit(f"{self.process.args}: ended with {self.process.wait()}")

    def turn(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.reports.append(self.read())

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.terminate()
        self.process.wait()


def in_turns(commands: dict[str, list[str]], seconds: float) -> dict[str, list[dict[str, float]]]:
    """Every system's reports, turn by turn."""
    systems = {name: System(command) for name, command in commands.items()}
    deadline = None
    turns = 0
    while deadline is None or time.monotonic() < deadline or turns < WARM_UP + 3:
        for system in systems.values():
            system.turn()
        turns += 1
        if turns == WARM_UP:
            deadline = time.monotonic() + seconds
    for system in systems.values():
        system.end()
    return {name: system.reports[WARM_UP:] for name, system in systems.items()}


def median_ratio(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    """How many times faster ours is: the median over the turns."""
    return statistics.median(b["seconds"] / a["seconds"] for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare hpcfl with a plain torch loop and with pfl-research.")
    parser.add_argument("--pfl", metavar="PYTHON", help="interpreter of an environment with pfl-research")
    parser.add_argument("--seconds", type=float, default=60, help="of measurement per model")
    parser.add_argument("--models", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--ranks", action="store_true", help="two ranks against one, instead")
    options = parser.parse_args()
    ours = [sys.executable, str(HERE / "bench_hpcfl.py")]
    if options.ranks:
        two = ["bash", str(HERE.parents[1] / "jobs/mpirun.sh"), "-n", "2", *ours, "mlp"]
        reports = in_turns({"one": [*ours, "mlp"], "two": two}, options.seconds)
        print(f"two ranks: {median_ratio(reports['two'], reports['one']):.2f} x one rank (to reach: 1.8)")
        return
    if not options.pfl:
        print("pfl-research is left out: give --pfl PYTHON, an interpreter with pfl installed")
    for model in options.models:
        commands = {"hpcfl": [*ours, model], "float64": [*ours, model, "--float64"]}
        commands["torch"] = [sys.executable, str(HERE / "peer_torch.py"), model]
        if options.pfl:
            commands["pfl-research"] = [options.pfl, str(HERE / "peer_pfl.py"), model]
        reports = in_turns(commands, options.seconds)
        line = f"{model:9}"
        for name in ("hpcfl", "torch", "pfl-research"):
            if name in reports:
                line += f" {name} {CLIENT_STEPS / statistics.median(r['seconds'] for r in reports[name]):.0f}/s,"
        line += f" {median_ratio(reports['hpcfl'], reports['torch']):.2f} x torch"
        if options.pfl:
            ratio = median_ratio(reports["hpcfl"], reports["pfl-research"])
            line += f", {ratio:.2f} x pfl-research (to reach: {TARGETS[model]})"
        shares = [statistics.median(r["outside_training"] for r in reports[name]) for name in ("hpcfl", "float64")]
        print(f"{line}, outside training {shares[0]:.1%}, with float64 sums {shares[1]:.1%}", flush=True)


if __name__ == "__main__":
    main()
