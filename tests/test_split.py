"""Body and head of a model: against automatic differentiation of the plain module, which is never split."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from helpers import CPU, same_bits, written_gradients
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from hpcfl.batch import Batch
from hpcfl.errors import InputError
from hpcfl.models import Spec
from hpcfl.models.cnn import CNN
from hpcfl.models.dense import MLP, Linear, Logistic
from hpcfl.rng import Purpose, stream
from hpcfl.split import Split
from hpcfl.task import Task

REAL = (6, 1, 4)  # samples of each client; the others are padding
OWN = (4, 2, 3)  # outputs that each client has, where they have heads of their own
LENGTH = 6


class HeadFirst(nn.Module):
    """A plugin whose head comes first among its parameters, and is not its last linear layer."""

    def __init__(self, outputs: int):
        super().__init__()
        self.head = nn.Linear(5, outputs)
        self.scale = nn.Parameter(torch.ones(5))
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scale * torch.tanh(self.inner(x)))


class Headless(nn.Module):
    """A plugin that says that it has no head."""

    head = None

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(self.last(torch.tanh(self.first(x))), -1)


def from_spec(model, shape, classes):
    return lambda: model.build(Spec(shape, classes))


def mlp(*hidden, classes=4, shape=(3,), **options):
    return from_spec(MLP(hidden=hidden, **options), shape, classes), shape, classes, "layers"


def cnn(**options):
    shape = (1, 4, 4)
    return from_spec(CNN(channels=(2, 3), kernel=3, hidden=4, **options), shape, 4), shape, 4, "out"


MODELS = {  # how to make it, shape of a sample, classes, name of the head (for "layers": the last of them)
    "mlp": mlp(5),
    "mlp-image": mlp(5, shape=(2, 3)),
    "mlp-deep": mlp(6, 5),
    "mlp-without-hidden": mlp(),
    "mlp-image-without-hidden": mlp(shape=(2, 3)),
    "mlp-without-bias": mlp(5, bias=False),
    "mlp-head-without-bias": mlp(5, head_bias=False),
    "mlp-head-alone-with-bias": mlp(6, 5, bias=False, head_bias=True),
    "mlp-uniform": mlp(5, head_init="uniform"),
    "mlp-regression": mlp(5, classes=None),
    "mlp-regression-without-hidden": mlp(classes=None),
    "linear": (from_spec(Linear(), (3,), None), (3,), None, "layers"),
    "logistic": (from_spec(Logistic(), (3,), 4), (3,), 4, "layers"),
    "cnn": cnn(),
    "cnn-head-without-bias": cnn(head_bias=False),
    "plugin-head-first": (lambda: HeadFirst(4), (3,), 4, "head"),
    "plugin-regression": (lambda: HeadFirst(1), (3,), None, "head"),
    "plugin-linear-alone": (lambda: nn.Linear(3, 4), (3,), 4, ""),
    "plugin-without-head": (Headless, (3,), 4, None),
}
PAIRS = [
    (name, backend)
    for name in MODELS
    for backend in ("model", "vmap", "loop")
    if backend != "model" or not name.startswith(("cnn", "plugin"))
]
every_pair = pytest.mark.parametrize(("name", "backend"), PAIRS)


def module_of(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return MODELS[name][0]()


def task_of(name: str, backend: str = "auto", l2: float = 0.0) -> Task:
    _, shape, classes, _ = MODELS[name]
    return Task(module_of(name), shape, classes, l2=l2, backend=backend, device=CPU, dtype=torch.float64)


def head_names(name: str, module: nn.Module) -> list[str]:
    """The head's parameters, by hand."""
    head = MODELS[name][3]
    if head is None:
        return []
    prefix = f"layers.{len(module.layers) - 1}" if head == "layers" else head
    return [
        n for n, _ in module.named_parameters() if n in {f"{prefix}.weight".lstrip("."), f"{prefix}.bias".lstrip(".")}
    ]


