"""Keyed dropout: masks that are a pure function of (seed, client, round, step), and are what dropout should be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import CPU, classes, make_engine, same_bits
from torch import nn

from hpcfl.algorithms.local import Local
from hpcfl.batch import Batch
from hpcfl.task import Task

P = 0.3
WIDTH = 400


class Masks(nn.Module):
    """Its loss's gradient by the weights is the mask: outputs [B, 1] = sum of dropout(w) over the features."""

    def __init__(self, layers: int = 1):
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDTH))
        self.drop = nn.ModuleList(nn.Dropout(P) for _ in range(layers))

    def forward(self, x):
        h = self.w * torch.ones_like(x[:, :1])
        return torch.cat([layer(h) for layer in self.drop], 1).sum(1, keepdim=True)


def masks(keys, backend="vmap", samples=1) -> torch.Tensor:
    """[C, WIDTH] the factor of every weight, of clients with these keys; 1/(1-p) or 0."""
    task = Task(Masks(), (2,), None, backend=backend, device=CPU, dtype=torch.float64)
    clients = len(keys)
    w = torch.ones(clients, WIDTH, dtype=torch.float64)
    zeros = torch.zeros(clients, samples, dtype=torch.float64)
    batch = Batch(zeros[..., None].expand(-1, -1, 2), zeros, torch.ones_like(zeros), clients, torch.as_tensor(keys))
    loss, gradient = task.gradient(w, batch)  # of (output - 0)^2 / 2 by w: output * mask
    return gradient / (2 * loss).sqrt()[:, None] if samples == 1 else gradient


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_same_key_same_mask(backend):
    found = masks([5, 6, 5, 2**62], backend)
    assert same_bits(found[0], found[2])
    assert not same_bits(found[0], found[1])
    np.testing.assert_allclose(found, masks([5, 6, 5, 2**62], "loop"), rtol=1e-12)


def test_rate_and_scale():
    found = masks(np.random.default_rng(0).integers(2**63 - 1, size=200))
    kept = found != 0
    np.testing.assert_allclose(found[kept], 1 / (1 - P), rtol=1e-12)  # so that the mean is unchanged
    n = kept.numel()
    assert abs(kept.double().mean() - (1 - P)) < 5 * np.sqrt(P * (1 - P) / n)
    # neither a weight nor a client is favoured, and neighbours are independent
    for rate, count in ((kept.double().mean(0), 200), (kept.double().mean(1), WIDTH)):
        assert (abs(rate - (1 - P)) < 5 * np.sqrt(P * (1 - P) / count)).all()
    both = (kept[:, 1:] & kept[:, :-1]).double().mean()
    assert abs(both - (1 - P) ** 2) < 5 * np.sqrt((1 - P) ** 2 * (1 - (1 - P) ** 2) / n)


def test_consecutive_keys_give_unrelated_masks():
    kept = masks(range(100)) != 0
    agree = (kept[1:] == kept[:-1]).double().mean()
    rate = P**2 + (1 - P) ** 2
    assert abs(agree - rate) < 5 * np.sqrt(rate * (1 - rate) / (99 * WIDTH))


def test_layers_and_samples_differ():
    module = nn.Sequential(nn.Linear(1, 60), nn.Dropout(0.5), nn.Unflatten(1, (60, 1)), nn.Flatten(), nn.Dropout(0.5))
    module.append(nn.Linear(60, 1))
    task = Task(module, (1,), None, device=CPU, dtype=torch.float64)
    first, second = (m for m in task.module.modules() if type(m).__name__ == "KeyedDropout")
    x = torch.ones(4, 60, dtype=torch.float64)
    task.module.train()
    a, b = first(x) != 0, second(x) != 0
    assert (a != b).double().mean() > 0.3
    assert all((a[0] != a[k]).double().mean() > 0.2 for k in (1, 2, 3))


def test_evaluation_drops_nothing():
    task = Task(Masks(), (2,), None, device=CPU, dtype=torch.float64)
    batch = Batch(torch.zeros(2, 1, 2), torch.zeros(2, 1), torch.ones(2, 1), 2, torch.tensor([1, 2]))
    sums = task.evaluate(torch.ones(2, WIDTH, dtype=torch.float64), batch)
    np.testing.assert_allclose(sums[:, 1], WIDTH**2)


def test_every_probability():
    x = torch.ones(1000)
    for p in (0.0, 0.01, 0.5, 0.99):
        task = Task(nn.Sequential(nn.Dropout(p), nn.Linear(4, 2)), (4,), 2, device=CPU, dtype=torch.float32)
        task.module.train()
        out = task.module[0](x)
        assert out.isfinite().all()
        assert abs((out != 0).float().mean() - (1 - p)) < 0.03


def test_keys_of_clients_rounds_and_steps():
    """Any two differ; none depends on who shares the block."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    algorithm, data = Local(batch_size=2, local_steps=3), classes([3, 4, 5, 6])
    keys = {}
    for limit in (None, 2):
        engine = make_engine(data, algorithm, model=model, number=3, block=limit)
        for round in (0, 1, 7):
            for block in engine.blocks(engine.everyone, {}, round):
                for t in block.steps:
                    for client, key in zip(block.ids[: block.real], block.batch(t).key, strict=False):
                        assert keys.setdefault((client, round, t), int(key)) == int(key)
    assert len(keys) == 4 * 3 * 3
    assert len(set(keys.values())) == len(keys)
    other = make_engine(data, algorithm, model=model, number=3, seed=1)
    assert int(next(other.blocks(other.everyone, {}, 0)).batch(0).key[0]) not in keys.values()


def test_full_batch_steps_have_keys_of_their_own():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    engine = make_engine(classes([3, 3]), Local(local_steps=3), model=model, number=3)
    block = next(engine.blocks(engine.everyone, {}, 0))
    assert len({int(key) for t in block.steps for key in block.batch(t).key}) == 6
