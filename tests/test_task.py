"""Loss and gradient of every built-in model and backend: against finite differences, against torch, to the bit."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import CPU, same_bits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import vector_to_parameters

from hpcfl.batch import Batch
from hpcfl.errors import InputError
from hpcfl.models import Spec
from hpcfl.models.cnn import CNN
from hpcfl.models.dense import MLP, Linear, Logistic
from hpcfl.task import Task

SMALL_CNN = CNN(channels=(2, 3), kernel=3, hidden=4)
MODELS = {  # model, shape of a sample, classes
    "linear": (Linear(), (3,), None),
    "linear-without-bias": (Linear(bias=False), (3,), None),
    "linear-l2": (Linear(l2=0.3), (3,), None),
    "logistic": (Logistic(), (3,), 4),
    "logistic-without-bias-l2": (Logistic(bias=False, l2=0.3), (2, 2), 4),
    "logistic-reference": (Logistic(reference=True), (3,), 4),
    "logistic-reference-two-classes": (Logistic(reference=True, l2=0.3), (3,), 2),
    "logistic-reference-two-classes-without-bias": (Logistic(reference=True, bias=False), (2, 2), 2),
    "mlp": (MLP(hidden=(5,)), (3,), 4),
    "mlp-deep-l2": (MLP(hidden=(5, 4), l2=0.3), (3,), 4),
    "mlp-without-bias": (MLP(hidden=(5, 4), bias=False), (3,), 3),
    "mlp-without-hidden": (MLP(hidden=()), (3,), 3),
    "mlp-regression": (MLP(hidden=(5,)), (3,), None),
    "cnn": (SMALL_CNN, (1, 4, 4), 3),
    "cnn-colour-l2": (replace(SMALL_CNN, l2=0.3), (3, 5, 4), 3),
    "cnn-without-channels": (SMALL_CNN, (4, 4), 3),
    "cnn-dropout": (replace(SMALL_CNN, dropout=0.4), (1, 4, 4), 3),
    "cnn-regression": (SMALL_CNN, (1, 4, 4), None),
}
PAIRS = [
    (name, backend)
    for name in MODELS
    for backend in ("model", "vmap", "loop")
    if not (backend == "model" and name.startswith("cnn"))
]
every_model = pytest.mark.parametrize("name", MODELS)
every_pair = pytest.mark.parametrize(("name", "backend"), PAIRS)


def built(model, shape, classes, seed=0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model.build(Spec(shape, classes))


def make_task(name, backend="auto", dtype=torch.float64) -> Task:
    model, shape, classes = MODELS[name]
    return Task(built(model, shape, classes), shape, classes, l2=model.l2, backend=backend, device=CPU, dtype=dtype)


def samples(shape, classes, clients, length, real=None, dtype=torch.float64, seed=0) -> Batch:
    """A batch of clients with ``real`` [C] samples each (absent: all), the rest padding."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(clients, length, *shape, generator=g, dtype=torch.float64).to(dtype)
    y = torch.randn(clients, length, generator=g, dtype=torch.float64).to(dtype)
    if classes:
        y = torch.randint(classes, (clients, length), generator=g)
    count = torch.full((clients,), length) if real is None else torch.tensor(real)
    weight = (torch.arange(length) < count[:, None]).double() / count[:, None]
    return Batch(x, y, weight.to(dtype), clients, torch.arange(clients) * 7919 + 1)


def weights(task, clients, seed=0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(clients, task.layout.size, generator=g, dtype=torch.float64).to(task.dtype) * 0.5


def case(name, backend="auto", clients=3, length=6, real=(6, 1, 4), dtype=torch.float64):
    task = make_task(name, backend, dtype)
    return task, weights(task, clients), samples(*MODELS[name][1:], clients, length, real, dtype)


def rows_of(batch: Batch, rows) -> Batch:
    return Batch(batch.x[rows], batch.y[rows], batch.weight[rows], len(rows), batch.key[rows])


@every_pair
def test_gradient_against_finite_differences(name, backend):
    task, w, batch = case(name, backend)
    _, gradient = task.gradient(w, batch)
    g, h = torch.Generator().manual_seed(1), 1e-6
    for _ in range(4):
        direction = torch.randn(w.shape, generator=g, dtype=w.dtype)
        up, down = (task.gradient(w + s * direction, batch)[0] for s in (h, -h))
        np.testing.assert_allclose((gradient * direction).sum(1), (up - down) / (2 * h), rtol=1e-6, atol=1e-8)


def reference(name, flat, x, y):
    """Mean loss and gradient of one client, with torch's own losses on the plain module."""
    model, shape, classes = MODELS[name]
    module = built(model, shape, classes).double()
    vector_to_parameters(flat, module.parameters())
    outputs = module(x)
    loss = cross_entropy(outputs, y) if classes else ((outputs.squeeze(-1) - y) ** 2).mean() / 2
    loss = loss + model.l2 / 2 * sum((p**2).sum() for p in module.parameters())
    return loss.detach(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])


