"""Going on with a results file: nothing counted is lost, whatever killed the run and when; locks; newest folders."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from results_example import EVERYTHING, SMALL, clients, rows, values

from hpcfl.analysis.reader import Run
from hpcfl.errors import InputError, RunError
from hpcfl.results import ResultsWriter, Schema, lock, new_run_folder, newest_run_folder
from hpcfl.results_open import read_attributes, read_config
from hpcfl.results_resume import clear_flag, lookup3

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)])}
OTHERS = {"host", "pid", "updated", "end", "status", "restarts", "start"}  # attributes that tell of the process
ATTRIBUTES = {"job": "test", "algorithm": "apfl", "protocol": "participants", "ranks": 2}


def resume(path: Path, base: dict, *, config: str = "[run]\nseed = 1\n", **changes) -> ResultsWriter:
    return ResultsWriter.resume(path, Schema(**base | changes), config=config, attributes={"job": "test"})


def killed(path: Path, base: dict, rounds: int, evaluations: int, *, final: bool = False) -> None:
    """Write a file in a process that ends by SIGKILL, with the file open."""
    code = """
import os, signal, sys
from pathlib import Path
import numpy as np
from hpcfl.results import ResultsWriter, Schema
from results_example import clients, rows, values
path, base, count, evaluations, final, attributes = Path(sys.argv[1]), *map(eval, sys.argv[2:])
schema = Schema(**base)
text = "[run]\\nseed = 1\\n"
writer = ResultsWriter.create(path, schema, clients=clients(schema), config=text, attributes=attributes)
writer.rounds(0, rows(base, 0, count))
for row in range(evaluations):
    writer.evaluation(row, 2 * row, 0.5 * row, values(base, row + 0.25))
writer.timing(np.arange(5.0 * schema.ranks).reshape(-1, 5))
if final:
    writer.models("global", 0, np.ones(9))
    writer.models("personal", 0, np.ones((4, 9)))
    writer.final()
    writer.status("stopped:walltime")
