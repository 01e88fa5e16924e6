"""The experiments of the Async-L2GD paper (arXiv 2204.13619): all runs of one in one process, and its table.

    python jobs/papers/async-l2gd/study.py simulated
    bash jobs/mpirun.sh -n 2 .venv/bin/python jobs/papers/async-l2gd/study.py all --seeds 5

A run is a job file of this folder with changes (observations, seed, gamma, ...). Where its results are there already,
they are taken, and a run that was killed goes on from its last checkpoint: start a study that was stopped again. The
table is printed, and written to OUT/EXPERIMENT/table.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all studies share

import tables_chem97
import tables_donors
import tables_simulated
from command import Asked, Parser, count, counts, start, write
from runs import Runs

from hpcfl.comm import Comm

EXPERIMENTS = ("simulated", "donors", "chem97")
SEEDS = {"simulated": 5, "donors": 1, "chem97": 5}


def arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="study.py", description="The experiments of the Async-L2GD paper, and their tables.")
    parser.add_argument("experiment", choices=[*EXPERIMENTS, "all"])
    parser.add_argument("--seeds", type=count, help="so many, from 0 on (default: 5, for donors 1)")
    parser.add_argument("--rounds", type=count, help="at most so many rounds in a run, for a short look")
    parser.add_argument("--out", type=Path, default=Path("results/async-l2gd"), help="folder (default: %(default)s)")
    simulated = parser.add_argument_group("simulated")
    simulated.add_argument("--observations", type=counts, default=tables_simulated.OBSERVATIONS, metavar="5,25")
    simulated.add_argument(
        "--iterated",
        type=counts,
        default=tables_simulated.ITERATED,
        metavar="5,25",
        help="of these the numbers of observations for which the iterative methods run, too (default: 5,25,100)",
    )
    simulated.add_argument(
        "--iterated-seeds", type=count, default=3, help="at most so many seeds for them (default: 3)"
    )
    donors = parser.add_argument_group("donors")
    donors.add_argument("--clients", type=count, help="so many, for a short look (default: as the job files, 29490)")
    return parser.parse_args(given)


def study(options: argparse.Namespace, comm: Comm, asked: Asked = lambda: None) -> None:
    """Collective over the world."""
    runs = Runs(comm, Path(__file__).resolve().parent, options.out, options.rounds, asked)
    for name in EXPERIMENTS if options.experiment == "all" else [options.experiment]:
        seeds = options.seeds or SEEDS[name]
        if name == "simulated":
            text = tables_simulated.run(
                runs,
                seeds=seeds,
                observations=options.observations,
                iterated=options.iterated,
                iterated_seeds=options.iterated_seeds,
            )
        elif name == "donors":
            text = tables_donors.run(runs, seeds=seeds, clients=options.clients)
        else:
            text = tables_chem97.run(runs, seeds=seeds)
        comm.from_root(partial(write, options.out / name / "table.md", f"{text}\n"))
    runs.say(f"{runs.made} runs made, {runs.found} found")


if __name__ == "__main__":
    sys.exit(start(sys.argv[1:], arguments, study))
