"""The command line. A command imports what it needs when it runs: ``show``, ``plot``, ``--help`` never import torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hpcfl.cli_options import Changes, DryRun, JobFile, Launcher, Out, Plugins, with_sbatch_options
from hpcfl.cli_sweep import sweep
from hpcfl.errors import HpcflError, keep_traceback, place
from hpcfl.launcher import launched_rank

# typer's errors of usage, wherever its version keeps their class
WrongCall: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="hpcfl",
    help="Personalized federated learning on HPC machines, over MPI.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Files = Annotated[list[Path], typer.Argument(help="Results files, or folders of runs.")]
app.add_typer(sweep, name="sweep")


@app.command()
def run(
    job: JobFile,
    changes: Changes = None,
    plugin: Plugins = None,
    out: Out = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest run of this job, on any number of ranks.")
    ] = False,
    max_walltime: Annotated[
        str | None, typer.Option(help="Stop with a checkpoint before this is over: 2h, 90min, 1-12:00:00.")
    ] = None,
    stop_signal: Annotated[
        str, typer.Option(help="Signal that asks for a checkpoint and a stop: USR1, USR2, HUP.")
    ] = "USR1",
) -> int:
    """Run a job, alone or under mpirun, and write OUT/JOB-NNN/results.h5. Exit code 75: go on with --resume."""
    from hpcfl.signals import StopRequest

    request = StopRequest(stop_signal)
    request.listen()  # before torch is imported, which takes seconds

    from hpcfl.config import toml_value
    from hpcfl.session import Session

    given = {"out": out, "max_walltime": max_walltime}
    overrides = [
        *(changes or []),
        *(f"run.{name}={toml_value(value)}" for name, value in given.items() if value is not None),
    ]
    return Session(job, overrides, plugin or [], request, resume=resume).run()


@app.command()
@with_sbatch_options
def submit(
    job: JobFile,
    changes: Changes = None,
    plugin: Plugins = None,
    out: Out = None,
    launcher: Launcher = None,
    dry_run: DryRun = False,
    *,
    sbatch: dict[str, str | None],
) -> None:
    """Check a job and submit it to SLURM; it is stopped before its time limit, requeued and resumed until done."""
    from hpcfl.submit import submit as hand_over

    hand_over(job, changes or [], plugin or [], out, sbatch, launcher, dry_run)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def status(job: JobFile, changes: Changes = None, out: Out = None) -> int:
    """Say how the newest run of a job stands; exit code 0: done, 75: stopped early, 1: anything else.

    Takes the options of run, and looks at those that say where the results are.
    """
    from hpcfl.states import status as look

    code, text = look(job, changes or [], out)
    print(text)
    return code


@app.command()
def show(
    files: Files,
    merged: Annotated[
        bool, typer.Option("--merged", help="Count consecutive averagings by coins (Async-L2GD) as one communication.")
    ] = False,
) -> None:
    """One table of any number of runs: accuracy or error, fairness, communication, time."""
    from hpcfl.analysis.table import table

    console = Console()
    Console(width=max(console.width, 132)).print(table(files, merged=merged))  # narrower, its cells would be folded


@app.command()
def plot(
    files: Files, output: Annotated[Path, typer.Option("-o", "--output", help="Picture to write (.png, .pdf, .svg).")]
) -> None:
    """Curves of personal and global accuracy per run, and a histogram of the clients."""
    from hpcfl.analysis.plot import plot as draw

    draw(files, output)
    print(f"wrote {output}")


@app.command()
def theory(
    job: JobFile,
    results: Annotated[
        Path | None, typer.Argument(help="Results of a run of the job, to be shown beside the predictions.")
    ] = None,
    changes: Changes = None,
    plugin: Plugins = None,
    accuracy: Annotated[
        float, typer.Option(help="Share of the squared distance to the minimiser that is left.", min=1e-30, max=1.0)
    ] = 1e-6,
) -> None:
    """What theory predicts for a job: step sizes, best probabilities, rounds and bytes; and what a run measured."""
    from hpcfl.forecast import theory as forecast

    forecast(job, changes or [], plugin or [], accuracy, results, Console())


@app.command(name="list")
def list_(
    kind: Annotated[str | None, typer.Argument(help="algorithms, models, data or partitions; absent: all.")] = None,
    plugin: Plugins = None,
) -> None:
    """Names of what can be used in a job file, with every option, its type and default."""
    from hpcfl.catalogue import print_catalogue

    print_catalogue(kind, plugin or [], Console())


@app.command()
def doctor() -> None:
    """MPI, ranks, threads and binding, devices, HDF5, data: what works here, and what to do about the rest."""
    from hpcfl.doctor import doctor as examine

    examine(Console())


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0 done, 1 failure, 2 wrong input."""
    try:
        code = app(
            args=list(sys.argv[1:] if arguments is None else arguments), prog_name="hpcfl", standalone_mode=False
        )
        return int(code or 0)
    except WrongCall as error:
        if error.format_message():  # none where the help was shown instead
            complain(f"{error.format_message()} (see: hpcfl --help)")
        return 2
    except HpcflError as error:
        complain(str(error))
        return error.exit_code
    except BrokenPipeError:  # hpcfl show ... | head
        sys.stderr.close()
        return 1
    except Exception as error:  # of a plug-in, or a mistake in hpcfl
        kept = keep_traceback(error, Path("hpcfl-error.txt"))
        complain(f"{type(error).__name__}: {' '.join(str(error).split())} ({place(error)}){kept}")
        return 1


def complain(text: str) -> None:
    """One line per mistake on standard error, of one rank only."""
    if launched_rank() == 0:
        for line in text.splitlines():
            print(f"hpcfl: {line}", file=sys.stderr)
