"""Jobs on a real SLURM: submitted by hpcfl, stopped, requeued, cancelled, failing; with the right final bits."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from hpcfl.analysis.reader import Run
from hpcfl.cli import main
from hpcfl.states import states
from hpcfl.sweep import Sweep

ROOT = Path(__file__).resolve().parents[2]
JOB = str(ROOT / "jobs/quickstart/apfl.toml")
ROUNDS = 40
SHORT = ["--set", f"run.rounds={ROUNDS}", "--set", "run.eval_every=2", "--set", "run.checkpoint_every=2"]
SHORT += ["--set", "run.save_models=true", "--set", "model={name='logistic'}", "--plugin", "paced.py"]

# Rounds last until the file "fast" is in the folder of the plug-in; with a large step size they fail until then.
PACED = """
import pathlib, time
from hpcfl.algorithms.apfl import APFL

plain = APFL.round

def paced(self, state, r):
    if not (pathlib.Path(__file__).parent / "fast").exists():
        if self.lr > 1:
            raise ValueError("no such luck")
        time.sleep(1.5)
    return plain(self, state, r)

APFL.round = paced
"""


@pytest.fixture(autouse=True)
def place(slurm, tmp_path, monkeypatch) -> Path:
    """A folder that is the current one, with the plug-in that makes rounds slow, and SLURM's clients at hand."""
    for name, value in {**slurm.env, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paced.py").write_text(PACED)
    return tmp_path


def submitted(capfd, *args: str) -> str:
    """The number of the job that a command of hpcfl submits."""
    capfd.readouterr()
    assert main(list(args)) == 0
    out = capfd.readouterr().out
    (number,) = re.findall(r"^submitted job (\d+)", out, re.MULTILINE)
    return number


@pytest.fixture(scope="module")
def limited(slurm, tmp_path_factory) -> tuple[Path, str]:
    """Folder and number of a job that hits its time limit while the other tests go on.

    SLURM looks only every 30 s, so the signal comes 25 to 55 s after the start. It goes through srun: with two ranks
    the PMIx of Debian's SLURM and that of Open MPI's wheel understand each other.
    """
    if not re.search(r"\bpmix\b", slurm.call("srun", "--mpi=list")):
        message = "srun knows no pmix; on Debian: apt-get install libpmix-dev"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    folder = tmp_path_factory.mktemp("limited")
    (folder / "paced.py").write_text(PACED)
    limit = ["--ntasks=2", "--time=1", "--signal=B:USR1@20", "--launcher", "srun --mpi=pmix"]
    with pytest.MonkeyPatch.context() as there:
        there.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
        there.chdir(folder)
        assert main(["submit", JOB, *SHORT, *limit]) == 0
    (number,) = slurm.call("squeue", "--me", "--noheader", "--format=%i").split()
    return folder, number


@pytest.fixture(scope="module")
def undisturbed(hpcfl, tmp_path_factory) -> Path:
    """The run folder of the job on one rank, never stopped."""
    out = tmp_path_factory.mktemp("undisturbed")
    (out / "fast").touch()
    (out / "paced.py").write_text(PACED)
    done = hpcfl("run", JOB, *SHORT, "--out", out, cwd=out)
    assert done.returncode == 0, done.stderr
    return out / "apfl-001"


def check_bits(folder: Path, other: Path) -> None:
    """Both runs are done, without a gap, with the same values per client and the same models."""
    with Run(folder) as a, Run(other) as b:
        assert a.status == b.status == "done"
        assert a.rounds_done == b.rounds_done == ROUNDS
        names = list[str]()
        for group in ("rounds", "evaluations", "per_client/personal", "per_client/global", "final/models"):
            names += [f"{group}/{name}" for name in b.file[group] if name != "seconds"]
        assert len(names) > 20
        for name in names:
            np.testing.assert_array_equal(a.read(name), b.read(name), err_msg=name)


@pytest.mark.usefixtures("limited")  # to be on its way
def test_signal_checkpoint_requeue_resume(slurm, place, capfd, undisturbed):
    """Two ranks on two nodes; the signal comes early, from scancel, as it would from the time limit."""
    layout = ["--nodes", "2", "--ntasks-per-node", "1"]
    job = submitted(capfd, "submit", JOB, *SHORT, *layout)
    slurm.wait_for_log(job, "round 2/")
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    slurm.wait_for_log(job, "back into the queue, restart 1 of at most 20")
    assert main(["status", JOB, "--max-walltime=1h"]) == 75
    (place / "fast").touch()
    facts = slurm.wait(job)
    log = slurm.log(job)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), log
    assert "2 tasks on n[1-2]" in log
    assert "start 2: 2 tasks" in log
    assert "going on after round" in log
    check_bits(place / "results/apfl-001", undisturbed)
    with Run(place / "results/apfl-001") as run:
        assert run.attributes["restarts"] == 1
        assert run.attributes["ranks"] == 2
    assert main(["submit", JOB, *SHORT]) == 2  # done already


