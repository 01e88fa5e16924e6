"""The data sets of PFLEGO's job files, tiny: in their original formats, and as arrays for the data set ``file``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from image_files import (
    accept_cifar10,
    accept_omniglot,
    drawings,
    half,
    write_cifar10,
    write_emnist,
    write_idx,
    write_omniglot,
)

from hpcfl.config import load, to_toml

JOBS = Path(__file__).resolve().parents[1] / "jobs/papers/pflego"
PER_CLASS = 100  # training images of a class, one for every client; of the test a fifth
ALPHABETS = 20


def write_sets(root: Path, patch: pytest.MonkeyPatch) -> None:
    """All five sets below ``root`` (the files' checksums are accepted while ``patch`` lasts)."""
    train, test = (half(n, (28, 28), 10, seed=n) for n in (10 * PER_CLASS, 2 * PER_CLASS))
    write_idx(root / "MNIST/raw", train=train, t10k=test)
    write_idx(root / "FashionMNIST/raw", train=test, t10k=test)
    write_emnist(root, half(62 * PER_CLASS, (28, 28), 62), half(1240, (28, 28), 62))
    accept_cifar10(patch, write_cifar10(root, half(10 * PER_CLASS, (3, 32, 32), 10), half(200, (3, 32, 32), 10)))
    alphabets = [(f"alphabet{k:02}", drawings(*[2] * (2 + k % 4), seed=k)) for k in range(ALPHABETS)]
    accept_omniglot(patch, write_omniglot(root, dict(alphabets[:12]), dict(alphabets[12:])))


def as_files(root: Path, folder: Path, sets: Iterable[str] = ("emnist", "cifar10", "omniglot")) -> list[Path]:
    """Copies FOLDER/pflego/SET.toml of the job files whose data are the arrays of ``write_sets``, in NPZ files.

    They need no data set, and may run in other processes. Call it while the checksums are accepted.
    """
    folder = folder / "pflego"
    folder.mkdir(parents=True)
    copies = []
    for name in sets:
        job = load(JOBS / f"{name}.toml", [f'data.root="{root}"'])
        data = job.data.load(job.run.seed)
        arrays = {"x": data.x, "y": data.y, "split": data.split}
        np.savez(folder / f"{name}.npz", **arrays, **({} if data.client is None else {"client": data.client}))
        tables = tomllib.loads(job.text) | {"data": {"name": "file", "path": str(folder / f"{name}.npz")}}
        copies.append(folder / f"{name}.toml")
        copies[-1].write_text(to_toml(tables))
    return copies