def ordered(name: str, module: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the body's and of the head's parameters, each in the module's order."""
    head = head_names(name, module)
    return [n for n, _ in module.named_parameters() if n not in head], head


def cut(name: str, module: nn.Module, theta: Tensor, W: Tensor) -> dict[str, Tensor]:
    """The parameters by name, from the vectors of one client; in them is no gap and no rest."""
    shapes, values = {n: p.shape for n, p in module.named_parameters()}, {}
    for flat, names in zip((theta, W), ordered(name, module), strict=True):
        pieces = torch.split(flat, [shapes[n].numel() for n in names]) if names else ()
        assert names or not len(flat)
        values |= {n: piece.view(shapes[n]) for n, piece in zip(names, pieces, strict=True)}
    return values


def batch_of(name: str, masked: bool = False, seed: int = 0) -> Batch:
    _, shape, classes, _ = MODELS[name]
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(3, LENGTH, *shape, generator=g, dtype=torch.float64)
    y = torch.randn(3, LENGTH, generator=g, dtype=torch.float64)
    if classes:
        most = torch.tensor(OWN if masked else [classes] * 3)[:, None]
        y = torch.randint(1000, (3, LENGTH), generator=g) % most
    weight = (torch.arange(LENGTH) < torch.tensor(REAL)[:, None]).double() / torch.tensor(REAL)[:, None]
    mask = None
    if masked:
        mask = torch.tensor([[0.0 if o < own else -torch.inf for o in range(classes)] for own in OWN]).double()[:, None]
    return Batch(x, y, weight, 3, torch.arange(3) * 7919 + 1, mask)


def vectors(task: Task, seed: int = 1) -> tuple[Tensor, Tensor]:
    """theta [3, P_body], W [3, P_head]."""
    g = torch.Generator().manual_seed(seed)
    split = task.split
    return tuple(
        0.5 * torch.randn(3, size, generator=g, dtype=torch.float64) for size in (split.body_size, split.head_size)
    )


def by_hand(name, theta, W, batch, k, l2=0.0, own=None) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and its gradients by theta and W of client k, on its real samples and its own outputs alone."""
    module, classes = module_of(name).double(), MODELS[name][2]
    leaves = [v[k].detach().clone().requires_grad_() for v in (theta, W)]
    outputs = functional_call(module, cut(name, module, *leaves), (batch.x[k, : REAL[k]],))
    y = batch.y[k, : REAL[k]]
    loss = cross_entropy(outputs[:, :own], y) if classes else ((outputs.squeeze(-1) - y) ** 2).mean() / 2
    loss = loss + l2 / 2 * sum((v**2).sum() for v in leaves)
    return loss.detach(), *torch.autograd.grad(loss, leaves, materialize_grads=True)


def same(found, expected) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-12, atol=1e-13)


# --- parts ------------------------------------------------------------------------------------------------------------


@every_pair
def test_parts_of_a_model(name, backend):
    task, module = task_of(name, backend), module_of(name).double()
    body, head = ordered(name, module)
    start, values = task.start(), dict(module.named_parameters())
    theta, W = task.split.parts(start)
    for part, names in ((theta, body), (W, head)):
        assert same_bits(
            part, torch.cat([values[n].detach().flatten() for n in names]) if names else torch.zeros(0).double()
        )
    assert (task.split.body_size, task.split.head_size) == (len(theta), len(W))

    w = torch.randn(3, task.layout.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert same_bits(task.split.join(*task.split.parts(w)), w)


@every_pair
def test_features(name, backend):
    task, batch = task_of(name, backend), batch_of(name)
    theta, W = vectors(task)
    features = task.split.features(theta, batch)
    module, head = module_of(name).double(), MODELS[name][3]
    seen = []
    if head is not None:
        layer = module.layers[-1] if head == "layers" else module.get_submodule(head)
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    for k in range(3):
        outputs = functional_call(module, cut(name, module, theta[k], W[k]), (batch.x[k],))
        same(features.x[k], (seen.pop() if seen else outputs).detach())
    assert features.y is batch.y
    assert features.weight is batch.weight


# --- gradients --------------------------------------------------------------------------------------------------------


def masks(name: str) -> list[bool]:
    return [False] if MODELS[name][2] is None or MODELS[name][3] is None else [False, True]


TRIPLES = [
    pytest.param(*pair, masked, id=f"{'-'.join(pair)}{'-masked' * masked}")
    for pair in PAIRS
    for masked in masks(pair[0])
]


@pytest.mark.parametrize(("name", "backend", "masked"), TRIPLES)
def test_gradients_are_those_of_the_plain_module(name, backend, masked):
    """Of clients with fewer outputs: those of a model that has no others."""
    l2 = 0.0 if name == "mlp" else 0.3
    task, batch = task_of(name, backend, l2), batch_of(name, masked)
    theta, W = vectors(task)
    loss, by_theta, by_W = task.split.gradients(theta, W, batch)
    features = task.split.features(theta, batch)
    head_loss, head_gradient = task.split.head_gradient(W, features)
    whole_loss, whole = task.gradient(task.split.join(theta, W), batch)
    parts = task.split.parts(whole.tensor())
    for k in range(3):
        right, right_theta, right_W = by_hand(name, theta, W, batch, k, l2, OWN[k] if masked else None)
        for found in (loss, head_loss, whole_loss):
            same(found[k], right)
        for found in (by_theta, parts[0]):
            same(found[k], right_theta)
        for found in (by_W, head_gradient, parts[1]):
            same(found[k], right_W)


@pytest.mark.parametrize("name", ["mlp", "mlp-head-without-bias", "cnn", "plugin-head-first", "mlp-without-hidden"])
def test_outputs_that_a_client_does_not_have(name):
    """Their rows of the head have no gradient, and play no part in that of others."""
    task, batch = task_of(name), batch_of(name, masked=True)
    theta, W = vectors(task)
    layer = task.split.layer
    mine = torch.stack([(torch.arange(4) < own).repeat_interleave(layer.in_features) for own in OWN])
    if layer.bias is not None:
        mine = torch.cat([mine, torch.stack([torch.arange(4) < own for own in OWN])], 1)
    _, by_theta, by_W = task.split.gradients(theta, W, batch)
    _, closed = task.split.head_gradient(W, task.split.features(theta, batch))
    for gradient in (by_W, closed):
        assert (gradient.tensor()[~mine] == 0).all()
        assert (gradient.tensor()[mine] != 0).float().mean() > 0.5  # some features are zero
    _, theta_again, W_again = task.split.gradients(theta, torch.where(mine, W, W + 5.0), batch)
    same(theta_again.tensor(), by_theta.tensor())
    same(W_again.tensor(), by_W.tensor())


USED = [("mlp", "model", 0.0), ("cnn", "loop", 0.0), ("plugin-head-first", "vmap", 0.0)]
USED += [(name, backend, 0.3) for name, backend in PAIRS if name in ("mlp", "cnn", "plugin-linear-alone")]
USED += [("plugin-without-head", "vmap", 0.3)]


@pytest.mark.parametrize(("name", "backend", "l2"), USED)
def test_a_gradient_may_be_used_again_and_with_factors(name, backend, l2):
    task, batch = task_of(name, backend, l2), batch_of(name)
    theta, W = vectors(task)
    each = torch.tensor([[0.5], [-2.0], [3.0]], dtype=torch.float64)

    def made():
        _, by_theta, by_W = task.split.gradients(theta, W, batch)
        _, closed = task.split.head_gradient(W, task.split.features(theta, batch))
        return (theta, by_theta), (W, by_W), (W, closed)

    for (at, used), (_, fresh), (_, plain) in zip(made(), made(), made(), strict=True):
        g = plain.tensor()
        for _ in range(2):
            same(at - 0.1 * used, at - 0.1 * g)
            same(at - each * used, at - each * g)
            same(at - 0.1 * 2.0 * each * used, at - 0.2 * each * g)
            same((each * used) + 0.0, each * g)
        same(used.tensor(), g)
        same(at - 0.1 * used, at - 0.1 * g)
        same(at - each * fresh, at - each * g)  # the first use has factors
        same(fresh.tensor(), g)


def test_what_is_not_used_is_not_computed(monkeypatch):
    calls = written_gradients(monkeypatch)
    task, batch = task_of("mlp"), batch_of("mlp")
    theta, W = vectors(task)
    loss, by_theta, by_W = task.split.gradients(theta, W, batch)
    assert loss.isfinite().all()
    assert calls == []
    theta - by_theta
    assert calls == ["body"]
    W - by_W
    assert calls == ["body", "head"]
    task.split.head_gradient(W, task.split.features(theta, batch))[1].tensor()
    assert calls == ["body", "head", "head"]


@pytest.mark.parametrize("name", ["cnn", "mlp", "plugin-linear-alone"])
@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_repeated_rows_of_a_block(name, backend):
    """The last of the real clients fills the block up."""
    task, batch = task_of(name, backend), batch_of(name)
    theta, W = vectors(task)
    at = [0, 1, 1]
    again = Batch(batch.x[at], batch.y[at], batch.weight[at], 2, batch.key[at])
    full, padded = (task.split.gradients(t, w, b) for t, w, b in ((theta, W, batch), (theta[at], W[at], again)))
    for one, other in zip(full, padded, strict=True):
        same(other[:2], one[:2])
    same(task.split.features(theta[at], again).x[:2], task.split.features(theta, batch).x[:2])


# --- what cannot be split ---------------------------------------------------------------------------------------------


class Ends(nn.Module):
    """Something comes after the linear layer; zero: whose parameters start at zero."""

    def __init__(self, last, zero: bool = False):
        super().__init__()
        self.head, self.last = nn.Linear(3, 4), last
        for parameter in self.head.parameters():
            if zero:
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head(x))


class Twice(nn.Module):
    """The head is a part of the body, too."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.head(x)))


class Tied(nn.Module):
    """The body reads the head's weight."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(x @ self.head.weight))


class Frozen(nn.Module):
    """A part of the head is not trained."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 5), nn.Linear(5, 4)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.first(x)))


class Several(nn.Module):
    """Has a head at every place of a sequence, not one vector per sample."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(1, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.first(x.unsqueeze(-1)))).squeeze(-1)


def split_of(module: nn.Module, shape=(3,), classes=4) -> Split:
    return Task(module, shape, classes, device=CPU, dtype=torch.float64).split


@pytest.mark.parametrize(
    ("module", "classes"),
    [
        (Ends(nn.LogSoftmax(-1)), 4),
        (Ends(nn.Tanh()), 4),
        (Ends(nn.LogSoftmax(-1), zero=True), 4),
        (Ends(nn.Tanh(), zero=True), 4),  # its outputs are zero wherever the tanh is
        (Twice(), 3),
        (Tied(), 3),
        (Several(), 3),
    ],
    ids=[
        "log_softmax",
        "tanh",
        "log_softmax-zero",
        "tanh-zero",
        "twice",
        "tied",
        "several",
    ],
)
def test_a_model_that_does_not_end_with_its_head_is_refused(module, classes):
    with pytest.raises(InputError) as error:
        split_of(module, classes=classes)
    message = str(error.value)
    assert message.startswith(f"model {type(module).__name__}: cannot be split into a body and a head")
    assert "\n" not in message


@pytest.mark.parametrize("classes", [2, 4])
def test_a_reference_class_is_refused(classes):
    """Its output is no row of the head."""
    with pytest.raises(InputError, match=r"^model\.reference = true: .*leave it out$"):
        split_of(Logistic(reference=True).build(Spec((3,), classes)), classes=classes)


class DropsOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head, self.drop = nn.Linear(3, 4), nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.head(torch.relu(self.first(x))))


class Asserts(nn.Module):
    """Does not work without its head."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.head(torch.relu(self.first(x)))
        assert outputs.shape[1] == 4
        return outputs


@pytest.mark.parametrize("module", [DropsOutputs(), Asserts()], ids=lambda m: type(m).__name__)
def test_what_is_random_or_strict_after_the_head_is_refused(module):
    with pytest.raises(InputError, match=f"^model {type(module).__name__}: cannot be split into a body and a head"):
        split_of(module)


def test_a_head_is_looked_for_unless_the_model_says_that_it_has_none():
    named = nn.Sequential(nn.Linear(3, 4))
    named.head = "0"  # a word, not None
    assert split_of(named).head_size == 16
    with pytest.raises(InputError, match=r"^model Conv: has no linear layer"):
        split_of(Conv())


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.unsqueeze(1)).squeeze(-1)


