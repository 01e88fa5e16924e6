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

from hpcfl.analysis.plot import plot
from hpcfl.analysis.reader import Run, find
from hpcfl.analysis.table import table
from hpcfl.errors import InputError
from hpcfl.results import FORMAT_VERSION, ResultsWriter, Schema

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


@pytest.mark.parametrize("minor", [0, 1, 2])
def test_a_file_of_an_older_format_is_read(tmp_path, minor):
    folder = finished(tmp_path, clusters=2)
    with h5py.File(folder / "results.h5", "r+") as file:
        old(file, minor)
    with Run(folder) as run:
        assert (run.clusters, run.truth, run.averages_by_coins, run.protocol) == (2, False, False, "clients")
    assert table([folder]).caption is None
    assert table([folder], merged=True).caption is None


def test_old_files_share_tables_and_figures_with_new_ones(tmp_path):
    pytest.importorskip("matplotlib")
    for minor in (0, 1, 2, 3, 4):
        folder = finished(tmp_path, participants=minor >= 2, own_classes=minor >= 2)
        with h5py.File(folder / "results.h5", "r+") as file:
            old(file, minor)
    shown = table([tmp_path])
    assert (shown.row_count, shown.caption) == (5, None)
    (tested,) = [column for column in shown.columns if str(column.header).startswith("participants")]
    assert [str(cell).partition("\n")[0] for cell in tested.cells] == ["-", "-", *["0.2812"] * 3]
    plot([tmp_path], tmp_path / "x.png")
    assert (tmp_path / "x.png").exists()


def old(file, minor):
    """Take from a file what a minor version of the format 1 did not have."""
    assert tuple(file.attrs["format_version"]) == FORMAT_VERSION == (1, 4)  # another one: say below what it adds
    if minor < 4:
        del file.attrs["data_sha256"]
    if minor < 3:
        del file.attrs["restarts"]
    if minor < 2:
        del file["rounds/forward_passes"], file["rounds/backward_passes"], file.attrs["protocol"], file.attrs["labels"]
    if minor < 1:
        del file["clusters"]
    file.attrs.modify("format_version", [1, minor])


def test_participants_and_own_classes(tmp_path):
    with Run(finished(tmp_path, participants=True, own_classes=True)) as run:
        assert (run.protocol, run.attributes["protocol"]) == ("participants", "participants")
        assert run.attributes["labels"] == "local"
        assert list(run.read("/rounds/participants_test_accuracy")) == [r / 16 for r in range(10)]
        assert list(run.read("/rounds/forward_passes")) == [2] * 10
        assert list(run.read("/clients/n_classes")) == [1, 2, 2, 1]
        assert (run.models, run.metrics, run.exposed) == (("personal", "global"), ("loss", "accuracy"), ())
    with Run(finished(tmp_path)) as run:
        assert (run.protocol, run.attributes["labels"]) == ("clients", "global")
        assert "participants_test_accuracy" not in run.file["/rounds"]
        assert "n_classes" not in run.file["/clients"]


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
    names = ["kind", "n_participants", "seconds", "train_loss", "forward_passes", "backward_passes"]
    names += [f"{what}_{way}" for what in ("vectors", "bytes") for way in ("up", "down")]
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
        (tmp_path / ("x" * 300), "cannot be read: File name too long"),
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
