"""What ends a job: an exception on one rank, a loss that is no number, a killed rank, a launcher without MPI."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import h5py
import pytest

from hpcfl.analysis.reader import Run

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "jobs/quickstart/local.toml"

LONG = ["--set", "run.rounds=1000000", "--set", "run.eval_every=1000000"]

FAILING = """
from dataclasses import dataclass
from typing import ClassVar
from hpcfl.algorithms.local import Local
from hpcfl.registry import register

@register("algorithm", "failing")
@dataclass(frozen=True)
class Failing(Local):
    def client(self, b, own):
        if 33 in b.ids and b.iteration(0) >= 20:
            raise ValueError("no luck today")
        return super().client(b, own)
"""


@pytest.fixture
def run_job(launch, tmp_path):
    """Runs the quickstart job on some ranks with changes: (result, the run's folder)."""

    def run(ranks, *changes):
        args = [word for change in changes for word in ("--set", change)]
        return launch(ranks, "-m", "hpcfl", "run", JOB, "--out", tmp_path, *args), tmp_path / "local-001"

    return run


def test_exception_on_one_rank_of_eight_ends_the_job_with_its_message(start, tmp_path):
    (tmp_path / "plugin.py").write_text(FAILING)
    args = ["-m", "hpcfl", "run", JOB, "--out", tmp_path, "--plugin", tmp_path / "plugin.py", *LONG]
    process = start(8, *args, "--set", 'algorithm.name="failing"')
    report = None
    while report is None and process.poll() is None:
        time.sleep(0.05)
        report = next(tmp_path.glob("local-001/error-rank*.txt"), None)
    assert report is not None, process.communicate()
    noticed = time.monotonic()
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - noticed < 10
    assert process.returncode == 1
    lines = [line for line in errors.splitlines() if "no luck today" in line]
    assert len(lines) == 1, errors
    assert "ValueError" in lines[0]
    assert "round 2, clients" in lines[0]
    assert "33" in lines[0]
    assert "plugin.py line 12" in lines[0]
    assert "Traceback" not in errors
    assert "Traceback" in report.read_text()
    with Run(tmp_path / "local-001/results.h5") as run:  # rank 0 wrote it after the other rank's abort
        assert run.status.startswith("failed:")
        assert "no luck today" in run.status


@pytest.mark.parametrize("ranks", [1, 3])
def test_loss_that_is_no_number_names_client_and_round(run_job, ranks):
    done, folder = run_job(ranks, "algorithm.lr=1e30", 'algorithm.name="local"')
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("hpcfl:")]
    assert len(said) == 1, done.stderr
    assert "round 0, client 0: the training loss is not finite" in said[0]
    assert "Traceback" not in done.stderr
    with Run(folder / "results.h5") as run:
        assert run.status.startswith("failed:round 0, client 0")


def test_diverged_average_names_client_and_round(run_job):
    done, folder = run_job(2, "algorithm.lr=1e30", 'algorithm.name="fedavg"')
    assert done.returncode == 1
    assert "hpcfl: round 0, client 0" in done.stderr
    with h5py.File(folder / "results.h5") as file:
        assert file.attrs["status"].startswith(b"failed:")


def test_model_that_is_no_number_after_the_last_round(hpcfl, tmp_path):
    """Its loss would be the next round's: the evaluation finds it."""
    changes = ["run.rounds=1", "algorithm.lr=1e38", "algorithm.local_steps=1", 'algorithm.name="local"']
    done = hpcfl("run", JOB, "--out", tmp_path, *(word for change in changes for word in ("--set", change)))
    assert done.returncode == 1
    assert "hpcfl: round 0, client 0: its model's loss is not finite" in done.stderr
    with Run(tmp_path / "local-001/results.h5") as run:
        assert run.status.startswith("failed:round 0")


def test_killed_rank_ends_the_job_and_the_file_says_so(start, tmp_path):
    process, file = started(start, 3, tmp_path)
    victim = next(pid for pid in ranks_of(process) if rank_of(pid) == 2)
    start_of_end = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    process.wait(timeout=20)
    assert time.monotonic() - start_of_end < 10
    assert process.returncode != 0
    with Run(file) as run:
        assert run.rounds_done > 0
        assert run.status.startswith("failed:") or run.stale


def test_terminated_run_is_marked(start, tmp_path):
    """Open MPI's mpirun leaves its ranks a quarter of a second."""
    process, file = started(start, 2, tmp_path)
    process.terminate()
    assert process.wait(timeout=20) != 0
    with Run(file) as run:
        assert run.status.startswith("failed:terminated by SIGTERM")
        assert "kill -USR1" in run.status


@pytest.mark.parametrize("variables", [{"OMPI_COMM_WORLD_SIZE": "8"}, {"PMI_SIZE": "4"}, {"SLURM_STEP_NUM_TASKS": "2"}])
def test_launcher_without_working_mpi_is_an_error(hpcfl, tmp_path, variables):
    done = hpcfl("run", JOB, "--out", tmp_path, env=variables)
    assert done.returncode == 2
    assert (
        f"a launcher started {next(iter(variables.values()))} tasks, but this process believes it is alone"
        in done.stderr
    )
    assert list(tmp_path.iterdir()) == []


def test_one_rank_runs_without_any_mpi_library(hpcfl, tmp_path):
    done = hpcfl("run", JOB, "--out", tmp_path, "--set", "run.rounds=1", env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    assert done.returncode == 0, done.stderr
    with Run(tmp_path / "local-001/results.h5") as run:
        assert run.status == "done"
        assert run.attributes["mpi_version"].startswith("none")


def started(start, ranks, out):
    """A long run that has written a row: (process, results file)."""
    process, file = start(ranks, "-m", "hpcfl", "run", JOB, "--out", out, *LONG), out / "local-001/results.h5"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        if file.exists():
            with Run(file) as run:
                if run.rounds_done > 0:
                    return process, file
        time.sleep(0.2)
    return pytest.fail("no round was written within a minute")


def ranks_of(process):
    """Process ids of the Python ranks of a launch."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                mine = os.getsid(int(entry.name)) == process.pid  # other jobs may run here
                if mine and b"-m\0hpcfl" in (entry / "cmdline").read_bytes() and rank_of(int(entry.name)) is not None:
                    yield int(entry.name)
            except OSError:
                continue


def rank_of(pid):
    for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if variable.startswith((b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK=")):
            return int(variable.split(b"=")[1])
    return None
