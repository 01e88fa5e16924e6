"""The making of a results file: every group, dataset and attribute at full size, as results_schema.py lists them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfl import __version__
from hpcfl import results_schema as layout
from hpcfl.errors import RunError
from hpcfl.results_schema import FORMAT_VERSION, Field, Schema

CHUNK = 1 << 18  # most values of one row in a chunk
ROWS = 1 << 10  # most rows of a column in a chunk
WRITING = "write the results"
CHANGING = {"status": 512, "host": 256, "updated": 32, "end": 32}  # bytes of the root's strings that change


def access_list() -> Any:
    """No write stays in a cache: what cannot be written fails at once, and nothing dirty is left to crash the close."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_V110)
    access.set_cache(0, 1, 1, 0.75)  # one byte for chunks
    access.set_sieve_buf_size(1)
    return access


def creation_list() -> Any:
    """Root attributes stay in the object header, the changing ones in the file's first page: one write each."""
    creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    creation.set_attr_phase_change(1000, 0)
    return creation


def create(path: Path) -> h5py.File:
    """A new file, empty, in the place of what a kill may have left half made under this temporary name."""
    path.unlink(missing_ok=True)
    return h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_EXCL, creation_list(), access_list()))


def open_to_write(path: Path) -> h5py.File:
    """A file at full size, in SWMR mode: from now on only bytes in place change.

    In that mode from the start: a kill in between would leave a file that nobody can open. Locks of HDF5, which readers
    hold, do not matter: writers are kept apart by the lock of the run's folder.
    """
    mode, access = h5py.h5f.ACC_RDWR | h5py.h5f.ACC_SWMR_WRITE, access_list()
    try:
        return h5py.File(h5py.h5f.open(os.fsencode(path), mode, access))
    except OSError as error:
        if "unable to lock" not in str(error):
            raise
        access.set_file_locking(False, True)
        return h5py.File(h5py.h5f.open(os.fsencode(path), mode, access))


def fill(
    file: h5py.File,
    schema: Schema,
    clients: Mapping[str, np.ndarray],
    config: str,
    more: Mapping[str, Any],
    kept: Mapping[str, Any] | None = None,
) -> None:
    """Everything that the file will ever hold, into a new one. Arguments as for ResultsWriter.create.

    kept: root attributes of the file that this one continues: they stay as they are.
    """
    _root_attributes(file, more, kept or {})
    for path, attributes in group_attributes(schema).items():
        group = file.require_group(path)
        for name, value in attributes.items():
            _attribute(group, name, value)
    for name, text, meaning in (
        ("toml", config, "resolved job file"),
        ("sha256", hashlib.sha256(config.encode()).hexdigest(), "SHA-256 of the UTF-8 text in toml, hexadecimal"),
    ):
        _attribute(file.create_dataset(f"config/{name}", data=_bytes(text)), "long_name", meaning)

    scales: dict[str, h5py.Dataset] = {}
    for field in layout.scales(schema):
        axis = field.axes[0]
        ids = {"client": clients["id"], "evaluated": schema.evaluated}
        scales[axis] = _dataset(file, field, schema, ids[axis] if axis in ids else np.arange(schema.lengths[axis]))
        scales[axis].make_scale(layout.NAMES.get(axis, axis))
    for field in layout.fields(schema):
        data = _dataset(file, field, schema, _known(field, schema, clients))
        for number, axis in enumerate(field.axes):
            name = layout.NAMES.get(axis, axis)
            if name not in data.parent:
                data.parent[name] = scales[axis]  # hard link: xarray shows a coordinate only in its own group
            data.dims[number].attach_scale(scales[axis])
    if schema.parameters is not None:
        offsets = accumulate((math.prod(shape) for _, shape in schema.parameters), initial=0)
        tensors = zip(schema.parameters, offsets, strict=False)  # the last offset is the end
        text = json.dumps([{"name": name, "shape": list(shape), "offset": offset} for (name, shape), offset in tensors])
        _attribute(file["final/models"], "parameters", text)


def group_attributes(schema: Schema) -> dict[str, dict[str, Any]]:
    """Attributes per group, by path: NeXus classes and what to plot, so that viewers plot without help."""
    main = f"test_{schema.metric}"
    curves = [f"{model}_{main}" for model in schema.models]

    def plot(signal: Sequence[str], *axes: str) -> dict[str, Any]:
        more = {"auxiliary_signals": list(signal[1:])} if len(signal) > 1 else {}
        return {"NX_class": "NXdata", "signal": signal[0], "axes": list(axes)} | more

    when = "after `round` rounds: the global model before the next round's work, the personal one after the last's"
    groups: dict[str, dict[str, Any]] = {
        "/": {"NX_class": "NXroot", "default": "evaluations"},
        "/config": {"NX_class": "NXcollection"},
        "/clients": plot(["n_train"], "client") | {"clusters": schema.clusters},
        "/clusters": plot(["n_clients"], "cluster"),
        "/rounds": plot(["train_loss"], "round"),
        "/evaluations": plot(curves, "round") | {"evaluated": when},
        "/per_client": plot(list(schema.exposed), "evaluation", "client")
        if schema.exposed
        else {"NX_class": "NXcollection", "default": schema.models[0]},
        "/timing": plot(layout.PHASES, "rank"),
        "/final": {"NX_class": "NXcollection"},
    }
    for model in schema.models:
        groups[f"/per_client/{model}"] = plot([main], "evaluation", "client")
    if schema.parameters is not None:
        axes = ("client", "parameter") if schema.models[0] == "personal" else ("parameter",)
        groups["/final/models"] = plot([schema.models[0]], *axes)
    return groups


