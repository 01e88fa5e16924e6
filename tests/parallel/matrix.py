"""Many small jobs in one launch: ``mpirun -n 3 python tests/parallel/matrix.py OUT`` writes OUT/<case>-001/results.h5.

One import of torch per rank serves them all. ``python tests/parallel/matrix.py OUT CASE ...`` runs these cases only,
``... OUT FILE.toml part.key=value ...`` job files instead, with the changes. ``... OUT --first`` runs the first rounds
of all cases, ``... OUT --second`` goes on with them and prints, as JSON, from which round each did.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from hpcfl.comm import Comm, world
from hpcfl.config import Job, load, resolve
from hpcfl.registry import registered
from hpcfl.run import Outcome, run
from hpcfl.start import Start, to_continue

BASE: dict[str, dict[str, Any]] = {
    "run": {"rounds": 5, "eval_every": 2, "seed": 3, "participation": 0.5, "save_models": True},
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "clients": 11, "alpha": 0.3, "min_samples": 2, "validation_share": 0.1},
    "model": {"name": "mlp", "hidden": [24]},
    "algorithm": {  # where it has such options
        "lr": 0.1,
        "local_steps": 3,
        "batch_size": 8,
        "p_global": 0.2,
        "p_cluster": 0.4,
        "smoothness": 20.0,
        "strong_convexity": 0.1,
    },
}
LEAST_SQUARES: dict[str, dict[str, Any]] = {  # for algorithms of linear regression only
    "data": {"name": "hierarchical-linear", "clusters": 4, "clients_per_cluster": 3, "dim": 5, "test_observations": 3},
    "partition": {"name": "natural"},
    "model": {"name": "linear", "bias": False},
    "run": {"dtype": "float64"},
}
OWN_LABELS: dict[str, Any] = {"name": "degrees", "clients": 11, "degree": "diverse", "labels": "local"}  # 2 to 5 each
TESTED: dict[str, Any] = {"protocol": "participants"}
SMALL_CNN: dict[str, Any] = {"name": "cnn", "channels": [3, 4], "hidden": [8, 6], "pool": 3}
KNOWN_CLUSTERS: dict[str, Any] = {"rounds": 24, "eval_every": 10, "participation": 1.0}

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "apfl-everyone": {"algorithm": {"name": "apfl"}, "run": {"participation": 1.0}},
    "apfl-step": {"algorithm": {"name": "apfl", "alpha_update": "step", "alpha": [0.01 * i for i in range(11)]}},
    "apfl-released": {"algorithm": {"name": "apfl", "variant": "released"}},
    "apfl-average": {"algorithm": {"name": "apfl", "average": True}, "run": {"dtype": "float64"}},
    "apfl-one-client-a-round": {"algorithm": {"name": "apfl"}, "run": {"participation": 0.1}},
    "async_l2gd-4-clusters": {
        "algorithm": {"name": "async_l2gd"},
        "partition": {"clusters": 4},
        "run": KNOWN_CLUSTERS,
    },
    "async_l2gd-4-clusters-float64": {
        "algorithm": {"name": "async_l2gd", "batch_size": None},
        "partition": {"clusters": 4},
        "run": KNOWN_CLUSTERS | {"dtype": "float64"},
    },
    "async_l2gd-uneven-clusters": {  # one of them on several ranks, several of them on one
        "algorithm": {
            "name": "async_l2gd",
            "alpha": [0.2, 0.5, 0.7, 1.0],
            "gamma": [0.3 + 0.05 * i for i in range(11)],
        },
        "partition": {"clusters": [7, 1, 1, 2]},
        "run": KNOWN_CLUSTERS,
    },
    "async_l2gd-two-clusters": {"algorithm": {"name": "async_l2gd"}, "partition": {"clusters": [3, 8]}},
    "async_l2gd-a-cluster-per-client": {
        "algorithm": {"name": "async_l2gd", "p_cluster": [0.05 + 0.05 * i for i in range(11)]},
        "partition": {"clusters": 11},
        "run": KNOWN_CLUSTERS | {"participation": 0.6},
    },
    "async_l2gd-one-coin": {
        "algorithm": {"name": "async_l2gd", "p_global": 0.4, "p_cluster": 0.0},
        "partition": {"clusters": 4},
        "run": KNOWN_CLUSTERS,
    },
    "async_l2gd-sum-theory": {  # everything that is found from the data
        "algorithm": {
            "name": "async_l2gd",
            "objective": "sum",
            "gamma": 1000.0,
            "alpha": 0.3,
            "tau": "bound",
            "lr": None,
            "smoothness": None,
            "p_global": "optimal",
            "p_cluster": "optimal",
        },
        "partition": {"clusters": [2, 9]},
        "model": {"name": "logistic", "l2": 0.01, "reference": True},
        "run": KNOWN_CLUSTERS | {"dtype": "float64"},
    },
    "async_l2gd-hierarchical-linear": {
        "algorithm": {"name": "async_l2gd", "lr": None, "smoothness": None, "batch_size": None},
        **LEAST_SQUARES,
        "run": KNOWN_CLUSTERS,
    },
    "async_l2gd_vr-theory": {  # on clusters of its own data
        "algorithm": {
            "name": "async_l2gd_vr",
            "gamma": [0.3 + 0.05 * i for i in range(12)],
            "lr": None,
            "smoothness": None,
            "strong_convexity": None,
            "batch_size": 2,
        },
        **LEAST_SQUARES,
        "model": {"name": "linear", "l2": 0.1},
        "run": KNOWN_CLUSTERS | {"dtype": "float64"},
    },
    "async_l2gd_vr-logistic": {
        "algorithm": {"name": "async_l2gd_vr", "alpha": 0.4, "batch_size": None, "strong_convexity": None},
        "partition": {"clusters": [7, 1, 1, 2]},
        "model": {"name": "logistic", "l2": 0.1},
        "run": KNOWN_CLUSTERS,
    },
    "blup-uneven-clusters": {
        "algorithm": {"name": "blup", "gamma": [0.3 + 0.05 * i for i in range(12)], "objective": "sum"},
        "partition": {"name": "natural", "clusters": [7, 1, 1, 3]},
        "run": {"participation": 1.0},
    },
    "blup-wide": {
        "algorithm": {"name": "blup", "alpha": [0.0, 1.0, 0.3, 0.0]},
        "data": LEAST_SQUARES["data"] | {"dim": 25},
        "run": {"participation": 1.0},
    },
    "fedavg-epochs": {"algorithm": {"name": "fedavg", "local_steps": None, "local_epochs": 2}},
    "fedavg-full-batch": {"algorithm": {"name": "fedavg", "batch_size": None, "server_momentum": 0.5}},
    "fedavg-cnn-loop": {
        "algorithm": {"name": "fedavg"},
        "model": {"name": "cnn", "channels": [3, 4], "hidden": 8, "dropout": 0.3},
    },
    "fedavg-cnn-vmap": {
        "algorithm": {"name": "fedavg"},
        "model": {"name": "cnn", "channels": [3, 4], "hidden": 8},
        "run": {"backend": "vmap"},
    },
    "fedavg-local-labels": {"algorithm": {"name": "fedavg"}, "partition": OWN_LABELS, "run": TESTED},
    "fedavg-mlp-vmap": {"algorithm": {"name": "fedavg"}, "run": {"backend": "vmap"}},
    "fedbabu-local-labels": {
        "algorithm": {"name": "fedbabu", "fine_tune": "all"},
        "partition": OWN_LABELS,
        "run": TESTED,
    },
    "fedper-local-labels": {
        "algorithm": {"name": "fedper", "batch_size": None, "start_heads": "drawn"},
        "partition": OWN_LABELS,
        "run": TESTED,
    },
    "fedper-logistic": {"algorithm": {"name": "fedper"}, "model": {"name": "logistic"}},  # no body
    "fedrecon-reset": {
        "algorithm": {"name": "fedrecon", "reset": True, "body_steps": 2},
        "partition": OWN_LABELS,
        "run": TESTED,
    },
    "fedrep-cnn-vmap": {
        "algorithm": {"name": "fedrep", "head_steps": 2, "body_steps": 2},
        "partition": OWN_LABELS,
        "model": SMALL_CNN,
        "run": {"backend": "vmap"},
    },
    "least_squares-pooled": {"algorithm": {"name": "least_squares", "pooled": True}},
    "local-logistic": {"algorithm": {"name": "local"}, "model": {"name": "logistic", "l2": 0.01}},
    "pflego-full-batch": {
        "algorithm": {"name": "pflego", "batch_size": None},
        "partition": OWN_LABELS,
        "model": {"name": "mlp", "hidden": [24, 12], "head_init": "uniform", "l2": 0.001},
        "run": TESTED,
    },
    "pflego-cnn": {
        "algorithm": {"name": "pflego", "batch_size": None, "server_optimizer": "sgd", "server_lr": 0.1},
        "partition": OWN_LABELS,
        "model": SMALL_CNN,
        "run": TESTED,
    },
    "pflego-two-clients": {  # a rank without any
        "algorithm": {"name": "pflego", "start_heads": "drawn"},
        "partition": {"name": "degrees", "clients": 2, "degree": "none"},
        "run": TESTED,
    },
    "pflego-released": {
        "algorithm": {"name": "pflego", "variant": "released", "local_steps": 1},
        "model": {"name": "mlp", "hidden": [24], "head_bias": False},
        "run": {"dtype": "float64"},
    },
    "single_cluster-gamma": {
        "algorithm": {"name": "single_cluster", "gamma": [0.3 + 0.05 * i for i in range(11)]},
        "partition": {"clusters": [7, 1, 1, 2]},
        "run": KNOWN_CLUSTERS,
    },
    "single_cluster-theory": {
        "algorithm": {"name": "single_cluster", "lr": None, "smoothness": None, "p_global": "optimal"},
        **LEAST_SQUARES,
        "run": KNOWN_CLUSTERS | {"dtype": "float64"},
    },
}


def cases() -> dict[str, Job]:
    """Name -> job: every registered algorithm with its defaults, and the special cases."""
    plain = {name: {"algorithm": {"name": name}} for name in registered("algorithm")}
    return {name: job(name, change) for name, change in (plain | CASES).items()}


def job(name: str, change: dict[str, dict[str, Any]]) -> Job:
    """The base with a change. A table with a ``name`` that the base's has not takes its place; None: not given."""
    cls = registered("algorithm")[change["algorithm"]["name"]]
    if cls.least_squares:
        change = {part: LEAST_SQUARES.get(part, {}) | change.get(part, {}) for part in BASE}
    if cls.whole_cohort:
        change = {**change, "run": {"participation": 1.0} | change.get("run", {})}
    known = {"name", *(f.name for f in dataclasses.fields(cls))}
    tables = {}
    for part, base in BASE.items():
        mine = change.get(part, {})
        if part == "algorithm":
            base = {k: v for k, v in base.items() if k in known}
        elif mine.get("name", base.get("name")) != base.get("name"):
            base = {}
        tables[part] = {k: v for k, v in {**base, **mine}.items() if v is not None}
    return resolve(tables, name, name)


