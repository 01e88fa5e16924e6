"""Runs that are asked to stop: exit code 75, one clear line, and the undisturbed bits when they have gone on."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest
from same import assert_same

from hpcfl.analysis.reader import Run

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "jobs/quickstart/apfl.toml"
CHANGES = ["run.rounds=800", "run.eval_every=300", "run.participation=0.5", "run.save_models=true"]
CHANGES += ["algorithm.local_steps=3"]
ARGS = ["-m", "hpcfl", "run", JOB, *(word for change in CHANGES for word in ("--set", change))]


@pytest.fixture(scope="module")
def undisturbed(hpcfl, tmp_path_factory):
    """Results of the run on one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = hpcfl(*ARGS[2:], "--out", folder, timeout=200)
    assert done.returncode == 0, done.stderr
    return folder / "apfl-001/results.h5"


@pytest.fixture
def stopped(start, tmp_path):
    """``stopped(2, signal.SIGUSR1, "--stop-signal", "USR1")``: what a run said that got signals in the midst of it."""

    def run(ranks, *numbers, options=(), env=None):
        args = [*ARGS, "--out", tmp_path, *options, *(["--resume"] if (tmp_path / "apfl-001").exists() else [])]
        process, file, before = start(ranks, *args, env=env), tmp_path / "apfl-001/results.h5", counted(tmp_path)
        end = time.monotonic() + 90
        while numbers and counted(tmp_path) <= before:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end, "no round within 90 s"
            time.sleep(0.05)
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.05)  # those that come together are handled by number, not by order
        out, errors = process.communicate(timeout=90)
        assert "Traceback" not in errors
        with Run(file) as found:
            return process.returncode, out, [line for line in errors.splitlines() if line.startswith("hpcfl:")], found

    return run


def counted(out: Path) -> int:
    """Rounds in the results file."""
    if not (out / "apfl-001/results.h5").exists():
        return 0
    with Run(out / "apfl-001") as run:
        return run.rounds_done


def check(found, why: str, notice: list[str]) -> int:
    """That a run stopped in order; after how many rounds."""
    code, out, errors, run = found
    assert code == 75, (out, errors)
    done = run.rounds_done
    assert 0 < done < 800
    assert run.status == f"stopped:{why}"
    line = f"stopped after round {done} ({why}); checkpoint after round {done}: go on with --resume"
    assert out.splitlines().count(line) == 1, out
    assert errors == notice
    return done


def noticed(name: str) -> list[str]:
    return [f"hpcfl: {name}: stopping with a checkpoint after the rounds under way; once more: at once"]


def test_stops_under_a_launcher(undisturbed, stopped, hpcfl, tmp_path):
    rounds = [check(stopped(2, signal.SIGUSR1), "signal SIGUSR1", noticed("SIGUSR1"))]
    options = ("--stop-signal", "USR2", "--set", "run.checkpoint_every=5")
    rounds.append(check(stopped(3, signal.SIGUSR2, options=options), "signal SIGUSR2", noticed("SIGUSR2")))
    over = {"SLURM_JOB_END_TIME": str(int(time.time()) + 1)}  # before torch is loaded: not a round more
    rounds.append(check(stopped(2, env=over), "walltime", []))
    assert rounds[0] < rounds[1] == rounds[2]
    assert hpcfl(*ARGS[2:], "--out", tmp_path, "--resume").returncode == 0
    assert_same(undisturbed, tmp_path / "apfl-001/results.h5")


def test_stops_of_a_single_process(undisturbed, stopped, hpcfl, tmp_path):
    rounds = [check(stopped(None, signal.SIGINT), "signal SIGINT", noticed("SIGINT"))]
    (tmp_path / "apfl-001/error-rank0.txt").write_text("ValueError of an earlier start\n")  # nothing to this one
    rounds.append(check(stopped(None, signal.SIGTERM), "signal SIGTERM", noticed("SIGTERM")))
    rounds.append(check(stopped(None, options=("--max-walltime", "1s")), "walltime", []))
    assert rounds[0] < rounds[1] == rounds[2]

    code, out, errors, run = stopped(None, signal.SIGUSR1, signal.SIGINT)  # the second one: at once
    assert code == 75
    assert "stopped after" not in out
    line = f"stopped at once by a second signal (SIGUSR1); the last checkpoint is of round {rounds[2]}"
    assert errors == [*noticed("SIGUSR1"), f"hpcfl: {line}"]
    assert run.status == f"stopped:{line}"
    assert run.rounds_done >= rounds[2]

    assert hpcfl(*ARGS[2:], "--out", tmp_path, "--resume").returncode == 0
    assert_same(undisturbed, tmp_path / "apfl-001/results.h5")


def test_a_stop_without_checkpoints_is_a_failure(stopped, tmp_path):
    code, out, _, run = stopped(None, signal.SIGUSR1, options=("--set", 'run.checkpoint_every="off"'))
    assert code == 1
    assert f"stopped after round {run.rounds_done} (signal SIGUSR1), without a checkpoint: {tmp_path}" in out
    assert not (tmp_path / "apfl-001/checkpoints").exists()


def test_checkpoints_by_the_clock(undisturbed, hpcfl, tmp_path):
    """One a second, one at the end, and the run goes on from the older one when the newest is lost."""
    done = hpcfl(*ARGS[2:], "--out", tmp_path, "--set", 'run.checkpoint_every="1s"')
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("checkpoints: ")]
    number = int(line.split()[1])
    assert number >= 2
    there = sorted((tmp_path / "apfl-001/checkpoints").iterdir(), key=lambda path: int(path.name.split("-")[1]))
    assert [path.name for path in there][1:] == ["round-800"]
    shutil.rmtree(there[1])
    more = hpcfl(*ARGS[2:], "--out", tmp_path, "--resume", "--set", "run.rounds=801")
    assert f"going on after round {there[0].name.split('-')[1]}\n" in more.stdout
    with Run(tmp_path / "apfl-001") as run, Run(undisturbed) as other:
        for name in ("train_loss", "n_participants", "bytes_up", "forward_passes"):
            assert (run.read(f"/rounds/{name}")[:800] == other.read(f"/rounds/{name}")).all()
