"""A run that is broken off on 3 ranks and goes on on 2 has the bits of the undisturbed run on one: every algorithm."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import matrix
import pytest
from same import assert_same

from hpcfl.comm import Comm

SCRIPT = Path(matrix.__file__)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Folder with the results of all cases on one rank."""
    folder = tmp_path_factory.mktemp("undisturbed")
    jobs = {name: matrix.with_run(job, out=str(folder)) for name, job in matrix.cases().items()}
    matrix.run_all(jobs, Comm())
    return folder


@pytest.fixture(scope="module")
def broken(launch, tmp_path_factory):
    """Folder with the first parts of all cases, on 3 ranks."""
    folder = tmp_path_factory.mktemp("restarted")
    first = launch(3, "-m", "mpi4py", SCRIPT, folder, "--first", timeout=230)
    assert first.returncode == 0, first.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def restarted(broken, launch):
    """Folder with the results of all cases, and name -> [rounds done, warnings] at the second start, on 2 ranks."""
    second = launch(2, "-m", "mpi4py", SCRIPT, broken, "--second", timeout=230)
    assert second.returncode == 0, second.stderr[-3000:]
    return broken, json.loads(second.stdout.splitlines()[-1])


def test_first_parts_are_stopped_where_they_should(broken):
    """Before the others: each of the launches has a time limit of its own."""
    for case, end in matrix.breaks().items():
        with h5py.File(broken / f"{case}-001/results.h5") as file:
            assert file.attrs["rounds_done"] == end.rounds
            assert file.attrs["status"] == (b"stopped:signal SIGUSR1" if end.asked else b"done")
        checkpoints = {path.name for path in (broken / f"{case}-001/checkpoints").iterdir()}
        assert {f"round-{end.rounds}", f"round-{end.goes_on}"} <= checkpoints


@pytest.mark.parametrize("case", matrix.cases())
def test_restart_gives_the_undisturbed_bits(undisturbed, restarted, case):
    folder, starts = restarted
    end, (done, warnings) = matrix.breaks()[case], starts[case]
    assert done == end.goes_on
    assert ["damaged checkpoint" in line for line in warnings] == [True] * end.damage
    assert_same(undisturbed / f"{case}-001/results.h5", folder / f"{case}-001/results.h5")
    with h5py.File(folder / f"{case}-001/results.h5") as file:
        assert (file.attrs["status"], file.attrs["restarts"], file.attrs["ranks"]) == (b"done", 1, 3)


def test_breaks_are_of_all_kinds():
    """Every kind of break with every place of the state, and in the middle between two evaluations."""
    kinds = {(b.asked, b.damage, b.states) for b in matrix.breaks().values()}
    assert len({kind[:2] for kind in kinds}) == 3
    assert len(kinds) == 9
    jobs = matrix.cases()
    assert sum(b.rounds % jobs[name].run.eval_every > 0 for name, b in matrix.breaks().items()) > len(jobs) / 2
