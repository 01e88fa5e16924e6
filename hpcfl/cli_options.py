"""Options and arguments that several commands have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from hpcfl.slurm import KNOWN, parse

JobFile = Annotated[Path, typer.Argument(help="Job file (TOML).")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="part.key=value overrides the job file, part={...} replaces a table."),
]
Plugins = Annotated[
    list[Path] | None,
    typer.Option("--plugin", help="Python file that registers an algorithm, model, data set or partition."),
]
Out = Annotated[str | None, typer.Option(help="Folder for the results; overrides run.out.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the batch script instead of submitting it.")]
Launcher = Annotated[
    str | None,
    typer.Option(help='mpirun, or srun with its options: "srun --mpi=pmix"; absent: HPCFL_LAUNCHER, else mpirun.'),
]
PANEL = "Options of sbatch"
More = Annotated[
    list[str] | None, typer.Argument(help="Any other options of sbatch, after --.", metavar="-- --NAME=VALUE")
]


def with_sbatch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the options of sbatch that hpcfl knows by name; it gets those given as one mapping, ``sbatch``.

    Any others follow after "--".
    """
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "sbatch"]
    names = {name.replace("-", "_"): name for name in KNOWN}
    theirs = [
        inspect.Parameter(
            key,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, typer.Option(f"--{name}", help=KNOWN[name], rich_help_panel=PANEL)],
        )
        for key, name in names.items()
    ]
    theirs.append(inspect.Parameter("more", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=More))

    @functools.wraps(command)
    def with_them(**values: Any) -> Any:
        given = {name: values.pop(key) for key, name in names.items()}
        sbatch = {name: value for name, value in given.items() if value is not None}
        more = parse(values.pop("more") or [], 'after "--"')
        return command(**values, sbatch=sbatch | more)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + theirs
    with_them.__dict__["__signature__"] = inspect.Signature(parameters)
    with_them.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_them