def test_the_message_says_what_to_do():
    right = (
        "its last step is not its last linear layer; call that layer `head`, train all of it, and apply it last, to "
        "one vector per sample"
    )
    with pytest.raises(InputError, match=right):
        split_of(Ends(nn.LogSoftmax(-1)))


def test_a_head_that_is_trained_in_part_only():
    """Refused, or its gradient is that by what is trained; never an error of torch."""
    try:
        split = split_of(Frozen())
    except InputError:
        return
    batch = batch_of("mlp")
    g = torch.Generator().manual_seed(0)
    theta, W = (torch.randn(3, n, generator=g, dtype=torch.float64) for n in (split.body_size, split.head_size))
    assert split.head_gradient(W, split.features(theta, batch))[1].tensor().shape == W.shape


def test_a_built_in_network_told_to_have_no_head():
    """``head = None`` says that the whole model travels."""
    module = module_of("mlp")
    module.head = None
    task = Task(module, (3,), 4, device=CPU, dtype=torch.float64)
    batch, w = batch_of("mlp"), torch.randn(3, task.layout.size, generator=torch.Generator().manual_seed(0)).double()
    loss, by_theta, by_W = task.split.gradients(w, w[:, :0], batch)
    right_loss, right = task.gradient(w, batch)
    same(loss, right_loss)
    same(by_theta.tensor(), right.tensor())
    assert by_W.shape == (3, 0)


