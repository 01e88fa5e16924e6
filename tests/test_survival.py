"""Runs whose files somebody damaged, lost or mixed up: one clear line, never other numbers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import h5py
import pytest

from hpcfl.analysis.reader import Run
from hpcfl.cli import main
from hpcfl.results_folder import lock
from hpcfl.signals import StopNow
from hpcfl.start import Start

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "jobs/quickstart/local.toml"


@pytest.fixture
def run(hpcfl_here):
    return partial(hpcfl_here, out="a")


def test_checkpoints_without_results_are_left_alone(run, tmp_path):
    """They would be overwritten by a run from the start, or continued by one with other options."""
    assert run()[0] == 0
    folder = tmp_path / "a/local-001"
    (folder / "results.h5").rename(tmp_path / "elsewhere.h5")
    code, errors, _ = run("--resume", "run.rounds=8", "algorithm.lr=0.01")
    assert (code, errors) == (
        2,
        [
            f"hpcfl: --resume: {folder} has checkpoints, but no results.h5; put that back, or run without --resume for "
            "a new one"
        ],
    )
    assert sorted(entry.name for entry in (folder / "checkpoints").iterdir()) == ["round-2", "round-4"]
    (tmp_path / "elsewhere.h5").rename(folder / "results.h5")
    code, errors, said = run("--resume", "run.rounds=8")
    assert (code, errors) == (0, [])
    assert "going on after round 4" in said


@pytest.mark.parametrize("other", ["algorithm.lr=0.01", "model.hidden=[5]"])
def test_checkpoints_of_another_run_are_refused(run, tmp_path, other):
    assert run()[0] == 0
    assert run(other, out="b")[0] == 0
    checkpoints = tmp_path / "a/local-001/checkpoints"
    shutil.rmtree(checkpoints)
    shutil.copytree(tmp_path / "b/local-001/checkpoints", checkpoints)
    code, errors, _ = run("--resume", "run.rounds=8")
    assert (code, len(errors)) == (2, 1), errors
    assert errors[0].startswith(f"hpcfl: {checkpoints}/round-4: of another run, ")
    with Run(tmp_path / "a/local-001") as found:
        assert found.status.startswith(f"failed:{checkpoints}/round-4: of another run, ")


def test_what_fails_before_the_first_round_is_in_the_status(run, tmp_path):
    assert run()[0] == 0
    checkpoints = tmp_path / "a/local-001/checkpoints"
    shutil.rmtree(checkpoints)
    checkpoints.write_text("")
    code, errors, _ = run("--resume", "run.rounds=8")
    assert (code, errors) == (1, [f"hpcfl: {checkpoints}: cannot read the checkpoint: Not a directory"])
    with Run(tmp_path / "a/local-001") as found:
        assert found.status == f"failed:{checkpoints}: cannot read the checkpoint: Not a directory"
    lock(checkpoints.parent).close()  # nobody holds it
    checkpoints.unlink()
    assert run("--resume", "run.rounds=8")[0] == 0


def test_a_first_run_with_resume_says_so(run, tmp_path):
    code, errors, said = run("--resume")
    assert (code, errors) == (0, [])
    assert said.startswith(f"--resume: there is no run of local in {tmp_path}/a yet; this is the first\n")


@pytest.mark.parametrize("damage", ["ten bytes", "its metadata"])
def test_a_damaged_results_file_is_one_line_for_every_command(run, tmp_path, capfd, damage):
    assert run()[0] == 0
    path = tmp_path / "a/local-001/results.h5"
    content = bytearray(path.read_bytes())
    content[60:6000] = bytes(range(1, 100)) * 60
    path.write_bytes(content[:10] if damage == "ten bytes" else content)
    code, errors, _ = run("--resume", "run.rounds=8")
    assert (code, len(errors)) == (2, 1), errors
    assert errors[0].startswith(f"hpcfl: {path}: ")
    for command in (["show", path], ["status", JOB, "--out", tmp_path / "a"], ["plot", path, "-o", tmp_path / "x.png"]):
        assert main([str(word) for word in command]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith(f"hpcfl: {path}: ")


def test_the_files_of_a_continued_run_are_read_by_all(run, tmp_path):
    assert run("run.eval_clients=3")[0] == 0
    assert run("run.eval_clients=3", "--resume", "run.rounds=7")[0] == 0
    import xarray

    path = tmp_path / "a/local-001/results.h5"
    for group, size in (("rounds", 7), ("evaluations", 4), ("per_client/personal", 4)):
        with xarray.open_dataset(path, engine="h5netcdf", group=group) as data:
            assert size in data.sizes.values()
    with h5py.File(path) as file:  # without SWMR: it was closed in order
        assert file["per_client/personal/test_accuracy"].shape == (4, 3)


def test_a_second_signal_while_the_results_are_closed(run, tmp_path, monkeypatch):
    close = Start.close

    def closing(self):
        close(self)
        raise StopNow("SIGUSR1")

    monkeypatch.setattr(Start, "close", closing)
    code, errors, _ = run()
    assert code == 75
    assert errors[0] == "hpcfl: stopped at once by a second signal (SIGUSR1); the last checkpoint is of round 4"
    with Run(tmp_path / "a/local-001") as found:
        assert found.status == "done"


@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_many_signals_end_a_run_once(tmp_path, name):
    """The second one stops it at once; those after it, to the very end, change nothing."""
    code = """
import os, subprocess, sys
from pathlib import Path
from hpcfl import session
from hpcfl.signals import StopRequest
def update(self, done, means):
    if done == 5:  # there is a checkpoint
        kill = f"while kill -{sys.argv[1]} {os.getpid()}; do sleep 0.005; done"
        subprocess.Popen(["sh", "-c", kill], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
session.Report.update = update
StopRequest.reason = None  # the first signal alone would stop the run in order, perhaps before the second one comes
request = StopRequest()
request.listen()
changes = ["run.rounds=100000", "run.eval_every=1", "run.checkpoint_every=4", f'run.out="{sys.argv[3]}"']
sys.exit(session.Session(Path(sys.argv[2]), changes, [], request).run())
"""
    done = subprocess.run(
        [sys.executable, "-c", code, name, str(JOB), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 75, done.stderr
    assert "Traceback" not in done.stderr
    with Run(tmp_path / "local-001") as found:
        assert found.status.startswith("stopped:")
