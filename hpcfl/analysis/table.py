"""The table of ``hpcfl show``: one row per run, computed from the values per client, not from the stored means."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

from hpcfl import results_means as formulas
from hpcfl.analysis.communication import communication
from hpcfl.analysis.reader import Run, find
from hpcfl.errors import InputError
from hpcfl.results_schema import RECENT, TOTALS

SENT = tuple(name for name in TOTALS if name != "seconds")
WORDS = {"accuracy": "accuracy", "squared_error": "sq. error"}
TOLERANCE = 1e-9  # relative, between a stored mean and the recomputed one: rounding of another order of summation
BLOCK = 1 << 22  # values per client in memory at once


@dataclass(frozen=True)
class Row:
    """The cells of a run; most have two lines."""

    metric: str
    about: list[str]
    quality: list[str]  # in the metric
    loss: str
    error: str | None  # of estimation; None: the true parameters are not known
    recent: str | None  # in the metric, of the participants in the last rounds; None: they were not tested
    cost: list[str]


def table(files: Iterable[Path], *, merged: bool = False) -> Table:
    """One row per run; files are results files, run folders, or folders with runs below them.

    merged: vectors and MB count consecutive averagings by coins once (analysis/communication.py). A stored mean that
    does not follow from the values per client or per round is complained about below the table, as are a file in a
    folder that cannot be read, and a run whose averagings cannot be merged. Raises InputError for a file that was named
    and cannot be read.
    """
    rows, metrics, choosers, warnings = list[Row](), set(), set(), list[str]()
    for path, named in find(files):
        try:
            with Run(path) as run:
                sent = {name: int(run.read(f"/rounds/{name}").sum()) for name in SENT}
                if merged and run.averages_by_coins:
                    try:
                        cost = communication(run, merged=True)
                        sent = {name: getattr(cost, name) for name in SENT}
                    except InputError as error:
                        warnings.append(f"warning: {error}; not merged")
                rows.append(_row(run, sent))
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
    errors = any(row.error is not None for row in rows)
    tested = any(row.recent is not None for row in rows)
    how = "merged" if merged else "up, down"
    headers = ["clients", f"personal\n{word}", "worst\ndecile", f"global\n{word}", best, "loss"]
    headers += [f"participants\nlast {RECENT} rounds"] * tested + ["estimation\nerror"] * errors
    for header in (*headers, f"vectors\n{how}", f"MB\n{how}", "seconds"):
        shown.add_column(header, justify="right", overflow="fold")
    for row in rows:
        quality, recent = row.quality, row.recent or "-"
        if mixed and row.metric == "squared_error":
            *quality, recent = [c if c == "-" else re.sub(r"^[^\n]+", r"(\g<0>)", c) for c in (*quality, recent)]
        more = [recent] * tested + [row.error or "-"] * errors
        shown.add_row(*map(escape, [*row.about, *quality, row.loss, *more, *row.cost]))
    return shown


def mismatches(run: Run) -> Iterator[str]:
    """What in the stored means does not follow from the values per client or per round, one line per column."""
    for model in run.models:
        for split in run.splits:
            samples = run.samples(split)
            for metric in run.metrics:
                values, means = f"/per_client/{model}/{split}_{metric}", f"/evaluations/{model}_{split}_{metric}"
                yield from _check_course(run, values, means, partial(formulas.client_mean, samples=samples))
                yield from _check_course(
                    run, values, f"{means}_by_sample", partial(formulas.sample_mean, samples=samples)
                )
        if run.truth:
            values, means = f"/per_client/{model}/estimation_error", f"/evaluations/{model}_estimation_error"
            yield from _check_course(run, values, means, formulas.client_mean)
    last = run.evaluations_done - 1
    if last >= 0 and run.file["/final/evaluation"][()] == last:
        for model in run.models:
            for metric in run.metrics:
                yield from _check_final(run, f"{model}_test_{metric}", _last(run, model, metric), "clients")
            if run.truth:
                yield from _check_final(run, f"{model}_estimation_error", _last_error(run, model), "clients")
    if run.protocol == "participants" and run.file["/final/rounds"][()] == run.rounds_done:
        for metric in run.metrics:
            yield from _check_final(run, f"participants_test_{metric}", _recent(run, metric), "rounds")


def _check_course(run: Run, values: str, means: str, mean: Callable[[np.ndarray], float]) -> Iterator[str]:
    """The first row of ``means`` that is not the mean of that row of ``values``."""
    data, stored = run.file[values], run.read(means)
    step = max(1, BLOCK // max(1, data.shape[1]))
    for first in range(0, run.evaluations_done, step):
        block = data[first : min(first + step, run.evaluations_done)]
        wrong = [k for k, row in enumerate(block) if not _same(stored[first + k], mean(row))]
        if wrong:
            found, row = mean(block[wrong[0]]), first + wrong[0]
            yield f"{means}[{row}] is {stored[row]:.6g}, but the clients give {found:.6g}"
            return


def _check_final(run: Run, what: str, found: Mapping[str, float], source: str) -> Iterator[str]:
    """Every /final/<what>_<name> that is not the value found."""
    for name, value in found.items():
        stored = float(run.file[f"/final/{what}_{name}"][()])
        if not _same(stored, value):
            yield f"/final/{what}_{name} is {stored:.6g}, but the {source} give {value:.6g}"


def _last(run: Run, model: str, metric: str) -> dict[str, float]:
    """Mean, deviation over clients, worst decile of the test samples at the last evaluation; NaN before the first."""
    values, samples = run.last(f"/per_client/{model}/test_{metric}"), run.samples("test")
    if values is None:
        return dict.fromkeys(("mean", "std", "worst_decile"), np.nan)
    return {
        "mean": formulas.client_mean(values, samples),
        "std": formulas.deviation(values, samples),
        "worst_decile": formulas.worst_decile(values, samples, metric),
    }


def _last_error(run: Run, model: str) -> dict[str, float]:
    """Mean and deviation over clients of the estimation error, as ``_last``; nothing without true parameters."""
    values = run.last(f"/per_client/{model}/estimation_error") if run.truth else None
    if values is None:
        return dict.fromkeys(("mean", "std"), np.nan)
    return {"mean": formulas.client_mean(values), "std": formulas.deviation(values)}


def _recent(run: Run, metric: str) -> dict[str, float]:
    """Mean and deviation over the last rounds of the participants' test; NaN before the first round."""
    return formulas.recent(run.read(f"/rounds/participants_test_{metric}"))