# --- heads: orthogonal, drawn -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("hidden", [7, 2])  # more or fewer columns than outputs
def test_orthogonal_head(bias, hidden):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = MLP(hidden=(hidden,), head_bias=bias, head_init="uniform").build(Spec((3,), 4))
    split = split_of(module)
    g = torch.Generator().manual_seed(0)
    W = torch.rand(split.head_size, generator=g, dtype=torch.float64)

    def matrix(flat):
        weight = flat[: 4 * hidden].view(4, hidden)
        return torch.cat([weight, flat[4 * hidden :].view(4, 1)], 1) if bias else weight

    found, start = split.orthogonal(W), matrix(W)
    q = matrix(found)
    small = q @ q.T if q.shape[1] >= 4 else q.T @ q
    np.testing.assert_allclose(small, np.eye(len(small)), atol=1e-12)
    u, _, v = np.linalg.svd(start.numpy(), full_matrices=False)
    np.testing.assert_allclose(q, u @ v, atol=1e-12)
    distance = torch.linalg.norm(q - start)  # nearest: no other such matrix is nearer
    for _ in range(20):
        other = torch.linalg.qr(torch.randn(max(q.shape), min(q.shape), generator=g, dtype=torch.float64))[0]
        assert torch.linalg.norm((other.T if q.shape[0] < q.shape[1] else other) - start) > distance
    same(split.orthogonal(found), found)


