"""The same job gives the same bits on any number of ranks, whatever the block size; every job file runs."""

from __future__ import annotations

from pathlib import Path

import h5py
import matrix
import numpy as np
import pytest
from same import assert_same, differences
from tiny_sets import as_files, write_sets

from hpcfl.comm import Comm
from hpcfl.config import load, resolve
from hpcfl.run import run

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(matrix.__file__)
JOBS = sorted((ROOT / "jobs").rglob("*.toml"))
SHORT = ["run.rounds=3", "run.eval_every=2"]
BLOCKS = ["apfl", "async_l2gd-uneven-clusters", "fedavg-full-batch"]
BLOCKS += ["fedavg-cnn-loop", "fedavg-cnn-vmap", "fedavg-mlp-vmap"]
BLOCKS += ["fedper-local-labels", "fedrep-cnn-vmap", "pflego-cnn", "pflego-full-batch"]
ON_FIVE = ["async_l2gd-4-clusters", "async_l2gd-sum-theory", "async_l2gd-two-clusters", "async_l2gd-uneven-clusters"]


@pytest.fixture(scope="module")
def results(launch, tmp_path_factory):
    """ranks -> folder with the results of all cases."""
    folders = {}
    for ranks in (1, 2, 3):
        folders[ranks] = tmp_path_factory.mktemp(f"ranks{ranks}")
        done = launch(None if ranks == 1 else ranks, "-m", "mpi4py", SCRIPT, folders[ranks], timeout=400)
        assert f"on {ranks} ranks" in done.stdout, done.stderr[-3000:]
    return folders


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", matrix.cases())
def test_ranks_give_the_same_bits(results, case, ranks):
    assert_same(results[1] / f"{case}-001/results.h5", results[ranks] / f"{case}-001/results.h5")


def test_more_ranks_than_clusters(results, launch, tmp_path):
    done = launch(5, "-m", "mpi4py", SCRIPT, tmp_path, *ON_FIVE, timeout=300)
    assert f"ran {len(ON_FIVE)} jobs on 5 ranks" in done.stdout, done.stderr[-3000:]
    for case in ON_FIVE:
        assert_same(results[1] / f"{case}-001/results.h5", tmp_path / f"{case}-001/results.h5")


def test_comparison_sees_a_difference(results):
    """The comparison itself can fail: two different algorithms are not the same."""
    assert differences(results[1] / "apfl-001/results.h5", results[1] / "apfl-step-001/results.h5")


@pytest.mark.parametrize("case", BLOCKS)
@pytest.mark.parametrize("block", [4, 5, 64])
def test_block_sizes_give_the_same_bits(results, case, block, tmp_path):
    job = matrix.cases()[case]
    changed = resolve_with(job, {"run": {"block": block, "out": str(tmp_path)}})
    run(changed, Comm(), opened=lambda *_: None, progress=lambda *_: None)
    assert_same(results[1] / f"{case}-001/results.h5", tmp_path / f"{case}-001/results.h5")


def resolve_with(job, change):
    """The job with some options changed."""
    import tomllib

    tables = tomllib.loads(job.text)
    return resolve({part: {**tables[part], **change.get(part, {})} for part in tables}, job.name, job.name)


def test_float64_reduction_is_close(results, tmp_path):
    job = resolve_with(matrix.cases()["apfl"], {"run": {"reduction": "float64", "out": str(tmp_path)}})
    run(job, Comm(), opened=lambda *_: None, progress=lambda *_: None)
    with h5py.File(results[1] / "apfl-001/results.h5") as a, h5py.File(tmp_path / "apfl-001/results.h5") as b:
        np.testing.assert_allclose(a["final/models/global"][()], b["final/models/global"][()], rtol=1e-5, atol=1e-6)


def test_backends_agree(results):
    """The model's own arithmetic, vmap and a loop give the same numbers to rounding."""
    with (
        h5py.File(results[1] / "fedavg-001/results.h5") as a,
        h5py.File(results[1] / "fedavg-mlp-vmap-001/results.h5") as b,
    ):
        np.testing.assert_allclose(a["final/models/global"][()], b["final/models/global"][()], rtol=1e-4, atol=1e-5)


def test_quickstart_on_eight_ranks(launch, tmp_path):
    """The main job, whole rounds of it, on 8 ranks and on one."""
    job = ROOT / "jobs/quickstart/apfl.toml"
    done = launch(8, "-m", "mpi4py", SCRIPT, tmp_path / "eight", job, *SHORT, timeout=300)
    assert "on 8 ranks" in done.stdout, done.stderr[-3000:]
    one = load(job, [*SHORT, f'run.out="{tmp_path / "one"}"'])
    run(one, Comm(), opened=lambda *_: None, progress=lambda *_: None)
    assert_same(tmp_path / "one/apfl-001/results.h5", tmp_path / "eight/quickstart-apfl-001/results.h5")


def test_every_job_file_on_one_and_two_ranks(launch, tmp_path, monkeypatch):
    """Those of data that cannot be had here on tiny sets of the same kind."""
    write_sets(tmp_path / "data", monkeypatch)
    tiny = {file.name: file for file in as_files(tmp_path / "data", tmp_path / "jobs")}
    files = [tiny.get(job.name, job) if job.parent.name == "pflego" else job for job in JOBS]
    assert set(tiny) < {job.name for job in JOBS}
    for ranks in (1, 2):
        done = launch(
            None if ranks == 1 else ranks, "-m", "mpi4py", SCRIPT, tmp_path / str(ranks), *files, *SHORT, timeout=600
        )
        assert f"ran {len(JOBS)} jobs on {ranks} ranks" in done.stdout, done.stderr[-3000:]
    for job in JOBS:
        name = f"{'-'.join(job.with_suffix('').parts[-2:])}-001/results.h5"
        assert_same(tmp_path / "1" / name, tmp_path / "2" / name)


def test_plans_do_not_change_results(results, tmp_path, monkeypatch):
    """However many rounds a plan holds, nothing but time changes."""
    job = resolve_with(matrix.cases()["apfl-average"], {"run": {"out": str(tmp_path)}})
    import hpcfl.build

    real = hpcfl.build.Coordinator
    monkeypatch.setattr(hpcfl.build, "Coordinator", lambda **options: real(**options, seconds_per_plan=0.0))
    run(job, Comm(), opened=lambda *_: None, progress=lambda *_: None)
    assert_same(results[1] / "apfl-average-001/results.h5", tmp_path / "apfl-average-001/results.h5")
