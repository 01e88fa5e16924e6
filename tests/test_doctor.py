"""hpcfl doctor: never a traceback, one line per finding, one reporter among several ranks."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from hpcfl import doctor, probe

ROOT = Path(__file__).resolve().parent.parent

SUBJECTS = {"Python", "packages", "MPI", "SLURM", "threads", "devices", "HDF5", "free disk"}
SUBJECTS |= {"mnist", "cifar10", "omniglot"}


def lines(done):
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith(("ok ", "warning ", "problem "))]
    assert all(any(subject in line for line in found) for subject in SUBJECTS), done.stdout
    return found


def test_alone(launch, hpcfl):  # launch: MPI works here
    found = lines(hpcfl("doctor"))
    assert not [line for line in found if line.startswith("problem")]
    assert any("starts two ranks" in line for line in found)


def test_two_ranks_make_one_report(launch):
    done = launch(2, "-m", "hpcfl", "doctor")
    assert sum(" MPI " in line for line in lines(done)) == 1
    assert "bound to cores" in done.stdout
    assert "starts two ranks" not in done.stdout


def test_ranks_that_do_not_see_each_other_make_one_report(hpcfl):
    variables = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    assert any(line.startswith("problem MPI") for line in lines(hpcfl("doctor", env=variables)))
    assert hpcfl("doctor", env=variables | {"OMPI_COMM_WORLD_RANK": "1"}).stdout == ""


def test_folder_that_cannot_be_written(hpcfl):
    found = lines(hpcfl("doctor", cwd="/proc", env={"PYTHONPATH": str(ROOT)}))
    assert any(line.startswith("problem HDF5") and "--out" in line for line in found)


def test_failing_check_is_a_finding():
    def weather():
        raise OSError("rain")

    assert doctor.guarded(weather) == [("problem", "weather", "OSError: rain")]


@pytest.mark.parametrize(
    ("threads", "level"), [(["1", "1"], "ok"), (["1", "2"], "warning"), (["1", "not set"], "warning")]
)
def test_threads_against_cores(threads, level):
    ranks = [doctor.Rank(i, "n1", i, "cpu", t, "0-1", 2) for i, t in enumerate(threads)]
    ranks.append(doctor.Rank(2, "n2", 0, "cpu", "1", "0-1", 2))
    assert [line[0] for line in doctor.threads(ranks)] == [level]


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5, 7, 8], "0-2,5,7-8")])
def test_ranges(numbers, text):
    assert doctor.ranges(numbers) == text


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """Puts a shell script in the place of mpirun; the library itself works."""

    def use(script: str):
        path = tmp_path / "mpirun"
        path.write_text(f'#!/usr/bin/env bash\nworks() {{ echo "works: $1 3.1 multiple Open MPI v5"; }}\n{script}\n')
        path.chmod(0o755)
        monkeypatch.setattr(shutil, "which", lambda name, path=None: str(tmp_path / name))
        attempt = probe.attempt
        alone = [sys.executable, "-c", probe.TRY_MPI]
        monkeypatch.setattr(
            probe, "attempt", lambda c, *a: "works: 1 3.1 multiple Open MPI v5" if c == alone else attempt(c, *a)
        )
        return list(probe.mpi())[-1]

    return use


def test_launcher_of_another_mpi(launcher):
    level, what, text = launcher("works 1; works 1")
    assert (level, what) == ("problem", "launcher")
    assert "two ranks do not see each other" in text


def test_launcher_that_needs_help_gets_it(launcher, monkeypatch):
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT", raising=False)
    level, _, text = launcher("""
if [ -z "$OMPI_ALLOW_RUN_AS_ROOT" ]; then echo "detected an attempt to run as root"
elif [[ "$*" != *--oversubscribe* ]]; then echo "There are not enough slots available"
elif [[ "$*" != *"--bind-to none"* ]]; then echo "more cpus than are available"
else works 2; fi""")
    assert level == "warning"
    assert "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 --oversubscribe --bind-to none" in text


def test_launcher_that_fails_is_quoted(launcher):
    level, _, text = launcher('echo "-----"; echo "no route to host"; exit 1')
    assert level == "problem"
    assert text.endswith("does not start two ranks: no route to host")


def test_reason_prefers_the_last_python_error():
    output = "Traceback (most recent call last):\n  File ...\nImportError: libmpi.so.12: cannot open\n-----\n"
    assert probe.reason(output) == "ImportError: libmpi.so.12: cannot open"
    assert probe.reason("") == "it printed nothing"
