"""``hpcfl theory``: what theory predicts for a job, and beside it what a run of the job measured."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hpcfl.algorithm import Work
from hpcfl.analysis.communication import communication, first
from hpcfl.analysis.reader import Run
from hpcfl.build import build
from hpcfl.comm import Comm
from hpcfl.config import Job, load
from hpcfl.errors import InputError
from hpcfl.launcher import launched_tasks
from hpcfl.registry import load_plugins

EXPERIMENT = ("seed", "dtype", "participation", "clients_per_round")  # what in [run] makes another experiment
Value = float | np.ndarray


def theory(
    job_file: Path,
    changes: Sequence[str],
    plugins: Sequence[Path],
    accuracy: float,
    file: Path | None,
    console: Console,
) -> None:
    """Prints the predictions for a job, one per line. file: results of a run of it, to be shown beside them."""
    if launched_tasks() > 1:
        raise InputError("hpcfl theory: works on one process; start it without a launcher")
    load_plugins(list(plugins))
    asked = load(job_file, changes)
    built = build(load(job_file, [*changes, 'run.dtype="float64"']), Comm())  # for solving
    cohort = asked.run.cohort(built.engine.group.population)
    algorithm, rounds, notes = built.algorithm, asked.run.rounds, ""
    assert isinstance(algorithm, Work)
    measured: dict[str, Value] = {}
    if file is not None:
        with Run(file) as run:
            check_same(asked, run)
            rounds = run.rounds_done
            measured, notes = measurements(run, algorithm.minimiser(built.engine))
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=escape(notes) or None, caption_justify="left")
    for header in (f"{asked.algorithm_name}, {asked.name}", "predicted", *(["measured"] if file else [])):
        shown.add_column(header, justify="right" if shown.columns else "left")
    for line in algorithm.predict(built.engine, cohort, rounds, accuracy):
        shorter = asked.run.dtype == "float32" and line.what.startswith("megabytes")
        cells = [text(line.value / 2 if shorter else line.value)]
        if file is not None:
            cells.append(text(measured[line.key]) if line.key in measured else "")
        shown.add_row(line.what, *cells)
    console.print(shown)


def check_same(job: Job, run: Run) -> None:
    """Raises InputError where the run is one of another experiment; its length and place do not matter."""
    for part, mine in tomllib.loads(job.text).items():
        theirs = run.config.get(part, {})
        keys = EXPERIMENT if part == "run" else {**mine, **theirs}
        wrong = [key for key in keys if mine.get(key) != theirs.get(key)]
        if wrong:
            raise InputError(
                f"{run.path}: a run of another job: its {part}.{wrong[0]} is {theirs.get(wrong[0], 'absent')}, the "
                f"job's is {mine.get(wrong[0], 'absent')}; give the changes that it ran with by --set"
            )


def measurements(run: Run, minimiser: np.ndarray | None) -> tuple[dict[str, Value], str]:
    """What the run says of the predicted quantities, by their keys; and why something is not there."""
    found: dict[str, Value] = {}
    notes = []
    for way in ("up", "down"):
        found[f"vectors_{way}"] = float(run.read(f"/rounds/vectors_{way}").sum())
        found[f"megabytes_{way}"] = float(run.read(f"/rounds/bytes_{way}").sum()) / 1e6
    for way in ("forward", "backward"):
        if run.rounds_done and f"{way}_passes" in run.file["/rounds"]:  # from format 1.2 on
            found[f"{way}_passes"] = float(run.read(f"/rounds/{way}_passes").mean())
    if "coins_global" in run.file["/rounds"]:
        everyone = run.read("/rounds/coins_global") == 1
        found["global_rounds"] = float(everyone.sum())
    if run.averages_by_coins:
        own = run.read("/rounds/coins_cluster") == 1
        found["cluster_rounds"] = (own & ~everyone).sum(0).astype(np.float64)
        found["mean_rounds"] = (own | everyone).sum(0).astype(np.float64)
        try:
            merged = communication(run, merged=True)
            found["global_merged"], found["mean_merged"] = float(merged.global_rounds), merged.mean_rounds
        except InputError as error:
            notes.append(f"not merged: {error}")
    elif "global_rounds" in found:
        found["global_merged"] = float(first(everyone).sum())
    if "coins_global" not in run.file["/rounds"]:
        return found, ""
    if minimiser is None:
        notes.append("the minimiser, and with it the noise, is solved for in linear regressions only")
    elif run.status != "done":
        notes.append(f"the run is not done ({run.status}): no models to measure the distance to the minimiser of")
    elif "/final/models/personal" in run.file:
        found["squared_distance"] = float(((run.read("/final/models/personal") - minimiser) ** 2).sum())
    else:
        notes.append("no models at the end: the distance to the minimiser needs run.save_models = true")
    return found, "\n".join(notes)


def text(value: Value) -> str:
    """A number, or the range of several."""
    low, high = (number(float(pick(value))) for pick in (np.min, np.max))
    return low if low == high else f"{low} .. {high}"


def number(value: float) -> str:
    if not math.isfinite(value):
        return "-" if math.isnan(value) else str(value)
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e15 else f"{value:,.6g}"
