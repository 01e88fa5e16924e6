"""Readers beside a writing process, and after it was killed: every counted row is complete and right."""

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hpcfl.analysis.reader import Run
from hpcfl.errors import InputError
from hpcfl.results import new_run_folder

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)])}

# Three rounds, then an evaluation, and so on, as fast as it goes.
WRITER = """
import sys
from pathlib import Path
from hpcfl.results import ResultsWriter, Schema
from results_example import EVERYTHING, clients, rows, values
base = EVERYTHING | {"rounds": 6_000, "evaluations": 2_000, "clients": 300, "parameters": None}
schema = Schema(**base)
writer = ResultsWriter.create(Path(sys.argv[1]), schema, clients=clients(schema), config="", attributes={})
print("ready", flush=True)
for row in range(2_000):
    writer.rounds(3 * row, rows(base, 3 * row, 3))
    writer.evaluation(row, 3 * row + 3, 0.5 * row, values(base, row))
"""


def check(run):
    """Every counted row against what the writer must have put there. Returns the number of evaluations."""
    n, e = run.rounds_done, run.evaluations_done
    r = np.arange(n)
    for name in ("n_participants", "seconds", "train_loss", "vectors_up", "vectors_down"):
        assert np.array_equal(run.read(f"/rounds/{name}"), r), name
    assert np.array_equal(run.read("/rounds/kind"), r % 3)
    assert np.array_equal(run.read("/rounds/bytes_down"), 8 * r)
    assert np.array_equal(run.read("/rounds/forward_passes"), r + 0.5)
    assert np.array_equal(run.read("/rounds/participants_test_accuracy"), 2 * r / 8)
    assert np.array_equal(run.read("/rounds/coins_cluster"), (r[:, None] + [0, 1]) % 2)
    assert np.array_equal(run.read("/evaluations/round"), 3 * np.arange(e) + 3)
    for name in (
        "personal/train_loss",
        "global/test_accuracy",
        "personal/validation_loss",
        "personal/estimation_error",
        "alpha",
    ):
        values = run.read(f"/per_client/{name}")
        assert np.array_equal(values, np.broadcast_to(np.arange(e)[:, None], (e, 300))), name
        if "/" in name:
            assert np.array_equal(run.read(f"/evaluations/{name.replace('/', '_')}"), np.arange(e)), name
    assert n in (3 * e, 3 * e + 3)
    return e


@pytest.fixture
def start(tmp_path):
    """``start()``: a writing process and its file."""
    started = []

    def begin():
        path = tmp_path / f"{len(started)}.h5"
        started.append(subprocess.Popen([sys.executable, "-c", WRITER, path], env=ENVIRONMENT, stdout=subprocess.PIPE))
        assert started[-1].stdout.readline() == b"ready\n"
        return started[-1], path

    yield begin
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_reader_follows_a_running_job(start):
    process, path = start()
    seen = {0}
    end = time.monotonic() + 60
    while len(seen) < 5 and time.monotonic() < end:
        with Run(path) as run:
            assert (run.status, run.stale) == ("running", False)
            assert run.attributes["pid"] == process.pid
            seen.add(check(run))
    assert len(seen) == 5


def test_every_counted_row_survives_sigkill(start):
    moments = random.Random(1)
    evaluations = []
    for _ in range(8):
        process, path = start()
        time.sleep(moments.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.wait()
        with Run(path) as run:
            assert run.stale
            evaluations.append(check(run))
    assert max(evaluations) > 0


def test_run_folders_are_numbered_on_from_the_highest(tmp_path):
    out = tmp_path / "not" / "yet"
    assert new_run_folder(out, "job") == out / "job-001"
    assert new_run_folder(out, "job") == out / "job-002"
    assert new_run_folder(out, "job-long") == out / "job-long-001"
    (out / "job-001").rmdir()
    (out / "job-0x4").mkdir()
    assert new_run_folder(out, "job") == out / "job-003"  # not 001: the newest run has the highest number
    (out / "job-999").mkdir()
    assert new_run_folder(out, "job") == out / "job-1000"


def test_runs_that_start_at_once_never_share_a_folder(tmp_path):
    code = """
import sys
from pathlib import Path
from hpcfl.results import new_run_folder
sys.stdin.readline()
for _ in range(20):
    print(new_run_folder(Path(sys.argv[1]), "job").name)
"""
    command = [sys.executable, "-c", code, tmp_path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=ENVIRONMENT, **pipes) for _ in range(3)]
    with ThreadPoolExecutor(8) as threads:
        ours = threads.map(lambda _: new_run_folder(tmp_path, "job").name, range(20))
        theirs = threads.map(lambda process: process.communicate("go\n", timeout=60)[0].split(), processes)
        names = list(ours) + [name for part in theirs for name in part]
    assert sorted(names) == [f"job-{k:03d}" for k in range(1, 81)]


def test_an_out_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        InputError, match=r"^out = .*/file: cannot create a run folder there \(.*\); choose another with --out$"
    ):
        new_run_folder(tmp_path / "file", "job")
    with pytest.raises(InputError, match="Not a directory"):
        new_run_folder(tmp_path / "file" / "below", "job")
    for name in ("a/b", "", ".."):
        with pytest.raises(InputError, match="expected the name of a folder"):
            new_run_folder(tmp_path, name)
    if os.geteuid() != 0:  # root may write anywhere
        tmp_path.chmod(0o500)
        with pytest.raises(InputError, match="Permission denied"):
            new_run_folder(tmp_path, "job")
        tmp_path.chmod(0o700)
