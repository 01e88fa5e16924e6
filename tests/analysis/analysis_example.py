"""Finished runs for tables and plots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hpcfl.results import ResultsWriter, Schema, new_run_folder

PER_CLIENT = np.array([0.9, 0.5, 0.7, 0.3])  # the last accuracies: mean 0.6
N_TEST = np.array([1, 1, 1, 5])  # mean over samples 0.45


def finished(
    out: Path,
    job: str = "job",
    algorithm: str = "apfl",
    seed: int = 1,
    extra: str = "",
    options: str = "",
    columns: Mapping[str, np.ndarray] | None = None,
    **changes: object,
) -> Path:
    """A run of two evaluations whose accuracies end at PER_CLIENT, estimation errors at ten times that.

    Clients from the last cluster's number on are in the last cluster. Where participants are tested, those of round r
    have r / 16 in each metric. extra, options: lines of the job's tables run and algorithm. columns: other ones of
    /rounds. changes: fields of Schema. Returns its folder.
    """
    regression = changes.get("metrics") == ("loss", "squared_error")
    base = {
        "clients": 4,
        "rounds": 10,
        "evaluations": 2,
        "ranks": 1,
        "clusters": 1,
        "classes": None if regression else 2,
    }
    base |= {"models": ("personal", "global"), "splits": ("train", "test"), "metrics": ("loss", "accuracy")}
    schema = Schema(**base | changes)
    n = np.arange(4)
    clients = {
        "id": n,
        "cluster": np.minimum(n, schema.clusters - 1),
        "n_train": 10 * n + 10,
        "n_test": N_TEST,
        "n_validation": n + 1,
    }
    clients |= {"class_counts": np.full((4, 2), 5)} if schema.classes else {}
    clients |= {"n_classes": np.array([1, 2, 2, 1])} if schema.own_classes else {}
    folder = new_run_folder(out, job)
    config = f'[run]\nseed = {seed}\n{extra}\n[algorithm]\nname = "{algorithm}"\n{options}\n'
    attributes = {"job": job, "protocol": "participants" if schema.participants else "clients"}
    attributes |= {"labels": "local" if schema.own_classes else "global", "data_sha256": "0" * 64}
    writer = ResultsWriter.create(folder / "results.h5", schema, clients=clients, config=config, attributes=attributes)
    one, r = np.ones(schema.rounds), np.arange(schema.rounds)
    rows = {"n_participants": 4 * one, "seconds": 0.5 * one, "train_loss": one, "kind": 2 * one}
    rows |= {"vectors_up": 400 * one, "vectors_down": 400 * one, "bytes_up": 1e6 * one, "bytes_down": 2e6 * one}
    rows |= {"forward_passes": 2 * one, "backward_passes": one}
    rows |= {f"participants_test_{metric}": r / 16 for metric in schema.metrics if schema.participants}
    rows |= {f"coins_{name}": np.zeros((schema.rounds, number)) for name, number in schema.coins.items()}
    writer.rounds(0, {**rows, **(columns or {})})
    for row, shift in enumerate((-0.2, 0.0)):
        found = {name: np.full(4, 0.25) for name in schema.exposed}
        for model in schema.models:
            for split in schema.splits:
                values = PER_CLIENT + shift - (0.1 if model == "global" else 0)
                found |= {f"{model}/{split}_{metric}": values for metric in schema.metrics}
            found |= {f"{model}/estimation_error": 10 * values} if schema.truth else {}
        writer.evaluation(row, schema.rounds * row, 5.0 * row, found)
    writer.final()
    writer.status("done")
    writer.close()
    return folder
