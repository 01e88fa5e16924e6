"""The convolutional network: sizes of published architectures, both poolings, hidden layers, messages."""

import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from hpcfl.errors import InputError
from hpcfl.models import Spec
from hpcfl.models.cnn import CNN, Channels, same_pool
from hpcfl.models.dense import MLP
from hpcfl.registry import build


def built(model, shape, classes=10, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model.build(Spec(shape, classes))


def names(module):
    return [name for name, _ in module.named_children()]


PUBLISHED = {  # PFLEGO: parameters of all but the last layer, and the features that it gets
    "cifar": (CNN(channels=(64, 64), pool=3, hidden=(384, 192)), (3, 32, 32), 1_754_496, 192),
    "omniglot": (CNN(channels=(64,) * 4, kernel=3, hidden=()), (1, 28, 28), 111_424, 64),
    "omniglot-without-channels": (CNN(channels=(64,) * 4, kernel=3, hidden=()), (28, 28), 111_424, 64),
    "mnist": (MLP(hidden=(200,)), (28, 28), 157_000, 200),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("classes", [2, 55])
def test_published_architectures(name, classes):
    model, shape, shared, features = PUBLISHED[name]
    module = built(model, shape, classes)
    last = [m for m in module.modules() if isinstance(m, nn.Linear)][-1]
    head = sum(p.numel() for p in last.parameters())
    assert last.in_features == features
    assert head == classes * (features + 1)
    assert sum(p.numel() for p in module.parameters()) - head == shared
    assert module(torch.zeros(2, *shape)).shape == (2, classes)


def same(image):
    """SAME max-pooling of one image [H, W] with 3x3 windows and stride 2, by its definition."""
    heights, widths = (math.ceil(n / 2) for n in image.shape)
    before = [max((math.ceil(n / 2) - 1) * 2 + 3 - n, 0) // 2 for n in image.shape]
    result = np.empty((heights, widths), image.dtype)
    for i in range(heights):
        for j in range(widths):
            top, left = 2 * i - before[0], 2 * j - before[1]
            result[i, j] = image[max(top, 0) : top + 3, max(left, 0) : left + 3].max()
    return result


@pytest.mark.parametrize("height", range(1, 10))
@pytest.mark.parametrize("width", range(1, 10))
def test_same_pooling_is_the_maximum_of_its_windows(height, width):
    images = -np.random.default_rng(height * 10 + width).uniform(1, 2, (2, 3, height, width))  # below a padding by 0
    pooled = same_pool(height, width)(torch.from_numpy(images)).numpy()
    expected = np.array([[same(image) for image in channels] for channels in images])
    np.testing.assert_array_equal(pooled, expected)


@pytest.mark.parametrize("height", [1, 2, 5, 8])
@pytest.mark.parametrize("width", [1, 3, 6])
def test_a_network_with_same_pooling(height, width):
    """All of it by hand, on sides that are odd at one pooling and even at another."""
    module = built(CNN(channels=(2, 3), kernel=3, pool=3, hidden=()), (2, height, width), 4).double()
    x = torch.randn(5, 2, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    h = x
    for conv in (module.conv1, module.conv2):
        h = nn.functional.conv2d(h, conv.weight, conv.bias, padding=1).clamp(min=0).detach()
        h = torch.from_numpy(np.array([[same(image) for image in channels] for channels in h.numpy()]))
    torch.testing.assert_close(module(x), h.flatten(1) @ module.out.weight.T + module.out.bias)


def test_gradients_of_many_clients_at_once_where_windows_overlap():
    module = built(CNN(channels=(3,), kernel=3, pool=3, hidden=(4,)), (5, 6), 3).double()
    g = torch.Generator().manual_seed(2)
    x = torch.randn(4, 2, 5, 6, dtype=torch.float64, generator=g)
    w = {k: torch.randn(4, *p.shape, dtype=torch.float64, generator=g) for k, p in module.named_parameters()}

    def loss(w, x):
        return functional_call(module, w, (x,)).square().sum()

    together = vmap(grad(loss))(w, x)
    for i in range(4):
        alone = grad(loss)({k: v[i] for k, v in w.items()}, x[i])
        for k in w:
            torch.testing.assert_close(together[k][i], alone[k])


@pytest.mark.parametrize("shape", [(3, 9, 8), (8, 9)])
def test_defaults_are_the_network_of_apfl(shape):
    """Names, initial values and outputs, to the bit."""
    module = built(CNN(dropout=0.25), shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = OrderedDict(
            channels=Channels(),
            conv1=nn.Conv2d(shape[0] if len(shape) == 3 else 1, 20, 5, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(20, 50, 5, padding=2),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc=nn.Linear(50 * 2 * 2, 512),
            relu=nn.ReLU(),
            dropout=nn.Dropout(0.25),
            out=nn.Linear(512, 10),
        )
    expected = nn.Sequential(layers)
    assert names(module) == list(layers)
    assert module.dropout.p == 0.25
    assert list(module.state_dict()) == list(expected.state_dict())
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(3))
    assert torch.equal(module.eval()(x), expected.eval()(x))


def test_a_list_of_one_hidden_layer_is_that_layer():
    one, listed = (built(CNN(channels=(2,), hidden=hidden), (4, 4)) for hidden in (7, (7,)))
    assert names(one) == names(listed)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), listed.parameters(), strict=True))


def test_several_hidden_layers():
    module = built(CNN(channels=(2,), hidden=(7, 5, 6), dropout=0.5), (4, 4), 3)
    stack = list(module)[names(module).index("flatten") + 1 :]
    assert [type(m) for m in stack] == [nn.Linear, nn.ReLU, nn.Dropout] * 3 + [nn.Linear]
    assert [(m.in_features, m.out_features) for m in stack[::3]] == [(8, 7), (7, 5), (5, 6), (6, 3)]
    assert [m.p for m in stack[2::3]] == [0.5] * 3
    assert [name for name, m in module.named_children() if isinstance(m, nn.Linear)] == ["fc1", "fc2", "fc3", "out"]
    assert names(module)[-1] == "out"


def test_no_hidden_layer():
    module = built(CNN(channels=(2,), hidden=()), (4, 4), 3)
    assert names(module) == ["channels", "conv1", "relu1", "pool1", "flatten", "out"]
    assert module.out.in_features == 8


@pytest.mark.parametrize("poolings", range(4))
def test_smallest_images(poolings):
    """2x2 windows need 2^k pixels a side; SAME leaves at least one pixel of any image."""
    channels, side = (2,) * poolings, 2**poolings
    assert built(CNN(channels=channels, hidden=()), (side, side + 1)).out.in_features <= 2 * (side + 1)
    assert built(CNN(channels=channels, pool=3, hidden=()), (1, 1)).out.in_features == (2 if poolings else 1)
    if poolings:
        for shape in [(side - 1, side), (1, side, side - 1)]:
            with pytest.raises(InputError, match=f"{poolings} poolings need images of at least {side} pixels a side"):
                built(CNN(channels=channels), shape)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"pool": 4}, "model.pool = 4: expected 2 or 3"),
        ({"hidden": 0}, "model.hidden = 0: expected greater than or equal to 1"),
        ({"hidden": [3, 0]}, "model.hidden.1 = 0: expected greater than or equal to 1"),
        ({"hidden": "many"}, 'model.hidden = "many": expected a list or a whole number'),
    ],
)
def test_wrong_options(table, message):
    with pytest.raises(InputError) as error:
        build("model", {"name": "cnn", **table})
    assert str(error.value) == message


@pytest.mark.parametrize(("hidden", "read"), [(64, 64), ([64, 32], (64, 32)), ([], ())])
def test_hidden_is_a_number_or_a_list(hidden, read):
    assert build("model", {"name": "cnn", "hidden": hidden, "pool": 3}).hidden == read


@pytest.mark.parametrize("shape", [(8,), (1, 2, 8, 8)])
def test_samples_that_are_no_images(shape):
    with pytest.raises(InputError, match=r"needs images, but one sample has shape \(.*\); use \"mlp\""):
        built(CNN(), shape)


def test_dropout_without_a_hidden_layer():
    with pytest.raises(InputError, match=r"model.dropout = 0.5: comes after hidden layers, but model.hidden = \[\]"):
        built(CNN(hidden=(), dropout=0.5), (8, 8))
