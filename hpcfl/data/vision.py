"""``mnist``, ``fashion-mnist``, ``emnist`` and ``cifar10``: torchvision's readers on a local folder.

Nothing is ever downloaded. ``read`` is how every set of torchvision is checked, read and complained about.
"""

from __future__ import annotations

import pickle
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpcfl.data import TEST, TRAIN, Dataset
from hpcfl.errors import InputError
from hpcfl.options import user_path
from hpcfl.registry import register

DAMAGE = (  # what torchvision, torch, numpy, pickle and Pillow raise on files that are not what they should be
    *(OSError, ValueError, TypeError, KeyError, RuntimeError, AssertionError, SyntaxError, EOFError),
    *(pickle.UnpicklingError, InputError),
)


@dataclass(frozen=True)
class Source:
    """Where a set of torchvision lies, and the command that puts it there.

    name: in the job file. folder: below ROOT. files: what must be in it. form: of the files, in words. fetch: the
    command, without its last argument ROOT.
    """

    name: str
    folder: str
    files: tuple[str, ...]
    form: str = "not compressed"
    fetch: str = "bash tests/get_data.sh"

    def missing(self, root: Path) -> list[str]:
        """Those of the files that are not there."""
        return [file for file in self.files if not (root / self.folder / file).exists()]

    def fetch_into(self, root: Path) -> str:
        """The whole command."""
        return f"{self.fetch} {shlex.quote(str(root))}"


def download(call: str) -> str:
    """The command in which torchvision itself fetches a set; ``call`` has ``sys.argv[1]`` for ROOT."""
    return f"python -c 'import sys; from torchvision.datasets import *; {call}'"


def idx_files(*parts: str) -> tuple[str, ...]:
    """Names of MNIST-like files, which hold the images and the labels of each part."""
    return tuple(f"{part}-{kind}-ubyte" for part in parts for kind in ("images-idx3", "labels-idx1"))


FILES = idx_files("train", "t10k")
MNIST = Source("mnist", "MNIST/raw", FILES)
FASHION = Source("fashion-mnist", "FashionMNIST/raw", FILES)
EMNIST = Source(
    "emnist",
    "EMNIST/raw",
    idx_files("emnist-byclass-train", "emnist-byclass-test"),
    fetch=download('EMNIST(sys.argv[1], "byclass", download=True)'),
)
CIFAR10 = Source(
    "cifar10",
    "cifar-10-batches-py",
    (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch", "batches.meta"),
    "unpacked from the version for Python",
    download("CIFAR10(sys.argv[1], download=True)"),
)


@register("data", "mnist")
@dataclass(frozen=True)
class Mnist:
    """Handwritten digits (LeCun, Cortes, Burges 1998): 60,000 training and 10,000 test images, 10 classes.

    root: folder that holds MNIST/raw. x [70000, 1, 28, 28] uint8, seen by the model as 0..1; the official test set is
    recorded in ``split``.
    """

    root: str = "data"

    def load(self, seed: int) -> Dataset:
        """The set; the seed plays no part. Raises InputError where it is missing or damaged."""
        return read(MNIST, self.root, lambda sets, root: _grey(sets.MNIST, root, 10))


@register("data", "fashion-mnist")
@dataclass(frozen=True)
class FashionMnist:
    """Pictures of clothes (Xiao, Rasul, Vollgraf 2017): 60,000 training and 10,000 test images, 10 classes.

    root: folder that holds FashionMNIST/raw; otherwise like ``mnist``.
    """

    root: str = "data"

    def load(self, seed: int) -> Dataset:
        """The set; the seed plays no part. Raises InputError where it is missing or damaged."""
        return read(FASHION, self.root, lambda sets, root: _grey(sets.FashionMNIST, root, 10))


@register("data", "emnist")
@dataclass(frozen=True)
class Emnist:
    """Handwritten digits and letters (Cohen et al. 2017), by class: 697,932 training and 116,323 test images.

    62 classes: 0-9, A-Z, a-z. root: folder that holds EMNIST/raw, of which only the four files of the split "byclass"
    are read. The files hold the images transposed; here they are upright. Otherwise like ``mnist``.
    """

    root: str = "data"

    def load(self, seed: int) -> Dataset:
        """The set; the seed plays no part. Raises InputError where it is missing or damaged."""
        return read(
            EMNIST,
            self.root,
            lambda sets, root: _grey(partial(sets.EMNIST, split="byclass"), root, 62, transposed=True),
        )


@register("data", "cifar10")
@dataclass(frozen=True)
class Cifar10:
    """Small photographs (Krizhevsky 2009): 50,000 training and 10,000 test images in colour, 10 classes.

    root: folder that holds cifar-10-batches-py. x [60000, 3, 32, 32] uint8, seen by the model as 0..1; the official
    test set is recorded in ``split``.
    """

    root: str = "data"

    def load(self, seed: int) -> Dataset:
        """The set; the seed plays no part. Raises InputError where it is missing or damaged."""
        return read(CIFAR10, self.root, _cifar10)


def read(source: Source, root: str, load: Callable[[Any, Path], Dataset]) -> Dataset:
    """What ``load(torchvision.datasets, ROOT)`` makes of the files. Raises InputError: missing, or damaged."""
    where = f'data.name = "{source.name}", data.root = "{root}"'
    base = user_path(root).absolute()
    folder, fetch, missing = base / source.folder, source.fetch_into(base), source.missing(base)
    if missing:
        raise InputError(
            f"{where}: no {missing[0]} in {folder}; `{fetch}` fetches the real data into that folder "
            f"(torchvision's layout: ROOT/{source.folder}/{source.files[0]} and so on, {source.form})"
        )

    import torchvision  # seconds, and torch with it: only when this set is really read

    try:
        return load(torchvision.datasets, base)
    except DAMAGE as error:
        text = str(error).partition(". You can use download=True")[0]
        reason = text.splitlines()[0] if text else type(error).__name__
        raise InputError(
            f"{where}: the files in {folder} are damaged ({reason}); remove that folder and run `{fetch}`"
        ) from None


def _grey(reader: Callable[..., Any], root: Path, classes: int, transposed: bool = False) -> Dataset:
    """A set in MNIST's format."""
    halves = [reader(root, train=train, download=False) for train in (True, False)]
    images = [half.data.numpy()[:, None] for half in halves]
    if transposed:
        images = [half.swapaxes(2, 3) for half in images]
    return _joined(images, [half.targets.numpy() for half in halves], classes)


def _cifar10(sets: Any, root: Path) -> Dataset:
    halves = [sets.CIFAR10(root, train=train, download=False) for train in (True, False)]
    images = [half.data.transpose(0, 3, 1, 2) for half in halves]  # torchvision's are [n, 32, 32, 3]
    return _joined(images, [np.array(half.targets, np.int64) for half in halves], 10)


def _joined(images: Sequence[np.ndarray], labels: Sequence[np.ndarray], classes: int) -> Dataset:
    """Training images, then test images: two [n, channels, height, width] uint8 in any memory order, two [n] int64."""
    for x, y in zip(images, labels, strict=True):
        if len(x) != len(y):
            raise InputError(f"{len(x)} images, but {len(y)} labels")
    shape = (sum(map(len, images)), *images[0].shape[1:])
    x = np.concatenate(images, out=np.empty(shape, np.uint8))  # contiguous, which a plain concatenate need not be
    split = np.repeat(np.array([TRAIN, TEST], np.uint8), [len(y) for y in labels])
    return Dataset(x, np.concatenate(labels), classes, split=split, scale=1 / 255)
