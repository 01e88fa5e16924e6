"""The clients' rows elsewhere than on the device: what is read is what was written, and what a full disk says."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import decide, least_squares, make_engine, ready, same_bits

from hpcfl.algorithm import State
from hpcfl.algorithms.apfl import APFL
from hpcfl.algorithms.async_l2gd_vr import AsyncL2GDVR
from hpcfl.algorithms.local import Local
from hpcfl.build import build
from hpcfl.comm import Comm
from hpcfl.config import resolve
from hpcfl.errors import InputError, RunError
from hpcfl.round import Round
from hpcfl.rows import compact, put, take
from hpcfl.store import DiskRows, HostRows, check_place, fetch, first_state, restore

SIZES = [3, 5, 2, 4, 6, 3, 2]


def rows_of(name: str, ids: np.ndarray) -> torch.Tensor:
    """First rows that tell client and name, in every type that a state may have."""
    k = torch.from_numpy(ids)[:, None]
    return {
        "single": k + torch.arange(3, dtype=torch.float32) / 8,
        "double": -k + torch.arange(2, dtype=torch.float64)[None] / 3,
        "count": k * 10,
        "flag": k % 2 == 0,
        "matrix": (k + torch.arange(6.0)).view(-1, 2, 3),
        "scalar": k[:, 0].double(),
    }[name]


NAMES = ("single", "double", "count", "flag", "matrix", "scalar")


class Every(Local):
    """A state with rows of all types."""

    def init(self, task, group):
        return State({"w": task.start()}, {name: rows_of(name, group.ids) for name in NAMES})


@pytest.fixture
def engine():
    return make_engine(least_squares(SIZES), Every())


def on_disk(engine, folder: Path) -> State:
    return first_state(Every(), engine, "disk", folder)


def test_rows_look_like_those_of_the_device(engine, tmp_path):
    here, there = first_state(Every(), engine, "device", tmp_path), on_disk(engine, tmp_path)
    assert here.local.keys() == there.local.keys()
    assert all(isinstance(rows, torch.Tensor) for rows in here.local.values())
    for name, rows in there.local.items():
        assert isinstance(rows, DiskRows)
        assert (tuple(rows.shape), rows.dtype) == (tuple(here.local[name].shape), here.local[name].dtype)
        assert len(rows) == len(SIZES)
    assert same_bits(here.shared["w"], there.shared["w"])
    assert list(tmp_path.iterdir()) == []  # nothing to be left behind


def random_work(g: np.random.Generator, local, model: dict[str, torch.Tensor]) -> None:
    """Reads or writes some rows of some names in both."""
    for _ in range(200):
        name = str(g.choice(NAMES))
        rows = g.choice(len(SIZES), g.integers(0, len(SIZES) + 1), replace=False)
        index = compact(np.sort(rows)) if g.random() < 0.5 else rows
        if g.random() < 0.5:
            more = np.concatenate([rows, rows[-1:]])  # as a padded block asks
            for wanted in (index, more):
                assert same_bits(take(local[name], wanted), model[name][wanted])
        else:
            new = take(model[name], index).clone()
            new = ~new if new.dtype == torch.bool else new * 2 + 1
            put(local[name], index, new)
            put(model[name], index, new)


@pytest.mark.parametrize("where", ["disk", "host"])
def test_rows_are_what_was_written(engine, tmp_path, where):
    model = {name: rows_of(name, engine.group.ids) for name in NAMES}
    local = on_disk(engine, tmp_path).local
    if where == "host":
        local = {name: HostRows(len(SIZES), rows[:1]) for name, rows in model.items()}
        for name, rows in model.items():
            local[name].put(slice(0, len(SIZES)), rows)
    random_work(np.random.default_rng(1), local, model)
    assert all(same_bits(a, model[name].numpy()) for name, a in fetch(local, slice(0, len(SIZES))).items())


def test_what_was_taken_is_a_copy(engine, tmp_path):
    local = on_disk(engine, tmp_path).local
    for name in NAMES:
        for _ in range(2):  # before and after there is a slot
            first = take(local[name], np.arange(3))
            before = first.clone()
            put(local[name], np.arange(3), torch.zeros_like(first))
            assert same_bits(first, before)


def test_a_client_has_a_slot_from_its_first_row_on(engine, tmp_path):
    local = on_disk(engine, tmp_path).local
    file = local["count"].file
    take(local["count"], np.arange(7))
    assert os.fstat(file._file.fileno()).st_size == 0
    put(local["count"], np.array([5, 2]), torch.zeros(2, 1, dtype=torch.int64))
    put(local["flag"], np.array([2]), torch.zeros(1, 1, dtype=torch.bool))
    assert np.flatnonzero(file.slot >= 0).tolist() == [2, 5]
    assert os.fstat(file._file.fileno()).st_size == 2 * file.record.itemsize
    assert same_bits(take(local["single"], np.array([2, 5])), rows_of("single", np.array([2, 5])))  # the first ones


def test_rows_come_back(engine, tmp_path):
    local, other = (on_disk(engine, tmp_path).local for _ in range(2))
    random_work(np.random.default_rng(2), local, {name: rows_of(name, engine.group.ids) for name in NAMES})
    restore(other, np.array([4, 1]), fetch(local, np.array([4, 1])))
    device = {name: rows_of(name, engine.group.ids) for name in NAMES}
    restore(device, np.array([4, 1]), fetch(local, np.array([4, 1])))
    for target in (other, device):
        for name in NAMES:
            expected = rows_of(name, engine.group.ids)
            expected[[4, 1]] = take(local[name], np.array([4, 1]))
            assert same_bits(take(target[name], slice(0, 7)), expected)


def test_only_the_rows_of_the_participants_are_made_and_read(tmp_path):
    engine, work = ready(least_squares(SIZES), APFL(alpha=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)))
    state = first_state(work, engine, "disk", tmp_path)
    made: list[int] = []
    file = state.local["v"].file
    real = file._first_rows
    file._first_rows = lambda rows: made.extend(rows.tolist()) or real(rows)
    for index in range(2):
        state = work.round(state, Round(engine, decide(engine, index, [1, 4])))
        assert set(made) == ({1, 4} if index == 0 else set())
        made.clear()
    assert np.flatnonzero(file.slot >= 0).tolist() == [1, 4]


def test_a_folder_that_cannot_be_written_to(engine, tmp_path):
    with pytest.raises(RunError, match=f"{tmp_path}/none: cannot keep the clients' rows there: No such file"):
        on_disk(engine, tmp_path / "none")


@pytest.mark.parametrize(("number", "reason"), [(errno.ENOSPC, "No space left"), (errno.EIO, "Input/output error")])
def test_a_disk_that_fails_says_which_and_why(engine, tmp_path, monkeypatch, number, reason):
    local = on_disk(engine, tmp_path).local

    def fails(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(RunError, match=f"^{tmp_path}: cannot keep .*: {reason}.*; set run.scratch"):
        put(local["count"], np.array([1]), torch.zeros(1, 1, dtype=torch.int64))
    assert (local["count"].file.slot == -1).all()
    monkeypatch.undo()
    assert same_bits(take(local["count"], np.array([1])), rows_of("count", np.array([1])))


def test_a_call_that_moves_a_part_only(engine, tmp_path, monkeypatch):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, memory, offset: write(file, memory[:5], offset))
    monkeypatch.setattr(os, "preadv", lambda file, parts, offset: read(file, [parts[0][:3]], offset))
    model = {name: rows_of(name, engine.group.ids) for name in NAMES}
    random_work(np.random.default_rng(3), on_disk(engine, tmp_path).local, model)


def test_algorithms_that_need_all_rows_at_once():
    gpu = torch.device("cuda")
    for where, device in (("disk", torch.device("cpu")), ("disk", gpu), ("host", gpu)):
        with pytest.raises(InputError, match=f'run.state = "{where}": this algorithm computes with the rows of all'):
            check_place(where, AsyncL2GDVR(), device)
        check_place(where, APFL(), device)
    check_place("host", AsyncL2GDVR(), torch.device("cpu"))
    tables = {
        "run": {"rounds": 1, "state": "disk"},
        "data": {"name": "hierarchical-linear", "clusters": 2, "clients_per_cluster": 3},
        "partition": {"name": "natural"},
        "model": {"name": "linear"},
        "algorithm": {"name": "async_l2gd_vr"},
    }
    with pytest.raises(InputError, match=r'^run\.state = "disk": '):
        build(resolve(tables, "job", "job"), Comm())
