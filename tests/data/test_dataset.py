"""A Dataset refuses wrong arrays with one line that names the array, the place and what was expected."""

import numpy as np
import pytest

from hpcfl.data import TEST, TRAIN, VALIDATION, Dataset
from hpcfl.errors import InputError

GOOD = {
    "x": np.zeros((4, 3), np.float32),
    "y": np.array([0, 1, 2, 1]),
    "classes": 3,
    "client": np.array([0, 1, 1, 0]),
    "cluster": np.array([1, 0]),
    "split": np.array([TRAIN, VALIDATION, TEST, TRAIN], np.uint8),
    "truth": np.array([[0.5, -1.0, 2.0], [0.0, 1.0, 1.0]]),
}


def test_good_sets_pass():
    assert len(Dataset(**GOOD)) == 4
    Dataset(np.zeros((2, 1, 8, 8), np.uint8), np.array([0, 9]), 10, scale=1 / 255)
    Dataset(np.zeros((1, 1)), np.array([-2.5], np.float32), None)
    Dataset(**GOOD | {"cluster": None})
    more = {"cluster": np.array([0, 0, 0]), "truth": np.zeros((3, 1))}
    Dataset(**GOOD | more)  # a client without samples: the partition's concern


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": np.zeros(4, np.float32)}, "x has shape [4]; expected [samples, features...]"),
        ({"x": np.zeros((0, 3), np.float32)}, "x has shape [0, 3]"),
        ({"x": np.zeros((4, 0), np.float32)}, "x has shape [4, 0]"),
        ({"x": np.zeros((4, 3), np.int64)}, "x is int64; expected uint8, float32 or float64"),
        ({"x": np.zeros((5, 3))}, "y has shape [4]; expected [5]"),
        ({"x": np.array([[0, 0], [0, np.nan], [0, 0], [0, 0]])}, "x[1, 1] = nan; expected finite"),
        ({"x": np.array([[0, 0], [0, 0], [np.inf, 0], [0, 0]])}, "x[2, 0] = inf; expected finite"),
        ({"y": np.array([0, 1, 2, 3])}, "y[3] = 3; expected class labels 0..2"),
        ({"y": np.array([0, -1, 2, 1])}, "y[1] = -1; expected class labels 0..2"),
        ({"y": np.array([0, 1, 2, 1], np.int32)}, "y is int32; expected int64"),
        ({"y": np.zeros(4)}, "y is float64; expected int64"),
        ({"y": np.zeros((4, 1), np.int64)}, "y has shape [4, 1]; expected [4]"),
        ({"classes": None}, "y is int64; expected float32 or float64"),
        ({"classes": None, "y": np.array([0, 1, np.nan, 0])}, "y[2] = nan; expected finite"),
        ({"client": np.array([0, 1, 2, 0])}, "client[2] = 2; expected client numbers 0..1"),
        ({"client": np.array([0, 1, -1, 0]), "cluster": None}, "client[2] = -1; expected client numbers 0 and up"),
        ({"client": np.array([0, 1, 1])}, "client has shape [3]; expected [4]"),
        ({"client": np.zeros(4)}, "client is float64; expected int64"),
        ({"client": None}, "cluster is given without client"),
        ({"cluster": np.array([0, -2])}, "cluster[1] = -2; expected cluster numbers 0 and up"),
        ({"cluster": np.array([[0, 1]])}, "cluster has shape [1, 2]"),
        ({"split": np.array([0, 1, 2, 3], np.uint8)}, "split[3] = 3; expected 0 train, 1 validation, 2 test: 0..2"),
        ({"split": np.array([0, 1, 2, 0])}, "split is int64; expected uint8"),
        ({"scale": float("nan")}, "scale = nan"),
        ({"client": None, "cluster": None}, "truth is given without client"),
        ({"truth": np.zeros((2, 3), np.float32)}, "truth is float32; expected float64"),
        ({"truth": np.zeros((3, 3))}, "truth has shape [3, 3]; expected [2, parameters], a row per natural client"),
        ({"truth": np.zeros((1, 3)), "cluster": None}, "truth has shape [1, 3]; expected [2, parameters]"),
        ({"truth": np.zeros(2)}, "truth has shape [2]; expected [2, parameters]"),
        ({"truth": np.zeros((2, 0))}, "truth has shape [2, 0]; expected [2, parameters]"),
        ({"truth": np.array([[0, 1], [np.inf, 2]])}, "truth[1, 0] = inf; expected finite"),
    ],
)
def test_wrong_arrays_are_named(wrong, message):
    with pytest.raises(InputError) as error:
        Dataset(**GOOD | wrong)
    assert str(error.value).startswith("data: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
