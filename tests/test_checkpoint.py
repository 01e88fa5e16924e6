"""Checkpoints: any ranks read what any ranks wrote, to the bit; damage, kills, full disks cost at most one."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoint_example import SHARED, names, rows_of, write
from helpers import on_ranks, same_bits

from hpcfl.checkpoint import load, newest, save
from hpcfl.comm import Comm
from hpcfl.errors import RunError

TESTS = Path(__file__).resolve().parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}


def check(checkpoint, ids: np.ndarray, there: np.ndarray) -> None:
    """That these clients get their own rows, those of them that have any, and once."""
    expected = rows_of(ids, checkpoint.round)
    got = {name: np.zeros_like(values) for name, values in expected.items()}
    times = np.zeros(len(ids), int)

    def put(at, found):
        assert found.keys() == got.keys()
        times[at] += 1
        for name, values in found.items():
            assert values.dtype == expected[name].dtype
            got[name][at] = values

    shared = load(checkpoint, ids, put)
    has = np.isin(ids, there)
    assert np.array_equal(times, has)
    for name, values in expected.items():
        assert same_bits(got[name][has], values[has]), name
    assert shared.keys() == SHARED.keys()
    for name, array in SHARED.items():
        assert same_bits(shared[name], array + checkpoint.round if name == "count" else array), name
    assert checkpoint.facts == {"plan": checkpoint.round, "pace": 0.1, "names": ["a", None]}


@pytest.mark.parametrize(("writers", "readers"), [(3, 2), (1, 3), (4, 1)])
def test_any_ranks_read_what_any_ranks_wrote(tmp_path, monkeypatch, writers, readers):
    monkeypatch.setattr("hpcfl.checkpoint.PIECE", 5_000)  # a dozen clients: many pieces of these few
    folder = tmp_path / "run" / "checkpoints"
    order = np.random.default_rng(writers).permutation(300)
    there = order[order % 7 != 2]  # the others were never visited
    on_ranks(writers, lambda world: write(folder, world, there[there % (writers + 1) == world.rank], 4))
    there = there[there % (writers + 1) < writers]
    assert sorted(file.name for file in (folder / "round-4").iterdir()) == [
        "manifest.json",
        *(f"rank-{rank:05d}.h5" for rank in range(writers)),
        "shared.h5",
    ]

    def read(world):
        checkpoint, warnings = newest(folder, world)
        check(checkpoint, np.random.default_rng(9).permutation(310)[world.rank :: readers], there)
        check(checkpoint, np.zeros(0, np.int64), there)
        return checkpoint, warnings

    found = on_ranks(readers, read)
    assert found == [found[0]] * readers
    assert found[0][1] == []


def test_ranks_without_clients_and_states_without_rows(tmp_path):
    def run(world):
        write(tmp_path, world, [] if world.rank == 0 else [3, 1], 1)
        check(newest(tmp_path, world)[0], np.arange(5), np.array([1, 3]))
        write(tmp_path, world, [], 2)
        check(newest(tmp_path, world)[0], np.arange(5), np.zeros(0))
        save(tmp_path, world, round=3, ids=np.arange(4), rows=lambda piece: {}, shared={}, facts={})
        assert load(newest(tmp_path, world)[0], np.arange(4), lambda at, found: None) == {}

    on_ranks(2, run)


def test_newest_looks_at_whole_folders_only(tmp_path):
    assert newest(tmp_path / "not there", Comm()) == (None, [])
    assert newest(tmp_path, Comm()) == (None, [])
    write(tmp_path, Comm(), [1], 9)
    write(tmp_path, Comm(), [1], 10)
    for name in (".round-11.part", ".round-12.old", "round-", "round-x", "round-013", "other"):
        shutil.copytree(tmp_path / "round-10", tmp_path / name)
    (tmp_path / "round-14").write_text("a file")
    (tmp_path / "round-15").symlink_to(tmp_path / "round-10")
    for at_most, expected in ((None, 10), (10, 10), (9, 9)):
        checkpoint, warnings = newest(tmp_path, Comm(), at_most=at_most)
        assert (checkpoint.round, checkpoint.path, warnings) == (expected, tmp_path / f"round-{expected}", [])
    assert newest(tmp_path, Comm(), at_most=8) == (None, [])


def change(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1 << offset % 8
    file.write_bytes(data)


DAMAGE = {
    "changed": lambda file: change(file, file.stat().st_size // 2),
    "first byte": lambda file: change(file, 0),
    "short": lambda file: os.truncate(file, file.stat().st_size - 1),
    "long": lambda file: file.write_bytes(file.read_bytes() + b"\n0"),
    "empty": lambda file: os.truncate(file, 0),
    "missing": lambda file: file.unlink(),
    "folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("file", ["rank-00000.h5", "rank-00001.h5", "shared.h5", "manifest.json"])
def test_a_damaged_checkpoint_is_recognised_and_the_older_one_is_used(tmp_path, file):
    whole, folder = tmp_path / "whole", tmp_path / "checkpoints"
    on_ranks(2, lambda world: [write(whole, world, [world.rank, world.rank + 2], round) for round in (1, 2)])
    for kind, damage in DAMAGE.items():
        shutil.copytree(whole, folder)
        damage(folder / "round-2" / file)
        found = on_ranks(2, lambda world: newest(folder, world))
        assert found[0] == found[1]
        checkpoint, warnings = found[0]
        assert checkpoint.round == 1, kind
        (line,) = warnings
        assert line.startswith(f"{folder}/round-2: damaged checkpoint, not used: "), line
        assert file in line or kind == "folder", line
        assert "\n" not in line
        check(checkpoint, np.arange(4), np.arange(4))
        damage(folder / "round-1" / file)
        checkpoint, warnings = newest(folder, Comm())
        assert checkpoint is None
        assert [line.partition(": ")[0] for line in warnings] == [f"{folder}/round-2", f"{folder}/round-1"], kind
        shutil.rmtree(folder)


def test_every_byte_of_the_manifest_counts(tmp_path):
    write(tmp_path, Comm(), [1], 1)
    file = tmp_path / "round-1" / "manifest.json"
    right, good = file.read_bytes(), newest(tmp_path, Comm())[0]
    for offset in range(len(right)):
        change(file, offset)
        checkpoint, warnings = newest(tmp_path, Comm())
        assert (checkpoint is None) == (len(warnings) == 1)
        assert checkpoint in (None, good)  # where it is but the layout of the text
        file.write_bytes(right)
    content = json.loads(right)
    for other in (content | {"format": 2}, [], 7, content | {"round": 2}, {}):
        file.write_text(json.dumps(other))
        checkpoint, warnings = newest(tmp_path, Comm())
        assert (checkpoint, len(warnings)) == (None, 1)


def test_the_newest_two_good_ones_are_kept_and_no_leftovers(tmp_path):
    for round in (1, 3, 20):
        write(tmp_path, Comm(), [1], round)
    assert names(tmp_path) == ["round-20", "round-3"]
    for leftover in (".round-4.part", ".round-21.part", ".round-2.old"):
        shutil.copytree(tmp_path / "round-3", tmp_path / leftover)
    (tmp_path / "notes").mkdir()
    (tmp_path / "round-20" / "shared.h5").unlink()
    write(tmp_path, Comm(), [1], 21)
    assert names(tmp_path) == ["notes", "round-21", "round-3"]  # 20 is damaged, and does not count
    change(tmp_path / "round-21" / "shared.h5", 1000)
    assert newest(tmp_path, Comm())[0].round == 3
    write(tmp_path, Comm(), [1], 25)
    assert names(tmp_path) == ["notes", "round-25", "round-3"]  # 21 was found damaged
    write(tmp_path, Comm(), [1], 12)
    assert names(tmp_path) == ["notes", "round-12", "round-3"]  # the run went back behind 25


def test_a_round_written_again_takes_the_place_of_a_damaged_one(tmp_path):
    for round in (1, 2):
        write(tmp_path, Comm(), [1], round)
    change(tmp_path / "round-2" / "rank-00000.h5", 99)
    assert newest(tmp_path, Comm())[0].round == 1
    write(tmp_path, Comm(), [1, 5], 2)
    checkpoint, warnings = newest(tmp_path, Comm())
    assert (checkpoint.round, warnings, names(tmp_path)) == (2, [], ["round-1", "round-2"])
    check(checkpoint, np.arange(6), np.array([1, 5]))


def test_what_fails_in_fetching_rows_stays_what_it_is(tmp_path):
    write(tmp_path, Comm(), [1], 1)

    def rows(piece):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        save(tmp_path, Comm(), round=2, ids=np.arange(3), rows=rows, shared={}, facts={})
    assert newest(tmp_path, Comm())[0].round == 1


def test_a_folder_that_cannot_be_written_is_one_line_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")
    errors = on_ranks(3, lambda world: write(tmp_path / "file", world, [1]), fails=RunError)
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]) == f"{tmp_path / 'file'}: cannot write the checkpoint: File exists"


def python(code: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_full_disk_costs_nothing_that_is_there_and_all_ranks_hear_of_it(tmp_path):
    # A limit on the size of files stands in for the full disk. Only the last rank has too much for it.
    code = """
