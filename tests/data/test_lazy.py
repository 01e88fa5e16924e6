"""Samples that are made or read on demand are those that a rank would hold, bit by bit, and so are results."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np
import pytest
from helpers import same_bits

import hpcfl.on_demand
from hpcfl.build import build
from hpcfl.comm import Comm
from hpcfl.config import Job, resolve
from hpcfl.data import TEST, TRAIN, VALIDATION
from hpcfl.data.file import File
from hpcfl.data.synthetic import Synthetic
from hpcfl.errors import InputError, RunError
from hpcfl.run import run

SYNTHETIC = {"name": "synthetic", "clients": 9, "dim": 4, "classes": 3, "samples": 13}
RECIPE = {"name": "synthetic", "clients": 5, "dim": 3, "classes": 4}


def job_of(data: dict[str, Any], lazy: bool, partition: dict[str, Any] | None = None, **options: Any) -> Job:
    tables = {
        "run": {"rounds": 3, "eval_every": 2, "clients_per_round": 3} | options,
        "data": data | ({"lazy": True} if lazy else {}),
        "partition": {"name": "natural"} | (partition or {}),
        "model": {"name": "logistic"},
        "algorithm": {"name": "apfl", "lr": 0.1, "local_steps": 3, "batch_size": 4},
    }
    return resolve(tables, "job", "job")


def file_of(folder, name="data.h5", **changes: Any) -> dict[str, Any]:
    """Eight clients, named by strings, sorted; three clusters; images in uint8 or whatever changes say."""
    g = np.random.default_rng(4)
    sizes = np.array([5, 9, 7, 12, 6, 8, 5, 11])
    owner, n = np.repeat(np.arange(8), sizes), sizes.sum()
    arrays = {"x": g.integers(0, 256, (n, 1, 2, 3)).astype(np.uint8), "y": g.integers(0, 3, n)}
    arrays |= {"client": np.array([f"c{k}" for k in owner]), "cluster": owner % 3}
    arrays = {key: value for key, value in (arrays | changes).items() if value is not None}
    with h5py.File(folder / name, "w") as file:
        for key, values in arrays.items():
            file[key] = values.astype(object) if values.dtype.kind == "U" else values
    return {"name": "file", "path": str(folder / name)}


def own_split(n: int) -> np.ndarray:
    return np.arange(n) % 5 // 3 * TEST  # of every five samples the last two


PARTITIONS = [{}, {"test_share": 0.0}, {"test_share": 0.3, "validation_share": 0.2}, {"min_samples": 2}]


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
@pytest.mark.parametrize("kind", ["synthetic", "recipe", "file", "floats", "own split", "own validation"])
def test_a_group_gathers_the_samples_that_it_would_hold(kind, partition, tmp_path):
    split = own_split(63) if kind.startswith("own") else None
    if split is not None and "validation_share" not in partition and kind == "own validation":
        split[::5] = VALIDATION
    data = {"synthetic": SYNTHETIC, "recipe": RECIPE}.get(kind) or file_of(tmp_path, split=split)
    if kind == "floats":
        data = file_of(tmp_path, x=np.random.default_rng(0).normal(size=(63, 4)).astype(np.float16), shift=None)
    held, lazy = (build(job_of(data, lazy, partition), Comm()).engine.group for lazy in (False, True))
    assert len(lazy.x) == len(lazy.y) == 0
    assert same_bits(held.count, lazy.count)
    assert same_bits(held.cluster, lazy.cluster)
    for part in (TRAIN, VALIDATION, TEST):
        rows = np.flatnonzero(held.count[:, part])[::-1]  # in any order
        if not len(rows):
            continue
        index = np.minimum(np.arange(held.count[rows, part].max()), held.count[rows, part, None] - 1)
        for a, b in zip(held.gather(rows, index, part), lazy.gather(rows, index, part), strict=True):
            assert same_bits(a, b)
        some = [group.some(rows[1:]).gather(np.arange(len(rows) - 1), index[1:], part) for group in (held, lazy)]
        for a, b in zip(*some, strict=True):
            assert same_bits(a, b)


DIFFERENT = ("config/", "timing/", "rounds/seconds", "evaluations/seconds", "final/seconds")


def results(job: Job) -> dict[str, np.ndarray]:
    """Everything that a run wrote, without what may differ."""
    folders = []
    run(job, Comm(), opened=lambda start: folders.append(start.folder), progress=lambda *_: None)
    with h5py.File(folders[0] / "results.h5") as file:
        names: list[str] = []
        file.visit(names.append)
        kept = [name for name in names if isinstance(file[name], h5py.Dataset) and not name.startswith(DIFFERENT)]
        return {name: file[name][()] for name in kept}


@pytest.mark.parametrize("protocol", ["clients", "participants"])
@pytest.mark.parametrize("kind", ["synthetic", "file"])
def test_results_are_the_same_but_for_the_classes(kind, protocol, tmp_path):
    data = SYNTHETIC if kind == "synthetic" else file_of(tmp_path)
    held, lazy = (results(job_of(data, lazy, protocol=protocol, out=str(tmp_path))) for lazy in (False, True))
    assert held.keys() - lazy.keys() == {"clients/class", "clients/class_counts"}
    assert [name for name in lazy if not same_bits(held[name], lazy[name])] == []


def test_nothing_is_made_before_it_is_needed_and_the_last_clients_are_kept(monkeypatch):
    made: list[int] = []
    real = Synthetic._client
    monkeypatch.setattr(Synthetic, "_client", lambda self, seed, k: made.append(k) or real(self, seed, k))
    monkeypatch.setattr(hpcfl.on_demand, "KEPT", 3 * 13 * (4 * 4 + 8))  # three clients in float32
    group = build(job_of(SYNTHETIC, True), Comm()).engine.group
    assert made == []
    everyone = np.arange(9)
    for rows, new in (
        (everyone, list(range(9))),
        (everyone, []),  # the same block
        ([6, 7, 8], []),
        ([0], [0]),  # 6 has to go
        ([7, 7], []),
        ([6], [6]),  # and 8
        ([7, 0], []),
        ([8], [8]),
    ):
        made.clear()
        for split in (TRAIN, TEST):
            group.gather(np.array(rows), np.zeros((len(rows), 1), int), split)
        assert made == new


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ({"name": "iid", "clients": 3}, 'could deal; set it to "natural"'),
        ({"name": "natural", "labels": "local"}, 'partition.labels = "local" needs to see all labels'),
        ({"name": "natural", "min_samples": 14}, "partition.min_samples = 14: client 0 has 13 training samples"),
        ({"name": "natural", "clusters": 10}, "more clusters than clients"),
    ],
)
def test_partitions_that_do_not_go_with_it(partition, expected):
    with pytest.raises(InputError, match=expected):
        build(job_of(SYNTHETIC, True, partition), Comm())


def test_the_same_refusals_as_of_samples_that_are_held(tmp_path):
    """No test sample in the set's own split, and too few samples for training."""
    data = file_of(tmp_path, split=np.zeros(63, int))
    for lazy in (False, True):
        with pytest.raises(InputError, match="the data's own split has no test sample"):
            build(job_of(data, lazy), Comm())
    split = own_split(63)
    split[:5] = TEST
    for lazy in (False, True):
        with pytest.raises(InputError, match="client 0 has 0 training samples"):
            build(job_of(file_of(tmp_path, "other.h5", split=split), lazy), Comm())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"client": None, "cluster": None}, 'no array "client"; data.lazy = true reads'),
        (
            {"client": np.arange(63) % 8, "cluster": None},
            r"client\[8\] comes before client\[7\] in order; .* sort all arrays",
        ),
        ({"y": np.arange(62)}, "client has shape|y has shape"),
        ({"y": np.full(63, -1)}, r"y\[0\] = -1"),
        ({"x": np.zeros(63, np.uint8)}, "x has shape"),
        ({"x": np.zeros((63, 0))}, "x has shape"),
        ({"x": np.zeros((63, 2), complex)}, "x is complex128"),
        ({"clients": np.zeros(63), "client": None, "cluster": None}, 'array "clients" is not known'),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, dict) else "",
)
def test_files_that_cannot_be_read_so(changes, expected, tmp_path):
    data = file_of(tmp_path, **changes)
    with pytest.raises(InputError, match=expected) as raised:
        File(data["path"], lazy=True).survey(0)
    assert str(raised.value).startswith(f'data.path = "{data["path"]}": ')


def test_npz_is_refused(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 1)), y=np.zeros(2, int), client=np.arange(2))
    with pytest.raises(InputError, match="not an HDF5 file"):
        File(str(tmp_path / "d.npz"), lazy=True).survey(0)


def test_what_is_found_wrong_later_names_the_client(tmp_path):
    x = np.zeros((63, 4))
    x[20, 2] = np.nan
    file = File(file_of(tmp_path, x=x)["path"], lazy=True)
    read = file.reader(0, file.survey(0).count.sum(1))
    assert read(0)[0].shape == (5, 4)
    with pytest.raises(RunError, match="x of client 2 is not finite"):
        read(2)
