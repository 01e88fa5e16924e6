"""A few trials of the stress script: killed jobs lose nothing, and end with the bits of undisturbed ones."""

from __future__ import annotations

import subprocess

import pytest
from kills import Bench, kill_trial, shrink_trial
from launching import ROOT


@pytest.fixture(scope="module")
def bench(launch, tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("kills"), seed=5)


@pytest.mark.parametrize(("job", "victim"), [("apfl", "one rank"), ("async_l2gd", "rank 0"), ("fedrep", "mpirun")])
def test_a_job_that_is_killed_twice(bench, job, victim):
    trial = kill_trial(bench, job, ranks=2, kills=2, victim=victim)
    assert trial.problems == [], trial
    assert trial.kills


@pytest.mark.parametrize(("job", "kills", "zero"), [("pflego", 2, False), ("apfl", 1, True)])
def test_a_job_that_loses_ranks(bench, job, kills, zero):
    version = subprocess.run(["bash", "jobs/mpirun.sh", "--version"], cwd=ROOT, capture_output=True, text=True)
    if "Open MPI" not in version.stdout:
        pytest.skip("only Open MPI's mpirun has --with-ft")
    trial = shrink_trial(bench, job, ranks=4, kills=kills, zero=zero)
    assert trial.problems == [], trial
    assert trial.kills
