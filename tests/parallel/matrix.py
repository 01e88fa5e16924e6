"""Many small jobs in one launch: ``mpirun -n 3 python tests/parallel/matrix.py OUT`` writes OUT/<case>-001/results.h5.

One import of torch per rank serves them all. ``python tests/parallel/matrix.py OUT FILE.toml part.key=value ...`` runs
job files instead, with the changes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hpcfl.comm import Comm, world
from hpcfl.config import Job, load, resolve
from hpcfl.registry import registered
from hpcfl.run import run

BASE: dict[str, dict[str, Any]] = {
    "run": {"rounds": 5, "eval_every": 2, "seed": 3, "participation": 0.5, "save_models": True},
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "clients": 11, "alpha": 0.3, "min_samples": 2, "validation_share": 0.1},
    "model": {"name": "mlp", "hidden": [24]},
    "algorithm": {"lr": 0.1, "local_steps": 3, "batch_size": 8},
}

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "apfl-everyone": {"algorithm": {"name": "apfl"}, "run": {"participation": 1.0}},
    "apfl-step": {"algorithm": {"name": "apfl", "alpha_update": "step", "alpha": [0.01 * i for i in range(11)]}},
    "apfl-released": {"algorithm": {"name": "apfl", "variant": "released"}},
    "apfl-average": {"algorithm": {"name": "apfl", "average": True}, "run": {"dtype": "float64"}},
    "apfl-one-client-a-round": {"algorithm": {"name": "apfl"}, "run": {"participation": 0.1}},
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
    "fedavg-mlp-vmap": {"algorithm": {"name": "fedavg"}, "run": {"backend": "vmap"}},
    "local-logistic": {"algorithm": {"name": "local"}, "model": {"name": "logistic", "l2": 0.01}},
}


def cases() -> dict[str, Job]:
    """Name -> job: every registered algorithm with its defaults, and the special cases."""
    changes = {name: {"algorithm": {"name": name}} for name in registered("algorithm")} | CASES
    jobs = {}
    for name, change in changes.items():
        tables = {part: {**BASE[part], **change.get(part, {})} for part in BASE}
        if "name" in change.get("model", {}):
            tables["model"] = change["model"]
        tables = {part: {k: v for k, v in table.items() if v is not None} for part, table in tables.items()}
        jobs[name] = resolve(tables, name, name)
    return jobs


def run_all(jobs: dict[str, Job], comm: Comm) -> None:
    """Collective: every job, one after the other."""
    for job in jobs.values():
        run(job, comm, opened=lambda *_: None, progress=lambda *_: None)


def main() -> None:
    out, *rest = sys.argv[1:]
    files, changes = [a for a in rest if a.endswith(".toml")], [a for a in rest if not a.endswith(".toml")]
    if files:
        names = ["-".join(Path(f).with_suffix("").parts[-2:]) for f in files]
        jobs = {name: load(Path(f), [*changes, f'run.out="{out}"']) for name, f in zip(names, files, strict=True)}
        jobs = {
            name: Job(name, job.run, job.data, job.partition, job.model, job.algorithm, job.text)
            for name, job in jobs.items()
        }
    else:
        BASE["run"]["out"] = out
        jobs = cases()
    comm = world()
    run_all(jobs, comm)
    if comm.rank == 0:
        print(f"ran {len(jobs)} jobs on {comm.size} ranks")


if __name__ == "__main__":
    main()