def _root_attributes(file: h5py.File, more: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
    counts = {"rounds_done": 0, "evaluations_done": 0, "restarts": 0}
    changing = {**counts, "status": "running", "end": "", **process()}
    for name, value in changing.items():  # before the others: see creation_list
        _attribute(file, name, kept.get(name, value), CHANGING.get(name, 0))
    fixed = {"filetype": layout.FILETYPE, "format_version": np.array(FORMAT_VERSION, "int64"), "start": now()}
    taken = more.keys() & (changing.keys() | fixed.keys())
    if taken:
        raise ValueError(f"attributes {sorted(taken)}: written by the results file itself")
    versions = {"hpcfl_version": __version__, "h5py_version": h5py.__version__, "numpy_version": np.__version__}
    for name, value in {**fixed, **versions, **more, **kept}.items():
        if name not in changing:
            _attribute(file, name, value)


def _known(field: Field, schema: Schema, clients: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """What is known of a field before the first round: everything about clients and clusters."""
    if field.group == "/clusters":
        weights = clients["n_train"] if field.name == "n_train" else None
        return np.bincount(clients["cluster"], weights, schema.clusters)
    if field.group != "/clients":
        return None
    if field.name == "n_validation" and "validation" not in schema.splits:
        return np.zeros(schema.clients, "int64")
    return cast(clients[field.name], field, tuple(schema.lengths[axis] for axis in field.axes))


def _dataset(file: h5py.File, field: Field, schema: Schema, values: np.ndarray | None) -> h5py.Dataset:
    """On the disk at full size. Where rows may be added later, a chunk is a row, or part of it, or many short ones."""
    shape = tuple(schema.lengths[axis] for axis in field.axes)
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    more: dict[str, Any] = {}
    if field.axes and field.axes[0] in layout.GROWING:
        if field.group.startswith("/per_client"):
            pieces = -(-shape[1] // CHUNK)
            chunks: tuple[int, ...] = (1, -(-shape[1] // pieces))
        else:
            chunks = (max(1, min(shape[0], ROWS)), *shape[1:])
        more = {"chunks": chunks, "maxshape": (None, *shape[1:])}
    data = file.create_dataset(field.path, shape, field.dtype, fillvalue=field.fill, dcpl=create, **more)
    if values is not None:
        data[()] = cast(values, field, shape)
    elif not shape:
        data[()] = field.fill  # h5py drops the early allocation of a scalar
    for name, value in {"units": field.units, "long_name": field.long_name, **field.attributes}.items():
        _attribute(data, name, value)
    return data


def cast(values: Any, field: Field, shape: tuple[int, ...]) -> np.ndarray:
    """A copy in the stored type; ValueError for another shape or for a number that is no such integer."""
    given = np.asarray(values)
    with np.errstate(invalid="ignore"):  # reported below
        stored = given.astype(field.dtype)
    if given.shape != shape or (stored.dtype.kind in "iu" and not np.array_equal(stored, given)):
        raise ValueError(f"{field.path}: got {given.dtype} {given.shape}, expected values of {field.dtype} {shape}")
    return stored


def _attribute(target: h5py.Dataset | h5py.Group, name: str, value: Any, size: int = 0) -> None:
    if isinstance(value, str | list):
        value = _bytes(value, size)
    target.attrs.create(name, value, dtype=getattr(value, "dtype", None))


def _bytes(text: str | Sequence[str], size: int = 0) -> np.ndarray:
    """Fixed-length UTF-8, at least ``size`` bytes each."""
    encoded = np.char.encode(np.asarray(text), "utf-8")
    return encoded.astype(h5py.string_dtype("utf-8", max(size, encoded.dtype.itemsize, 1)))


def process() -> dict[str, Any]:
    """The root attributes that say who writes, and when it last did."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "updated": now()}


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


@contextlib.contextmanager
def disk(path: Path, what: str) -> Iterator[None]:
    """What the file system refuses becomes a RunError that names the file and the reason. what: "write the results"."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:  # h5py raises any of them for a failed write
        found = re.search(r"errno = (\d+)", str(error))
        if isinstance(error, ValueError) and not found:
            raise
        reason = os.strerror(int(found[1])) if found else getattr(error, "strerror", None)
        reason = reason or str(error).partition("\n")[0]
        locks = "unable to lock" in str(error)
        hint = "; on a file system without locks, set HDF5_USE_FILE_LOCKING=FALSE" if locks else ""
        raise RunError(f"{path}: cannot {what}: {reason}{hint}") from error


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
