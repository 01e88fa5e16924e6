"""What a run with tests of the participants and labels of the clients' own leaves in its file."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpcfl.build import load
from hpcfl.comm import Comm
from hpcfl.config import resolve
from hpcfl.run import run

JOB: dict[str, dict[str, Any]] = {
    "run": {"rounds": 3, "eval_every": 1, "dtype": "float64"},
    "data": {"name": "synthetic", "clients": 3, "dim": 4, "classes": 5, "samples": 100, "alpha": 0.0},
    "partition": {"name": "degrees", "clients": 6, "degree": "diverse", "labels": "local", "test_share": 0.25},
    "model": {"name": "logistic"},
    "algorithm": {"name": "local", "lr": 0.1, "local_steps": 4},
}


def ran(out: Path, **changes: dict[str, Any]) -> tuple[Any, Path]:
    tables = {part: {**table, **changes.get(part, {})} for part, table in JOB.items()}
    tables["run"]["out"] = str(out)
    job = resolve(tables, "job", "job")
    run(job, Comm(), opened=lambda *_: None, progress=lambda *_: None)
    return job, out / "job-001" / "results.h5"


def test_participants_that_are_all_clients_have_the_mean_over_samples(tmp_path):
    """With purely local training the model after a client's local work is its personal model after the round."""
    _, path = ran(tmp_path, run={"protocol": "participants"})
    with h5py.File(path) as file:
        assert (file.attrs["protocol"], file.attrs["labels"]) == (b"participants", b"local")
        for metric in ("loss", "accuracy"):
            course = file[f"rounds/participants_test_{metric}"][()]
            assert len(set(file["clients/n_test"])) > 1  # else both means agree
            np.testing.assert_allclose(course, file[f"evaluations/personal_test_{metric}_by_sample"], rtol=1e-12)
            assert file[f"final/participants_test_{metric}_mean"][()] == pytest.approx(course.mean(), rel=1e-15)
            assert file[f"final/participants_test_{metric}_std"][()] == pytest.approx(course.std(), rel=1e-12)


def test_the_default_protocol_tests_nobody_in_the_rounds(tmp_path):
    _, path = ran(tmp_path, partition={"labels": "global"})
    with h5py.File(path) as file:
        assert (file.attrs["protocol"], file.attrs["labels"]) == (b"clients", b"global")
        assert not [name for part in ("rounds", "final") for name in file[part] if "participants_test" in name]
        assert "n_classes" not in file["clients"]


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_passes_are_means_over_the_participants(tmp_path, participation):
    """Every local step of plain training is one pass each way, whoever takes part; tests count for nothing."""
    _, path = ran(tmp_path, run={"participation": participation, "protocol": "participants"})
    with h5py.File(path) as file:
        assert list(file["rounds/n_participants"]) == [6 * participation] * 3
        assert list(file["rounds/forward_passes"]) == [4, 4, 4]
        assert list(file["rounds/backward_passes"]) == [4, 4, 4]


def test_classes_of_the_clients_and_of_the_data(tmp_path):
    job, path = ran(tmp_path)
    data, shares = load(job)
    owned = [set(data.y[shares.client == i].tolist()) for i in range(6)]
    with h5py.File(path) as file:
        assert list(file["clients/n_classes"]) == [len(classes) for classes in owned]
        assert len(set(file["clients/n_classes"])) > 1
        assert list(file["clients/class"]) == [0, 1, 2, 3, 4]  # of the data
        for counts, classes in zip(file["clients/class_counts"], owned, strict=True):
            assert set(np.flatnonzero(counts)) <= classes
