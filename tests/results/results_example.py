"""Small results files with values that tell their place, so that a test can say what must stand there."""

from __future__ import annotations

import numpy as np

from hpcfl.results import Schema

EVERYTHING = {
    "clients": 4,
    "rounds": 6,
    "evaluations": 3,
    "ranks": 2,
    "clusters": 2,
    "classes": 3,
    "models": ("personal", "global"),
    "splits": ("train", "validation", "test"),
    "metrics": ("loss", "accuracy"),
    "exposed": ("alpha",),
    "coins": {"global": 1, "cluster": 2},
    "truth": True,
    "participants": True,
    "own_classes": True,
    "parameters": (("body.weight", (2, 3)), ("head.bias", (3,))),
}
SMALL = {  # regression, no coins, nothing exposed, no true parameters, no tests in rounds, one model, none saved
    "clients": 4,
    "rounds": 6,
    "evaluations": 3,
    "ranks": 1,
    "clusters": 1,
    "classes": None,
    "models": ("global",),
    "splits": ("train", "test"),
    "metrics": ("loss", "squared_error"),
}


def clients(schema: Schema) -> dict[str, np.ndarray]:
    n = np.arange(schema.clients)
    columns = {"id": n, "cluster": n % schema.clusters, "n_train": n + 1, "n_validation": n + 2, "n_test": n + 3}
    if schema.classes is not None:
        columns["class_counts"] = np.outer(n + 1, np.ones(schema.classes, int))
    if schema.own_classes:
        columns["n_classes"] = n % 3 + 1
    return columns


def rows(schema: dict, first: int, count: int, factor: int = 1) -> dict[str, np.ndarray]:
    """Rows of /rounds whose values tell the round that they belong to."""
    r = factor * np.arange(first, first + count)
    columns = dict.fromkeys(("n_participants", "seconds", "train_loss", "vectors_up", "vectors_down"), r)
    columns |= {"kind": np.arange(first, first + count) % 3, "bytes_up": 4 * r, "bytes_down": 8 * r}
    columns |= {"forward_passes": r + 0.5, "backward_passes": r + 0.25}
    tested = schema["metrics"] if schema.get("participants") else ()
    columns |= {f"participants_test_{metric}": (k + 1) * r / 8 for k, metric in enumerate(tested)}
    for name, number in schema.get("coins", {}).items():
        columns[f"coins_{name}"] = np.arange(first, first + count)[:, None] + np.arange(number) & 1
    return columns


def values(schema: dict, number: float = 0.5) -> dict[str, np.ndarray]:
    """One evaluation in which everything is ``number``."""
    keys = [f"{m}/{s}_{q}" for m in schema["models"] for s in schema["splits"] for q in schema["metrics"]]
    keys += [f"{m}/estimation_error" for m in schema["models"] if schema.get("truth")]
    return {key: np.full(schema["clients"], number) for key in [*keys, *schema.get("exposed", ())]}
