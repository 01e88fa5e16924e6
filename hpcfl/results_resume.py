"""Goes on with the results file of a run that ended or was killed.

Where everything has its place already, the file is opened as it is; the flag that a killed writer leaves in the
superblock is cleared first. For more rounds, evaluations or ranks, or another text of the job, a new file at full size
is made beside it, gets what was counted, and takes its name by one rename: a kill leaves a good file at any moment.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfl import results_file as making
from hpcfl import results_schema as layout
from hpcfl.errors import InputError, RunError
from hpcfl.results_open import open_to_read, root_attributes, text
from hpcfl.results_schema import FORMAT_VERSION, Schema

PIECE = 1 << 20  # values that are copied at once
SCALES = {"round": "/rounds/round", "evaluation": "/evaluations/evaluation", "rank": "/timing/rank"}  # that may grow
MEANINGS = {"algorithm", "seed", "protocol", "labels", "data_sha256"}  # attributes that every start of a run has alike
MASK = 0xFFFFFFFF


def reopen(
    path: Path,
    schema: Schema,
    config: str,
    attributes: Mapping[str, Any],
    clients: Mapping[str, np.ndarray] | None = None,
) -> tuple[h5py.File, Schema]:
    """The file at full size, in SWMR mode, and the schema with the lengths that it has. Arguments as for ``resume``.

    Raises InputError where it does not fit, RunError where it is damaged.
    """
    clear_flag(path)  # first: where the flag is set, HDF5 waits for what is damaged, as not yet written
    with open_to_read(path) as old:
        had = root_attributes(path, old)
        version = tuple(int(number) for number in had["format_version"])
        if version != FORMAT_VERSION:
            texts = [".".join(map(str, numbers)) for numbers in (version, FORMAT_VERSION)]
            raise InputError(f"{path}: format version {texts[0]}, only {texts[1]} can be continued; start a new run")
        lengths = {axis: len(old[scale]) for axis, scale in SCALES.items()}
        rounds, evaluations, ranks = (max(n, schema.lengths[axis]) for axis, n in lengths.items())
        full = replace(schema, rounds=rounds, evaluations=evaluations, ranks=ranks)
        difference = _difference(old, full, lengths) or _changed(old, had, attributes, clients or {})
        if difference:
            raise InputError(f"{path}: the data have changed since this run began: {difference}; start a new run")
        if not lengths.items() <= full.lengths.items() or text(old, "/config/toml") != config:
            _rebuild(path, old, full, config, had)
    return making.open_to_write(path), full


def _difference(old: h5py.File, schema: Schema, lengths: Mapping[str, int]) -> str | None:
    """The first dataset that a file of this schema, with these lengths of the axes that grow, would not have so."""
    expected = [*layout.scales(schema), *layout.fields(schema)]
    for field in expected:
        shape = tuple({**schema.lengths, **lengths}[axis] for axis in field.axes)
        found = f"{old[field.path].dtype} {old[field.path].shape}" if field.path in old else "not there"
        if found != f"{np.dtype(field.dtype)} {shape}":
            return f"{field.path} is {found}, expected {field.dtype} {shape}"
    names: list[str] = []
    old.visititems(lambda name, item: names.append(f"/{name}") if isinstance(item, h5py.Dataset) else None)
    unknown = set(names) - {field.path for field in expected} - {"/config/toml", "/config/sha256"}
    return f"{min(unknown)} is there, expected no such dataset" if unknown else None


def _changed(
    old: h5py.File, had: Mapping[str, Any], attributes: Mapping[str, Any], clients: Mapping[str, np.ndarray]
) -> str | None:
    """The first thing known about the clients, or of what says what the numbers mean, that is not what it was."""
    for name, values in clients.items():
        stored = old["/clients/client" if name == "id" else f"/clients/{name}"][()]
        rows = np.flatnonzero((stored != values).reshape(len(stored), -1).any(1))
        if len(rows):
            return f"/clients/{name} is not what it was, first for client {rows[0]}"
    for name in MEANINGS & attributes.keys():
        if had.get(name) != attributes[name]:
            return f'{name} was "{had.get(name)}", and is "{attributes[name]}" now'
    return None


def _rebuild(path: Path, old: h5py.File, schema: Schema, config: str, had: Mapping[str, Any]) -> None:
    """Put a new file of this schema in the place of the old one, with what that one has counted."""
    temporary = path.with_name(f".{path.name}.part")
    clients = {name: data[()] for name, data in old["/clients"].items()}
    counted = {"round": had["rounds_done"], "evaluation": had["evaluations_done"], "rank": len(old[SCALES["rank"]])}
    try:
        with making.create(temporary) as file:
            kept = {**had, "status": "running"}  # a run that was done is not, with more rounds
            making.fill(file, schema, clients | {"id": clients["client"]}, config, {}, kept)
            for field in layout.fields(schema):
                if field.axes and field.axes[0] in layout.GROWING:
                    for rows in pieces(old[field.path], counted[field.axes[0]]):
                        file[field.path][rows] = old[field.path][rows]
        making.sync(temporary)
        temporary.rename(path)
        making.sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def pieces(data: h5py.Dataset, count: int) -> Iterator[slice]:
    """The first ``count`` rows, some MB at a time."""
    step = max(1, PIECE // max(1, math.prod(data.shape[1:])))
    return (slice(first, min(first + step, count)) for first in range(0, count, step))


def clear_flag(path: Path) -> None:
    """Clear the flag of a writer that was killed, in place: one write of the superblock, nothing else.

    Raises RunError for anything but a whole superblock of version 3 that describes a whole file.
    """
    with path.open("r+b") as file:
        block, size = file.read(48), os.fstat(file.fileno()).st_size
        whole = len(block) == 48 and block[:11] == b"\x89HDF\r\n\x1a\n\x03\x08\x08"  # version, sizes of numbers
        whole = whole and int.from_bytes(block[44:], "little") == lookup3(block[:44])
        if not whole or size < int.from_bytes(block[28:36], "little"):
            raise RunError(f"{path}: damaged: its first 48 bytes are no superblock of this file; start a new run")
        if block[11]:
            cleared = block[:11] + b"\0" + block[12:44]
            file.seek(0)
            file.write(cleared + lookup3(cleared).to_bytes(4, "little"))
            file.flush()
            os.fsync(file.fileno())


def lookup3(data: bytes) -> int:
    """Bob Jenkins' hash of 2006 (hashlittle with initval 0), the checksum of HDF5's metadata. data: not empty."""

    def turned(x: int, bits: int) -> int:
        return (x << bits | x >> (32 - bits)) & MASK

    a = b = c = (0xDEADBEEF + len(data)) & MASK
    padded = data + bytes(-len(data) % 12)
    words = [int.from_bytes(padded[k : k + 4], "little") for k in range(0, len(padded), 4)]
    for k in range(0, len(words) - 3, 3):
        a, b, c = ((x + word) & MASK for x, word in zip((a, b, c), words[k : k + 3], strict=True))
        a, c = (a - c & MASK) ^ turned(c, 4), (c + b) & MASK
        b, a = (b - a & MASK) ^ turned(a, 6), (a + c) & MASK
        c, b = (c - b & MASK) ^ turned(b, 8), (b + a) & MASK
        a, c = (a - c & MASK) ^ turned(c, 16), (c + b) & MASK
        b, a = (b - a & MASK) ^ turned(a, 19), (a + c) & MASK
        c, b = (c - b & MASK) ^ turned(b, 4), (b + a) & MASK
    a, b, c = ((x + word) & MASK for x, word in zip((a, b, c), words[-3:], strict=True))
    c = (c ^ b) - turned(b, 14) & MASK
    a = (a ^ c) - turned(c, 11) & MASK
    b = (b ^ a) - turned(a, 25) & MASK
    c = (c ^ b) - turned(b, 16) & MASK
    a = (a ^ c) - turned(c, 4) & MASK
    b = (b ^ a) - turned(a, 14) & MASK
    return (c ^ b) - turned(b, 24) & MASK
