"""The table of ``hpcfl show``: one row per run, computed from the values per client, not from the stored means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

from hpcfl import results_schema as layout
from hpcfl.analysis.reader import Run, find
from hpcfl.errors import InputError

WORDS = {"accuracy": "accuracy", "squared_error": "sq. error"}
TOLERANCE = 1e-9  # relative, between a stored mean and the recomputed one: rounding of another order of summation
BLOCK = 1 << 22  # values per client in memory at once


def table(files: Iterable[Path]) -> Table:
    """One row per run; files are results files, run folders, or folders with runs below them.

    A stored mean that does not follow from the values per client is complained about below the table, as is a file in
    a folder that cannot be read. Raises InputError for a file that was named and cannot be read.
    """
    rows, metrics, choosers, warnings = [], set(), set(), []
    for path, named in find(files):
        try:
            with Run(path) as run:
                rows.append(_row(run))
                metrics.add(run.metric)
                choosers.add(_chooser(run))
                warnings += [f"warning: {run.path}: {line}" for line in mismatches(run)]
        except InputError as error:
            if named:
                raise
            warnings.append(f"warning: {error}")
    mixed = len(metrics) > 1
    word = "accuracy\n(sq. error)" if mixed else WORDS[next(iter(metrics), "accuracy")]
    best = f"best by\n{choosers.pop()}" if len(choosers) == 1 else "best"
    note = escape("\n".join(warnings)) or None
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=note, caption_justify="left", caption_style="red")
    for header in ("run", "status"):
        shown.add_column(header, overflow="fold", max_width=32)
    for header in ("clients", f"personal\n{word}", "worst\ndecile", f"global\n{word}", best, "loss"):
        shown.add_column(header, justify="right", overflow="fold")
    for header in ("vectors\nup, down", "MB\nup, down", "seconds"):
        shown.add_column(header, justify="right", overflow="fold")
    for metric, left, quality, right in rows:
        if mixed and metric == "squared_error":
            quality = [cell if cell == "-" else re.sub(r"^[^\n]+", r"(\g<0>)", cell) for cell in quality]
        shown.add_row(*map(escape, [*left, *quality, *right]))
    return shown


def mismatches(run: Run) -> Iterator[str]:
    """What in the stored means does not follow from the values per client, one line per column."""
    for model in run.models:
        for split in run.splits:
            for metric in run.metrics:
                yield from _check_course(run, model, split, metric)
    last = run.evaluations_done - 1
    if last < 0 or run.file["/final/evaluation"][()] != last:
        return
    for model in run.models:
        for metric in run.metrics:
            for name, value in _last(run, model, metric).items():
                stored = float(run.file[f"/final/{model}_test_{metric}_{name}"][()])
                if not _same(stored, value):
                    yield f"/final/{model}_test_{metric}_{name} is {stored:.6g}, but the clients give {value:.6g}"


def _check_course(run: Run, model: str, split: str, metric: str) -> Iterator[str]:
    data = run.file[f"/per_client/{model}/{split}_{metric}"]
    samples = run.read(f"/clients/n_{split}")
    step = max(1, BLOCK // max(1, run.clients))
    for suffix, mean in (("", layout.client_mean), ("_by_sample", layout.sample_mean)):
        path = f"/evaluations/{model}_{split}_{metric}{suffix}"
        stored = run.read(path)
        for first in range(0, run.evaluations_done, step):
            block = data[first : min(first + step, run.evaluations_done)]
            wrong = [k for k, row in enumerate(block) if not _same(stored[first + k], mean(row, samples))]
            if wrong:
                found, row = mean(block[wrong[0]], samples), first + wrong[0]
                yield f"{path}[{row}] is {stored[row]:.6g}, but the clients give {found:.6g}"
                break


def _last(run: Run, model: str, metric: str) -> dict[str, float]:
    """Mean, deviation over clients, worst decile of the test samples at the last evaluation; NaN before the first."""
    values, samples = run.last(f"/per_client/{model}/test_{metric}"), run.read("/clients/n_test")
    if values is None:
        return dict.fromkeys(("mean", "std", "worst_decile"), np.nan)
    worst = layout.worst_decile(values, samples, metric)
    return {
        "mean": layout.client_mean(values, samples),
        "std": layout.deviation(values, samples),
        "worst_decile": worst,
    }


def _row(run: Run) -> tuple[str, list[str], list[str], list[str]]:
    """The metric, and the cells: about the run, in that metric, and the rest. Most cells have two lines."""
    main, planned = run.models[0], len(run.file["/rounds/round"])
    seed = "" if run.seed is None else f", seed {run.seed}"
    progress = f"{run.rounds_done}" if run.rounds_done == planned else f"{run.rounds_done}/{planned}"
    left = [f"{run.name}\n{run.algorithm}{seed}", f"{'killed' if run.stale else run.status}\n{progress} rounds"]
    values = {model: _last(run, model, run.metric) for model in run.models}
    quality = [_spread(values.get("personal")), _number(values[main]["worst_decile"])]
    quality += [_spread(values.get("global")), _best(run, main)]
    total = {name: run.read(f"/rounds/{name}").sum() for name in layout.TOTALS}
    vectors, megabytes = ([total[f"{what}_{way}"] for way in ("up", "down")] for what in ("vectors", "bytes"))
    right = [
        "\n".join(map(_short, vectors)),
        "\n".join(f"{n / 1e6:,.2f}" for n in megabytes),
        f"{total['seconds']:,.1f}",
    ]
    return run.metric, [*left, f"{run.clients:,}"], quality, [_number(_last(run, main, "loss")["mean"]), *right]


def _best(run: Run, model: str) -> str:
    row = layout.best_evaluation(run.read(f"/evaluations/{model}_{_chooser(run)}_{run.metric}"), run.metric)
    if row < 0:
        return "-"
    value, at = (run.read(f"/evaluations/{name}")[row] for name in (f"{model}_test_{run.metric}", "round"))
    return f"{_number(value)}\n@ {at}"


def _chooser(run: Run) -> str:
    return "validation" if "validation" in run.splits else "test"


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.4f}"


def _spread(values: dict[str, float] | None) -> str:
    if values is None or np.isnan(values["mean"]):
        return "-"
    return f"{_number(values['mean'])}\n±{_number(values['std'])}"


def _short(count: int) -> str:
    return f"{count:,}" if count < 1_000_000 else f"{count / 1e6:,.2f} M"


def _same(a: float, b: float) -> bool:
    return bool(np.isclose(a, b, rtol=TOLERANCE, atol=0, equal_nan=True))
