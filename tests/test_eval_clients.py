"""``run.eval_clients``: evaluations of a fixed random sample give the sample's part of those of all clients."""

from __future__ import annotations

from io import StringIO
from typing import Any

import h5py
import numpy as np
import pytest
from helpers import least_squares, make_engine, on_ranks, same_bits
from rich.console import Console

from hpcfl.algorithms.local import Local
from hpcfl.analysis.plot import plot
from hpcfl.analysis.reader import Run
from hpcfl.analysis.table import mismatches, table
from hpcfl.comm import Comm
from hpcfl.config import Job, resolve
from hpcfl.rng import Purpose, stream
from hpcfl.run import run

TABLES: dict[str, dict[str, Any]] = {
    "run": {"rounds": 4, "eval_every": 2, "clients_per_round": 5, "seed": 3, "save_models": True},
    "data": {"name": "hierarchical-linear", "clusters": 3, "clients_per_cluster": 8, "dim": 4},
    "partition": {"name": "natural"},
    "model": {"name": "linear", "bias": False},
    "algorithm": {"name": "apfl", "lr": 0.05},
}


def job_of(folder, **options: Any) -> Job:
    return resolve(TABLES | {"run": TABLES["run"] | {"out": str(folder)} | options}, "job", "job")


def finished(job: Job):
    folders = []
    run(job, Comm(), opened=lambda start: folders.append(start.folder), progress=lambda *_: None)
    return folders[0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Runs that evaluate all clients, ten of 24, and more than there are."""
    out = tmp_path_factory.mktemp("runs")
    return [finished(job_of(out, **({"eval_clients": n} if n else {}))) for n in (None, 10, 25)]


def test_the_sample_is_of_the_seed_alone():
    drawn = [make_engine(least_squares([2] * 30), Local(), seed=s, eval_clients=8).eval_sample for s in (5, 5, 6)]
    assert same_bits(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])
    assert (np.diff(drawn[0]) > 0).all()
    assert same_bits(drawn[0], np.sort(stream(5, Purpose.EVALUATION).choice(30, 8, replace=False, shuffle=False)))
    for number in (None, 30, 31):
        engine = make_engine(least_squares([2] * 30), Local(), eval_clients=number)
        assert engine.eval_sample is None
        assert engine.evaluated is engine.everyone


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_rank_evaluates_those_of_the_sample_that_it_hosts(ranks):
    def ids(comm):
        engine = make_engine(least_squares([2] * 9), Local(), world=comm, cluster=[1, 0, 1] * 3, eval_clients=3)
        return engine.group.ids[engine.evaluated], engine.eval_sample

    found = on_ranks(ranks, ids)
    assert sorted(np.concatenate([mine for mine, _ in found]).tolist()) == found[0][1].tolist()


def test_the_values_are_those_of_all_clients(folders):
    with Run(folders[0]) as whole, Run(folders[1]) as part:
        sample = part.evaluated
        assert len(sample) == 10
        assert whole.evaluated.tolist() == list(range(24))
        names: list[str] = []
        part.file["per_client"].visititems(
            lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) and item.ndim == 2 else None
        )
        assert {"alpha", "personal/test_loss", "global/train_squared_error", "personal/estimation_error"} <= set(names)
        for name in names:
            a, b = whole.read(f"/per_client/{name}"), part.read(f"/per_client/{name}")
            assert same_bits(a[:, sample], b), name
        for name in ("rounds/train_loss", "clients/n_train", "final/models/personal", "final/models/client"):
            assert same_bits(whole.read(f"/{name}"), part.read(f"/{name}")), name


def test_more_than_there_are_is_all(folders):
    with Run(folders[0]) as whole, Run(folders[2]) as more:
        assert "client" in more.file["per_client"]
        assert more.file["per_client/client"] == more.file["clients/client"]
        assert same_bits(whole.read("/per_client/alpha"), more.read("/per_client/alpha"))


def test_means_and_summary_are_of_the_sample(folders):
    with Run(folders[1]) as part:
        assert list(mismatches(part)) == []
        values = part.last("/per_client/personal/test_loss").astype(np.float64)
        n = part.read("/clients/n_test")[part.evaluated]
        assert same_bits(part.samples("test"), n)
        assert part.read("/evaluations/personal_test_loss")[-1] == pytest.approx(values.mean())
        assert part.read("/evaluations/personal_test_loss_by_sample")[-1] == pytest.approx(
            np.average(values, weights=n)
        )
        assert part.read("/final/personal_test_loss_std") == pytest.approx(values.std())
        assert part.read("/final/personal_test_loss_worst_decile") == pytest.approx(values.max())


def test_tables_and_plots(folders, tmp_path):
    printed = StringIO()
    Console(width=200, file=printed).print(table(folders))
    text = printed.getvalue()
    assert "10 of" in text
    assert "warning" not in text
    assert text.count(" 24 ") == 3
    plot(folders, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 0


def test_other_readers(folders):
    xarray = pytest.importorskip("xarray")
    with Run(folders[1]) as part:
        sample = part.evaluated.tolist()
    for group in ("per_client", "per_client/personal", "per_client/global"):
        with xarray.open_dataset(folders[1] / "results.h5", engine="h5netcdf", group=group) as data:
            assert data["client"].values.tolist() == sample
            assert all(array.dims == ("evaluation", "client") for array in data.data_vars.values())
    with h5py.File(folders[1] / "results.h5") as file:
        assert file["per_client/personal/client"] == file["per_client/client"]
        assert file["final/models/client"] == file["clients/client"]


def test_a_run_goes_on_with_its_sample(folders, tmp_path):
    """Also with more rounds, for which the file is written anew."""
    folder = finished(job_of(tmp_path, eval_clients=10, rounds=2, checkpoint_every=1))
    job = job_of(tmp_path, eval_clients=10, checkpoint_every=1)
    run(job, Comm(), opened=lambda start: None, progress=lambda *_: None, folder=folder)
    with Run(folders[1]) as whole, Run(folder) as continued:
        assert continued.evaluated.tolist() == whole.evaluated.tolist()
        for name in ("alpha", "personal/test_loss", "global/test_loss"):
            assert same_bits(whole.read(f"/per_client/{name}"), continued.read(f"/per_client/{name}"))
