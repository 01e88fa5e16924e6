"""A few trials of the stress script: killed jobs lose nothing, and end with the bits of undisturbed ones."""

from __future__ import annotations

import subprocess

import pytest
from kills import LONGEST, Bench, kill_trial, shrink_trial
from launching import ROOT, Launch
from left import problems


@pytest.fixture(scope="module")
def bench(launch, tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("kills"), seed=5)


@pytest.mark.parametrize(("job", "victim"), [("apfl", "one rank"), ("async_l2gd", "rank 0"), ("fedrep", "mpirun")])
def test_a_job_that_is_killed_twice(bench, job, victim):
    trial = kill_trial(bench, job, ranks=2, kills=2, victim=victim)
    assert trial.problems == [], trial
    assert trial.kills


@pytest.fixture(scope="module")
def open_mpi(launch):
    version = subprocess.run(["bash", "jobs/mpirun.sh", "--version"], cwd=ROOT, capture_output=True, text=True)
    if "Open MPI" not in version.stdout:
        pytest.skip("only Open MPI's mpirun has --with-ft")


@pytest.mark.parametrize(("job", "kills", "zero"), [("pflego", 2, False), ("apfl", 1, True)])
def test_a_job_that_loses_ranks(bench, open_mpi, job, kills, zero):
    trial = shrink_trial(bench, job, ranks=4, kills=kills, zero=zero)
    assert trial.problems == [], trial
    assert trial.kills


DYING = """
import os
import signal
from hpcfl.results import ResultsWriter

final = ResultsWriter.final

def dying(self):
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    final(self)

ResultsWriter.final = dying
"""


def test_rank_0_dies_when_nothing_is_left_but_the_summary(bench, open_mpi, tmp_path):
    """The others have nothing more to do, but are still there to do it."""
    (tmp_path / "dying.py").write_text(DYING)
    name, folder = bench.next("apfl")
    changes = [*bench.changes("apfl"), 'run.on_rank_loss="shrink"']
    options = ["--plugin", str(tmp_path / "dying.py")]
    launch = Launch(bench.folder, name, changes, 3, *options, mpirun=("--with-ft", "ulfm"))
    assert launch.wait(LONGEST), launch.output
    assert "1 of 3 ranks died; the other 2 go on" in launch.output
    assert problems(folder / "results.h5", bench.reference("apfl"), 60, done=60) == []
    assert "done: " in launch.output
