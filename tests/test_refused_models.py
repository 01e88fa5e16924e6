"""Modules that cannot be one flat vector per client, and backends that a model has not: one clear line each."""

from __future__ import annotations

import pytest
import torch
from helpers import CPU
from torch import nn
from torch.nn.functional import dropout

from hpcfl.errors import InputError
from hpcfl.task import Task


class Functional(nn.Module):
    """Random without torch.nn.Dropout."""

    def __init__(self, p):
        super().__init__()
        self.p, self.layer, self.out = p, nn.Linear(3, 50), nn.Linear(50, 2)

    def forward(self, x):
        return self.out(dropout(self.layer(x), self.p, self.training))


def refused(module, shape=(3,), classes=2, backend="auto"):
    with pytest.raises(InputError) as caught:
        Task(module, shape, classes, backend=backend, device=CPU, dtype=torch.float32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_running_statistics_are_refused():
    message = refused(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    assert "BatchNorm" in message
    assert "use GroupNorm instead" in message
    Task(nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.Linear(4, 2)), (3,), 2, device=CPU, dtype=torch.float32)


class BatchMean(nn.Module):
    """Subtracts it, without any buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        x = self.layer(x)
        return x - x.mean(0)


@pytest.mark.parametrize("middle", [nn.BatchNorm1d(4, track_running_stats=False), None])
def test_what_depends_on_the_other_samples_is_refused(middle):
    """Padded samples would count, and an evaluation's pieces."""
    module = BatchMean() if middle is None else nn.Sequential(nn.Linear(3, 4), middle, nn.Linear(4, 2))
    message = refused(module)
    assert "depends on the other samples of the batch" in message
    assert "use GroupNorm instead" in message


@pytest.mark.parametrize("p", [0.5, 0.001])
def test_functional_dropout_is_refused(p):
    """Also one that drops so little that a pass over two samples seldom shows it."""
    for seed in range(10):
        torch.manual_seed(seed)
        assert "torch.nn.Dropout" in refused(Functional(p))


@pytest.mark.parametrize("layer", [nn.Dropout1d(0.5), nn.AlphaDropout(0.5), nn.RReLU()], ids=lambda x: type(x).__name__)
def test_other_random_layers_are_refused(layer):
    for seed in range(10):
        torch.manual_seed(seed)
        assert "torch.nn.Dropout" in refused(nn.Sequential(nn.Linear(3, 50), layer, nn.Linear(50, 2)))


def test_wrong_output_shape_is_refused():
    assert "outputs have shape (3,) per sample, expected (2,)" in refused(nn.Linear(3, 3))
    assert "outputs have shape (2,) per sample, expected (1,)" in refused(nn.Linear(3, 2), classes=None)
    Task(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), (3,), None, device=CPU, dtype=torch.float32)


def test_wrong_input_shape_is_refused():
    assert "cannot be applied to inputs of shape (3,)" in refused(nn.Linear(4, 2))


def test_a_model_without_parameters_is_refused():
    assert "no trainable parameters" in refused(nn.Identity(), shape=(2,))


def test_a_backend_that_the_model_has_not_is_refused():
    assert 'run.backend = "model"' in refused(nn.Linear(3, 2), backend="model")
