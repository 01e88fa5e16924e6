"""``hpcfl submit``: checks a job, and hands it to SLURM in the script slurm/run.sbatch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcfl import slurm
from hpcfl.config import Job, load, toml_value
from hpcfl.errors import InputError
from hpcfl.registry import load_plugins
from hpcfl.start import to_continue


def submit(
    file: Path,
    changes: Sequence[str],
    plugins: Sequence[Path],
    out: str | None,
    sbatch: slurm.Options,
    launcher: str | None,
    dry_run: bool,
) -> None:
    """Submits the job, or prints the script; says its number and log. Raises InputError for what would fail later."""
    load_plugins(list(plugins))
    overrides = [*changes, *([f"run.out={toml_value(out)}"] if out is not None else [])]
    job = load(file, overrides)
    continued = continues(job)
    arguments = [str(file), *(word for change in changes for word in ("--set", change))]
    arguments += [word for plugin in plugins for word in ("--plugin", str(plugin))]
    arguments += ["--out", out] if out is not None else []
    weak = {"job-name": job.name, "cpus-per-task": str(job.run.threads)}
    script = slurm.fill("run.sbatch", [weak, sbatch], arguments, launcher)
    if dry_run:
        print(script, end="")
        return
    number = slurm.sbatch(script)
    print(f"submitted job {number}; log: {slurm.log_file(script, number)}")
    if continued:
        print(f"it goes on with {continued}")


def continues(job: Job) -> Path | None:
    """The run folder that the job, once started, goes on with. Raises InputError where that is done, or another job."""
    elsewhere = "for another run give another folder: --out"
    try:
        folder, done = to_continue(job)
    except InputError as error:
        raise InputError(f"{error}\nA submitted job resumes the newest run of its name; {elsewhere}") from None
    if done:
        raise InputError(f"{folder} is this job, and done already; {elsewhere}")
    return folder
