"""APFL of a network: alpha = 0 is FedAvg, alpha = 1 local training, to the bit; gradients by finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import classes, make_engine, personal, play, same_bits

from hpcfl.algorithm import State
from hpcfl.algorithms.apfl import APFL
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.local import Local
from hpcfl.models import Spec
from hpcfl.models.dense import MLP
from hpcfl.schedules import Exponential

SIZES = [4, 9, 6, 17, 5]
COHORTS = [[0, 2, 3], [1, 3], [0, 2, 3], [3], None]


def network() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MLP(hidden=(6,)).build(Spec((4,), 3))


LIMIT = {"lr": 0.07, "lr_schedule": Exponential(decay=0.9), "local_steps": 4, "batch_size": 3}
DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["paper", "released"])
def test_alpha_0_is_fedavg_to_the_bit(dtype, variant):
    options = {"model": network(), "number": 3, "dtype": dtype}
    models = []
    for algorithm in (
        APFL(**LIMIT, alpha=0.0, alpha_update="off", variant=variant),
        FedAvg(**LIMIT, weighting="client"),
    ):
        engine = make_engine(classes(SIZES), algorithm, **options)
        state = play(engine, algorithm, COHORTS)
        models.append(algorithm.global_model(state))
        if isinstance(algorithm, APFL):  # whose personal models are the global one
            assert all(same_bits(row, models[0]) for row in personal(engine, algorithm, state, len(COHORTS)))
    assert same_bits(*models)


@pytest.mark.parametrize("dtype", DTYPES)
def test_alpha_1_is_local_training_to_the_bit(dtype):
    options = {"model": network(), "number": 3, "dtype": dtype}
    models = []
    for algorithm in (APFL(**LIMIT, alpha=1.0, alpha_update="off"), Local(**LIMIT)):
        engine = make_engine(classes(SIZES), algorithm, **options)
        models.append(personal(engine, algorithm, play(engine, algorithm, COHORTS), len(COHORTS)))
    assert same_bits(*models)


def test_gradients_of_alpha_and_v_by_finite_differences():
    """Of f_i(alpha v + (1 - alpha) w) for a network; one round with one step of size lr shows the gradients."""
    lr, h = 1e-3, 1e-5
    algorithm = APFL(lr=lr, alpha=0.4)
    engine = make_engine(classes([6, 6, 6]), algorithm, model=network(), number=3)
    g = torch.Generator().manual_seed(3)
    parameters = engine.task.layout.size
    w = torch.randn(parameters, generator=g, dtype=torch.float64)
    v, a = torch.randn(3, parameters, generator=g, dtype=torch.float64), torch.full((3, 1), 0.4, dtype=torch.float64)
    batch = next(engine.blocks(engine.everyone, {}, 0)).batch(0)

    def f(a, v):
        return engine.task.gradient(a * v + (1 - a) * w, batch)[0]

    new = play(engine, algorithm, 1, State({"w": w}, {"v": v.clone(), "alpha": a.clone()})).local
    np.testing.assert_allclose((a - new["alpha"])[:, 0] / lr, (f(a + h, v) - f(a - h, v)) / (2 * h), rtol=1e-6)
    for _ in range(5):
        direction = torch.randn(3, parameters, generator=g, dtype=torch.float64)
        slope = (f(a, v + h * direction) - f(a, v - h * direction)) / (2 * h)
        np.testing.assert_allclose(((v - new["v"]) / lr * direction).sum(1), slope, rtol=1e-6)
