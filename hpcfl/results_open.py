"""Opens results files of any state to read them: finished, running, killed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfl.errors import InputError
from hpcfl.results_schema import FILETYPE, FORMAT_VERSION

TRIES, PAUSE = 50, 0.01  # while writers come and go; seconds


def open_to_read(path: Path) -> h5py.File:
    """Raises InputError for what is not a readable HDF5 file; ``read_attributes`` tells whether hpcfl wrote it."""
    try:
        path.stat()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected a results.h5 or the folder of a run") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        locking = None
        for _ in range(TRIES):
            try:
                return _open(path, locking=locking)
            except OSError as error:
                if "unable to lock" in str(error):  # another program's lock, or a file system without any
                    locking = False
                elif "already open" in str(error):  # a writer came or went meanwhile
                    time.sleep(PAUSE)
                else:
                    raise
        return _open(path, locking=locking)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or str(error)}") from None


def _open(path: Path, *, locking: bool | None) -> h5py.File:
    """One attempt. locking: None: as h5py does it; False: no locks."""
    with path.open("rb") as file:
        head, size = file.read(48).ljust(48, b"\0"), os.fstat(file.fileno()).st_size
    if not h5py.is_hdf5(path):
        raise InputError(f"{path}: not an HDF5 file; expected a results.h5")
    modern, flags, end = head[8] == 3, head[11], int.from_bytes(head[28:36], "little")  # of the superblock
    if modern and size < end:
        raise InputError(f"{path}: cut off after {size} of {end} bytes; copy it again")
    # SWMR only where a writer has it or was killed: in this mode HDF5 waits for damaged parts, as not yet written.
    return h5py.File(path, "r", swmr=modern and flags != 0, locking=locking)


def root_attributes(path: Path, file: h5py.File) -> Mapping[str, Any]:
    """The root attributes as Python's own types. Raises InputError for files of others, or of a newer format."""
    attributes = {name: plain(value) for name, value in file.attrs.items()}
    if attributes.get("filetype") != FILETYPE:
        raise InputError(f'{path}: an HDF5 file, but not of hpcfl; its attribute "filetype" is not "{FILETYPE}"')
    version = tuple(int(number) for number in attributes["format_version"])
    if version[0] > FORMAT_VERSION[0]:
        raise InputError(
            f"{path}: format version {version[0]}.{version[1]} is newer than this hpcfl, which reads "
            f"{FORMAT_VERSION[0]}.x; update hpcfl"
        )
    return attributes


def read_attributes(path: Path) -> Mapping[str, Any]:
    """The root attributes of a file in any state, "status" and "rounds_done" among them. Raises InputError."""
    with open_to_read(path) as file, whole(path):
        return root_attributes(path, file)


def read_config(path: Path) -> str:
    """The TOML text of the job, of a file in any state. Raises InputError for what is not a readable results file."""
    with open_to_read(path) as file, whole(path):
        root_attributes(path, file)
        return text(file, "/config/toml")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[None]:
    """What h5py says of parts that are damaged or missing becomes an InputError."""
    try:
        yield
    except (KeyError, OSError) as error:
        raise InputError(f"{path}: damaged ({error})") from None


def text(file: h5py.File, path: str) -> str:
    return str(plain(file[path][()]))


def plain(value: Any) -> Any:
    """Python's own type for an attribute or a scalar: fixed-length strings come as bytes."""
    if isinstance(value, bytes):
        return value.decode()
    return value.item() if isinstance(value, np.generic) else value
