"""``file``: the user's own arrays, in one HDF5 or NPZ file."""

from __future__ import annotations

import difflib
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from hpcfl.data import SPLITS, Dataset, Reader, Survey
from hpcfl.errors import InputError, RunError
from hpcfl.options import Positive, user_path
from hpcfl.registry import register

REQUIRED, OPTIONAL = ("x", "y"), ("client", "cluster", "split")
MANY = 100  # classes; and numbers of classes for each that there is
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
    lazy: read a client's x whenever it is needed, so that nobody holds all of it. Needs an HDF5 file whose samples are
    sorted by client, and the partition "natural".
    """

    path: str
    scale: Positive | None = None
    shift: float = 0.0
    lazy: bool = False

    def load(self, seed: int) -> Dataset:
        """The file's samples; the seed plays no part. Raises InputError, one line that names the file and the array."""
        with self._named():
            return self._dataset(_read(user_path(self.path)))

    def survey(self, seed: int) -> Survey:
        """What the other arrays say, which are read whole, and the shape of x. Raises InputError as ``load``."""
        with self._named():
            arrays, shape = _read_but_x(user_path(self.path))
            data = self._dataset(arrays)
            if data.client is None:
                raise InputError('no array "client"; data.lazy = true reads the samples client by client')
            back = np.flatnonzero(data.client[1:] < data.client[:-1])
            if len(back):
                raise InputError(
                    f"client[{back[0] + 1}] comes before client[{back[0]}] in order; data.lazy = true reads a client's "
                    "samples in one piece: sort all arrays by client, or leave data.lazy out"
                )
        split = np.zeros(len(data), np.uint8) if data.split is None else data.split
        clients = int(data.client[-1]) + 1
        count = np.bincount(data.client * 3 + split, minlength=3 * clients).reshape(clients, 3)
        own = data.split is not None
        return Survey(count, shape, data.x.dtype, data.classes, data.cluster, own, data.scale, data.shift)

    def reader(self, seed: int, sizes: np.ndarray) -> Reader:
        """Reads one client's samples. What is wrong with them raises RunError: a run is under way."""
        start, path = np.concatenate([[0], sizes.cumsum()]), user_path(self.path)
        with self._named(), _readable(path):
            file = h5py.File(path, "r")  # open as long as the reader is

        def read(client: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
            rows = slice(int(start[client]), int(start[client + 1]))
            try:
                x, y = _features(file["x"][rows]), _targets(file["y"][rows])
                split = _split(_h5_array(file["split"], rows)) if "split" in file else None
            except (OSError, ValueError, InputError) as error:
                raise RunError(f'data.path = "{self.path}": samples of client {client}: {error}') from error
            if x.dtype.kind == "f" and not np.isfinite(x).all():
                raise RunError(
                    f'data.path = "{self.path}": x of client {client} is not finite; expected finite numbers'
                )
            return x, y, split

        return read

    @contextmanager
    def _named(self) -> Iterator[None]:
        """What is wrong is said with the name of the file."""
        try:
            yield
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
        if classes is not None and classes > MANY and classes > MANY * len(np.unique(y)):
            raise InputError(
                f"y has labels up to {classes - 1}, but only {len(np.unique(y))} different ones; number the classes "
                "0, 1, 2, ...: the model has an output for each number"
            )
        scale = self.scale if self.scale is not None else 1 / 255 if x.dtype == np.uint8 else 1.0
        return Dataset(x, y, classes, client, cluster, split, scale, self.shift)


def _read_but_x(path: Path) -> tuple[dict[str, np.ndarray], tuple[int, ...]]:
    """The arrays of an HDF5 file, zeros that take no memory in the place of x; and the shape of one sample."""
    with _readable(path):
        if not h5py.is_hdf5(path):
            raise InputError("not an HDF5 file; data.lazy = true reads parts of arrays, which only that allows")
        with h5py.File(path, "r") as h5:
            arrays = {name: _h5_array(h5[name]) for name in _columns(list(h5)) if name != "x"}
            first, shape = _features(_h5_array(h5["x"], slice(0, 1))), h5["x"].shape
    narrow = tuple(min(length, 1) for length in shape[1:])
    return arrays | {"x": np.broadcast_to(np.zeros((), first.dtype), (*shape[:1], *narrow))}, shape[1:]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """What keeps a file from being read becomes an InputError."""
    try:
        if not path.is_file():
            raise InputError(f"{'a folder' if path.is_dir() else 'no such file'} ({path.absolute()})")
        with path.open("rb"):
            pass  # a file without read permission would look like one of another format
        yield
    except (OSError, ValueError, EOFError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"cannot be read: {error}") from None


def _read(path: Path) -> dict[str, np.ndarray]:
    """The arrays that hpcfl knows, strings as numpy strings."""
    with _readable(path):
        if h5py.is_hdf5(path):
            with h5py.File(path, "r") as h5:
                return {name: _h5_array(h5[name]) for name in _columns(list(h5))}
        if zipfile.is_zipfile(path):
            with np.load(path, allow_pickle=False) as npz:
                return {name: _decoded(npz[name]) for name in _columns(list(npz.files))}
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


def _h5_array(node: h5py.Dataset | h5py.Group, rows: slice | tuple[()] = ()) -> np.ndarray:
    if not isinstance(node, h5py.Dataset):
        raise InputError(f'"{node.name.strip("/")}" is not an array; expected a dataset')
    if h5py.check_string_dtype(node.dtype) is not None:
        return np.asarray(node.asstr()[rows]).astype(str)
    return np.asarray(node[rows])


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