@pytest.mark.parametrize(("name", "backend"), [pair for pair in PAIRS if "dropout" not in pair[0]])
def test_loss_and_gradient_against_the_plain_module(name, backend):
    real = (6, 1, 4)
    task, w, batch = case(name, backend, real=real)
    loss, gradient = task.gradient(w, batch)
    for k, n in enumerate(real):
        right_loss, right_gradient = reference(name, w[k], batch.x[k, :n], batch.y[k, :n])
        np.testing.assert_allclose(loss[k], right_loss, rtol=1e-10)
        np.testing.assert_allclose(gradient[k], right_gradient, rtol=1e-10, atol=1e-14)


@every_pair
def test_evaluation_against_the_plain_module(name, backend):
    real = (6, 1, 4)
    task, w, batch = case(name, backend, real=real)
    model, shape, classes = MODELS[name]
    sums = task.evaluate(w, batch)
    assert sums.dtype == torch.float64
    for k, n in enumerate(real):
        module = built(model, shape, classes).double().eval()
        vector_to_parameters(w[k], module.parameters())
        with torch.no_grad():
            outputs = module(batch.x[k, :n])
        y = batch.y[k, :n]
        if classes:
            right = [cross_entropy(outputs, y, reduction="sum"), (outputs.argmax(-1) == y).sum()]
        else:
            error = ((outputs.squeeze(-1) - y) ** 2).sum()
            right = [error / 2, error]
        np.testing.assert_allclose(sums[k], right, rtol=1e-10)
    np.testing.assert_allclose(task.penalty(w), model.l2 / 2 * (w**2).sum(1), rtol=1e-12)


