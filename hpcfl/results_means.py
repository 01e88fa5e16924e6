"""The formulas of the means in a results file, as its writer and its readers compute them."""

from __future__ import annotations

import math

import numpy as np

from hpcfl.results_schema import HIGHER_IS_BETTER, RECENT


def client_mean(values: np.ndarray, samples: np.ndarray | None = None) -> float:
    """Mean over the clients that have samples (None: over all). values, samples [N]; NaN where there are none."""
    chosen = _chosen(values, samples)
    return float(chosen.mean()) if chosen.size else math.nan


def sample_mean(values: np.ndarray, samples: np.ndarray) -> float:
    """Mean over samples: clients weighted by their numbers of samples. values, samples [N]."""
    weights = samples[samples > 0].astype("float64")
    return float((values[samples > 0] * weights).sum() / weights.sum()) if weights.size else math.nan


def deviation(values: np.ndarray, samples: np.ndarray | None = None) -> float:
    """Standard deviation over the clients that have samples (divided by their number); as for ``client_mean``."""
    chosen = _chosen(values, samples)
    return float(chosen.std()) if chosen.size else math.nan


def worst_decile(values: np.ndarray, samples: np.ndarray, metric: str) -> float:
    """Mean over the ceil(N/10) worst of the N clients that have samples. values, samples [N]."""
    chosen = np.sort(_chosen(values, samples))
    if not chosen.size or np.isnan(chosen[-1]):  # sort puts NaN last
        return math.nan
    number = -(-chosen.size // 10)
    return float((chosen[:number] if HIGHER_IS_BETTER[metric] else chosen[-number:]).mean())


def best_evaluation(course: np.ndarray, metric: str) -> int:
    """Index of the best value of a course [evaluations], the first of equals; -1 where none is finite."""
    signed = np.where(np.isfinite(course), course if HIGHER_IS_BETTER[metric] else -course, -np.inf)
    return int(signed.argmax()) if np.isfinite(course).any() else -1


def recent(course: np.ndarray) -> dict[str, float]:
    """Mean and standard deviation (divided by their number) of the last rounds of a course [rounds]."""
    last = course[-RECENT:]
    return {"mean": float(last.mean()), "std": float(last.std())} if last.size else {"mean": math.nan, "std": math.nan}


def _chosen(values: np.ndarray, samples: np.ndarray | None) -> np.ndarray:
    """float64 values of the clients that count."""
    return (values if samples is None else values[samples > 0]).astype("float64")
