"""``file``: the user's own arrays, in one HDF5 or NPZ file."""

from __future__ import annotations

import difflib
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from hpcfl.data import SPLITS, Dataset
from hpcfl.errors import InputError
from hpcfl.options import Positive, user_path
from hpcfl.registry import register

REQUIRED, OPTIONAL = ("x", "y"), ("client", "cluster", "split")
MOST_CLASSES = 1_000_000  # a larger label is an identifier in the wrong place


@register("data", "file")
@dataclass(frozen=True)
class File:
    """Arrays of an HDF5 file (datasets of its root group) or an NPZ file.

    path: the file. Its arrays, one entry per sample:
      x        [n, ...] numbers; images as [n, channels, height, width]. uint8, float32, float64 stay what they are.
      y        [n] integers 0, 1, ... (classification) or floats (regression)
      client   [n] optional: integers or strings, numbered 0..N-1 in sorted order (for the partition "natural")
      cluster  [n] optional: integers or strings, the same for all samples of a client, numbered like client
      split    [n] optional: 0, 1, 2 or "train", "validation", "test"
    scale, shift: the model sees x * scale + shift; absent scale: 1/255 for uint8 (images), else 1.
    """

    path: str
    scale: Positive | None = None
    shift: float = 0.0

    def load(self, seed: int) -> Dataset:
        """The file's samples; the seed plays no part. Raises InputError, one line that names the file and the array."""
        try:
            return self._dataset(_read(user_path(self.path)))
        except InputError as error:
            raise InputError(f'data.path = "{self.path}": {str(error).removeprefix("data: ")}') from None

    def _dataset(self, arrays: Mapping[str, np.ndarray]) -> Dataset:
        x, y = _features(arrays["x"]), _targets(arrays["y"])
        for name, column in arrays.items():
            if name in OPTIONAL and column.shape != y.shape:
                raise InputError(f"{name} has shape {list(column.shape)}; expected {list(y.shape)}, one per sample")
        client = cluster = None
        if "client" in arrays:
            ids, client = _numbered("client", arrays["client"])
            if "cluster" in arrays:
                cluster = _clusters(ids, client, arrays["cluster"])
        elif "cluster" in arrays:
            raise InputError('array "cluster" without "client"; a cluster is a group of clients: add "client"')
        split = _split(arrays["split"]) if "split" in arrays else None
        classes = None if y.dtype.kind == "f" else max(1, int(y.max()) + 1)
        scale = self.scale if self.scale is not None else 1 / 255 if x.dtype == np.uint8 else 1.0
        return Dataset(x, y, classes, client, cluster, split, scale, self.shift)


def _read(path: Path) -> dict[str, np.ndarray]:
    """The arrays that hpcfl knows, strings as numpy strings."""
    if not path.is_file():
        raise InputError(f"no such file ({path.absolute()})")
    try:
        with path.open("rb"):
            pass  # a file without read permission would look like one of another format
        if h5py.is_hdf5(path):
            with h5py.File(path, "r") as h5:
                return {name: _h5_array(h5[name]) for name in _columns(list(h5))}
        if zipfile.is_zipfile(path):
            with np.load(path, allow_pickle=False) as npz:
                return {name: _decoded(npz[name]) for name in _columns(list(npz.files))}
    except (OSError, ValueError, EOFError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"cannot be read: {error}") from None
    raise InputError("neither HDF5 nor NPZ; expected a file written by h5py or numpy.savez")


def _columns(names: list[str]) -> list[str]:
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise InputError(f'no array "{missing[0]}"; the file has: {", ".join(sorted(names)) or "nothing"}')
    for name in OPTIONAL:
        near = difflib.get_close_matches(name, [n for n in names if n not in OPTIONAL], n=1, cutoff=0.8)
        if name not in names and near:
            raise InputError(f'array "{near[0]}" is not known; rename it "{name}" if it is that, else leave it out')
    return [name for name in (*REQUIRED, *OPTIONAL) if name in names]


def _h5_array(node: h5py.Dataset | h5py.Group) -> np.ndarray:
    if not isinstance(node, h5py.Dataset):
        raise InputError(f'"{node.name.strip("/")}" is not an array; expected a dataset')
    if h5py.check_string_dtype(node.dtype) is not None:
        return np.asarray(node.asstr()[()]).astype(str)
    return np.asarray(node[()])


def _decoded(values: np.ndarray) -> np.ndarray:
    return np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values


def _features(x: np.ndarray) -> np.ndarray:
    """uint8 as it is, everything else in the smallest of float32 and float64 that holds it."""
    if x.dtype.kind not in "buif":
        raise InputError(f"x is {x.dtype}; expected numbers")
    if x.dtype == np.uint8:
        return x
    return x.astype(np.float32 if np.result_type(x.dtype, np.float32).itemsize == 4 else np.float64, copy=False)


def _targets(y: np.ndarray) -> np.ndarray:
    """Integers become int64 labels, floats float32 or float64."""
    if y.dtype.kind not in "buif":
        raise InputError(f"y is {y.dtype}; expected integers (class labels 0, 1, ...) or floats (regression)")
    if y.ndim != 1 or len(y) == 0:
        raise InputError(f"y has shape {list(y.shape)}; expected [samples], at least one")
    if y.dtype.kind == "f":
        return _features(y)
    if y.max() >= MOST_CLASSES:
        raise InputError(f"y[{y.argmax()}] = {y.max()}; expected class labels 0, 1, ..., below {MOST_CLASSES:,}")
    if y.min() < 0:
        raise InputError(f"y[{(y < 0).argmax()}] = {y[(y < 0).argmax()]}; expected class labels 0, 1, ...")
    return y.astype(np.int64)


def _numbered(name: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorted distinct ids [N] and the number of each sample's id [n] int64."""
    if values.dtype.kind not in "iuU":
        raise InputError(f"{name} is {values.dtype}; expected integers or strings")
    ids, number = np.unique(values, return_inverse=True)
    return ids, number.astype(np.int64)


def _clusters(ids: np.ndarray, client: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Cluster of each client [N] from the cluster of each sample [n]."""
    names, number = _numbered("cluster", column)
    cluster = np.zeros(len(ids), np.int64)
    cluster[client] = number
    wrong = np.flatnonzero(cluster[client] != number)
    if len(wrong):
        k, (a, b) = client[wrong[0]], sorted((number[wrong[0]], cluster[client[wrong[0]]]))
        raise InputError(
            f"client {ids[k].item()!r} is in cluster {names[a].item()!r} and in {names[b].item()!r}; "
            "expected one cluster per client"
        )
    return cluster


def _split(values: np.ndarray) -> np.ndarray:
    """[n] uint8 from numbers or names."""
    if values.dtype.kind not in "iuU":
        raise InputError(f"split is {values.dtype}; expected 0, 1, 2 or the strings {', '.join(SPLITS)}")
    valid = np.arange(len(SPLITS)) if values.dtype.kind in "iu" else np.array(SPLITS)
    matches = values[:, None] == valid
    wrong = np.flatnonzero(~matches.any(1))
    if len(wrong):
        shown = values[wrong[0]].item()
        raise InputError(f"split[{wrong[0]}] = {shown!r}; expected {', '.join(repr(v.item()) for v in valid)}")
    return matches.argmax(1).astype(np.uint8)
