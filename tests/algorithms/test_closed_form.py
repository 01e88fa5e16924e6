"""FedAvg and local training on quadratic clients (least squares), whose minimisers and recursions are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import least_squares, least_squares_gradient, make_engine, minibatch, personal, play

from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.local import Local
from hpcfl.models.dense import Linear
from hpcfl.schedules import Exponential, Theory

SIZES = [4, 9, 6, 17, 5]
DATA = least_squares(SIZES)
COHORTS = [[0, 2, 3], [1, 4], [0, 1, 2, 3, 4], [3], [0, 4]]
SHARES = {"client": np.full(5, 1 / 5), "sample": np.array(SIZES) / sum(SIZES)}


def fedavg(cohorts, tau, eta, weighting="sample", size=None, l2=0.0, server_lr=1.0, momentum=0.0):
    """The global models after each round, by the formulas of the paper; eta(round, t) is the step size."""
    w, u, models = np.zeros(3), np.zeros(3), []
    for r, cohort in enumerate(cohorts):
        p = np.array([SIZES[i] if weighting == "sample" else 1.0 for i in cohort])
        new = np.zeros(3)
        for i, share in zip(cohort, p / p.sum(), strict=True):
            mine = w
            for t in range(tau):
                mine = mine - eta(r, t) * least_squares_gradient(mine, *minibatch(DATA, i, r, t, size), l2)
            new = new + share * mine
        u = momentum * u + (new - w)
        w = w + server_lr * u
        models.append(w)
    return models


def rounds_of(algorithm, cohorts, **options):
    """The global models after each round, by hpcfl."""
    engine = make_engine(DATA, algorithm, **options)
    models, state = [], algorithm.init(engine.task, engine.group)
    for r, cohort in enumerate(cohorts):
        state = play(engine, algorithm, [cohort], state, first=r)
        models.append(algorithm.global_model(state).numpy().copy())
    return models


@pytest.mark.parametrize("weighting", ["client", "sample"])
def test_one_full_batch_step_is_gradient_descent_on_the_mean_objective(weighting):
    models = rounds_of(FedAvg(lr=0.5, weighting=weighting), [None] * 120)
    w = np.zeros(3)
    for found in models:
        gradients = [least_squares_gradient(w, x, y) for x, y in DATA]
        w = w - 0.5 * sum(p * g for p, g in zip(SHARES[weighting], gradients, strict=True))
        np.testing.assert_allclose(found, w, rtol=1e-10, atol=1e-12)

    # its minimiser: least squares over all samples, each with the weight of its client divided by the client's size
    scale = np.repeat(np.sqrt(SHARES[weighting] / SIZES), SIZES)
    x, y = (np.concatenate([client[k] for client in DATA]) for k in (0, 1))
    np.testing.assert_allclose(w, np.linalg.lstsq(x * scale[:, None], y * scale)[0], rtol=1e-8)
    if weighting == "sample":
        np.testing.assert_allclose(w, np.linalg.lstsq(x, y)[0], rtol=1e-8)


def test_local_training_finds_every_clients_own_solution():
    data = least_squares([30, 20, 45])
    algorithm = Local(lr=0.4, local_steps=60)
    engine = make_engine(data, algorithm)
    models = personal(engine, algorithm, play(engine, algorithm, 10), 10).numpy()
    for i, w in zip(engine.group.ids, models, strict=True):
        np.testing.assert_allclose(w, np.linalg.lstsq(*data[i])[0], rtol=1e-8)


def test_clients_that_sit_out_do_not_train():
    algorithm = Local(lr=0.1, local_steps=2)
    engine = make_engine(DATA, algorithm)
    models = personal(engine, algorithm, play(engine, algorithm, [[1, 3], [3]]), 2).numpy()
    for i, steps in enumerate([0, 2, 0, 4, 0]):
        w = np.zeros(3)
        for _ in range(steps):
            w = w - 0.1 * least_squares_gradient(w, *DATA[i])
        np.testing.assert_allclose(models[i], w, rtol=1e-12)


@pytest.mark.parametrize("weighting", ["client", "sample"])
@pytest.mark.parametrize(("server_lr", "momentum"), [(1.0, 0.0), (0.6, 0.0), (1.0, 0.5), (0.7, 0.9)])
def test_server_step(weighting, server_lr, momentum):
    algorithm = FedAvg(lr=0.1, local_steps=2, weighting=weighting, server_lr=server_lr, server_momentum=momentum)
    expected = fedavg(COHORTS, 2, lambda r, t: 0.1, weighting, server_lr=server_lr, momentum=momentum)
    np.testing.assert_allclose(rounds_of(algorithm, COHORTS), expected, rtol=1e-10)


@pytest.mark.parametrize("tau", [1, 3, 8])
@pytest.mark.parametrize("size", [None, 1, 4, 7])
def test_local_steps(tau, size):
    """Up to several epochs of uneven clients; the short last batch of an epoch keeps its true size."""
    algorithm = FedAvg(lr=0.1, local_steps=tau, batch_size=size)
    np.testing.assert_allclose(
        rounds_of(algorithm, COHORTS), fedavg(COHORTS, tau, lambda r, t: 0.1, size=size), rtol=1e-10
    )


@pytest.mark.parametrize(
    ("schedule", "eta"),
    [
        (Exponential(decay=0.8), lambda r, t: 0.1 * 0.8**r),
        (Theory(mu=2.0, a=100.0), lambda r, t: 16 / (2.0 * (3 * r + t + 100.0))),  # 3 local steps per round
    ],
)
def test_schedules_and_l2(schedule, eta):
    algorithm = FedAvg(lr=0.1, local_steps=3, lr_schedule=schedule)
    found = rounds_of(algorithm, COHORTS, model=Linear(bias=False, l2=0.2))
    np.testing.assert_allclose(found, fedavg(COHORTS, 3, eta, l2=0.2), rtol=1e-10)


def test_float32_agrees_with_float64():
    algorithm = FedAvg(lr=0.1, local_steps=3, batch_size=4)
    a, b = (rounds_of(algorithm, COHORTS, dtype=dtype)[-1] for dtype in (torch.float32, torch.float64))
    assert a.dtype == np.float32
    np.testing.assert_allclose(a, b, rtol=1e-4)
