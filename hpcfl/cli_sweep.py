"""``hpcfl sweep``: one job with other settings and seeds, many times; here or by SLURM."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from hpcfl.cli_options import Changes, DryRun, JobFile, Launcher, Plugins, with_sbatch_options
from hpcfl.errors import InputError

Folder = Annotated[Path, typer.Argument(help="Folder of a sweep.")]
Submit = Annotated[bool, typer.Option("--submit", help="Run the members by SLURM, as one array.")]
Local = Annotated[bool, typer.Option("--local", help="Run the members here, one after the other.")]
Ranks = Annotated[int | None, typer.Option(help="MPI ranks of a member that runs here; absent: one process.", min=1)]
Parallel = Annotated[int | None, typer.Option(help="Members that SLURM may run at once; absent: any number.", min=1)]


class JobOrCommand(TyperGroup):
    """``hpcfl sweep JOB.toml ...`` is short for ``hpcfl sweep create JOB.toml ...``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in ("--help", *self.commands):
            args = ["create", *args]
        return super().parse_args(ctx, args)


sweep = typer.Typer(
    cls=JobOrCommand,
    help="A job with other settings and seeds, many times: hpcfl sweep JOB.toml --grid algorithm.lr=0.01,0.1 --seeds 5",
    no_args_is_help=True,
)


@sweep.command()
@with_sbatch_options
def create(
    job: JobFile,
    grid: Annotated[
        list[str] | None, typer.Option("--grid", help="part.key=value,value,...; all combinations are run.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="So many seeds, from the job's on.", min=1, max=10_000)] = None,
    changes: Changes = None,
    plugin: Plugins = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the sweep, new or empty; absent: OUT/JOB-sweep-NNN.")
    ] = None,
    submit: Submit = False,
    local: Local = False,
    ranks: Ranks = None,
    parallel: Parallel = None,
    launcher: Launcher = None,
    dry_run: DryRun = False,
    *,
    sbatch: dict[str, str | None],
) -> int:
    """Make a sweep: a folder with a job file for every member. Then run it, here or by SLURM, or say what would run."""
    from hpcfl import sweep as sweeps
    from hpcfl.registry import load_plugins

    _check(submit, local, ranks, sbatch, parallel, dry_run)
    load_plugins(plugin or [])
    made = sweeps.make(job, grid or [], seeds, changes or [], plugin or [], out, sbatch)
    if not dry_run:
        print(f"sweep: {made.folder}, {len(made.members)} members", flush=True)
    if submit or local:
        return _start(made, [m.number for m in made.members], local, ranks, {}, parallel, launcher, dry_run)
    for line in sweeps.commands(made):
        print(line)
    print(f"hpcfl sweep missing {made.folder} --local or --submit runs them")
    return 0


@sweep.command()
def status(folder: Folder) -> None:
    """What became of every member: done, running, stopped, failed, killed or pending, and why."""
    from hpcfl.states import states, table
    from hpcfl.sweep import Sweep

    console = Console()
    Console(width=max(console.width, 132)).print(table(states(Sweep.open(folder))))


@sweep.command()
@with_sbatch_options
def missing(
    folder: Folder,
    submit: Submit = False,
    local: Local = False,
    ranks: Ranks = None,
    parallel: Parallel = None,
    launcher: Launcher = None,
    dry_run: DryRun = False,
    *,
    sbatch: dict[str, str | None],
) -> int:
    """The members that are not done, not running and not in the queue: list them, or run them (again), each from its
    last checkpoint."""
    from hpcfl.states import states
    from hpcfl.sweep import Sweep

    _check(submit, local, ranks, sbatch, parallel, dry_run)
    opened = Sweep.open(folder)
    found = [state for state in states(opened) if state.missing]
    if (submit or local) and found:
        numbers = [state.member.number for state in found]
        return _start(opened, numbers, local, ranks, sbatch, parallel, launcher, dry_run)
    for state in found:
        print(f"{state.member.name}: {state.word}{f', {state.why}' if state.why else ''}")
    if not found:
        print("none is missing: all members are done, running or in the queue")
    return 0


@sweep.command()
def collect(
    folder: Folder,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="CSV file; absent: print.")] = None,
) -> None:
    """One row per member as CSV: what it changes, its state, and its final metrics."""
    from hpcfl import states
    from hpcfl.sweep import Sweep

    found = states.states(Sweep.open(folder))
    if output is None:
        states.collect(found, sys.stdout)
        return
    try:
        with output.open("w", newline="") as file:
            states.collect(found, file)
    except OSError as error:
        raise InputError(f"-o {output}: cannot be written ({error.strerror})") from None
    print(f"wrote {output}")


def _check(
    submit: bool, local: bool, ranks: int | None, sbatch: dict[str, str | None], parallel: int | None, dry_run: bool
) -> None:
    if submit and local:
        raise InputError("--submit and --local: give one of the two")
    if ranks is not None and not local:
        raise InputError("--ranks is for --local; SLURM's number of ranks is --ntasks")
    if not submit and (sbatch or parallel or dry_run):
        given = [f"--{name}" for name in sbatch] + ["--parallel"] * bool(parallel) + ["--dry-run"] * dry_run
        raise InputError(f"{given[0]} is for --submit")


def _start(
    sweep: Any,
    numbers: list[int],
    local: bool,
    ranks: int | None,
    sbatch: dict[str, str | None],
    parallel: int | None,
    launcher: str | None,
    dry_run: bool,
) -> int:
    from hpcfl import sweep as sweeps

    if local:
        return sweeps.run_here(sweep, numbers, ranks)
    sweeps.submit(sweep, numbers, sbatch, parallel, launcher, dry_run)
    return 0