os.kill(os.getpid(), signal.SIGKILL)
"""
    arguments = map(repr, (base, rounds, evaluations, final, ATTRIBUTES))
    done = subprocess.run([sys.executable, "-c", code, path, *arguments], env=ENVIRONMENT, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes()[11] != 0


def contents(path: Path) -> tuple[dict, dict]:
    """(every dataset: type, chunks, values as bytes, attributes), (root attributes)."""
    found = {}

    def visit(name, item):
        if isinstance(item, h5py.Dataset):
            references = ("DIMENSION_LIST", "REFERENCE_LIST")
            attributes = {k: np.asarray(v).tobytes() for k, v in item.attrs.items() if k not in references}
            scales = [[scale.name for scale in axis.values()] for axis in item.dims]
            found[name] = (item.dtype, item.shape, item.chunks, item.maxshape, item[()].tobytes(), attributes, scales)

    with h5py.File(path, "r") as file:  # without SWMR: only what was closed in order opens so
        file.visititems(visit)
        return found, {name: np.asarray(value).tolist() for name, value in file.attrs.items()}


@pytest.mark.parametrize("base", [EVERYTHING, SMALL])
def test_a_killed_run_goes_on_in_place(tmp_path, base):
    path = tmp_path / "results.h5"
    killed(path, base, 4, 2)
    assert read_config(path) == "[run]\nseed = 1\n"
    before, inode, size = read_attributes(path), path.stat().st_ino, path.stat().st_size
    assert (before["rounds_done"], before["evaluations_done"], before["restarts"]) == (4, 2, 0)
    writer = resume(path, base)
    assert (path.stat().st_ino, path.stat().st_size, os.listdir(tmp_path)) == (inode, size, ["results.h5"])
    after = read_attributes(path)
    assert {name for name in after if not np.array_equal(after[name], before[name])} <= {"pid", "updated", "restarts"}
    assert (after["pid"], after["restarts"], after["status"], after["end"]) == (os.getpid(), 1, "running", "")
    writer.rounds(2, rows(base, 2, 1, factor=10))  # again, with other numbers
    with Run(path) as run:
        assert (run.rounds_done, run.evaluations_done, run.stale) == (4, 2, False)
        assert list(run.read("/rounds/vectors_up")) == [0, 1, 20, 3]
    writer.evaluation(1, 3, 0.1, values(base, 7.0))
    writer.rounds(3, rows(base, 3, 3))
    with pytest.raises(ValueError, match="no gap"):
        writer.evaluation(3, 3, 0.1, values(base, 7.0))
    writer.status("done")
    writer.close()
    with Run(path) as run:
        assert list(run.read("/rounds/vectors_up")) == [0, 1, 20, 3, 4, 5]
        assert list(run.read("/evaluations/round")) == [0, 3]
        assert run.read("/per_client/global/test_loss").tolist() == [[0.25] * 4, [7.0] * 4]
    assert contents(path)[1]["restarts"] == 1
    resume(path, base).close()  # of a file that was closed in order
    assert read_attributes(path)["restarts"] == 2


@pytest.mark.parametrize("base", [EVERYTHING, SMALL])
def test_a_longer_file_is_what_a_new_one_of_that_length_would_be(tmp_path, base):
    path, longer = tmp_path / "results.h5", base | {"rounds": 3000, "evaluations": 50, "ranks": 5}
    killed(path, base, 6, 3)
    text = "[run]\nseed = 1\nrounds = 3000\n"
    with Run(path) as reader:  # whoever has the old file open keeps it
        writer = resume(path, longer, config=text)
        assert list(reader.read("/rounds/vectors_up")) == [0, 1, 2, 3, 4, 5]
    assert os.listdir(tmp_path) == ["results.h5"]
    assert read_config(path) == text
    expected = np.vstack([np.arange(5.0 * base["ranks"]).reshape(-1, 5), np.zeros((5 - base["ranks"], 5))])
    assert writer.timing_so_far().tolist() == expected.tolist()
    fresh = Schema(**longer)
    other = ResultsWriter.create(tmp_path / "new.h5", fresh, clients=clients(fresh), config=text, attributes=ATTRIBUTES)
    other.rounds(0, rows(base, 0, 6))
    for row in range(3):
        other.evaluation(row, 2 * row, 0.5 * row, values(base, row + 0.25))
    other.timing(np.arange(5.0 * base["ranks"]).reshape(-1, 5))
    for each in (writer, other):
        each.rounds(4, rows(base, 4, 2996))
        each.evaluation(3, 10, 0.5, values(base, 9.0))
        each.final()
        each.status("done")
        each.close()
    (ours, attributes), (theirs, others) = contents(path), contents(tmp_path / "new.h5")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert [name for name in others if attributes[name] != others[name] and name not in OTHERS] == []
    assert list(attributes) == list(others)
    assert attributes["restarts"] == 1
    assert ours["config/sha256"][4] == hashlib.sha256(text.encode()).hexdigest().encode()


def test_a_shorter_run_keeps_the_length(tmp_path):
    path = tmp_path / "results.h5"
    killed(path, EVERYTHING, 6, 3)
    inode = path.stat().st_ino
    writer = resume(path, EVERYTHING, rounds=5, evaluations=1, ranks=1)
    assert path.stat().st_ino == inode
    writer.rounds(5, rows(EVERYTHING, 5, 1))
    writer.timing(writer.timing_so_far()[:1] + 100)
    assert writer.timing_so_far().tolist() == [[100, 101, 102, 103, 104], [5, 6, 7, 8, 9]]
    for table in (np.zeros((3, 5)), np.zeros((1, 4))):
        with pytest.raises(ValueError, match="timing: shape"):
            writer.timing(table)
    writer.close()
    resume(path, EVERYTHING, ranks=1, config="[run]\nseed = 2\n").close()  # made anew, and as long as before
    assert path.stat().st_ino != inode
    with Run(path) as run:
        assert run.config == {"run": {"seed": 2}}
        assert run.rounds_done == 6
        assert run.read("/timing/compute").tolist() == [100, 5]


@pytest.mark.parametrize("config", ["[run]\nseed = 1\n", "[run]\nseed = 2\n"])
def test_the_summary_of_an_earlier_end_is_gone(tmp_path, config):
    path = tmp_path / "results.h5"
    killed(path, EVERYTHING, 4, 2, final=True)
    assert read_attributes(path)["status"] == "stopped:walltime"
    with Run(path) as run:
        assert run.read("/final/rounds") == 4
    writer = resume(path, EVERYTHING, config=config)
    assert (read_attributes(path)["status"], read_attributes(path)["end"]) == ("running", "")
    with Run(path) as run:
        names = [n for n in run.file["/final"] if n not in ("cluster", "models")]
        names += ["models/personal", "models/global"]
        assert len(names) > 20
        for name in names:
            found = run.read(f"/final/{name}")
            assert np.all(np.isnan(found) | (found == -1)), name
    writer.final()
    with Run(path) as run:
        assert run.read("/final/rounds") == 4
    writer.close()


def test_other_data_are_refused_and_the_file_stays(tmp_path):
    path = tmp_path / "results.h5"
    killed(path, EVERYTHING, 4, 2)
    clear_flag(path)
    before = path.read_bytes()
    for changes, first in (
        ({"clients": 5}, "/clients/client is int64 (4,), expected int64 (5,)"),
        ({"classes": 4}, "/clients/class is int64 (3,), expected int64 (4,)"),
        ({"metrics": ("loss", "squared_error")}, "/rounds/participants_test_squared_error is not there"),
        ({"dtype": "float64"}, "/per_client/alpha is float32 (3, 4), expected float64 (3, 4)"),
        ({"exposed": ("alpha", "beta")}, "/per_client/beta is not there, expected float32 (3, 4)"),
        ({"exposed": ()}, "/per_client/alpha is there"),
        ({"parameters": None}, "/final/models/global is there"),
    ):
        with pytest.raises(InputError, match="the data have changed") as caught:
            resume(path, EVERYTHING, **{"rounds": 9} | changes)
        assert str(caught.value).startswith(f"{path}: ")
        assert first in str(caught.value)
    schema = Schema(**EVERYTHING)
    known, options = clients(schema), {"config": "[run]\nseed = 1\n", "attributes": {}}
    for name, row in (("n_train", 2), ("cluster", 1), ("class_counts", 3)):
        other = known | {name: known[name].copy()}
        other[name][row] += 1
        with pytest.raises(InputError, match=f"/clients/{name} is not what it was, first for client {row}"):
            ResultsWriter.resume(path, schema, clients=other, **options)
    with pytest.raises(InputError, match='algorithm was "apfl", and is "local" now'):
        ResultsWriter.resume(path, schema, **options | {"attributes": {"algorithm": "local"}})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["results.h5"]
    ResultsWriter.resume(path, schema, clients=known, **options).close()


def test_damaged_files_are_refused_and_stay(tmp_path):
    path = tmp_path / "results.h5"
    killed(path, SMALL, 4, 2)
    whole = path.read_bytes()
    version_2 = whole[:8] + b"\2" + whole[9:]
    for damaged in (whole[:30] + b"x" + whole[31:], version_2, whole[:44] + b"abcd" + whole[48:], whole[:1000], b"x"):
        path.write_bytes(damaged)
        with pytest.raises((InputError, RunError), match=re.escape(str(path))):
            resume(path, SMALL)
        with pytest.raises(RunError, match="damaged"):
            clear_flag(path)
        assert path.read_bytes() == damaged
    path.write_bytes(whole)
    clear_flag(path)
    changed = [k for k, (a, b) in enumerate(zip(whole, path.read_bytes(), strict=True)) if a != b]
    assert set(changed) <= {11, 44, 45, 46, 47}
    with h5py.File(path, "r+") as file:
        file.attrs.modify("format_version", [1, 2])
    with pytest.raises(InputError, match=r"format version 1\.2, only 1\.\d can be continued"):
        resume(path, SMALL)
    with pytest.raises(RunError, match="No such file"):
        resume(tmp_path / "none.h5", SMALL)


def test_the_checksum_of_the_superblock():
    # The examples of the hash's author, in his source.
    assert lookup3(b"Four score and seven years ago") == 0x17770551
    assert lookup3(b"a" * 12) != lookup3(b"a" * 13)


def test_a_full_disk_while_the_longer_file_is_made(tmp_path):
    code = """