def _row(run: Run, sent: Mapping[str, int]) -> Row:
    main, planned = run.models[0], len(run.file["/rounds/round"])
    seed = "" if run.seed is None else f", seed {run.seed}"
    progress = f"{run.rounds_done}" if run.rounds_done == planned else f"{run.rounds_done}/{planned}"
    about = [f"{run.name}\n{run.algorithm}{seed}", f"{'killed' if run.stale else run.status}\n{progress} rounds"]
    values = {model: _last(run, model, run.metric) for model in run.models}
    quality = [_spread(values.get("personal")), _number(values[main]["worst_decile"])]
    quality += [_spread(values.get("global")), _best(run, main)]
    return Row(
        run.metric,
        [*about, _clients(run)],
        quality,
        loss=_number(_last(run, main, "loss")["mean"]),
        error=_spread(_last_error(run, main)) if run.truth else None,
        recent=_spread(_recent(run, run.metric)) if run.protocol == "participants" else None,
        cost=[
            "\n".join(_short(sent[f"vectors_{way}"]) for way in ("up", "down")),
            "\n".join(f"{sent[f'bytes_{way}'] / 1e6:,.2f}" for way in ("up", "down")),
            f"{run.read('/rounds/seconds').sum():,.1f}",
        ],
    )


def _clients(run: Run) -> str:
    """Their number; of a random sample that was evaluated, both numbers."""
    evaluated = len(run.evaluated)
    return f"{run.clients:,}" if evaluated == run.clients else f"{evaluated:,} of\n{run.clients:,}"


def _best(run: Run, model: str) -> str:
    row = formulas.best_evaluation(run.read(f"/evaluations/{model}_{_chooser(run)}_{run.metric}"), run.metric)
    if row < 0:
        return "-"
    value, at = (run.read(f"/evaluations/{name}")[row] for name in (f"{model}_test_{run.metric}", "round"))
    return f"{_number(value)}\n@ {at}"


def _chooser(run: Run) -> str:
    return "validation" if "validation" in run.splits else "test"


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3g}"


def _spread(values: dict[str, float] | None) -> str:
    if values is None or np.isnan(values["mean"]):
        return "-"
    return f"{_number(values['mean'])}\n±{_number(values['std'])}"


def _short(count: int) -> str:
    return f"{count:,}" if count < 1_000_000 else f"{count / 1e6:,.2f} M"


def _same(a: float, b: float) -> bool:
    return bool(np.isclose(a, b, rtol=TOLERANCE, atol=0, equal_nan=True))
