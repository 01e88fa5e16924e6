"""Starting hpcfl from tests: on MPI ranks (``launch``, ``start``) and as one process (``hpcfl``).

A launch costs seconds (every rank imports torch), so one launch should do the work of many checks: ``launch`` lives as
long as the session and may be used by fixtures of any scope.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
Variables = Mapping[str, str | None]


def _environment() -> dict[str, str]:
    """The variables of jobs/env.sh (home, threads, MPI settings), for the interpreter that runs the tests."""
    start = os.environ | {"HPCFL_VENV": sys.prefix, "MPLBACKEND": "Agg"}
    command = ["bash", "-c", '. "$1" && env -0', "bash", str(ROOT / "jobs" / "env.sh")]
    shown = subprocess.run(command, env=start, capture_output=True, check=True).stdout
    return dict(line.split("=", 1) for line in os.fsdecode(shown).split("\0") if "=" in line)


# Here, before a test module imports torch, which reads the number of threads only once.
os.environ.update(_environment())


def start_python(
    ranks: int | None, *args: str | Path, env: Variables | None = None, cwd: Path | str = ROOT
) -> subprocess.Popen[str]:
    """Start ``python ARGS`` on MPI ranks (None: one process, no launcher). env: variables to set; None removes one."""
    command = [sys.executable, *map(str, args)]
    if ranks is not None:
        command = ["bash", str(ROOT / "jobs" / "mpirun.sh"), "-n", str(ranks), *command]
    variables = {**os.environ, **(env or {})}
    return subprocess.Popen(
        command,
        env={name: value for name, value in variables.items() if value is not None},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # the ranks have process groups of their own, but stay in this session
    )


def end(process: subprocess.Popen[str]) -> None:
    """End a process and all that is left of its session: politely, so that MPI removes its files, then by force."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
    for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        try:
            if os.getsid(pid) == process.pid:
                os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # ended meanwhile, or not ours
            continue


def finish(process: subprocess.Popen[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Wait for the end; after ``timeout`` seconds the test fails with what was printed so far."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end(process)
        out, err = process.communicate()
        pytest.fail(f"{process.args}: not done after {timeout} s\n{out[-2000:]}\n{err[-4000:]}")
    end(process)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="session")
def launch() -> Run:
    """``launch(3, "-m", "hpcfl", "run", job, timeout=60, env={}, cwd=folder)``: CompletedProcess with text output."""

    def run(
        ranks: int | None, *args: str | Path, timeout: float = 120, env: Variables | None = None, cwd: Path | str = ROOT
    ):
        return finish(start_python(ranks, *args, env=env, cwd=cwd), timeout)

    works = run(2, "-c", "from mpi4py import MPI; MPI.COMM_WORLD.rank or print('ranks:', MPI.COMM_WORLD.size)")
    if "ranks: 2" not in works.stdout:
        message = (
            f"no working MPI launcher; bash jobs/install.sh installs one. It printed: {works.stdout}{works.stderr}"
        )
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    return run


@pytest.fixture
def start(launch: Run) -> Iterator[Start]:
    """``start(3, "-m", "hpcfl", ...)``: a Popen, for tests that send signals; ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(ranks: int | None, *args: str | Path, **options: object) -> subprocess.Popen[str]:
        started.append(start_python(ranks, *args, **options))
        return started[-1]

    yield run
    for process in started:
        end(process)
        process.communicate()


@pytest.fixture(scope="session")
def hpcfl() -> Run:
    """``hpcfl("run", job, timeout=60, env={}, cwd=folder)``: ``python -m hpcfl`` as one process, without a launcher."""

    def run(*args: str | Path, timeout: float = 120, env: Variables | None = None, cwd: Path | str = ROOT):
        return finish(start_python(None, "-m", "hpcfl", *args, env=env, cwd=cwd), timeout)

    return run


@pytest.fixture
def hpcfl_here(tmp_path, monkeypatch, capfd):
    """``hpcfl_here("run.rounds=8", "--resume", out="a")``: a short run in this process, which keeps its signals.

    Returns the exit code, the lines of complaint, and what it said. out: folder in tmp_path.
    """
    from hpcfl.cli import main
    from hpcfl.signals import StopRequest

    monkeypatch.setattr(StopRequest, "listen", lambda self: None)
    monkeypatch.setattr(StopRequest, "follow", lambda self, rank, told: None)
    short = ["run.rounds=4", "run.eval_every=2", "run.checkpoint_every=2", "algorithm.local_steps=1"]

    def call(*given: str, out: str = "") -> tuple[int, list[str], str]:
        changes = [word for change in [*short, *given] if not change.startswith("--") for word in ("--set", change)]
        options = [word for word in given if word.startswith("--")]
        capfd.readouterr()
        job = str(ROOT / "jobs/quickstart/local.toml")
        code = main(["run", job, "--out", str(tmp_path / out), *changes, *options])
        said, errors = capfd.readouterr()
        assert "Traceback" not in said + errors
        return code, [line for line in errors.splitlines() if line.startswith("hpcfl:")], said

    return call
