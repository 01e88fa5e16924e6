"""Checkpoints: the state of a run on the disk, written by all ranks and read by any number of them.

folder/round-<n>/ holds a file of every rank with the rows of its clients (rank-00000.h5, ...: "id" [c] and the group
"local" with arrays [c, ...]), the shared arrays (shared.h5) and, written last, manifest.json with the size and the
SHA-256 of each, and of itself. All is made and synced in the hidden folder .round-<n>.part, and gets its name by one
rename: a kill leaves a whole checkpoint or none. What is damaged later shows by the checksums.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfl.comm import Comm
from hpcfl.errors import RunError
from hpcfl.results_file import access_list, disk, sync

FORMAT = 1
KEPT = 2
PIECE = 1 << 22  # bytes of clients' rows that are in memory at once
MANIFEST, SHARED, DAMAGED = "manifest.json", "shared.h5", "damaged.txt"
WRITING, READING = "write the checkpoint", "read the checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """A good checkpoint on the disk."""

    path: Path
    round: int  # rounds done
    facts: Mapping[str, Any]  # what the writer added: JSON values
    files: Sequence[Mapping[str, Any]]  # "name", "bytes", "sha256", and "clients": how many have rows there


def save(
    folder: Path,
    world: Comm,
    *,
    round: int,
    ids: np.ndarray,
    rows: Callable[[slice], Mapping[str, np.ndarray]],
    shared: Mapping[str, np.ndarray],
    facts: Mapping[str, Any],
) -> None:
    """Collective over the world: writes folder/round-<round>, complete or not there at all.

    ids [c]: the clients whose rows this rank writes, none of them twice; c may be 0. rows: name -> [k, ...] of a slice
    of 0, ..., c - 1; asked for one client first (none if c is 0), then for pieces of some MB. shared: equal on all
    ranks. facts: JSON values. Leaves the newest two that are whole; removes those of later rounds, which the run has
    gone back behind, and what killed runs left. Raises RunError, on all ranks alike, where it cannot be written; the
    older ones stay then.
    """
    part = folder / f".round-{round}.part"
    try:
        world.from_root(lambda: _prepare(folder, part))
        files = world.gather(world.together(lambda: _write_rank(part, world.rank, ids, rows, shared)))
        world.from_root(lambda: _finish(folder, part, round, [file for some in files or [] for file in some], facts))
    except RunError:
        if world.rank == 0:
            shutil.rmtree(part, ignore_errors=True)  # what stays is removed by the next save
        raise


def newest(folder: Path, world: Comm, *, at_most: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """Collective over the world: the newest good checkpoint, the same on all ranks, and a line about each damaged one.

    at_most: the most rounds done. All files are read and compared with their checksums, spread over the ranks. In a
    damaged checkpoint a note is left, for people and for ``save``, which keeps the newest two without a note.
    Raises RunError, on all ranks alike, where the folder is there, but cannot be read.
    """
    warnings: list[str] = []
    for number in world.from_root(lambda: _rounds(folder)):
        if at_most is not None and number > at_most:
            continue
        path = folder / f"round-{number}"
        found = world.from_root(partial(_examined, path))
        problem = found if isinstance(found, str) else _verified(found, world)
        if not isinstance(found, str) and problem is None:
            return found, warnings
        warnings.append(f"{path}: damaged checkpoint, not used: {problem}")
        if world.rank == 0:
            with contextlib.suppress(OSError):  # a disk that is read only: the warning says the same
                (path / DAMAGED).write_text(f"{problem}\n")
    return None, warnings


def load(
    checkpoint: Checkpoint, ids: np.ndarray, put: Callable[[np.ndarray, Mapping[str, np.ndarray]], None]
) -> dict[str, np.ndarray]:
    """The shared arrays; calls put(positions in ids [k], name -> rows [k, ...]) for the clients that have rows.

    Not collective. ids: different clients in any order. Pieces of some MB, in the order of the files. Raises RunError
    for what cannot be read.
    """
    order = np.argsort(ids)
    for file in checkpoint.files:
        if file["clients"] and len(ids):
            for wanted, found in _read_rows(checkpoint.path / file["name"], ids[order]):
                put(order[wanted], found)
    path = checkpoint.path / SHARED
    with disk(path, READING), h5py.File(path, "r") as stored:
        return {name: np.asarray(data[()], data.dtype) for name, data in stored.items()}


def _prepare(folder: Path, part: Path) -> None:
    """On rank 0: removes what killed runs left, and makes the folder to write into."""
    with disk(folder, WRITING):
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.iterdir():
            if re.fullmatch(r"\.round-\d+\.(part|old)", left.name):
                shutil.rmtree(left, ignore_errors=True)  # what stays takes space, no more
        part.mkdir()


def _write_rank(
    part: Path,
    rank: int,
    ids: np.ndarray,
    rows: Callable[[slice], Mapping[str, np.ndarray]],
    shared: Mapping[str, np.ndarray],
) -> list[dict[str, Any]]:
    """Writes the files of one rank; what the manifest says of them."""
    path = part / f"rank-{rank:05d}.h5"
    _write_rows(path, ids, rows)
    written = [_described(path, len(ids))]
    if rank == 0:
        with disk(part / SHARED, WRITING), _create(part / SHARED) as file:
            for name, array in shared.items():
                file.create_dataset(name, data=array)
        written.append(_described(part / SHARED, 0))
    return written


def _write_rows(path: Path, ids: np.ndarray, rows: Callable[[slice], Mapping[str, np.ndarray]]) -> None:
    clients, first, step = len(ids), 0, 1
    with disk(path, WRITING):
        file = _create(path)
    try:
        with disk(path, WRITING):
            file["id"] = np.asarray(ids, np.int64)
            local = file.create_group("local")
        while first < max(clients, 1):
            piece = slice(first, min(first + step, clients))
            found = rows(piece)  # outside of ``disk``: what fails there is no matter of this file
            with disk(path, WRITING):
                for name, values in found.items():
                    if first == 0:
                        local.create_dataset(name, (clients, *values.shape[1:]), values.dtype)
                    local[name][piece] = values
            first, step = first + step, _per_piece(local)
    finally:
        with disk(path, WRITING):
            file.close()


def _read_rows(path: Path, ids: np.ndarray) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Positions [k] in the ascending ids, and name -> rows [k, ...], of those that the file has."""
    with disk(path, READING):
        file = h5py.File(path, "r")
    with file:
        with disk(path, READING):
            there, local = file["id"][()], file["local"]
            step = _per_piece(local)
        at = np.minimum(np.searchsorted(ids, there), len(ids) - 1)
        wanted = np.flatnonzero(ids[at] == there)  # rows of the file
        while len(wanted):
            first = wanted[0]
            now, wanted = np.split(wanted, [np.searchsorted(wanted, first + step)])
            with disk(path, READING):
                found = {name: data[first : now[-1] + 1][now - first] for name, data in local.items()}
            yield at[now], found


