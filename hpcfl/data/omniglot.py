"""``omniglot``: the characters of 50 alphabets, one client per alphabet; torchvision's reader on a local folder."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcfl.data import TEST, TRAIN, Dataset
from hpcfl.data.vision import Source, download, read
from hpcfl.errors import InputError
from hpcfl.options import Count
from hpcfl.registry import register
from hpcfl.rng import Purpose, stream

PARTS = ("images_background", "images_evaluation")
FOLDER = "omniglot-py"
SOURCE = Source(
    "omniglot",
    FOLDER,
    (*(f"{part}.zip" for part in PARTS), *PARTS),
    "the two zip files and beside each the folder unpacked from it",
    download("[Omniglot(sys.argv[1], part, download=True) for part in (True, False)]"),
)


@register("data", "omniglot")
@dataclass(frozen=True)
class Omniglot:
    """Handwritten characters (Lake, Salakhutdinov, Tenenbaum 2015) as in PFLEGO: 50 alphabets, 1,623 characters.

    Natural client: an alphabet, the 30 of the background part first, then the 20 of the evaluation part, each in
    sorted order; class: a character, numbered in the same order over all alphabets. Ink is 255, paper 0; seen by the
    model as 0..1.

    root: folder that holds omniglot-py with images_background.zip and images_evaluation.zip (torchvision checks their
    md5) and the folders unpacked from them.
    size: images are resized from 105 x 105 to size x size pixels, bilinear with antialiasing: x [n, 1, size, size].
    rotations: each drawing is followed by itself turned by 90, 180 and 270 degrees (counterclockwise), as samples of
    the same class: 80 instead of 20 a character.

    ``split`` is drawn within each character: a quarter of its samples, rounded to the nearest, for the test (60 + 20,
    without rotations 15 + 5); turned copies of a training drawing can be in the test.
    """

    root: str = "data"
    size: Count = 28
    rotations: bool = True

    def load(self, seed: int) -> Dataset:
        """The set; the seed decides the split alone. Raises InputError where it is missing or damaged."""
        return read(SOURCE, self.root, lambda sets, root: self._dataset(sets, root, seed))

    def _dataset(self, sets: Any, root: Path, seed: int) -> Dataset:
        files = [file for part in PARTS for file in _drawings(sets, root, part)]
        x = np.stack([_pixels(file, self.size) for file in files])
        y, client = _numbered([file.parent for file in files]), _numbered([file.parent.parent for file in files])
        if self.rotations:
            turned = [np.rot90(x, turns, axes=(1, 2)) for turns in range(4)]
            x = np.stack(turned, axis=1).reshape(-1, self.size, self.size)
            y, client = y.repeat(4), client.repeat(4)
        return Dataset(x[:, None], y, int(y[-1]) + 1, client=client, split=_split(y, client, seed), scale=1 / 255)


def _drawings(sets: Any, root: Path, part: str) -> list[Path]:
    """PNG files PART/ALPHABET/CHARACTER/FILE of one part, sorted; torchvision's order is that of the file system."""
    # the reader's loader gets the path: alphabet and character without its private lists
    reader = sets.Omniglot(root, background=part == PARTS[0], download=False, loader=Path)
    files = sorted(reader[k][0] for k in range(len(reader)))
    with zipfile.ZipFile(root / FOLDER / f"{part}.zip") as archive:
        names = [name for name in archive.namelist() if name.startswith(f"{part}/") and name.endswith(".png")]
    if len(files) < len(names):  # torchvision checks the zip file only
        raise InputError(f"{len(files)} images in {part}, but {len(names)} in {part}.zip")
    return files


def _pixels(file: Path, size: int) -> np.ndarray:
    """[size, size] uint8, ink high."""
    from PIL import Image

    with Image.open(file) as image:
        return 255 - np.asarray(image.convert("L").resize((size, size), Image.Resampling.BILINEAR))


def _numbered(folders: list[Path]) -> np.ndarray:
    """The number of each sample's folder [n] int64, counted as they come."""
    numbers: dict[Path, int] = {}
    return np.array([numbers.setdefault(folder, len(numbers)) for folder in folders], np.int64)


def _split(y: np.ndarray, client: np.ndarray, seed: int) -> np.ndarray:
    """[n] uint8: a quarter of each class for the test, to the nearest, halves up. y, client [n]: sorted."""
    split = np.full(len(y), TRAIN, np.uint8)
    for k in range(client[-1] + 1):
        # step 1: a partition draws validation samples from step 0 of the same streams
        generator = stream(seed, Purpose.SPLIT, client=k, step=1)
        for label in np.unique(y[client == k]):
            samples = np.flatnonzero(y == label)
            split[generator.permutation(samples)[: (len(samples) + 2) // 4]] = TEST
    return split
