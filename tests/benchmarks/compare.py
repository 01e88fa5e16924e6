"""hpcfl, a plain torch loop and pfl-research on the same work, in turns, one core and one thread each:

python tests/benchmarks/compare.py [--pfl PYTHON] [--repeats 5]

PYTHON: the interpreter of an environment with `pip install "pfl[pytorch]"`; without it that column is left out, with a
message. Prints medians over the repeats: client-steps per second, ratios within a repeat, and the share of an hpcfl
round outside local training. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROUNDS = {"logistic": (300, 20), "mlp": (40, 5), "cnn": (2, 1)}  # timed, warm-up
TARGETS = {"logistic": 6.0, "mlp": 1.8, "cnn": 1.0}  # of pfl-research


def measure(python: str, script: str, model: str, *options: str) -> dict:
    """One process of one system; its report."""
    rounds, warmup = ROUNDS[model]
    command = [python, str(HERE / script), model, "--rounds", str(rounds), "--warmup", str(warmup), *options]
    if shutil.which("taskset"):
        command = ["taskset", "-c", "0", *command]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare hpcfl with a plain torch loop and with pfl-research.")
    parser.add_argument("--pfl", metavar="PYTHON", help="interpreter of an environment with pfl-research")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=ROUNDS, default=list(ROUNDS))
    options = parser.parse_args()
    systems = {"torch": (sys.executable, "peer_torch.py")}
    if options.pfl:
        systems["pfl-research"] = (options.pfl, "peer_pfl.py")
    else:
        print("pfl-research is left out: give --pfl PYTHON, an interpreter with pfl installed")
    for model in options.models:
        rates: dict[str, list[float]] = {name: [] for name in ["hpcfl", *systems]}
        outside: dict[str, list[float]] = {"reproducible": [], "float64": []}
        for _ in range(options.repeats):
            for name, (python, script) in systems.items():
                rates[name].append(measure(python, script, model)["client_steps_per_second"])
            report = measure(sys.executable, "bench_hpcfl.py", model)
            rates["hpcfl"].append(report["client_steps_per_second"])
            outside["reproducible"].append(report["outside_training"])
            outside["float64"].append(measure(sys.executable, "bench_hpcfl.py", model, "--float64")["outside_training"])
        print(f"{model:9}", *(f"{name} {statistics.median(rate):8.0f}/s" for name, rate in rates.items()), end="  ")
        for name in systems:
            ratios = [ours / theirs for ours, theirs in zip(rates["hpcfl"], rates[name], strict=True)]
            target = f" (to reach: {TARGETS[model]})" if name == "pfl-research" else ""
            print(f"{statistics.median(ratios):.2f} x {name}{target}", end="  ")
        print(
            "outside training:",
            *(f"{name} {statistics.median(share):.1%}" for name, share in outside.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
