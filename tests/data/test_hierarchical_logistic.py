"""The surrogate of the donor data: sizes, covariates, success rate and parameters are what it says they are."""

from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest

from hpcfl.data import TEST, TRAIN
from hpcfl.data.hierarchical_logistic import HierarchicalLogistic, skewed_sizes
from hpcfl.partition import deal
from hpcfl.partition.natural import Natural


@pytest.fixture(scope="module")
def donors():
    return HierarchicalLogistic().load(0)


def expected(data):
    """The probability of a success by the true parameters [n]."""
    return 1 / (1 + np.exp(-(data.x * data.truth[data.client]).sum(1)))


def test_defaults(donors):
    rows = np.bincount(donors.client)
    assert (len(rows), donors.x.dtype, donors.classes, donors.split) == (29490, np.float64, 2, None)
    assert donors.truth.shape == (29490, 3)
    assert (rows.min(), rows.max()) == (10, 400)
    assert rows.mean() == pytest.approx(60, abs=2)
    assert np.median(rows) < 45  # skewed
    assert donors.y.mean() == pytest.approx(0.94, abs=0.01)


def test_default_split_is_the_papers(donors):
    shares = deal(Natural(), donors, 0)
    rows = np.bincount(donors.client)
    np.testing.assert_array_less(abs(shares.counts(TEST) - 0.2 * rows), 0.51)
    np.testing.assert_array_equal(shares.counts(TRAIN) + shares.counts(TEST), rows)


def test_sizes_of_clusters(donors):
    sizes = np.bincount(donors.cluster)
    assert (len(sizes), sizes.sum()) == (51, 29490)
    assert (np.diff(donors.cluster) >= 0).all()
    assert (np.diff(sizes) <= 0).all()
    assert 0.06 < sizes[0] / 29490 < 0.12
    assert 1 <= sizes[-1] < 100
    np.testing.assert_array_equal(sizes, skewed_sizes(29490, 51))


@pytest.mark.parametrize(("clients", "clusters"), [(1, 1), (7, 1), (5, 5), (6, 5), (51, 51), (60, 51), (1000, 3)])
def test_no_cluster_is_empty(clients, clusters):
    sizes = skewed_sizes(clients, clusters)
    assert (len(sizes), sizes.sum(), sizes.min() >= 1) == (clusters, clients, True)
    assert (np.diff(sizes) <= 0).all()


def test_covariates(donors):
    np.testing.assert_allclose(donors.x[:, :2].mean(0), 0, atol=0.02)
    np.testing.assert_allclose(donors.x[:, :2].std(0), 1, atol=0.02)
    assert abs(np.corrcoef(donors.x[:, 0], donors.x[:, 1])[0, 1]) < 0.01
    assert (donors.x[:, 2] == 1).all()
    gifts, days = np.exp(donors.x[:, :2] * [0.85, 0.9] + [1.39, 5.3]).T
    for numbers in (gifts, days):
        np.testing.assert_allclose(numbers, numbers.round(), rtol=1e-12)
        assert numbers.min().round() >= 1
    normal = NormalDist()
    for k in (1, 2, 5):  # floor(e^z) < k, z ~ N(1.2, 1)
        assert (gifts < k + 0.5).mean() == pytest.approx(normal.cdf(np.log(k) - 1.2), abs=0.002)
    for k in (30, 200, 1000):  # ceil(e^z) <= k, z ~ N(5.3, 0.81)
        assert (days < k + 0.5).mean() == pytest.approx(normal.cdf((np.log(k) - 5.3) / 0.9), abs=0.002)


def test_labels_have_the_probabilities_of_the_truth(donors):
    p = expected(donors)
    edges = np.quantile(p, np.linspace(0, 1, 21))
    for low, high in pairwise(edges):
        of = (p >= low) & (p <= high)
        deviation = np.sqrt((p[of] * (1 - p[of])).sum())
        assert abs(donors.y[of].sum() - p[of].sum()) < 4.5 * deviation


def test_parameters(donors):
    made = HierarchicalLogistic(clients=20000, clusters=400, cluster_variance=0.5, client_variance=0.2, max_rows=10)
    data = made.load(3)
    centers = np.array([data.truth[data.cluster == j].mean(0) for j in range(400)])
    np.testing.assert_allclose((data.truth - centers[data.cluster]).var(0), 0.2, rtol=0.06)
    sizes = np.bincount(data.cluster)
    large = sizes >= 20
    np.testing.assert_allclose(centers[large].var(0, ddof=1), 0.5, rtol=0.35)
    np.testing.assert_allclose(centers[large].mean(0), [0.5, -0.5, made.intercept()], atol=0.2)


@pytest.mark.parametrize("success", [0.05, 0.5, 0.94, 0.999])
@pytest.mark.parametrize("variance", [0.0, 0.4])
def test_success(success, variance):
    """Many clusters, so that their centres average out."""
    options = {"clients": 4000, "clusters": 2000, "cluster_variance": variance, "client_variance": variance}
    data = HierarchicalLogistic(**options, success=success).load(1)
    assert data.y.mean() == pytest.approx(success, abs=0.2 * success * (1 - success) + 3e-4)


def test_without_variance_all_clients_are_the_same():
    made = HierarchicalLogistic(clients=9, clusters=2, cluster_variance=0.0, client_variance=0.0)
    np.testing.assert_array_equal(made.load(0).truth, [[0.5, -0.5, made.intercept()]] * 9)


def test_a_client_depends_on_its_number_and_its_cluster_alone():
    few, many = (HierarchicalLogistic(clients=n, clusters=1).load(5) for n in (4, 9))
    np.testing.assert_array_equal(few.truth, many.truth[:4])
    np.testing.assert_array_equal(few.x, many.x[: len(few)])
    np.testing.assert_array_equal(few.y, many.y[: len(few)])
    short = HierarchicalLogistic(clients=9, clusters=1, max_rows=10).load(5)
    np.testing.assert_array_equal(short.truth, many.truth)
    for k in range(9):
        np.testing.assert_array_equal(short.x[short.client == k], many.x[many.client == k][:10])


def test_seeds_and_streams():
    a, b, c = (HierarchicalLogistic(clients=6, clusters=3).load(seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(a.x, b.x)
    np.testing.assert_array_equal(a.y, b.y)
    assert not np.isin(a.truth, c.truth).any()
    assert len(np.unique(a.truth)) == a.truth.size
    assert HierarchicalLogistic(min_rows=7, max_rows=7, clients=5, clusters=1).load(0).x.shape == (35, 3)
