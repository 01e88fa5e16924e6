"""The user's own file: HDF5 and NPZ give the same set, and every mistake is one line that names file and array."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcfl.data import TEST, TRAIN, VALIDATION
from hpcfl.data.file import File
from hpcfl.errors import InputError

N = 6
X = np.arange(N * 2, dtype=np.float32).reshape(N, 2)
Y = np.array([0, 1, 2, 0, 1, 2])


def npz(path, **arrays):
    np.savez(path.with_suffix(".npz"), **arrays)
    return str(path.with_suffix(".npz"))


def hdf5(path, **arrays):
    with h5py.File(path.with_suffix(".h5"), "w") as f:
        for name, values in arrays.items():
            values = np.asarray(values)
            f[name] = values.astype(object) if values.dtype.kind == "U" else values
    return str(path.with_suffix(".h5"))


both = pytest.mark.parametrize("write", [npz, hdf5])


@both
def test_all_arrays(tmp_path, write):
    path = write(
        tmp_path / "d",
        x=X,
        y=Y,
        client=np.array(["paris", "oslo", "oslo", "rome", "paris", "rome"]),
        cluster=np.array(["south", "north", "north", "south", "south", "south"]),
        split=np.array(["train", "test", "train", "validation", "train", "train"]),
    )
    data = File(path).load(0)
    np.testing.assert_array_equal(data.x, X)
    np.testing.assert_array_equal(data.y, Y)
    assert data.client.tolist() == [1, 0, 0, 2, 1, 2]  # oslo, paris, rome
    assert data.cluster.tolist() == [0, 1, 1]  # north, south
    assert data.split.tolist() == [TRAIN, TEST, TRAIN, VALIDATION, TRAIN, TRAIN]
    assert (data.classes, data.scale, data.shift, data.x.dtype) == (3, 1.0, 0.0, np.float32)


@both
def test_numbers_as_ids_and_split(tmp_path, write):
    client, cluster = np.array([70, -5, 70, 9, 9, 70]), np.array([3, 8, 3, 3, 3, 3], np.uint8)
    data = File(write(tmp_path / "d", x=X, y=Y, client=client, cluster=cluster, split=[0, 0, 2, 1, 2, 0])).load(0)
    assert data.client.tolist() == [2, 0, 2, 1, 1, 2]
    assert data.cluster.tolist() == [1, 0, 0]
    assert data.split.tolist() == [0, 0, 2, 1, 2, 0]
    assert data.split.dtype == np.uint8


@both
def test_kinds_of_numbers(tmp_path, write):
    def load(**options):
        x, y = options.pop("x", X), options.pop("y", Y)
        return File(write(tmp_path / "d", x=x, y=y), **options).load(0)

    for given, kept in ((np.uint8, np.uint8), (np.float64, np.float64), (bool, np.float32), (np.float16, np.float32)):
        assert load(x=X.astype(given)).x.dtype == kept
    assert load(x=X.astype(np.int16)).x.dtype == np.float32
    assert load(x=X.astype(np.int64)).x.dtype == np.float64
    np.testing.assert_array_equal(load(x=X.astype(">f4")).x, X)
    assert load(x=X.astype(np.uint8)).scale == 1 / 255
    assert load(x=X.astype(np.uint8), scale=1.0, shift=-3.0).scale == 1
    assert load(x=X, shift=-3.0).shift == -3
    assert load(y=Y.astype(np.uint8)).y.dtype == np.int64
    assert load(y=Y > 1).classes == 2
    regression = load(y=Y.astype(np.float32))
    assert (regression.classes, regression.y.dtype) == (None, np.float32)


def test_byte_strings(tmp_path):
    data = File(npz(tmp_path / "d", x=X, y=Y, client=np.array([b"b", b"a", b"a", b"b", b"b", b"b"]))).load(0)
    assert data.client.tolist() == [1, 0, 0, 1, 1, 1]
    with h5py.File(tmp_path / "fixed.h5", "w") as f:
        f["x"], f["y"], f["client"] = X, Y, np.array([b"b", b"a", b"a", b"b", b"b", b"b"])
    assert File(str(tmp_path / "fixed.h5")).load(0).client.tolist() == [1, 0, 0, 1, 1, 1]


@both
@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": None}, 'no array "x"; the file has: y'),
        ({"y": None}, 'no array "y"; the file has: x'),
        ({"y": Y[:5]}, "y has shape [5]; expected [6]"),
        ({"y": Y[:, None]}, "y has shape [6, 1]; expected [samples]"),
        ({"y": Y[:0]}, "y has shape [0]; expected [samples], at least one"),
        ({"y": np.array(list("abcabc"))}, "expected integers (class labels 0, 1, ...) or floats"),
        ({"y": Y - 1}, "y[0] = -1; expected class labels 0, 1, ..."),
        ({"y": Y + 2**62}, f"y[2] = {2**62 + 2}; expected class labels 0, 1, ..., below 1,000,000"),
        ({"y": Y.astype(np.uint64) + np.uint64(2**63)}, "expected class labels 0, 1, ..., below 1,000,000"),
        ({"y": np.where(Y == 2, 70_000, Y)}, "y has labels up to 70000, but only 3 different ones; number the classes"),
        ({"y": np.where(Y == 2, np.nan, Y)}, "y[2] = nan; expected finite"),
        ({"x": np.where(X == 5, np.nan, X)}, "x[2, 1] = nan; expected finite"),
        ({"x": X + 1j}, "x is complex64; expected numbers"),
        ({"x": X[:, 0]}, "x has shape [6]; expected [samples, features...]"),
        ({"client": Y[:5]}, "client has shape [5]; expected [6], one per sample"),
        ({"client": Y.astype(float)}, "client is float64; expected integers or strings"),
        ({"cluster": Y}, 'array "cluster" without "client"'),
        (
            {"client": Y, "cluster": np.array([0, 1, 0, 0, 5, 0])},
            "client 1 is in cluster 1 and in 5; expected one cluster per client",
        ),
        (
            {"client": np.array(list("abcabc")), "cluster": np.array(list("xyxxyz"))},
            "client 'c' is in cluster 'x' and in 'z'; expected one cluster per client",
        ),
        ({"split": [0, 1, 2, 3, 0, 0]}, "split[3] = 3; expected 0, 1, 2"),
        ({"split": np.array(["train"] * 5 + ["tset"])}, "split[5] = 'tset'; expected 'train', 'validation', 'test'"),
        ({"split": np.zeros(6)}, "split is float64; expected 0, 1, 2 or the strings train, validation, test"),
        ({"clients": Y}, 'array "clients" is not known; rename it "client" if it is that'),
    ],
)
def test_wrong_arrays(tmp_path, write, arrays, message):
    path = write(tmp_path / "d", **{k: v for k, v in ({"x": X, "y": Y} | arrays).items() if v is not None})
    check(path, message)


def check(path, message):
    with pytest.raises(InputError) as error:
        File(str(path)).load(0)
    assert str(error.value).startswith(f'data.path = "{path}": ')
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_wrong_files(tmp_path):
    check(tmp_path / "none.h5", "no such file")
    check(tmp_path, "a folder (")
    text = tmp_path / "d.csv"
    text.write_text("x,y\n1,2\n")
    check(text, "neither HDF5 nor NPZ; expected a file written by h5py or numpy.savez")
    (tmp_path / "empty.npz").touch()
    check(tmp_path / "empty.npz", "neither HDF5 nor NPZ")
    np.save(tmp_path / "one.npy", X)
    check(tmp_path / "one.npy", "neither HDF5 nor NPZ")


def test_damaged_files(tmp_path):
    rng = np.random.default_rng(0)
    good = {"x": rng.random((2000, 3)), "y": rng.integers(3, size=2000)}
    for write in (npz, hdf5):
        path = write(tmp_path / "d", **good)
        content = Path(path).read_bytes()
        short = tmp_path / f"short{Path(path).suffix}"
        short.write_bytes(content[: len(content) // 2])
        check(short, "NPZ" if write is npz else "cannot be read: ")
    content = bytearray(Path(npz(tmp_path / "d", **good)).read_bytes())
    content[20000:20100] = bytes(100)
    (tmp_path / "flipped.npz").write_bytes(content)
    check(tmp_path / "flipped.npz", "cannot be read: ")


def test_objects_and_groups(tmp_path):
    objects = np.empty(N, object)
    objects[:] = [{}] * N
    check(npz(tmp_path / "o", x=X, y=Y, client=objects), "cannot be read: ")
    with h5py.File(tmp_path / "g.h5", "w") as f:
        f["x/inner"], f["y"] = X, Y
    check(tmp_path / "g.h5", '"x" is not an array')


def test_home_and_relative_paths(tmp_path, monkeypatch):
    npz(tmp_path / "d", x=X, y=Y)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert len(File("~/d.npz").load(0)) == len(File("d.npz").load(0)) == N
