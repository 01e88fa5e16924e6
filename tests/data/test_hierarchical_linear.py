"""The hierarchical linear model follows its definition, and nothing of a client depends on what it should not."""

import numpy as np
import pytest

from hpcfl.data import TEST, TRAIN
from hpcfl.data.hierarchical_linear import HierarchicalLinear
from hpcfl.errors import InputError
from hpcfl.partition import deal
from hpcfl.partition.natural import Natural


def residuals(data):
    return data.y - (data.x * data.truth[data.client]).sum(1)


def of_client(data, k, split=TRAIN):
    mine = data.client == k if data.split is None else (data.client == k) & (data.split == split)
    return data.x[mine], data.y[mine]


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


def test_defaults_are_the_papers():
    data = HierarchicalLinear().load(0)
    assert (data.x.shape, data.x.dtype, data.y.dtype, data.classes) == ((44000, 20), np.float64, np.float64, None)
    assert (data.truth.shape, data.cluster.tolist()) == ((400, 20), np.repeat(range(20), 20).tolist())
    shares = deal(Natural(), data, 0)
    assert shares.counts(TRAIN).tolist() == [10] * 400
    assert shares.counts(TEST).tolist() == [100] * 400
    np.testing.assert_array_equal(shares.cluster, data.cluster)


def test_without_test_observations():
    data = HierarchicalLinear(test_observations=0, clusters=2).load(0)
    assert data.split is None
    assert deal(Natural(test_share=0.0), data, 0).counts(TRAIN).tolist() == [10] * 40


def test_inputs_and_noise():
    data = HierarchicalLinear(noise_variance=0.25, test_observations=90).load(1)
    n = len(data)
    assert abs(data.x.mean(0)).max() < 5 / np.sqrt(n)
    np.testing.assert_allclose(data.x.T @ data.x / n, np.eye(20), atol=5 * np.sqrt(2 / n))
    e = residuals(data)
    assert abs(e.mean()) < 5 * 0.5 / np.sqrt(n)
    assert e.var() == pytest.approx(0.25, rel=5 * np.sqrt(2 / n))
    assert abs(data.x.T @ e / n).max() < 5 * 0.5 / np.sqrt(n)
    assert (e**3).mean() == pytest.approx(0, abs=5 * np.sqrt(15) * 0.5**3 / np.sqrt(n))
    silent = HierarchicalLinear(noise_variance=0.0).load(1)
    np.testing.assert_allclose(residuals(silent), 0, atol=1e-13)


def test_parameters_have_the_variances_of_their_clusters():
    clusters, clients, dim = 60, 30, 40
    variance = tuple(np.linspace(0.0, 4.0, clusters))
    center = tuple(np.linspace(-3.0, 3.0, dim))
    made = HierarchicalLinear(clusters, clients, dim, 1, 0, center, cluster_variance=2.0, client_variance=variance)
    theta = made.load(2).truth.reshape(clusters, clients, dim)
    within = theta.var(1, ddof=1).mean(1)  # dim * (clients - 1) degrees of freedom
    np.testing.assert_allclose(within, variance, rtol=5 * np.sqrt(2 / dim / (clients - 1)), atol=1e-15)
    means = theta.mean(1) - center  # N(0, 2 + s_j^2 / clients) [K, dim]
    scaled = means / np.sqrt(2 + np.array(variance)[:, None] / clients)
    assert (scaled**2).mean() == pytest.approx(1, abs=5 * np.sqrt(2 / scaled.size))
    assert abs(scaled.mean(0)).max() < 5 / np.sqrt(clusters)


def test_without_variance_all_are_the_center():
    options = {"clusters": 3, "clients_per_cluster": 4, "dim": 2, "observations": 3}
    same = HierarchicalLinear(**options, cluster_variance=0.0, client_variance=0.0, center=(1.0, -2.0)).load(5)
    np.testing.assert_array_equal(same.truth, [[1.0, -2.0]] * 12)
    clustered = HierarchicalLinear(**options, client_variance=0.0, center=3.0).load(5)
    assert np.unique(clustered.truth, axis=0).shape == (3, 2)
    np.testing.assert_array_equal(clustered.truth, np.repeat(clustered.truth[::4], 4, axis=0))
    shifted = HierarchicalLinear(**options, center=3.0).load(5).truth - HierarchicalLinear(**options).load(5).truth
    np.testing.assert_allclose(shifted, 3.0)


def test_a_client_does_not_depend_on_the_number_of_clusters():
    few, many = (HierarchicalLinear(clusters=k, clients_per_cluster=3, dim=5).load(7) for k in (2, 6))
    np.testing.assert_array_equal(few.truth, many.truth[:6])
    for k in range(6):
        for split in (TRAIN, TEST):
            assert_same(of_client(few, k, split), of_client(many, k, split))


def test_fewer_observations_are_the_first_ones():
    options = {"clusters": 2, "clients_per_cluster": 3, "dim": 4}
    some = HierarchicalLinear(**options, observations=5).load(7)
    more = HierarchicalLinear(**options, observations=10).load(7)
    untested = HierarchicalLinear(**options, observations=10, test_observations=0).load(7)
    np.testing.assert_array_equal(some.truth, more.truth)
    for k in range(6):
        assert_same(of_client(some, k), [column[:5] for column in of_client(more, k)])
        assert_same(of_client(some, k, TEST), of_client(more, k, TEST))
        assert_same(of_client(untested, k), of_client(more, k))


def test_streams_do_not_mix():
    data = HierarchicalLinear(clusters=3, clients_per_cluster=2, dim=3).load(3)
    numbers = np.concatenate([data.x.ravel(), data.truth.ravel(), data.y, residuals(data)])
    assert len(np.unique(numbers.round(9))) == len(numbers)  # no number is drawn twice, for whatever purpose
    other = HierarchicalLinear(clusters=3, clients_per_cluster=2, dim=3).load(4)
    assert not np.isin(data.x, other.x).any()
    np.testing.assert_array_equal(HierarchicalLinear(clusters=3, clients_per_cluster=2, dim=3).load(3).x, data.x)


def test_errors_of_least_squares_are_those_of_the_published_design():
    """Mean of ||estimate - truth||, 25 observations: 2.082 for each client alone (sd 0.03), 6.098 pooled (sd 0.12)."""
    data = HierarchicalLinear(observations=25, test_observations=0).load(0)
    local = np.array([np.linalg.lstsq(*of_client(data, k), rcond=None)[0] for k in range(400)])
    assert np.linalg.norm(local - data.truth, axis=1).mean() == pytest.approx(2.082, abs=0.15)
    pooled = np.linalg.lstsq(data.x, data.y, rcond=None)[0]
    assert np.linalg.norm(pooled - data.truth, axis=1).mean() == pytest.approx(6.098, abs=0.5)


def test_wrong_lengths():
    with pytest.raises(
        InputError, match=r"^data\.center: 1 values, expected one, or one per coordinate \(data\.dim = 20\)$"
    ):
        HierarchicalLinear(center=(0.0,))
    HierarchicalLinear(center=(0.0,), dim=1, client_variance=(1.0,), clusters=1)
