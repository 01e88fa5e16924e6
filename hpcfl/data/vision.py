"""``mnist`` and ``fashion-mnist``: torchvision's reader on a local folder. Nothing is ever downloaded."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

import numpy as np

from hpcfl.data import TEST, TRAIN, Dataset
from hpcfl.errors import InputError
from hpcfl.options import user_path
from hpcfl.registry import register

FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))


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
        return read("mnist", "MNIST", self.root)


@register("data", "fashion-mnist")
@dataclass(frozen=True)
class FashionMnist:
    """Pictures of clothes (Xiao, Rasul, Vollgraf 2017): 60,000 training and 10,000 test images, 10 classes.

    root: folder that holds FashionMNIST/raw; otherwise like ``mnist``.
    """

    root: str = "data"

    def load(self, seed: int) -> Dataset:
        """The set; the seed plays no part. Raises InputError where it is missing or damaged."""
        return read("fashion-mnist", "FashionMNIST", self.root)


def read(name: str, torchvision_name: str, root: str) -> Dataset:
    """Training and test images of one of torchvision's MNIST-like sets, the training images first."""
    where = f'data.name = "{name}", data.root = "{root}"'
    base = user_path(root).absolute()
    folder, fetch = base / torchvision_name / "raw", f"bash tests/get_data.sh {shlex.quote(str(base))}"
    missing = [file for file in FILES if not (folder / file).is_file()]
    if missing:
        raise InputError(
            f"{where}: no {missing[0]} in {folder}; `{fetch}` fetches the real data into that "
            f"folder (torchvision's layout: ROOT/{torchvision_name}/raw/{FILES[0]} and so on, not compressed)"
        )

    import torchvision  # seconds, and torch with it: only when this set is really read

    reader = getattr(torchvision.datasets, torchvision_name)
    try:
        halves = [reader(base, train=train, download=False) for train in (True, False)]
        x = np.concatenate([half.data.numpy() for half in halves])[:, None]
        y = np.concatenate([half.targets.numpy() for half in halves])
        split = np.repeat(np.array([TRAIN, TEST], np.uint8), [len(half.targets) for half in halves])
        return Dataset(x, y, classes=10, split=split, scale=1 / 255)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, AssertionError, InputError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{where}: the files in {folder} are damaged ({reason}); remove that folder and run `{fetch}`"
        ) from None