def test_orthogonal_head_without_a_head():
    assert split_of(Headless()).orthogonal(torch.zeros(0)).shape == (0,)


CLIENTS = np.array([5, 0, 3])


@pytest.mark.parametrize(("init", "low", "high"), [("uniform", 0.0, 1.0), ("standard", -1 / 5**0.5, 1 / 5**0.5)])
@pytest.mark.parametrize("bias", [True, False])
def test_drawn_heads(init, low, high, bias):
    """Bounds: [0, 1), or 1 / sqrt(features) both ways."""
    split = split_of(MLP(hidden=(5,), head_init=init, head_bias=bias).build(Spec((3,), 4)))
    heads = split.drawn_heads(1, CLIENTS, 2)
    assert heads.shape == (3, 4 * 5 + 4 * bias)
    many = split.drawn_heads(9, np.arange(60), 0)
    assert low <= many.min() < low + 0.02
    assert high - 0.02 < many.max() < high
    assert abs(many.mean() - (low + high) / 2) < 0.05


def test_drawn_heads_are_a_function_of_seed_client_and_round():
    split = split_of(module_of("mlp"))
    heads = split.drawn_heads(1, CLIENTS, 2)
    for k, client in enumerate(CLIENTS):
        assert same_bits(split.drawn_heads(1, CLIENTS[k : k + 1], 2)[0], heads[k])
        draws = stream(1, Purpose.HEAD, client=int(client), round=2).random(4 * 5 + 4)  # the weight's, then the bias's
        same(heads[k], (2 * draws - 1) / np.sqrt(5))
    others = [split.drawn_heads(2, CLIENTS, 2), split.drawn_heads(1, CLIENTS, 3), split.drawn_heads(1, CLIENTS + 1, 2)]
    assert not any((other == heads).any() for other in others)
    assert len({row.sum().item() for row in heads}) == 3


def test_drawing_heads_changes_nothing_else():
    split = split_of(module_of("mlp"))
    kept, state = deepcopy(split.layer.state_dict()), torch.get_rng_state()
    split.drawn_heads(1, CLIENTS, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(same_bits(values, kept[name]) for name, values in split.layer.state_dict().items())


def test_drawn_heads_without_a_head():
    assert split_of(Headless()).drawn_heads(1, CLIENTS, 2).shape == (3, 0)


@pytest.mark.parametrize(
    "model", [MLP(hidden=(50,), head_init="uniform"), CNN(channels=(2,), hidden=50, head_init="uniform")]
)
def test_uniform_heads_start_between_0_and_1(model):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = [m for m in model.build(Spec((4, 4), 10)).modules() if isinstance(m, nn.Linear)][-1]
    values = torch.cat([layer.weight.flatten(), layer.bias]).detach()
    assert len(values) == 510
    assert 0 <= values.min() < 0.02
    assert 0.98 < values.max() < 1
    assert 0 <= layer.bias.min() < layer.bias.max() < 1
    assert abs(values.mean() - 0.5) < 0.05