import resource, sys
from functools import partial
from pathlib import Path
import numpy as np
from helpers import on_ranks
from hpcfl.errors import RunError
from checkpoint_example import names, write
folder = Path(sys.argv[1])
def attempt(world, round):
    write(folder, world, np.arange(3 if world.rank < 2 else 5000), round)
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
on_ranks(3, partial(attempt, round=1))
for size in (100_000, 3_000, 1_000, 10):
    limit(size)
    for error in on_ranks(3, partial(attempt, round=2), fails=RunError):
        print(error)
    print(names(folder))
limit(resource.RLIM_INFINITY)
on_ranks(3, partial(attempt, round=2))
print(names(folder))
"""
    process = python(code, tmp_path)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors  # a failed close must not crash the interpreter's exit either
    *lines, end = out.splitlines()
    assert len(lines) == 16
    for first in range(0, 16, 4):
        file = "rank-00002.h5" if first == 0 else ""
        assert lines[first].startswith(f"{tmp_path}/.round-2.part/{file}")
        assert lines[first].endswith(": cannot write the checkpoint: File too large")
        assert lines[first : first + 4] == [lines[first]] * 3 + ["['round-1']"]
    assert end == "['round-1', 'round-2']"


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    code = """
import itertools, sys
from pathlib import Path
import numpy as np
from hpcfl.comm import Comm
from checkpoint_example import write
from hpcfl.checkpoint import newest
folder = Path(sys.argv[1])
last = newest(folder, Comm())[0]
for round in itertools.count(1 if last is None else last.round):
    write(folder, Comm(), np.arange(round, round + 2000), round)
    print(round, flush=True)
