"""Data sets: samples, labels, and what a set itself knows about its clients, clusters and test samples.

A registered data class has ``load(seed) -> Dataset``; its fields are the options of the job file's ``[data]`` table.
Images are stored as ``[n, channels, height, width]``.

A class whose samples can be had client by client has a field ``lazy``, and where that is true ``survey(seed) ->
Survey``, called by one process per node, and ``reader(seed, sizes) -> Reader``, called by every rank with the clients'
numbers of samples [N]. What they give together are the samples of ``load``, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from hpcfl.errors import InputError
from hpcfl.splits import SPLITS, TEST, TRAIN, VALIDATION

__all__ = ["SPLITS", "TEST", "TRAIN", "VALIDATION", "Dataset", "Reader", "Survey"]

# natural client -> its samples in the order of the data set: x [n, ...], y [n], and its part of Dataset.split or None
Reader = Callable[[int], tuple[np.ndarray, np.ndarray, np.ndarray | None]]


@dataclass(frozen=True, eq=False)
class Survey:
    """What is known of a data set before its samples are made or read. As in ``Dataset`` where not said otherwise.

    count: [N, 3] int64, samples of each natural client in TRAIN, VALIDATION, TEST of the set's own split; without one
    (own_split false) all in TRAIN. shape: of one sample. dtype: of x.
    """

    count: np.ndarray
    shape: tuple[int, ...]
    dtype: np.dtype
    classes: int | None
    cluster: np.ndarray | None = None
    own_split: bool = False
    scale: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples in the order in which every partition counts them; checked when it is made.

    x: [n, ...] uint8, float32 or float64, finite. y: [n] int64 class labels in 0..classes-1, or float32/float64
    (regression, ``classes`` None). client: [n] int64, the natural client of each sample, 0..N-1. cluster: [N] int64,
    the natural cluster of each natural client. split: [n] uint8 of TRAIN, VALIDATION, TEST, where the set brings its
    own. The model sees ``x * scale + shift``: uint8 images are normalised on the device. truth: [N, P] float64, the
    true parameters of each natural client, where they are known. Raises InputError.
    """

    x: np.ndarray
    y: np.ndarray
    classes: int | None
    client: np.ndarray | None = None
    cluster: np.ndarray | None = None
    split: np.ndarray | None = None
    scale: float = 1.0
    shift: float = 0.0
    truth: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.check()

    def __len__(self) -> int:
        return len(self.y)

    def check(self) -> None:
        """Raise InputError that says which array is wrong, what was expected and what is there."""
        x, y = self.x, self.y
        if x.ndim < 2 or x.size == 0:
            _fail(f"x has shape {list(x.shape)}; expected [samples, features...], at least one of each")
        if x.dtype not in (np.uint8, np.float32, np.float64):
            _fail(f"x is {x.dtype}; expected uint8, float32 or float64")
        _check_column("y", y, len(x), (np.float32, np.float64) if self.classes is None else (np.int64,))
        _check_finite("x", x)
        _check_finite("y", y)
        if self.classes is not None:
            _check_range("y", y, self.classes, "class labels")
        if not (np.isfinite(self.scale) and np.isfinite(self.shift)):
            _fail(f"scale = {self.scale}, shift = {self.shift}; expected finite numbers")
        if self.split is not None:
            _check_column("split", self.split, len(x), (np.uint8,))
            _check_range("split", self.split, len(SPLITS), "0 train, 1 validation, 2 test:")
        self._check_clients()

    def _check_clients(self) -> None:
        clients = np.iinfo(np.int64).max
        if self.cluster is not None:
            if self.client is None:
                _fail("cluster is given without client; a cluster is a group of natural clients")
            clients = len(self.cluster)
            _check_column("cluster", self.cluster, clients, (np.int64,))
            _check_range("cluster", self.cluster, np.iinfo(np.int64).max, "cluster numbers")
        if self.client is not None:
            _check_column("client", self.client, len(self.x), (np.int64,))
            _check_range("client", self.client, clients, "client numbers")
        if self.truth is not None:
            self._check_truth(self.truth)

    def _check_truth(self, truth: np.ndarray) -> None:
        if self.client is None:
            _fail("truth is given without client; it holds the true parameters of natural clients")
        clients = int(self.client.max()) + 1 if self.cluster is None else len(self.cluster)
        if truth.dtype != np.float64:
            _fail(f"truth is {truth.dtype}; expected float64")
        if truth.ndim != 2 or len(truth) != clients or truth.shape[1] == 0:
            _fail(f"truth has shape {list(truth.shape)}; expected [{clients}, parameters], a row per natural client")
        _check_finite("truth", truth)


def _check_column(name: str, column: np.ndarray, length: int, dtypes: tuple[type, ...]) -> None:
    if column.dtype not in dtypes:
        _fail(f"{name} is {column.dtype}; expected {' or '.join(np.dtype(d).name for d in dtypes)}")
    if column.shape != (length,):
        _fail(f"{name} has shape {list(column.shape)}; expected [{length}]")


def _check_finite(name: str, values: np.ndarray) -> None:
    finite = values.dtype.kind != "f" or np.isfinite(values)
    if not np.all(finite):
        place = np.argwhere(~np.asarray(finite))[0]
        _fail(f"{name}{place.tolist()} = {values[tuple(place)]}; expected finite numbers")


def _check_range(name: str, values: np.ndarray, end: int, what: str) -> None:
    wrong = np.flatnonzero((values < 0) | (values >= end))
    if len(wrong):
        last = f"..{end - 1}" if end < np.iinfo(np.int64).max else " and up"
        _fail(f"{name}[{wrong[0]}] = {values[wrong[0]]}; expected {what} 0{last}")


def _fail(what: str) -> NoReturn:
    raise InputError(f"data: {what}")
