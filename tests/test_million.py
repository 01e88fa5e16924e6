"""The job of a million clients, made small: what a round costs, and that it gives the same on any number of ranks.

The large sizes: tests/benchmarks/million.py.
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

TESTS = Path(__file__).parent
JOB = TESTS.parent / "jobs/examples/million.toml"
MORE = 20.0  # MB: what the small numbers of 48,000 clients more may take, which no rank has samples or rows of


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    for folder in ("benchmarks", "parallel"):
        monkeypatch.syspath_prepend(TESTS / folder)


@pytest.mark.usefixtures("launch")
def test_25_times_the_clients():
    from million import measure

    changes = ["run.clients_per_round=200", "run.eval_clients=200"]
    few, many = (measure(clients, 2, 16, changes) for clients in (2_000, 50_000))
    for before, after in zip(few.peak, many.peak, strict=True):
        assert after - before < MORE
    assert many.round < 3 * few.round  # mostly what else the machine does


def test_on_demand_and_on_disk_on_any_number_of_ranks(launch, tmp_path):
    from same import assert_same

    small = ["data.clients=60", "run.clients_per_round=20", "run.eval_clients=15", "run.save_models=true"]
    small += ["run.rounds=5", "run.eval_every=2", "partition.clusters=3"]
    held = ["data.lazy=false", 'run.state="device"']
    for ranks, name, changes in ((1, "held", held), (1, "1", []), (2, "2", []), (3, "3", [])):
        script = ["-m", "mpi4py", TESTS / "parallel/matrix.py", tmp_path / name, JOB, *small, *changes]
        done = launch(None if ranks == 1 else ranks, *script)
        assert f"ran 1 jobs on {ranks} ranks" in done.stdout, done.stderr[-3000:]
    files = {name: next((tmp_path / name).glob("*/results.h5")) for name in ("held", "1", "2", "3")}
    assert_same(files["1"], files["2"])
    assert_same(files["1"], files["3"])
    with h5py.File(files["held"]) as a, h5py.File(files["1"]) as b:
        assert "class_counts" in a["clients"]
        assert "class_counts" not in b["clients"]
        for name in ("rounds/train_loss", "per_client/alpha", "per_client/personal/test_loss", "final/models/personal"):
            np.testing.assert_array_equal(a[name][()], b[name][()])
