"""Markdown tables of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean, and standard deviation where there are several values (divided by their number less one)."""
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):.{digits}f}"


def with_error(values: np.ndarray, digits: int = 4) -> str:
    """Mean of independent values [n], and its standard error."""
    return f"{values.mean():.{digits}f} ± {values.std(ddof=1) / np.sqrt(len(values)):.{digits}f}"


def over(seeds: int, *, deviation: bool = True) -> str:
    """What ``spread`` shows, in words."""
    return "seed 0" if seeds == 1 else f"mean {'± deviation ' * deviation}over {seeds} seeds"
