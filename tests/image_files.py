"""Tiny image sets in the files' original formats, for torchvision's readers; and their checksums, to be accepted."""

from __future__ import annotations

import hashlib
import pickle
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torchvision
from PIL import Image

Half = tuple[np.ndarray, np.ndarray]  # images [n, ...], labels [n]
Alphabets = Mapping[str, Sequence[np.ndarray]]  # name -> per character its drawings [n, 105, 105]: ink 0, paper 255


def half(n: int, shape: tuple[int, ...], classes: int, seed: int = 0) -> Half:
    """Random images [n, *shape] uint8; labels 0, 1, ..., classes - 1, 0, ..."""
    return np.random.default_rng(seed).integers(256, size=(n, *shape), dtype=np.uint8), np.arange(n) % classes


def idx(path: Path, values: np.ndarray) -> None:
    """An array of bytes in LeCun's idx format."""
    header = [0, 0, 8, values.ndim]
    for size in values.shape:
        header += list(size.to_bytes(4, "big"))
    path.write_bytes(bytes(header) + values.astype(np.uint8).tobytes())


def write_idx(folder: Path, **parts: Half) -> Path:
    """Images [n, height, width] and labels of each part, as FOLDER/PART-images-idx3-ubyte and so on."""
    folder.mkdir(parents=True)
    for part, (x, y) in parts.items():
        idx(folder / f"{part}-images-idx3-ubyte", x)
        idx(folder / f"{part}-labels-idx1-ubyte", y)
    return folder


def write_emnist(root: Path, train: Half, test: Half) -> Path:
    """Upright images [n, 28, 28]; the files hold them transposed. Returns their folder; nothing checks its md5."""
    halves = {"emnist-byclass-train": train, "emnist-byclass-test": test}
    return write_idx(root / "EMNIST" / "raw", **{part: (x.transpose(0, 2, 1), y) for part, (x, y) in halves.items()})


def write_cifar10(root: Path, train: Half, test: Half) -> dict[str, str]:
    """Images [n, 3, 32, 32], the training images in five batches. Returns the md5 of each file."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    batches = [*zip(*(np.array_split(a, 5) for a in train), strict=True), test]
    contents: dict[str, dict] = {"batches.meta": {"label_names": [f"class {k}" for k in range(10)]}}
    for name, (x, y) in zip([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"], batches, strict=True):
        contents[name] = {"data": x.reshape(len(x), 3072), "labels": y.tolist()}
    for name, content in contents.items():
        (folder / name).write_bytes(pickle.dumps(content))
    return {name: md5(folder / name) for name in contents}


def accept_cifar10(monkeypatch: pytest.MonkeyPatch, sums: Mapping[str, str]) -> None:
    """Make torchvision take these files for the real ones."""
    kind = torchvision.datasets.CIFAR10
    for entry in ("train_list", "test_list"):
        monkeypatch.setattr(kind, entry, [[name, sums[name]] for name, _ in getattr(kind, entry)])
    monkeypatch.setattr(kind, "meta", kind.meta | {"md5": sums["batches.meta"]})


def drawings(*counts: int, seed: int = 0) -> list[np.ndarray]:
    """Random characters for an alphabet, in blocks of 15 pixels: character k has counts[k] drawings."""
    rng = np.random.default_rng(seed)
    blocks = [rng.integers(2, size=(n, 7, 7), dtype=np.uint8) * np.uint8(255) for n in counts]
    return [b.repeat(15, axis=1).repeat(15, axis=2) for b in blocks]


def write_omniglot(root: Path, background: Alphabets, evaluation: Alphabets) -> dict[str, str]:
    """Black-and-white PNG files in folders, and both parts' zip files. Returns the md5 of each part's zip file."""
    folder = root / "omniglot-py"
    for part, alphabets in (("images_background", background), ("images_evaluation", evaluation)):
        for alphabet, characters in alphabets.items():
            for c, images in enumerate(characters, 1):
                (folder / part / alphabet / f"character{c:02}").mkdir(parents=True)
                for k, image in enumerate(images, 1):
                    file = folder / part / alphabet / f"character{c:02}" / f"{c:04}_{k:02}.png"
                    Image.fromarray(image).convert("1", dither=Image.Dither.NONE).save(file)
        shutil.make_archive(str(folder / part), "zip", folder, part)
    return {part: md5(folder / f"{part}.zip") for part in ("images_background", "images_evaluation")}


def accept_omniglot(monkeypatch: pytest.MonkeyPatch, sums: Mapping[str, str]) -> None:
    """Make torchvision take these zip files for the real ones."""
    monkeypatch.setattr(torchvision.datasets.Omniglot, "zips_md5", dict(sums))


def md5(file: Path) -> str:
    return hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()
