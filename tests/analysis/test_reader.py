"""Run: what it reads, and one clear line for what it cannot read."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from analysis_example import PER_CLIENT, finished

from hpcfl.analysis.reader import Run, find
from hpcfl.analysis.table import table
from hpcfl.errors import InputError
from hpcfl.results import ResultsWriter, Schema

ROOT = Path(__file__).resolve().parents[2]


def test_properties_of_a_finished_run(tmp_path):
    with Run(finished(tmp_path, seed=7, exposed=("alpha",))) as run:
        assert (run.name, run.algorithm, run.seed, run.status, run.stale) == ("job-001", "apfl", 7, "done", False)
        assert (run.clients, run.rounds_done, run.evaluations_done) == (4, 10, 2)
        assert (run.models, run.splits) == (("personal", "global"), ("train", "test"))
        assert (run.metrics, run.metric, run.exposed) == (("loss", "accuracy"), "accuracy", ("alpha",))
        assert run.config["algorithm"]["name"] == "apfl"
        assert (run.clusters, run.truth, run.averages_by_coins) == (1, False, False)
        assert run.last("/per_client/personal/test_accuracy") == pytest.approx(PER_CLIENT, rel=1e-6)


@pytest.mark.parametrize(
    ("coins", "expected"),
    [({"cluster": 2, "global": 1}, True), ({"global": 1}, False), ({"global": 1, "cluster": 3}, False)],
)
def test_coins_that_say_who_averages(tmp_path, coins, expected):
    with Run(finished(tmp_path, clusters=2, coins=coins, truth=True)) as run:
        assert (run.clusters, run.averages_by_coins, run.truth, run.exposed) == (2, expected, True, ())
        assert run.metrics == ("loss", "accuracy")


def test_a_file_of_format_1_0_is_read(tmp_path):
    folder = finished(tmp_path, clusters=2)
    with h5py.File(folder / "results.h5", "r+") as file:
        del file["clusters"]
        file.attrs.modify("format_version", [1, 0])
    with Run(folder) as run:
        assert (run.clusters, run.truth, run.averages_by_coins) == (2, False, False)
    assert table([folder], merged=True).caption is None


def test_only_counted_rows_are_returned(tmp_path):
    schema = Schema(
        4, 10, 5, 1, 1, None, ("global",), ("train", "test"), ("loss", "squared_error"), coins={"global": 1}
    )
    n = np.arange(4)
    clients = {"id": n, "cluster": 0 * n, "n_train": n, "n_test": n}
    writer = ResultsWriter.create(tmp_path / "x.h5", schema, clients=clients, config="", attributes={})
    with Run(tmp_path / "x.h5") as run:
        assert run.read("/rounds/seconds").shape == run.read("/rounds/round").shape == (0,)
        assert run.read("/per_client/global/test_loss").shape == (0, 4)
        assert run.last("/per_client/global/test_loss") is None
        assert run.read("/rounds/global_coin").shape == (1,)
        assert run.read("/per_client/global/client").shape == (4,)
        assert (run.name, run.algorithm, run.seed, run.status, run.stale) == ("x", "-", None, "running", False)
    names = ("kind", "n_participants", "seconds", "train_loss", "vectors_up", "vectors_down", "bytes_up", "bytes_down")
    writer.rounds(0, {name: np.ones(3) for name in names} | {"coins_global": np.ones((3, 1))})
    with Run(tmp_path / "x.h5") as run:
        assert list(run.read("/rounds/round")) == [0, 1, 2]
        assert run.read("/rounds/coins_global").shape == (3, 1)
    writer.close()


def test_bad_files_are_one_clear_line(tmp_path):
    (tmp_path / "text.h5").write_text("hello")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file.attrs["filetype"] = "statepoint"
    newer = finished(tmp_path) / "results.h5"
    with h5py.File(newer, "r+") as file:
        file.attrs.modify("format_version", [2, 0])
    whole = finished(tmp_path) / "results.h5"
    (tmp_path / "half.h5").write_bytes(whole.read_bytes()[:3000])
    (tmp_path / "holes.h5").write_bytes(whole.read_bytes()[:1000] + bytes(whole.stat().st_size - 1000))
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "no.h5", "no such file"),
        (tmp_path / "text.h5", "not an HDF5 file"),
        (tmp_path / "other.h5", "not of hpcfl"),
        (newer, "format version 2.0 is newer than this hpcfl, which reads 1.x; update hpcfl"),
        (tmp_path / "half.h5", "cut off after 3000 of"),
        (tmp_path / "holes.h5", "damaged|cannot be read"),
        (tmp_path / "empty", "no such file"),
    ):
        with pytest.raises(InputError, match=message) as error:
            Run(path)
        assert str(error.value).startswith(str(tmp_path))
        assert "\n" not in str(error.value)
    with h5py.File(newer, "r+") as file:
        file.attrs.modify("format_version", [1, 9])  # a newer minor version only adds fields
    Run(newer).close()


def test_a_locked_file_is_read_all_the_same(tmp_path):
    path = finished(tmp_path) / "results.h5"
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with Run(path) as run:
            assert run.evaluations_done == 2


def test_stale_is_known_for_this_host_only(tmp_path):
    path = finished(tmp_path) / "results.h5"
    dead = subprocess.Popen(["true"])
    dead.wait()

    def stale(**attributes):
        with h5py.File(path, "r+") as file:
            for name, value in attributes.items():
                file.attrs.modify(name, np.array(value, file.attrs.get_id(name).dtype))
        with Run(path) as run:
            return run.stale

    assert not stale(pid=dead.pid)  # done is done
    assert stale(status=b"running")
    assert not stale(pid=os.getpid())
    assert not stale(pid=dead.pid, host=b"another")


def test_find_takes_files_and_folders(tmp_path):
    folders = [finished(tmp_path, job=job) for job in ("a", "a", "b")]
    (tmp_path / "a-010").mkdir()
    (folders[0] / "results.h5").rename(tmp_path / "a-010" / "results.h5")
    below = [(tmp_path / name / "results.h5", False) for name in ("a-002", "a-010", "b-001")]
    assert list(find([tmp_path])) == below  # by number, not by letter
    assert list(find([folders[1], tmp_path / "x"])) == [(folders[1], True), (tmp_path / "x", True)]
    with pytest.raises(InputError, match=r"no results\.h5 in or below this folder"):
        list(find([folders[0]]))


def test_reading_tables_and_plots_import_neither_torch_nor_mpi(tmp_path):
    code = """
import sys
from pathlib import Path
from hpcfl.analysis import communication, plot, reader, table
from hpcfl import results
assert "matplotlib" not in sys.modules
table.table([Path(sys.argv[1])], merged=True)
plot.plot([Path(sys.argv[1])], Path(sys.argv[1], "x.png"))
print(sorted({"torch", "torchvision", "mpi4py", "pydantic"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code, finished(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"
