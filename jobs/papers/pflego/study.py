"""The experiments of the PFLEGO paper (arXiv 2202.09848): all runs of one in one process, and its tables.

    python jobs/papers/pflego/study.py table --data mnist --degrees high,medium --methods pflego,fedper
    bash jobs/mpirun.sh -n 2 .venv/bin/python jobs/papers/pflego/study.py participation --data mnist
    python jobs/papers/pflego/study.py tune --data mnist --degrees high --beta .007,.02 --rho .001,.003
    python jobs/papers/pflego/study.py table --data mnist --rates high:0.02:0.003 --missing skip

table: methods and degrees of personalisation on MNIST, Fashion-MNIST, EMNIST and CIFAR-10, beside what was published.
participation: 20 to 100 % of the clients in a round. rates: PFLEGO on a grid of beta (clients) and rho (server).
omniglot: alphabets as clients; FedRecon beside PFLEGO for several tau. tune: PFLEGO's rates by validation, for --rates.
list: the ``hpcfl run`` command of every run, of all experiments or of ``list EXPERIMENT OPTIONS``.

A run is a job file of this folder with changes. Where its results are there already, they are taken, and a run that was
killed goes on from its last checkpoint: start a study that was stopped again. The tables are printed, and written to
OUT/EXPERIMENT.md.

As in the paper, labels are each client's own, numbered from 0: FedAvg shares a head of 2 outputs in High-Pers. Heads
start uniform in [0, 1), personal ones at numbers of their own: in No-Pers heads that start alike gain PFLEGO five
points. Not known: the tuned rates, the degree of the participation study, the grid of the study of the rates, how
FedRep divides tau (here 25 steps of the head, then 25 of the body). Not the same: bodies start as torch's layers do;
the comparison with FedRecon has 16 participants in every round instead of a random number from 4 to 28.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all studies share

import settings
import tables
from command import Asked, Parser, count, counts, start, write
from runs import Runs
from settings import Rates, Setting

from hpcfl.comm import Comm
from hpcfl.config import toml_value
from hpcfl.errors import nearest

FOLDER = Path(__file__).resolve().parent
EXPERIMENTS = ("table", "participation", "rates", "omniglot", "tune")

Plan = tuple[Mapping[Any, Setting], Callable[[Mapping[Any, Path]], str]]  # runs by key; their tables


def rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f'"{text}" is not a number > 0')
    return value


def several_rates(text: str) -> list[float]:
    return [rate(part) for part in text.split(",")]


def word(text: str, valid: Sequence[str]) -> str:
    if text not in valid:
        raise argparse.ArgumentTypeError(f'"{text}" is unknown{nearest(text, valid)}')
    return text


def words(text: str, valid: Sequence[str]) -> list[str]:
    return [word(part, valid) for part in dict.fromkeys(text.split(","))]


def percents(text: str) -> list[int]:
    found = counts(text)
    if max(found) > 100:
        raise argparse.ArgumentTypeError(f"{max(found)} % of the clients; expected at most 100")
    return found


def rates_by_degree(text: str) -> dict[str, Rates]:
    """ "high:0.02:0.003,medium:0.007:0.001"."""
    found = {}
    for part in text.split(","):
        pieces = part.split(":")
        if len(pieces) != 3:
            raise argparse.ArgumentTypeError(f'"{part}": expected DEGREE:BETA:RHO, e.g. high:0.02:0.003')
        degree = word(pieces[0], list(settings.DEGREES))
        if degree in found:
            raise argparse.ArgumentTypeError(f'"{text}": has two pairs for {degree}')
        found[degree] = rate(pieces[1]), rate(pieces[2])
    return found


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """experiments: the options of one, or for ``list`` of those that it lists."""
    if given[:1] != ["list"]:
        return argparse.Namespace(listed=False, experiments=[experiment(given)])
    listed = [given[1:]] if given[1:] else [[name] for name in EXPERIMENTS]
    return argparse.Namespace(listed=True, experiments=[experiment(one) for one in listed])


def experiment(given: Sequence[str]) -> argparse.Namespace:
    sets, degrees, methods = list(settings.SETS), list(settings.DEGREES), list(settings.METHODS)
    some_degrees, some_methods = (partial(words, valid=valid) for valid in (degrees, methods))
    parser = Parser(prog="study.py", description="The experiments of the PFLEGO paper, and their tables.")
    experiments = parser.add_subparsers(dest="experiment", required=True, metavar="|".join([*EXPERIMENTS, "list"]))

    def add(name: str, rounds: int | None = None) -> Parser:
        one = experiments.add_parser(name)
        one.add_argument("--seeds", type=count, default=1, help="so many, from 0 on (default: 1)")
        one.add_argument("--rounds", type=count, default=rounds, help="at most so many in a run, for a short look")
        one.add_argument("--out", type=Path, default=Path("results/pflego"), help="folder (default: %(default)s)")
        one.add_argument("--root", help="folder of the data sets (default: data)")
        one.add_argument("--missing", choices=["run", "skip"], default="run", help="skip: take what is there")
        return one

    table = add("table")
    table.add_argument("--data", type=partial(words, valid=sets), default=sets, metavar=",".join(sets))
    table.add_argument("--degrees", type=some_degrees, default=degrees, metavar=",".join(degrees))
    table.add_argument("--methods", type=some_methods, default=methods, metavar=",".join(methods))
    table.add_argument("--beta", type=rate, default=settings.BETA, help="rate of the clients (default: %(default)s)")
    table.add_argument("--rho", type=rate, default=settings.RHO, help="of the server (default: %(default)s)")
    table.add_argument("--rates", type=rates_by_degree, default={}, metavar="high:0.02:0.003,...", help="of PFLEGO")

    shares = add("participation")
    shares.add_argument("--shares", type=percents, default=settings.SHARES, metavar="20,100", help="percent")
    shares.add_argument("--methods", type=some_methods, default=["fedavg", "fedper", "pflego"])
    shares.add_argument("--beta", type=rate, default=settings.SLOW, help="(default: %(default)s)")
    shares.add_argument("--rho", type=rate, default=settings.SLOW, help="(default: %(default)s)")

    grid, tune = add("rates"), add("tune", rounds=100)
    for one in (grid, tune):
        one.add_argument("--beta", type=several_rates, default=settings.BETAS, metavar=".007,.02")
        one.add_argument("--rho", type=several_rates, default=settings.RHOS, metavar=".001,.003")
    tune.add_argument("--degrees", type=some_degrees, default=degrees, metavar=",".join(degrees))
    for one, default in ((shares, "cifar10"), (grid, "mnist"), (tune, "mnist")):
        one.add_argument("--data", type=partial(word, valid=sets), default=default, help="(default: %(default)s)")
    for one in (shares, grid):
        one.add_argument("--degree", type=partial(word, valid=degrees), default="high", help="(default: %(default)s)")

    omniglot = add("omniglot")
    omniglot.add_argument("--methods", type=some_methods, default=methods, metavar=",".join(methods))
    omniglot.add_argument("--taus", type=counts, default=settings.TAUS, metavar="10,50", help="beside FedRecon")
    omniglot.add_argument("--beta", type=rate, default=settings.BETA, help="(default: %(default)s)")
    omniglot.add_argument("--rho", type=rate, default=settings.RHO_OMNIGLOT, help="(default: %(default)s)")
    chosen = parser.parse_args(given)
    if chosen.experiment == "table":
        for degree in chosen.rates.keys() - set(chosen.degrees):
            parser.error(f"--rates: of {degree}, which is not among --degrees")
    return chosen


def plan(o: argparse.Namespace) -> Plan:
    """What an experiment runs, and what becomes of it."""
    if o.experiment == "table":
        chosen = {"degrees": o.degrees, "methods": o.methods, "seeds": o.seeds, "rates": (o.beta, o.rho)}
        chosen["tuned"] = o.rates
        return settings.table(o.data, **chosen), partial(tables.comparison, **chosen)
    if o.experiment == "participation":
        chosen = {"data": o.data, "degree": o.degree, "methods": o.methods, "shares": o.shares, "seeds": o.seeds}
        chosen["rates"] = o.beta, o.rho
        return settings.participation(**chosen), partial(tables.participation, **chosen)
    if o.experiment == "rates":
        made = settings.learning_rates(o.data, [o.degree], o.beta, o.rho, o.seeds)
        return made, partial(tables.learning_rates, data=o.data, degree=o.degree, seeds=o.seeds)
    if o.experiment == "omniglot":
        chosen = {"methods": o.methods, "taus": o.taus, "seeds": o.seeds, "rates": (o.beta, o.rho)}
        return settings.omniglot(**chosen), partial(tables.omniglot, **chosen)
    kept = f"partition.validation_share={settings.VALIDATION}"
    made = settings.learning_rates(o.data, o.degrees, o.beta, o.rho, o.seeds, kept)
    return made, partial(tables.tuning, data=o.data, degrees=o.degrees, betas=o.beta, rhos=o.rho, seeds=o.seeds)


def study(options: argparse.Namespace, comm: Comm, asked: Asked = lambda: None) -> None:
    """Collective over the world."""
    if options.listed:
        lines = [line for o in options.experiments for line in commands(o, Runs(comm, FOLDER, o.out, o.rounds))]
        if comm.rank == 0:
            print(*dict.fromkeys(lines), sep="\n")
        return
    (o,) = options.experiments
    runs = Runs(comm, FOLDER, o.out, o.rounds, asked)
    wanted, report = plan(o)
    one = runs.find if o.missing == "skip" else runs.run
    results = {key: one(s.job_file, s.data, *changes(s, o)) for key, s in wanted.items()}
    there = {key: path for key, path in results.items() if path is not None}
    runs.say(f"{runs.made} runs made, {runs.found} found, {len(wanted) - len(there)} missing")
    if there:
        comm.from_root(lambda: write(o.out / f"{o.experiment}.md", f"{report(there)}\n"))


def commands(o: argparse.Namespace, runs: Runs) -> list[str]:
    """The ``hpcfl run`` commands that make the runs of an experiment, for the shell."""
    lines = []
    for s in plan(o)[0].values():
        _, changed = runs.job(s.job_file, s.data, *changes(s, o))
        sets = chain.from_iterable(("--set", change) for change in changed)
        lines.append(shlex.join(["hpcfl", "run", os.path.relpath(FOLDER / s.job_file), *sets]))
    return lines


def changes(s: Setting, o: argparse.Namespace) -> tuple[str, ...]:
    return s.changes if o.root is None else (*s.changes, f"data.root={toml_value(o.root)}")


if __name__ == "__main__":
    sys.exit(start(sys.argv[1:], arguments, study))