"""
    moments, done = random.Random(3), []
    for _ in range(15):
        process = python(code, tmp_path)
        first = process.stdout.readline()
        time.sleep(moments.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        said = [first, *process.communicate()[0].split()]
        assert process.returncode == -signal.SIGKILL
        checkpoint, warnings = newest(tmp_path, Comm())
        assert checkpoint.round >= int(said[-1])
        assert warnings == []
        there = np.arange(checkpoint.round, checkpoint.round + 2000)
        check(checkpoint, np.arange(checkpoint.round + 2100), there)
        assert len([name for name in names(tmp_path) if name.startswith("round-")]) in (1, 2, 3)
        done.append(checkpoint.round)
    assert done[-1] > 15
    write(tmp_path, Comm(), [1], done[-1] + 1)
    assert len(names(tmp_path)) == 2


def test_memory_is_that_of_a_piece(tmp_path):
    code = """
import resource, sys
from pathlib import Path
import numpy as np
from hpcfl.comm import Comm
from hpcfl.checkpoint import load, newest, save
folder, width = Path(sys.argv[1]), 1000
def rows(ids):
    return {"x": ids[:, None] + np.zeros(width, np.float32), "y": ids[:, None] + np.zeros(width)}
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
seen = 0
def put(at, found):
    global seen
    assert all((found[name] == at[:, None]).all() for name in found)
    seen += len(at)
for round, clients in ((1, 500), (2, 17_000)):
    before, ids = peak(), np.arange(clients)
    save(folder, Comm(), round=round, ids=ids, rows=lambda piece: rows(ids[piece]), shared={}, facts={})
    checkpoint, warnings = newest(folder, Comm())
    seen = 0
    load(checkpoint, ids, put)
    assert seen == clients and not warnings
bytes = sum(file["bytes"] for file in checkpoint.files)
print(int(bytes / 1e6), peak() - before)
"""
    process = python(code, tmp_path)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    megabytes, more = map(float, out.split())
    assert megabytes > 200
    assert more < 20
