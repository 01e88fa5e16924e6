"""The batch scripts, run by bash as SLURM would: with SLURM's variables, from a copy in another folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcfl.analysis.reader import Run

ROOT = Path(__file__).resolve().parents[2]

# Stand for the environment's programs: write down what they are asked for, and end as a test wants it.
FAKES = {
    "python": """
case "$3" in
    run) trap 'exit 75' USR1; date >>"$HOME/started"; echo up; eval "$RUN" ;;
    status) [ -z "${HOLD-}" ] || { touch "$HOLD"; sleep 1; }
        [ -e "$HOME/started" ] || STATUS=$BEFORE; echo "$STATUS in results" ;;
esac""",
    "mpirun": '[ "$1" = --version ] && exit; while [ "$1" != python ]; do shift; done; exec "$@"',
    "srun": 'while [ "$1" != python ]; do shift; done; exec "$@"',
    "scontrol": "",
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("venv")
    (folder / "bin").mkdir()
    for name, text in FAKES.items():
        path = folder / "bin" / name
        path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >>"$LOG"\n{text}\n')
        path.chmod(0o755)
    return folder


class Script:
    """Runs a batch script with the fakes. ``calls``: what they were asked for."""

    def __init__(self, programs: Path, folder: Path):
        self.log, self.started = folder / "calls", list[subprocess.Popen[str]]()
        self.variables = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "HOME": str(folder)}
        self.variables |= {
            "HPCFL_VENV": str(programs),
            "LOG": str(self.log),
            "RUN": "exit 0",
            "STATUS": "done",
            "BEFORE": "",
        }
        self.copy = folder / "slurm_script"

    def start(self, *args: str | Path, script: str = "run.sbatch", **variables: str) -> subprocess.Popen[str]:
        shutil.copy(ROOT / "slurm" / script, self.copy)
        self.started.append(
            subprocess.Popen(
                ["bash", self.copy, *args],
                env=os.environ | self.variables | variables,
                cwd=self.copy.parent,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return self.started[-1]

    def __call__(self, *args: str | Path, **options: str) -> tuple[int, str]:
        process = self.start(*args, **options)
        out, _ = process.communicate(timeout=20)
        return process.returncode, out

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()

    @property
    def requeued(self) -> bool:
        return "scontrol requeue 7" in self.calls


@pytest.fixture
def script(programs: Path, tmp_path: Path) -> Iterator[Script]:
    made = Script(programs, tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


def test_done(script):
    code, out = script("job.toml", "--set", "run.rounds=5")
    assert code == 0
    assert "mpirun -n 3 python -m hpcfl run job.toml --set run.rounds=5 --resume" in script.calls
    assert "python -m hpcfl status job.toml --set run.rounds=5" in script.calls
    assert "job 7, start 1: 3 tasks" in out
    assert f"launcher {script.variables['HPCFL_VENV']}/bin/mpirun, binding none" in out
    assert "exit code 0; done in results" in out
    assert not script.requeued


@pytest.mark.parametrize(
    ("end", "status", "restarts", "code", "requeued"),
    [
        ("exit 75", "stopped:signal", "", 75, True),
        ("exit 75", "stopped:walltime", "19", 75, True),
        ("exit 75", "stopped:walltime", "20", 75, False),
        ("exit 75", "failed:no room", "", 75, False),
        ("exit 143", "stopped:walltime", "", 75, True),  # a rank was killed while it left
        ("exit 137", "running", "", 137, False),
        ("exit 0", "running", "", 1, False),
        ("exit 0", "stopped:signal", "", 1, False),
        ("exit 2", "stopped:signal", "", 2, False),
        ("exit 1", "failed:diverged", "1", 1, False),
        ("exit 14", "no run of job", "", 14, False),
        ("kill -USR1 $$; sleep 5", "stopped:signal", "1", 75, True),
    ],
)
def test_end(script, end, status, restarts, code, requeued):
    found, out = script("job.toml", RUN=end, STATUS=status, SLURM_RESTART_COUNT=restarts or "0")
    assert found == code, out
    assert script.requeued == requeued
    assert ("submit it again" in out) == (restarts == "20")
    assert ("launcher with python -m hpcfl doctor" in out) == status.startswith("no run")


@pytest.mark.parametrize("end", ["exit 75", "exit 137"])
def test_status_of_an_earlier_start_does_not_count(script, end):
    code, out = script("job.toml", RUN=end, STATUS="stopped:signal", BEFORE="stopped:signal")
    assert code == int(end.split()[1]), out
    assert not script.requeued


def test_most_restarts_can_be_set(script):
    assert script("job.toml", RUN="exit 75", STATUS="stopped:signal", HPCFL_MAX_RESTARTS="0")[0] == 75
    assert not script.requeued


@pytest.mark.parametrize(
    ("ignores", "status", "sent", "code", "requeued"),
    [
        ("", "stopped:signal", [signal.SIGUSR1], 75, True),
        ("trap 'trap - USR1; sleep 1; exit 75' USR1; ", "stopped:signal", [signal.SIGUSR2, signal.SIGUSR1], 75, True),
        ("trap - USR1; ", "running", [signal.SIGUSR1], 75, True),  # killed by it, before it could be handled
        ("trap 'exit 137' USR1; ", "stopped:signal", [signal.SIGUSR1], 75, True),
        ("trap 'exit 1' USR1; ", "stopped:signal", [signal.SIGUSR1], 1, False),  # without a checkpoint
        ("", "failed:terminated", [signal.SIGTERM], 143, False),
    ],
)
def test_signals(script, ignores, status, sent, code, requeued):
    process = script.start("job.toml", RUN=f"{ignores}echo ready; while :; do sleep 0.05; done", STATUS=status)
    assert process.stdout is not None
    while process.stdout.readline() != "ready\n":
        pass
    for number in sent:
        process.send_signal(number)
        time.sleep(0.3)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == code, out
    assert script.requeued == requeued


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGTERM, 143)])
def test_a_signal_before_the_launch(script, tmp_path, number, code):
    """While the script asks for the status of earlier starts."""
    process = script.start("job.toml", RUN="while :; do sleep 0.05; done", HOLD=str(tmp_path / "asked"))
    while not (tmp_path / "asked").exists():
        time.sleep(0.01)
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == code, out
    assert script.requeued == (code == 75)


def test_srun(script):
    code, out = script("job.toml", HPCFL_LAUNCHER="srun --mpi=pmix", SLURM_CPUS_PER_TASK="2")
    assert code == 0
    assert "launcher srun --mpi=pmix" in out
    assert (
        "srun --mpi=pmix --kill-on-bad-exit=1 --cpus-per-task=2 python -m hpcfl run job.toml --resume" in script.calls
    )


def test_site_file(script, tmp_path):
    site = tmp_path / ".config/hpcfl/slurm.sh"
    site.parent.mkdir(parents=True)
    site.write_text("#SBATCH --account=a\necho loading $UNSET modules\nexport HPCFL_LAUNCHER='srun --mpi=pmi2'\n")
    code, out = script("job.toml")
    assert code == 0
    assert "loading modules" in out
    assert any(call.startswith("srun --mpi=pmi2 ") for call in script.calls)
    other = tmp_path / "other.sh"
    other.write_text("export HPCFL_LAUNCHER='mpirun --bind-to core'\n")
    assert script("job.toml", HPCFL_SITE=str(other))[0] == 0
    assert "mpirun -n 3 --bind-to core python -m hpcfl run job.toml --resume" in script.calls
    given = {"HPCFL_SITE": str(other), "HPCFL_GIVEN_LAUNCHER": "srun --mpi=pmix"}  # as by hpcfl submit --launcher
    assert script("job.toml", **given)[0] == 0
    assert any(call.startswith("srun --mpi=pmix ") for call in script.calls)


@pytest.mark.parametrize(
    ("args", "variables", "text"),
    [
        ([], {}, "usage: sbatch"),
        (["job.toml"], {"HPCFL_LAUNCHER": "mpiexec"}, "HPCFL_LAUNCHER=mpiexec: expected mpirun, or srun"),
        (["job.toml"], {"HPCFL_SITE": "/nowhere.sh"}, "HPCFL_SITE=/nowhere.sh: no such file"),
        ([], {"script": "sweep.sbatch"}, "usage: sbatch --array=0-N"),
        (["/tmp"], {"script": "sweep.sbatch", "SLURM_ARRAY_TASK_ID": "12345"}, "no job file of a member 12345"),
    ],
)
def test_wrong_use(script, args, variables, text):
    code, out = script(*args, **variables)
    assert code == 2
    assert text in out


def test_member_of_a_sweep(script, tmp_path):
    for name in ("000.toml", "011-lr=1.toml", "012-lr=2, 3.toml"):
        (tmp_path / name).touch()
    alone = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_JOB_ID": "4"}
    assert script(tmp_path, script="sweep.sbatch", **alone)[0] == 0
    assert f"python -m hpcfl status {tmp_path}/000.toml --out {tmp_path}" in script.calls
    array = {"SLURM_ARRAY_TASK_ID": "12", "SLURM_ARRAY_JOB_ID": "5"}
    code, out = script(tmp_path, "--plugin", "p.py", script="sweep.sbatch", **array)
    assert code == 0
    assert "job 7, task 12 of array 5" in out
    member = f"{tmp_path}/012-lr=2, 3.toml --plugin p.py --out {tmp_path}"
    assert f"mpirun -n 3 python -m hpcfl run {member} --resume" in script.calls
    assert f"python -m hpcfl status {member}" in script.calls
    (tmp_path / "started").unlink()
    assert script(tmp_path, script="sweep.sbatch", RUN="exit 75", STATUS="stopped:signal", **array)[0] == 75
    assert script.calls[-1] == "scontrol requeue 5_12"  # not 7, which may stand for the whole array


def test_real_run(launch, tmp_path):
    copy = shutil.copy(ROOT / "slurm/run.sbatch", tmp_path / "slurm_script")
    environment = os.environ | {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}
    command = ["bash", copy, "jobs/quickstart/apfl.toml", "--out", str(tmp_path), "--set", "run.rounds=1"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with Run(tmp_path / "apfl-001/results.h5") as run:
        assert run.status == "done"
        assert run.attributes["ranks"] == 2
