"""L and mu of the clients' losses against dense Hessians."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import classes, least_squares, make_engine, on_ranks
from torch.autograd.functional import hessian
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from hpcfl.algorithms.async_l2gd import AsyncL2GD
from hpcfl.errors import InputError
from hpcfl.models.cnn import CNN
from hpcfl.models.dense import MLP, Linear, Logistic
from hpcfl.theory.curvature import curvature, is_linear

SIZES = [5, 1, 8, 3, 19, 2, 7]  # with and without fewer samples than parameters
WORK = AsyncL2GD(lr=0.1)


def engine_for(data, model, **options):
    return make_engine(data, WORK, model=model, **options)


def hessians(engine, data, w, objective):
    """Of each client's f_i at w, by automatic differentiation of the plain module's loss: [N, P, P]."""
    module, layout, found = engine.task.module, engine.task.layout, []
    for x, y in data:
        x, y, scale = torch.tensor(x), torch.tensor(y), len(y) if objective == "sum" else 1

        def loss(flat, x=x, y=y, scale=scale):
            outputs = functional_call(module, dict(zip(layout.names, layout.views(flat), strict=True)), (x,))
            mean = cross_entropy(outputs, y) if engine.task.classes else ((outputs[:, 0] - y) ** 2).mean() / 2
            return scale * (mean + engine.task.l2 / 2 * (flat**2).sum())

        found.append(hessian(loss, w))
    return torch.stack(found)


def extremes(engine, data, w, objective):
    """Smallest and largest eigenvalue over all clients."""
    values = torch.linalg.eigvalsh(hessians(engine, data, w, objective))
    return float(values.min()), float(values.max())


def zeros(engine):
    return torch.zeros(engine.task.layout.size, dtype=torch.float64)


every_objective = pytest.mark.parametrize("objective", ["mean", "sum"])


@every_objective
@pytest.mark.parametrize("model", [Linear(), Linear(bias=False), Linear(l2=0.3), MLP(hidden=(), l2=0.1)])
@pytest.mark.parametrize("sizes", [SIZES, [9, 30, 12]], ids=["some singular", "none singular"])
def test_linear_models_exactly(model, objective, sizes):
    data = least_squares(sizes)
    engine = engine_for(data, model)
    low, high = extremes(engine, data, zeros(engine), objective)
    found = curvature(engine, objective=objective)
    np.testing.assert_allclose(found.L, high, rtol=1e-12)
    assert found.mu == pytest.approx(low, rel=1e-9, abs=1e-12)
    assert is_linear(engine)
    assert found.mu > 0 or (model.l2 == 0 and sizes is SIZES)


@every_objective
@pytest.mark.parametrize("bias", [True, False])
def test_two_classes_with_a_reference_reach_the_bound_at_zero(objective, bias):
    data = classes(SIZES, number=2)
    engine = engine_for(data, Logistic(bias=bias, reference=True, l2=0.05), number=2)
    found = curvature(engine, objective=objective)
    _, high = extremes(engine, data, zeros(engine), objective)
    np.testing.assert_allclose(found.L, high, rtol=1e-12)
    by_formula = 0.0
    for x, _ in data:
        x, n = np.hstack([x, np.ones((len(x), 1))]) if bias else x, len(x)
        by_formula = max(by_formula, np.linalg.eigvalsh(x.T @ x / n).max() / 4 * (n if objective == "sum" else 1))
    np.testing.assert_allclose(found.L - 0.05 * (max(SIZES) if objective == "sum" else 1), by_formula, rtol=1e-12)


@every_objective
@pytest.mark.parametrize(("number", "reference"), [(2, False), (2, True), (4, False), (4, True)])
def test_logistic_models_stay_within_the_bounds(objective, number, reference):
    data = classes(SIZES, number=number)
    engine = engine_for(data, Logistic(reference=reference, l2=0.05), number=number)
    found = curvature(engine, objective=objective)
    g = torch.Generator().manual_seed(3)
    seen = []
    for scale in (0, 0.1, 1, 10):
        w = scale * torch.randn(engine.task.layout.size, generator=g, dtype=torch.float64)
        low, high = extremes(engine, data, w, objective)
        assert high <= found.L * (1 + 1e-12)
        assert low >= found.mu - 1e-9
        seen.append(high)
    assert max(seen) > found.L / 3  # no bound far above
    assert found.mu == pytest.approx(0.05 * (min(SIZES) if objective == "sum" else 1))
    if (number, reference) == (2, False):
        assert seen[0] == pytest.approx(found.L, rel=1e-12)  # Boehning's 1/2 is reached


@every_objective
@pytest.mark.parametrize(
    ("model", "number"), [(Linear(l2=0.2), None), (Logistic(), 3), (Logistic(reference=True, l2=0.2), 2)]
)
def test_one_sample_at_a_time(model, number, objective):
    """L_sample is the largest L of federations with a single sample for each client, times n_i for sums."""
    data = least_squares(SIZES, 4) if number is None else classes(SIZES, number=number)
    expected = 0.0
    for x, y in data:
        parts = [(x[k : k + 1], y[k : k + 1]) for k in range(len(y))]
        alone = curvature(engine_for(parts, model, number=number), objective="mean").L
        expected = max(expected, alone * (len(y) if objective == "sum" else 1))
    found = curvature(engine_for(data, model, number=number), objective=objective)
    assert found.L_sample == pytest.approx(expected, rel=1e-12)
    assert found.L_sample >= found.L


@pytest.mark.parametrize("ranks", [2, 3, 9])
@pytest.mark.parametrize("block", [None, 2])
def test_ranks_agree(ranks, block):
    """Ranks without clients, too."""
    data = least_squares(SIZES)
    alone = curvature(engine_for(data, Linear(l2=0.1)), objective="sum")
    for found in on_ranks(
        ranks, lambda comm: curvature(engine_for(data, Linear(l2=0.1), world=comm, block=block), objective="sum")
    ):
        for name in ("L", "mu", "L_sample"):
            assert getattr(found, name) == pytest.approx(getattr(alone, name), rel=1e-12)


def test_whatever_the_minibatch():
    data = least_squares(SIZES)
    for size in (1, 4):
        engine = make_engine(data, AsyncL2GD(lr=0.1, batch_size=size), model=Linear())
        assert curvature(engine, objective="mean") == curvature(engine_for(data, Linear()), objective="mean")


def test_single_precision():
    data = least_squares(SIZES)
    exact, found = (
        curvature(engine_for(data, Linear(l2=0.1), dtype=dtype), objective="mean")
        for dtype in (torch.float64, torch.float32)
    )
    np.testing.assert_allclose(found.L, exact.L, rtol=1e-5)
    assert found.mu == pytest.approx(exact.mu, rel=1e-4)


@pytest.mark.parametrize("model", [MLP(hidden=(4,)), CNN(channels=(2,), kernel=3, hidden=4)])
def test_other_models_are_refused(model):
    shaped = isinstance(model, CNN)
    data = [(x.reshape(-1, 1, 4, 4) if shaped else x, y) for x, y in classes(SIZES, 16)]
    engine = engine_for(data, model, number=3)
    assert not is_linear(engine)
    with pytest.raises(InputError, match=r"^algorithm.smoothness: .*linear and logistic models only; give it"):
        curvature(engine, objective="mean")
