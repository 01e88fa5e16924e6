"""Async-L2GD with variance reduction as a whole: its parameters, what it refuses, where it converges to."""

from __future__ import annotations

import numpy as np
import pytest
from dense_example import Dense
from helpers import classes, least_squares, play, ready

from hpcfl.algorithms.async_l2gd import AsyncL2GD
from hpcfl.algorithms.async_l2gd_vr import AsyncL2GDVR
from hpcfl.errors import InputError
from hpcfl.models.dense import MLP, Linear, Logistic

OF = np.array([1, 0, 1, 0, 1, 2])  # cluster of each client
SIZES = np.array([4, 9, 6, 7, 5, 3])
DATA = least_squares(SIZES)
L2 = 0.2
GAMMA, P_CLUSTER = (0.7, 0.2, 1.3, 0.4, 0.9, 0.5), (0.3, 0.2, 0.4)
OPTIONS = {"gamma": GAMMA, "alpha": (0.6, 0.15, 1.0), "p_global": 0.25, "p_cluster": P_CLUSTER, "tau": (0.3, 0.8, 0.0)}


def prepared(data=DATA, model=None, number=None, **options):
    model = Linear(bias=False, l2=L2) if model is None else model
    return ready(data, AsyncL2GDVR(**{**OPTIONS, **options}), cluster=OF, model=model, number=number)[1]


@pytest.mark.parametrize("objective", ["mean", "sum"])
@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize(
    "options", [{}, {"p_refresh": 0.03}, {"gamma": 50.0}, {"alpha": 0.0, "p_global": 0.0, "tau": "balance"}]
)
def test_parameters_of_the_theory(options, objective, size):
    algorithm = prepared(objective=objective, batch_size=size, **options)
    s, k = algorithm.setting, algorithm.katyusha
    scale = SIZES if objective == "sum" else np.ones(6)
    eigenvalues = [c * (np.linalg.eigvalsh(x.T @ x / len(x)) + L2) for c, (x, _) in zip(scale, DATA, strict=True)]
    L, mu = np.max(eigenvalues), np.min(eigenvalues)
    single = max(c * ((x**2).sum(1).max() + L2) for c, (x, _) in zip(scale, DATA, strict=True))
    p = s.p_global or np.mean(P_CLUSTER)
    rho = options.get("p_refresh", p * (1 - p))
    eta = 1 / (4 * max(L + np.max(options.get("gamma", GAMMA)), s.expected_smoothness(single if size else L)))
    theta1 = min(0.5, np.sqrt(eta * mu * max(0.5, 0.5 / rho)))
    gamma = 1 / max(2 * mu, 4 * theta1 / eta)
    found = [k.eta, k.mu, k.rho, k.theta1, k.theta2, k.gamma, k.beta]
    np.testing.assert_allclose(found, [eta, mu, rho, theta1, 0.5, gamma, 1 - gamma * mu], rtol=1e-10)
    assert prepared(lr=0.001, **options).katyusha.eta == 0.001


def test_given_smoothness_and_convexity_take_the_place_of_what_the_data_say():
    algorithm = prepared(smoothness=40.0, strong_convexity=0.7)
    assert algorithm.katyusha.mu == 0.7
    assert algorithm.katyusha.eta == pytest.approx(0.25 / algorithm.setting.expected_smoothness(40.0))
    network = MLP(hidden=(2,))
    assert prepared(model=network, smoothness=40.0, strong_convexity=0.7).katyusha == algorithm.katyusha


@pytest.mark.parametrize("size", [None, 1])
def test_losses_that_are_not_strongly_convex_are_refused(size):
    """Fewer samples than parameters, or a logistic model, without a penalty."""
    two = classes(SIZES, 3, number=2)
    for data, options in (
        (DATA[:5] + least_squares([2]), {"model": Linear(bias=False)}),
        (two, {"model": Logistic(reference=True), "number": 2}),
    ):
        with pytest.raises(InputError) as error:
            prepared(data, batch_size=size, **options)
        assert str(error.value).startswith("algorithm.strong_convexity: some client's loss is not strongly convex")
        assert str(error.value).endswith("give model.l2 > 0, or a value")
        prepared(data, batch_size=size, strong_convexity=0.1, **options)
    prepared(two, model=Logistic(reference=True, l2=0.1), number=2)


MANY = np.array([0, 1, 2, 0, 1, 0, 0, 1, 2, 0])
RIDGE = least_squares([8] * 10)
STRENGTHS = (0.7, 0.2, 1.3, 0.4, 0.9, 0.5, 1.0, 0.8, 0.6, 0.3)


@pytest.mark.parametrize(
    ("options", "iterations"),
    [
        ({"p_global": 0.3, "p_cluster": 0.3, "alpha": (0.6, 0.15, 0.9)}, 600),
        ({"p_global": 0.3, "p_cluster": 0.3, "alpha": (0.6, 0.15, 0.9), "batch_size": 1}, 1800),
        ({"p_global": 0.3, "p_cluster": 0.0, "alpha": (0.6, 0.15, 0.9)}, 600),
        ({"p_global": 0.3, "p_cluster": 0.0, "alpha": 1.0}, 600),
        ({"p_global": 0.0, "p_cluster": 0.3, "alpha": 0.0}, 600),
    ],
)
def test_converges_at_a_constant_step_where_async_l2gd_stalls_at_its_noise(options, iterations):
    f = Dense(RIDGE, MANY, STRENGTHS, np.broadcast_to(options["alpha"], 3), l2=1.0)
    optimum = f.minimiser()

    def distances(o, rounds, last):
        """Squared, to the minimiser, at some of the last rounds."""
        engine, algorithm = ready(RIDGE, o, cluster=MANY, model=Linear(bias=False, l2=1.0))
        state, found = play(engine, algorithm, rounds - last), []
        for first in range(rounds - last, rounds, 10):
            state = play(engine, algorithm, 10, state, first)
            models = state.local["y" if "y" in state.local else "theta"].numpy()
            found.append(((models - optimum[engine.group.ids]) ** 2).sum())
        return algorithm, np.array(found)

    accelerated, left = distances(AsyncL2GDVR(gamma=STRENGTHS, **options), iterations, 50)
    assert left.max() < 1e-20 * (optimum**2).sum()
    full_batch = {**options, "batch_size": None}
    plain, stalled = distances(AsyncL2GD(gamma=STRENGTHS, **full_batch), 800, 500)
    assert stalled.min() > 1e8 * left.max()
    sigma2 = plain.setting.noise((f.gradients(optimum) ** 2).sum(1), *f.deviations(optimum))
    bound = 2 * plain.eta * sigma2 / accelerated.katyusha.mu
    assert bound / 100 < stalled.mean() < bound
