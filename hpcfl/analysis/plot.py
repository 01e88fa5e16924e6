"""The figure of ``hpcfl plot``: the course of training, and how the clients fare at its end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from hpcfl.analysis.reader import Run, find
from hpcfl.errors import InputError
from hpcfl.names import short_names

# Okabe and Ito's palette, told apart with any kind of colour vision; its yellow is too faint for lines and left out.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
WORDS = {"accuracy": "test accuracy", "squared_error": "test squared error"}
STYLES = {"personal": "-", "global": "--"}
BINS = 20


def plot(files: Iterable[Path], out: Path) -> None:
    """Draw the runs into ``out``, in the format that its ending names (.png, .pdf, .svg).

    Left: mean over clients of the personal (solid) and the global (dashed) model against rounds. Right: each client's
    last value, of the personal model where there is one. files: files, run folders, or folders with runs below them.
    Raises InputError without matplotlib, for runs with nothing to show, for classification beside regression, and
    where ``out`` cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("plots need matplotlib; install it with: pip install 'hpcfl[analysis]'") from None
    with ExitStack() as opened:
        runs = [opened.enter_context(Run(path)) for path, _ in find(files)]
        metrics = {run.metric for run in runs}
        if len(metrics) > 1:
            raise InputError("accuracy and squared error do not fit into one figure; plot these runs apart")
        if not any(run.evaluations_done for run in runs):
            raise InputError(f"{runs[0].path}: no evaluation in it yet, so there is nothing to plot")
        last = [_last(run) for run in runs]
        if not any(values.size for values in last):
            raise InputError(f"{runs[0].path}: no client has a finite test value, so there is nothing to plot")
        colours = _colours(len(runs))
        figure = Figure(figsize=(11, 4.6), layout="constrained", dpi=150)
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        _curves(left, runs, colours)
        _histograms(right, last, [STYLES[run.models[0]] for run in runs], colours)
        word = WORDS[metrics.pop()]
        left.set(xlabel="round", ylabel=f"{word}, mean over clients")
        right.set(xlabel=f"last {word} of each client (dotted: mean)")
        handles = [right.plot([], [], color=colour, linewidth=3)[0] for colour in colours]
        figure.legend(handles, labels(runs), loc="outside lower center", ncols=min(4, len(runs)), frameon=False)
    for panel in (left, right):
        panel.grid(color="0.92")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(out)
    except (OSError, ValueError) as error:  # ValueError: an ending that names no format
        raise InputError(f"{out}: cannot write the figure ({getattr(error, 'strerror', None) or error})") from None


def _curves(panel: Any, runs: Sequence[Run], colours: Sequence[Any]) -> None:
    for run, colour in zip(runs, colours, strict=True):
        rounds = run.read("/evaluations/round")
        marker = "o" if len(rounds) == 1 else None  # a line through one point is invisible
        for model in run.models:
            values = run.read(f"/evaluations/{model}_test_{run.metric}")
            panel.plot(rounds, values, STYLES[model], color=colour, marker=marker, linewidth=1.6)
    shown = [model for model in STYLES if any(model in run.models for run in runs)]
    handles = [panel.plot([], [], STYLES[model], color="0.3")[0] for model in shown]
    panel.legend(handles, [f"{model} model" for model in shown], loc="best", framealpha=0.8)


def _last(run: Run) -> np.ndarray:
    """The clients' last test values, those that are finite."""
    values = run.last(f"/per_client/{run.models[0]}/test_{run.metric}")
    return np.empty(0) if values is None else values[np.isfinite(values)]


def _histograms(panel: Any, values: Sequence[np.ndarray], styles: Sequence[str], colours: Sequence[Any]) -> None:
    """One row per run, the first on top: histograms over one another cannot be read from three runs on."""
    together = np.concatenate(values)
    low, high = together.min(), together.max()
    edges = np.linspace(low, high, BINS + 1) if high > low else np.array([low - 0.05, low + 0.05])
    shares = [np.histogram(v, edges)[0] / max(1, v.size) for v in values]
    peak = max(share.max() for share in shares)
    for k, (v, share) in enumerate(zip(values, shares, strict=True)):
        foot, height = len(values) - 1 - k, 0.9 * share / peak
        style: dict[str, Any] = {"color": colours[k], "baseline": foot}
        panel.stairs(foot + height, edges, fill=True, alpha=0.25, **style)
        panel.stairs(foot + height, edges, linewidth=1.6, linestyle=styles[k], **style)
        if v.size:
            panel.plot([v.mean()] * 2, [foot, foot + 0.9], ":", color=colours[k], linewidth=1.6)
    panel.set_yticks(range(len(values)), [""] * len(values))
    panel.tick_params(axis="y", length=0)
    panel.set_ylim(bottom=0)
    panel.set_ylabel(f"share of clients (tallest bar: {peak:.0%})")


def _colours(runs: int) -> list[Any]:
    """A different one for each run: of many, along a scale of brightness."""
    if runs <= len(COLOURS):
        return list(COLOURS[:runs])
    from matplotlib import colormaps

    return list(colormaps["viridis"](np.linspace(0, 0.92, runs)))


def labels(runs: Sequence[Run]) -> list[str]:
    """A different name for each run: the algorithm and, among runs of the same one, what differs in their job files."""
    names = []
    for run in runs:
        flat = [_flat(other.config) for other in runs if other.algorithm == run.algorithm]
        own = _flat(run.config)
        differing = [key for key in own if key != "run.out" and any(f.get(key) != own[key] for f in flat)]
        short = short_names(own)
        names.append(", ".join([run.algorithm, *(f"{short[key]}={_shown(own[key])}" for key in differing)]))
    return [f"{name} ({run.name})" if names.count(name) > 1 else name for name, run in zip(names, runs, strict=True)]


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