def _per_piece(local: h5py.Group) -> int:
    """Clients whose rows make a piece."""
    width = sum(data.dtype.itemsize * int(np.prod(data.shape[1:])) for data in local.values())
    return max(1, PIECE // max(width, 8))


def _create(path: Path) -> h5py.File:
    return h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_EXCL, fapl=access_list()))


def _described(path: Path, clients: int) -> dict[str, Any]:
    """Syncs a file that is complete; its entry in the manifest."""
    with disk(path, WRITING):
        sync(path)
        return {"name": path.name, "bytes": path.stat().st_size, "sha256": _checksum(path), "clients": clients}


def _finish(folder: Path, part: Path, round: int, files: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """On rank 0: writes the manifest, gives the checkpoint its name, and removes the older ones."""
    path, old = folder / f"round-{round}", folder / f".round-{round}.old"
    content: dict[str, Any] = {"format": FORMAT, "round": round, "facts": facts, "files": files}
    text = json.dumps(content | {"sha256": _signature(content)}, indent=1)
    with disk(path, WRITING):
        (part / MANIFEST).write_text(text)
        sync(part / MANIFEST)
        sync(part)
        if path.exists():  # damaged, or of a run that wrote this round before
            path.rename(old)
        part.rename(path)
        sync(folder)
    _remove_older(folder, round)


def _remove_older(folder: Path, round: int) -> None:
    """All but the newest whole ones. They lose their names first: a kill leaves nothing that looks like one."""
    there = {number: folder / f"round-{number}" for number in _rounds(folder)}
    good = (n for n, path in there.items() if not (path / DAMAGED).exists() and isinstance(_examined(path), Checkpoint))
    kept = list(islice((n for n in good if n <= round), KEPT))
    for number in there.keys() - set(kept):
        with disk(there[number], "remove the old checkpoint"):
            there[number].rename(folder / f".round-{number}.old")
    for left in folder.glob(".round-*.old"):
        shutil.rmtree(left, ignore_errors=True)  # what stays is removed by the next save


def _rounds(folder: Path) -> list[int]:
    """The rounds of all checkpoints, also of damaged ones, the newest first."""
    with disk(folder, READING):
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return []
        real = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    matches = (re.fullmatch(r"round-(0|[1-9]\d*)", name) for name in real)
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def _examined(path: Path) -> Checkpoint | str:
    """The checkpoint by its manifest, with all files at their sizes; or what is wrong with it."""
    try:
        content = json.loads((path / MANIFEST).read_bytes())
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            return f"{MANIFEST} is not of format {FORMAT}"
        if content.pop("sha256", None) != _signature(content) or path.name != f"round-{content['round']}":
            return f"{MANIFEST} was changed"
        for file in content["files"]:
            size = (path / file["name"]).stat().st_size
            if size != file["bytes"]:
                return f"{file['name']} has {size} bytes, expected {file['bytes']}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{MANIFEST} or a file that it lists cannot be read: {error.strerror}"
    except ValueError:  # no UTF-8, or no JSON
        return f"{MANIFEST} is not JSON"
    return Checkpoint(path, content["round"], content["facts"], content["files"])


def _verified(checkpoint: Checkpoint, world: Comm) -> str | None:
    """Collective over the world: what is wrong with the contents of the files, None if nothing is."""
    problem = None
    for file in checkpoint.files[world.rank :: world.size]:
        try:
            if _checksum(checkpoint.path / file["name"]) != file["sha256"]:
                problem = f"{file['name']} has another checksum than when it was written"
        except OSError as error:
            problem = f"{file['name']} cannot be read: {error.strerror}"
    problems = world.gather(problem)
    return world.bcast(next((p for p in problems if p), None) if problems else None)


def _signature(content: Mapping[str, Any]) -> str:
    """Of a manifest, whatever its layout as text."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