def run_all(jobs: dict[str, Job], comm: Comm) -> None:
    """Collective: every job, one after the other."""
    for job in jobs.values():
        run(job, comm, opened=lambda *_: None, progress=lambda *_: None)


@dataclasses.dataclass(frozen=True)
class Break:
    """How the first part of a job ends and the second begins; it has the fewer rounds, or is asked to stop."""

    rounds: int  # of the first part
    asked: bool
    checkpoint_every: int
    damage: bool  # to the newest checkpoint: the older one counts, and rows are written again
    states: tuple[str, str]  # run.state of the parts

    @property
    def goes_on(self) -> int:
        """The rounds after which the second part goes on."""
        return self.rounds - self.checkpoint_every if self.damage else self.rounds


def breaks() -> dict[str, Break]:
    """Name of a case -> its break: by turns all kinds, every second one between two evaluations."""
    found = {}
    for number, (name, job) in enumerate(cases().items()):
        rounds, every = job.run.rounds, job.run.eval_every
        between = rounds // 2 + (rounds // 2 % every == 0)
        states = [("device", "device"), ("disk", "device"), ("device", "disk")][number // 4 % 3]
        found[name] = [
            Break(between, False, rounds, False, states),
            Break(between, True, between, False, states),
            Break(every, True, 1000, False, states),
            Break(between, True, 1, True, states),
        ][number % 4]
        if job.algorithm.whole_cohort:
            found[name] = dataclasses.replace(found[name], states=("device", "device"))
    return found


def with_run(job: Job, **options: Any) -> Job:
    """The job with other options of the run."""
    tables = tomllib.loads(job.text)
    return resolve({**tables, "run": tables["run"] | options}, job.name, job.name)


def first_part(job: Job, comm: Comm, end: Break) -> Outcome:
    """Collective: a job up to its break, with a checkpoint there."""
    done = 0

    def progress(rounds: int, means: object) -> None:
        nonlocal done
        done = rounds

    options = {"checkpoint_every": end.checkpoint_every, "state": end.states[0]}
    part = with_run(job, **options, **({} if end.asked else {"rounds": end.rounds}))
    asked = (lambda: "signal SIGUSR1" if done >= end.rounds else None) if end.asked else (lambda: None)
    folders: list[Path] = []
    outcome = run(part, comm, opened=lambda start: folders.append(start.folder), progress=progress, asked=asked)
    if end.damage and comm.rank == 0:
        damage(folders[0] / f"checkpoints/round-{outcome.saved}/shared.h5")
    return outcome


def damage(file: Path) -> None:
    """Flips a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


def second_part(job: Job, comm: Comm, end: Break) -> Start:
    """Collective: the job from its break to its end; how it was when it went on."""
    job = with_run(job, state=end.states[1])
    folder, _ = comm.from_root(lambda: to_continue(job))
    starts: list[Start] = []
    run(job, comm, folder=folder, opened=starts.append, progress=lambda *_: None)
    return starts[0]


def run_first(comm: Comm) -> None:
    """Collective: the first part of every case, each until its break."""
    for name, job in cases().items():
        outcome, end = first_part(job, comm, breaks()[name]), breaks()[name]
        assert (outcome.done, outcome.saved) == (end.rounds, end.rounds), (name, outcome.done, outcome.saved)


def run_second(comm: Comm) -> None:
    """Collective: the second part of every case. Prints name -> [rounds done, warnings] at its beginning."""
    starts = {name: second_part(job, comm, breaks()[name]) for name, job in cases().items()}
    if comm.rank == 0:
        print(json.dumps({name: [start.done, start.warnings] for name, start in starts.items()}))


PARTS = {"--first": run_first, "--second": run_second}


def main() -> None:
    out, *rest = sys.argv[1:]
    files, others = [a for a in rest if a.endswith(".toml")], [a for a in rest if not a.endswith(".toml")]
    if files:
        names = ["-".join(Path(f).with_suffix("").parts[-2:]) for f in files]
        jobs = {name: load(Path(f), [*others, f'run.out="{out}"']) for name, f in zip(names, files, strict=True)}
        jobs = {
            name: Job(name, job.run, job.data, job.partition, job.model, job.algorithm, job.text)
            for name, job in jobs.items()
        }
    else:
        BASE["run"]["out"] = out
        jobs = {name: job for name, job in cases().items() if name in others or not others}
    comm = world()
    if others and others[0] in PARTS:
        PARTS[others[0]](comm)
        return
    run_all(jobs, comm)
    if comm.rank == 0:
        print(f"ran {len(jobs)} jobs on {comm.size} ranks")


if __name__ == "__main__":
    main()