def test_cancelled(slurm, place, capfd, undisturbed):
    """A cancelled job ends, is not requeued, and goes on when it is submitted again."""
    command = ["submit", JOB, *SHORT, "--ntasks", "1", "--launcher", "mpirun"]
    job = submitted(capfd, *command)
    slurm.wait_for_log(job, "round 2/")
    slurm.call("scancel", job)
    facts = slurm.wait(job, timeout=20)
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0")
    slurm.wait_for_log(job, "ended by SIGTERM: scancel", timeout=10)
    assert main(["status", JOB]) == 1
    (place / "fast").touch()
    again = submitted(capfd, *command)
    facts = slurm.wait(again)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "0"), slurm.log(again)
    assert "going on after round" in slurm.log(again)
    check_bits(place / "results/apfl-001", undisturbed)


def test_sweep(slurm, place, capfd):
    """An array of four, of which one fails: status finds it, missing submits it again. The last one is requeued."""
    settings = ["--set", "run.rounds=3", "--set", "run.eval_every=1", "--plugin", "paced.py", "--out", "sweep"]
    array = submitted(
        capfd,
        "sweep",
        JOB,
        "--grid",
        "algorithm.lr=0.1,0.2,2,0.3",
        *settings,
        "--submit",
        "--parallel",
        "2",
        "--time=10",
    )
    sweep = Sweep.open(place / "sweep")
    found = states(sweep)
    assert {state.word for state in found} <= {"pending", "running"}
    assert not any(state.missing for state in found)
    slurm.wait_for_log(f"{array}_3", "round 1/", timeout=100)
    slurm.call("scancel", "--batch", "--signal=USR1", f"{array}_3")
    slurm.wait_for_log(f"{array}_3", "back into the queue")
    assert [slurm.wait(f"{array}_{number}")["Restarts"] for number in range(4)] == ["0", "0", "0", "1"]
    found = states(sweep)
    assert [state.word for state in found] == ["done", "done", "failed", "done"]
    assert "no such luck" in found[2].why
    assert "exit code 1; failed:" in (place / f"sweep/log-{array}_2.out").read_text()
    assert main(["sweep", "status", "sweep"]) == 0
    assert "3 done, 1 failed" in capfd.readouterr().out
    (place / "fast").touch()
    again = submitted(capfd, "sweep", "missing", "sweep", "--submit")
    assert slurm.wait(f"{again}_2")["JobState"] == "COMPLETED"
    assert [state.word for state in states(sweep)] == ["done"] * 4
    assert main(["sweep", "missing", "sweep"]) == 0
    assert main(["sweep", "collect", "sweep"]) == 0
    out = capfd.readouterr().out
    assert "none is missing" in out
    assert out.count(",done,") == 4


def test_srun_without_a_fitting_mpi(slurm, place, capfd):
    """Tasks that do not find one another are an error, never several runs of the same job."""
    job = submitted(capfd, "submit", JOB, *SHORT, "--ntasks", "2", "--launcher", "srun --mpi=none")
    facts = slurm.wait(job)
    log = slurm.log(job)
    assert (facts["JobState"], facts["Restarts"]) == ("FAILED", "0"), log
    assert facts["ExitCode"] in ("2:0", "143:0")  # srun ends the other task, which may not have left yet
    assert "launcher srun --mpi=none" in log
    assert "a launcher started 2 tasks, but this process believes it is alone" in log
    assert "under srun the matching --mpi type" in log
    assert "Traceback" not in log
    assert not (place / "results").exists()


def test_srun_and_mpich(slurm, place, capfd, monkeypatch, undisturbed):
    """MPICH under srun --mpi=pmi2, on two nodes: signal, checkpoint, requeue, resume."""
    library = os.environ.get("HPCFL_TEST_MPICH") or str(Path(sys.prefix, "lib/libmpi.so.12"))
    if not Path(library).exists():
        pytest.skip(f"no {library}: set HPCFL_TEST_MPICH to the libmpi.so.12 of an MPICH")
    monkeypatch.setenv("MPI4PY_LIBMPI", library)
    layout = ["--nodes=2", "--ntasks-per-node=1", "--launcher", "srun --mpi=pmi2"]
    job = submitted(capfd, "submit", JOB, *SHORT, *layout)
    slurm.wait_for_log(job, "round 2/")
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    slurm.wait_for_log(job, "back into the queue, restart 1 of at most 20")
    (place / "fast").touch()
    facts = slurm.wait(job)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), slurm.log(job)
    check_bits(place / "results/apfl-001", undisturbed)


def test_doctor_under_srun(slurm, place):
    out = slurm.call("srun", "--ntasks=2", "--mpi=none", "python", "-m", "hpcfl", "doctor", env={"COLUMNS": "400"})
    assert out.count("srun --mpi= ") == 1
    assert re.search(r"srun --mpi= .*none.*; launcher of the batch scripts: mpirun", out)
    assert re.search(r"inside job \d+: nodes 1, tasks 2", out)
    assert re.search(r"problem +MPI +a launcher started 2 tasks", out)


def test_time_limit(slurm, limited, undisturbed):
    """SLURM itself sends the signal."""
    folder, job = limited
    slurm.wait_for(lambda: slurm.job(job)["Restarts"] != "0", 90, lambda: slurm.log(job))
    (folder / "fast").touch()
    facts = slurm.wait(job, timeout=180)  # on a busy machine it may take more than one restart
    assert facts["JobState"] == "COMPLETED", slurm.log(job)
    assert "asking for a checkpoint" in slurm.log(job)
    check_bits(folder / "results/apfl-001", undisturbed)
