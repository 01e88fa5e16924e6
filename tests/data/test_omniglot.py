"""Omniglot from tiny files: alphabets are clients, characters are classes, drawings are turned, inverted and split."""

import os

import numpy as np
import pytest
from image_files import accept_omniglot, drawings, write_omniglot

from hpcfl.data import TEST, TRAIN
from hpcfl.data.omniglot import Omniglot
from hpcfl.errors import InputError
from hpcfl.partition import deal
from hpcfl.partition.natural import Natural

BACKGROUND = {"Tagalog": drawings(4, 2, 3, seed=1), "Greek": drawings(5, 4, seed=2)}
EVALUATION = {"Atlantean": drawings(2, 6, seed=3), "Ge_ez": drawings(1, seed=4)}
CHARACTERS = [*BACKGROUND["Greek"], *BACKGROUND["Tagalog"], *EVALUATION["Atlantean"], *EVALUATION["Ge_ez"]]
COUNTS = [5, 4, 4, 2, 3, 2, 6, 1]  # drawings per character, in that order
OF = [0, 0, 1, 1, 1, 2, 2, 3]  # alphabet of each character


@pytest.fixture
def root(tmp_path, monkeypatch):
    accept_omniglot(monkeypatch, write_omniglot(tmp_path, BACKGROUND, EVALUATION))
    return tmp_path


def load(root, seed=0, **options):
    return Omniglot(root=str(root), **options).load(seed)


def message(root):
    with pytest.raises(InputError) as error:
        load(root)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_alphabets_are_clients_and_characters_are_classes(root):
    data = load(root)
    n = 4 * sum(COUNTS)
    assert (data.x.shape, data.x.dtype, data.x.flags.c_contiguous) == ((n, 1, 28, 28), np.uint8, True)
    assert (data.y.dtype, data.classes, data.scale, data.shift) == (np.int64, 8, 1 / 255, 0)
    assert data.y.tolist() == np.repeat(range(8), np.multiply(COUNTS, 4)).tolist()
    np.testing.assert_array_equal(data.client, np.array(OF)[data.y])
    assert deal(Natural(), data, 0).counts(TRAIN).tolist() == np.bincount(data.client[data.split == TRAIN]).tolist()


def test_without_rotations_at_full_size_the_drawings_are_inverted(root):
    data = load(root, size=105, rotations=False)
    np.testing.assert_array_equal(data.x[:, 0], 255 - np.concatenate(CHARACTERS))
    assert data.y.tolist() == np.repeat(range(8), COUNTS).tolist()


def test_each_drawing_is_followed_by_its_rotations(root):
    plain, turned = load(root, rotations=False).x[:, 0], load(root).x[:, 0]
    for k in range(4):
        np.testing.assert_array_equal(turned[k::4], [np.rot90(image, k) for image in plain])
    assert len(np.unique(turned[:4], axis=0)) == 4


def test_resizing_is_antialiased(tmp_path, monkeypatch):
    stripes = np.full((1, 105, 105), 255, np.uint8)
    stripes[:, :, ::2] = 0
    dark = np.full((1, 105, 105), 255, np.uint8)
    dark[:, :, :45] = 0
    accept_omniglot(monkeypatch, write_omniglot(tmp_path, {"A": [stripes, dark]}, {"B": drawings(1)}))
    x = load(tmp_path, rotations=False).x[:, 0].astype(float)
    assert np.abs(x[0] - 127.5).max() < 40  # stripes of one pixel become grey; picking pixels would give 0 and 255
    assert x[1, :, :11].min() == 255  # 45 pixels of 105 are 12 of 28
    assert x[1, :, 13:].max() == 0


def test_the_order_is_not_that_of_the_file_system(root, monkeypatch):
    before, listdir = load(root), os.listdir
    for order in (sorted, lambda names: sorted(names, reverse=True)):
        monkeypatch.setattr(os, "listdir", lambda path, order=order: order(listdir(path)))
        after = load(root)
        for name in ("x", "y", "client", "split"):
            np.testing.assert_array_equal(getattr(after, name), getattr(before, name))


@pytest.mark.parametrize(("rotations", "test"), [(True, COUNTS), (False, [1, 1, 1, 1, 1, 1, 2, 0])])
def test_a_quarter_of_each_character_is_for_the_test(root, rotations, test):
    data = load(root, rotations=rotations)
    assert set(data.split.tolist()) == {TRAIN, TEST}
    assert np.bincount(data.y[data.split == TEST], minlength=8).tolist() == test


def test_the_split_is_drawn_from_the_seed(root):
    first, again, other = load(root, 3), load(root, 3), load(root, 4)
    np.testing.assert_array_equal(first.split, again.split)
    assert (first.split != other.split).any()
    np.testing.assert_array_equal(first.x, other.x)


def test_the_split_takes_every_place(root):
    hits = sum((load(root, seed).split == TEST).astype(int) for seed in range(40))
    assert hits.min() > 0  # P(one place is never drawn) = 0.75^40 = 1e-5, over 108 places 0.1 %
    assert hits.max() < 25  # mean 10, deviation 2.7


def test_an_alphabets_split_depends_on_itself_alone(root, tmp_path, monkeypatch):
    before = load(root)
    other = tmp_path / "other"
    accept_omniglot(monkeypatch, write_omniglot(other, BACKGROUND | {"Greek": drawings(3)}, EVALUATION))
    after = load(other)
    np.testing.assert_array_equal(after.split[after.client > 0], before.split[before.client > 0])


def test_equal_alphabets_are_split_differently(tmp_path, monkeypatch):
    accept_omniglot(monkeypatch, write_omniglot(tmp_path, {"A": drawings(9), "B": drawings(9)}, {"C": drawings(9)}))
    splits = load(tmp_path).split.reshape(3, -1)
    assert len(np.unique(splits, axis=0)) == 3


@pytest.mark.parametrize("missing", ["images_background.zip", "images_evaluation.zip"])
def test_missing_zip_files_are_named(root, missing):
    folder = root / "omniglot-py"
    (folder / missing).unlink()
    text = message(root)
    assert f'data.name = "omniglot", data.root = "{root}": no {missing} in {folder}; `python -c ' in text
    assert f"{root}` fetches" in text
    assert "ROOT/omniglot-py/images_background.zip" in text


def test_missing_folders_are_named(root, tmp_path):
    (root / "omniglot-py" / "images_evaluation").rename(tmp_path / "away")
    assert f"no images_evaluation in {root}/omniglot-py" in message(root)
    assert f"no images_background.zip in {root}/nowhere/omniglot-py" in message(root / "nowhere")


def test_damaged_zip_files(root):
    file = root / "omniglot-py" / "images_evaluation.zip"
    file.write_bytes(file.read_bytes() + b"x")
    text = message(root)
    assert f"the files in {root}/omniglot-py are damaged (Dataset not found or corrupted); remove that folder" in text


def test_damaged_and_missing_drawings(root):
    drawing = root / "omniglot-py" / "images_background" / "Greek" / "character02" / "0002_03.png"
    whole = drawing.read_bytes()
    for content in (b"", b"no picture", whole[: len(whole) // 2], whole[:45] + bytes(len(whole) - 45)):
        drawing.write_bytes(content)
        assert f"the files in {root}/omniglot-py are damaged (" in message(root)
    drawing.unlink()
    assert "damaged (17 images in images_background, but 18 in images_background.zip)" in message(root)