import os, resource, sys
from pathlib import Path
from hpcfl.errors import RunError
from test_results_resume import SMALL, resume
path = Path(sys.argv[1])
for size in (10, 5_000, 60_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        resume(path, SMALL, rounds=100_000)
    except RunError as error:
        print(error)
    print(os.listdir(path.parent))
"""
    path = tmp_path / "results.h5"
    killed(path, SMALL, 4, 2)
    clear_flag(path)
    before = path.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", code, path], env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{path}: cannot write the results: File too large", "['results.h5']"] * 3
    assert path.read_bytes() == before


def test_kills_while_the_file_is_opened_made_longer_and_written(tmp_path):
    code = """
import sys
from pathlib import Path
import numpy as np
from hpcfl.results import ResultsWriter, Schema
from hpcfl.results_open import read_attributes
from results_example import EVERYTHING, clients, rows, values
path, number = Path(sys.argv[1]), int(sys.argv[2])
size = 1000 * (number // 3 + 1)  # the first of three makes the file longer, the others find it so
base = EVERYTHING | {"rounds": size, "evaluations": size // 10, "clients": 50, "parameters": None}
schema, text = Schema(**base), f"# {number // 3}"
print("go", flush=True)
if path.exists():
    before = read_attributes(path)
    first = max(0, before["rounds_done"] // 10 - 2)  # from a checkpoint some time ago
    writer = ResultsWriter.resume(path, schema, config=text, attributes={}, clients=clients(schema))
else:
    first = 0
    writer = ResultsWriter.create(path, schema, clients=clients(schema), config=text, attributes={})
print("writing", flush=True)
for row in range(first, size // 10):
    writer.rounds(10 * row, rows(base, 10 * row, 10))
    writer.evaluation(row, 10 * row + 10, 0.0, values(base, row))
"""
    path, moments, done, restarts = tmp_path / "results.h5", random.Random(5), [(0, 0)], []
    while_made = 0  # files that were left half made
    for number in range(21):
        process = subprocess.Popen(
            [sys.executable, "-c", code, path, str(number)], env=ENVIRONMENT, stdout=subprocess.PIPE
        )
        with process:
            assert process.stdout.readline() == b"go\n"
            assert number % 3 != 1 or process.stdout.readline() == b"writing\n"
            time.sleep(moments.uniform(0.0, 0.3))
            process.send_signal(signal.SIGKILL)
        if not path.exists():
            continue
        with Run(path) as run:
            r, e = np.arange(run.rounds_done), np.arange(run.evaluations_done)
            assert np.array_equal(run.read("/rounds/bytes_down"), 8 * r)
            assert np.array_equal(run.read("/rounds/coins_cluster"), (r[:, None] + [0, 1]) % 2)
            assert np.array_equal(run.read("/evaluations/round"), 10 * e + 10)
            values = run.read("/per_client/personal/test_loss")
            assert np.array_equal(values, np.broadcast_to(e[:, None], (len(e), 50)))
            assert (len(r), len(e)) >= done[-1]
            done.append((len(r), len(e)))
            restarts.append(run.attributes["restarts"])
        while_made += (tmp_path / ".results.h5.part").exists()
    assert done[-1][1] > 20
    assert restarts[-1] > 5
    assert while_made > 0
    assert set(os.listdir(tmp_path)) <= {"results.h5", ".results.h5.part"}
    schema = Schema(**EVERYTHING | {"clients": 50, "parameters": None})
    ResultsWriter.resume(path, schema, config="# end", attributes={}).close()
    assert os.listdir(tmp_path) == ["results.h5"]
    contents(path)


def test_newest_run_folder(tmp_path):
    assert newest_run_folder(tmp_path / "none", "job") is None
    assert newest_run_folder(tmp_path, "job") is None
    for _ in range(2):
        made = new_run_folder(tmp_path, "job")
    new_run_folder(tmp_path, "job-long")
    (tmp_path / "job-007").write_text("no folder")
    (tmp_path / "job-0x9").mkdir()
    assert newest_run_folder(tmp_path, "job") == made == tmp_path / "job-002"
    (tmp_path / "job-1000").mkdir()
    assert newest_run_folder(tmp_path, "job") == tmp_path / "job-1000"
    with pytest.raises(InputError, match="cannot look for runs there"):
        newest_run_folder(tmp_path / "job-007", "job")
    with pytest.raises(InputError, match="expected the name of a folder"):
        newest_run_folder(tmp_path, "a/b")


HOLDER = """
import sys, time
from pathlib import Path
from hpcfl.errors import RunError
from hpcfl.results import lock
try:
    held = lock(Path(sys.argv[1]))
    print("held", flush=True)
    sys.stdin.readline()
except RunError as error:
    print(error, flush=True)
"""


@pytest.fixture
def holder(tmp_path):
    """``holder()``: a process that locks tmp_path, and what it said of that; ends when its input does."""
    started = []

    def start():
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], env=ENVIRONMENT, **pipes))
        return started[-1], started[-1].stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_locked_folder(tmp_path, holder):
    first, said = holder()
    assert said == "held"
    says = f"{tmp_path} is in use by process {first.pid} on host {socket.gethostname()} since 20"
    _, refused = holder()
    assert refused.startswith(says)
    with pytest.raises(RunError, match=re.escape(says)):
        lock(tmp_path)
    shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    lock(tmp_path.with_name("copy")).close()
    first.send_signal(signal.SIGKILL)
    first.wait()
    with lock(tmp_path):  # the file of a dead process blocks nobody
        _, refused = holder()
        assert refused.startswith(f"{tmp_path} is in use by process {os.getpid()} on host ")
        child = subprocess.Popen(["sleep", "60"])  # what the run starts does not hold the lock
    last, said = holder()
    assert said == "held"
    child.kill()
    child.wait()
    shutil.rmtree(tmp_path)
    last.communicate("\n")
    assert last.returncode == 0


def test_a_folder_that_cannot_be_locked(tmp_path, monkeypatch):
    with pytest.raises(RunError, match="cannot lock the run's folder: No such file or directory"):
        lock(tmp_path / "none")
    for number in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO):

        def flock(file, operation, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)
        if number == errno.EIO:
            with pytest.raises(RunError, match="cannot lock the run's folder: Input/output error"):
                lock(tmp_path)
        else:  # a file system without locks
            lock(tmp_path).close()
    assert f"process {os.getpid()} on host" in (tmp_path / ".lock").read_text()