@every_model
def test_backends_agree(name):
    found = []
    for backend in ("model", "vmap", "loop"):
        if (name, backend) in PAIRS:
            task, w, batch = case(name, backend)
            found.append([*task.gradient(w, batch), task.evaluate(w, batch)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@every_pair
def test_padded_samples_change_nothing(name, backend):
    task, w, batch = case(name, backend)
    changed = replace(batch, x=batch.x.clone(), y=batch.y.clone())
    padding = batch.weight == 0
    changed.x[padding] = 1e3
    changed.y[padding] = 1
    for a, b in zip(
        [*task.gradient(w, batch), task.evaluate(w, batch)],
        [*task.gradient(w, changed), task.evaluate(w, changed)],
        strict=True,
    ):
        assert same_bits(a, b)
    assert padding.any()


# Sizes for which a library may choose another kernel: few and many clients, one and many samples, and rows of models
# and samples that begin anywhere in memory.
REALISTIC = {
    "linear": (Linear(), (60,), None),
    "linear-without-bias": (Linear(bias=False), (13,), None),
    "logistic": (Logistic(), (64,), 10),
    "logistic-l2": (Logistic(bias=False, l2=0.1), (60,), 10),
    "logistic-reference": (Logistic(reference=True), (13,), 2),
    "logistic-reference-many-classes": (Logistic(reference=True, l2=0.1), (60,), 10),
    "mlp": (MLP(hidden=(64,)), (64,), 10),
    "mlp-deep": (MLP(hidden=(40, 33), bias=False), (30,), 3),
    "mlp-regression": (MLP(hidden=(20,)), (30,), None),
    "cnn": (CNN(hidden=64), (1, 8, 8), 10),
    "cnn-colour-dropout": (CNN(channels=(6,), kernel=3, hidden=32, dropout=0.5, l2=0.1), (3, 8, 8), 10),
}


@pytest.mark.parametrize("length", [1, 7, 20])
@pytest.mark.parametrize(
    ("name", "backend"),
    [(n, b) for n in REALISTIC for b in ("model", "vmap", "loop") if not (b == "model" and n.startswith("cnn"))],
)
def test_neither_the_size_of_a_block_nor_the_place_in_it_changes_a_bit(name, backend, length):
    model, shape, classes = REALISTIC[name]
    most = 9 if name.startswith("cnn") else 20
    task = Task(
        built(model, shape, classes), shape, classes, l2=model.l2, backend=backend, device=CPU, dtype=torch.float32
    )
    w = weights(task, most) * 0.3
    real = np.maximum(1, length - np.arange(most) % 3)
    batch = samples(shape, classes, most, length, real, torch.float32)
    whole = [*task.gradient(w, batch), task.evaluate(w, batch), task.penalty(w)]
    for size in (task.least, task.least + 1, 8):
        for first in (0, 1, most - size):
            rows = torch.arange(first, first + size)
            part = rows_of(batch, rows)
            found = [*task.gradient(w[rows], part), task.evaluate(w[rows], part), task.penalty(w[rows])]
            for quantity, a, b in zip(("loss", "gradient", "evaluation", "penalty"), found, whole, strict=True):
                assert same_bits(a, b[rows]), f"{quantity} in a block of {size} from {first}"


@pytest.mark.parametrize("backend", ["model", "vmap", "loop"])
def test_repeated_clients_of_a_padded_block(backend):
    """The rows after the real ones are dropped by the engine; they may not change the others, and are finite."""
    task, w, batch = case("mlp", backend, clients=4, real=(6, 1, 4, 4))
    w[3], batch.x[3], batch.y[3] = w[2], batch.x[2], batch.y[2]
    loss, gradient = task.gradient(w, replace(batch, real=3))
    right_loss, right_gradient = task.gradient(w, batch)
    np.testing.assert_allclose(loss, right_loss, rtol=1e-12)
    np.testing.assert_allclose(gradient, right_gradient, rtol=1e-12)
    np.testing.assert_allclose(task.evaluate(w, replace(batch, real=3)), task.evaluate(w, batch), rtol=1e-12)


@every_model
def test_start_is_the_module_s_own(name):
    model, shape, classes = MODELS[name]
    task = make_task(name, dtype=torch.float32)
    expected = torch.cat([p.detach().flatten() for p in built(model, shape, classes).parameters()])
    assert same_bits(task.start(), expected)
    if isinstance(model, Linear | Logistic):
        assert not expected.any()


@pytest.mark.parametrize("classes", [2, 4])
def test_the_reference_class_has_logit_zero_and_no_parameters(classes):
    """The loss is that of the usual model with zeros for the first class; of two classes, by the logistic function."""
    full, reference = (
        Task(built(Logistic(reference=r), (3,), classes), (3,), classes, device=CPU, dtype=torch.float64)
        for r in (False, True)
    )
    assert reference.layout.size == (classes - 1) * 4
    w, batch = weights(reference, 3), samples((3,), classes, 3, 6)
    matrix, bias = w[:, : 3 * (classes - 1)], w[:, 3 * (classes - 1) :]
    zeros = torch.zeros(3, 3, dtype=w.dtype), torch.zeros(3, 1, dtype=w.dtype)
    padded = torch.cat([zeros[0], matrix, zeros[1], bias], 1)
    loss, gradient = reference.gradient(w, batch)
    right_loss, right_gradient = full.gradient(padded, batch)
    np.testing.assert_allclose(loss, right_loss, rtol=1e-12)
    of_matrix, of_bias = right_gradient[:, 3 : 3 * classes], right_gradient[:, 3 * classes + 1 :]
    np.testing.assert_allclose(gradient, torch.cat([of_matrix, of_bias], 1), rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(reference.evaluate(w, batch), full.evaluate(padded, batch), rtol=1e-12)
    if classes == 2:
        odds = (batch.x * matrix[:, None]).sum(2) + bias
        signs = 2.0 * batch.y - 1
        np.testing.assert_allclose(loss, torch.log1p(torch.exp(-signs * odds)).mean(1), rtol=1e-12)
        np.testing.assert_array_equal(reference.evaluate(w, batch)[:, 1], ((odds > 0) == batch.y).sum(1))


def test_a_reference_class_needs_another_one():
    with pytest.raises(
        InputError, match=r"^model.reference = true: needs at least two classes, but the data have one$"
    ):
        built(Logistic(reference=True), (3,), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_pair
def test_dtype_is_kept(name, backend, dtype):
    task, w, batch = case(name, backend, dtype=dtype)
    loss, gradient = task.gradient(w, batch)
    assert loss.dtype == gradient.dtype == task.start().dtype == dtype
    assert gradient.shape == w.shape
    assert task.evaluate(w, batch).shape == (3, 2)


def test_frozen_parameters_are_no_part_of_the_vector():
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    module[0].weight.requires_grad_(False)
    frozen = deepcopy(module[0].weight)
    task = Task(module, (3,), 2, device=CPU, dtype=torch.float64)
    assert task.layout.size == 4 + 4 * 2 + 2
    w, batch = weights(task, 2), samples((3,), 2, 2, 5)
    loss, gradient = task.gradient(w, batch)
    assert gradient.shape == w.shape
    x = batch.x[0] @ frozen.double().T + w[0, :4]
    outputs = x.relu() @ w[0, 4:12].view(2, 4).T + w[0, 12:]
    np.testing.assert_allclose(loss[0], cross_entropy(outputs, batch.y[0]), rtol=1e-10)
