"""The synthetic set follows its recipe, and a client depends on the seed and its number only."""

import numpy as np
import pytest

from hpcfl.data.synthetic import Synthetic
from hpcfl.errors import InputError


def of_client(data, k):
    return data.x[data.client == k], data.y[data.client == k]


def test_defaults_are_the_recipes():
    data = Synthetic(clients=20).load(0)
    sizes = np.bincount(data.client)
    assert data.x.shape == (sizes.sum(), 60)
    assert (data.x.dtype, data.classes, data.split) == (np.float32, 10, None)
    assert (sizes % 5 == 0).all()
    assert sizes.min() >= 250
    assert len(set(sizes.tolist())) > 10


def test_number_of_samples_is_lognormal():
    sizes = np.bincount(Synthetic(clients=400, dim=1, classes=2).load(1).client)
    logs = np.log(sizes / 5 - 50 + 0.5)  # floor(e^z) + 1/2
    assert np.median(logs) == pytest.approx(4, abs=0.3)
    assert np.quantile(logs, 0.84) == pytest.approx(6, abs=0.5)


def test_a_client_does_not_depend_on_the_number_of_clients_nor_its_models_on_the_samples():
    few, many = Synthetic(clients=3).load(5), Synthetic(clients=8).load(5)
    for k in range(3):
        for a, b in zip(of_client(few, k), of_client(many, k), strict=True):
            np.testing.assert_array_equal(a, b)
    some = Synthetic(clients=2, samples=40).load(5)
    assert np.bincount(some.client).tolist() == [40, 40]
    for k in range(2):  # the same inputs from the same model, as far as they go
        np.testing.assert_array_equal(of_client(some, k)[0], of_client(few, k)[0][:40])
        np.testing.assert_array_equal(of_client(some, k)[1], of_client(few, k)[1][:40])


def test_seeds():
    a, b, c = (Synthetic(clients=2, samples=10).load(seed).x for seed in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert not np.isin(a, c).any()


def test_inputs_have_the_recipes_moments():
    dim, samples = 20, 4000
    data = Synthetic(clients=40, dim=dim, classes=3, samples=samples, beta=9.0).load(0)
    means = np.array([of_client(data, k)[0].mean(0) for k in range(40)])  # v_k
    variances = np.array([of_client(data, k)[0].var(0) for k in range(40)]).mean(0)
    np.testing.assert_allclose(variances, np.arange(1, dim + 1) ** -1.2, rtol=0.05)
    assert means.mean(1).var() == pytest.approx(9 + 1 / dim, rel=0.5)  # B_k ~ N(0, beta): beta is a variance
    assert means.var(1, ddof=1).mean() == pytest.approx(1, rel=0.15)  # v_k ~ N(B_k, 1)


def test_alpha_changes_no_label():
    """As in the published recipe: u_k is added to the logits of all classes."""
    a, b = (Synthetic(alpha=alpha, clients=3, samples=500).load(3) for alpha in (0.0, 9.0))
    np.testing.assert_array_equal(a.x, b.x)
    np.testing.assert_array_equal(a.y, b.y)


@pytest.mark.parametrize("classes", [1, 2, 7])
def test_labels_are_a_linear_models(classes):
    """The labels of one client can be told apart by a linear model: least squares on them is nearly perfect."""
    data = Synthetic(clients=1, samples=4000, dim=4, classes=classes).load(2)
    w = np.linalg.lstsq(np.c_[data.x, np.ones(4000)], np.eye(classes)[data.y], rcond=None)[0]
    assert ((np.c_[data.x, np.ones(4000)] @ w).argmax(1) == data.y).mean() > 0.8


def test_iid_clients_share_one_model_and_one_input_distribution():
    data = Synthetic(alpha=0.0, beta=0.0, iid=True, clients=5, samples=2000).load(0)
    means = np.array([of_client(data, k)[0].mean(0) for k in range(5)])
    assert abs(means).max() < 0.15
    shares = np.array([np.bincount(of_client(data, k)[1], minlength=10) for k in range(5)]) / 2000
    assert np.ptp(shares, axis=0).max() < 0.07
    apart = Synthetic(alpha=0.0, beta=0.0, clients=5, samples=2000).load(0)
    shares = np.array([np.bincount(of_client(apart, k)[1], minlength=10) for k in range(5)]) / 2000
    assert np.ptp(shares, axis=0).max() > 0.3


def test_iid_needs_zero_heterogeneity():
    with pytest.raises(InputError, match=r"data\.iid = true with data\.alpha = 1\.0.*need alpha = 0 and beta = 0"):
        Synthetic(iid=True)
