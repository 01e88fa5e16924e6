"""FedPer, FedRep, FedBABU, FedRecon: their update rules, written once more client by client, and their limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import (
    TwoLayers,
    adam,
    classes,
    decide,
    make_engine,
    minibatch,
    personal,
    play,
    same_bits,
    written_gradients,
)
from torch import Tensor, nn

from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.fedbabu import FedBABU
from hpcfl.algorithms.fedper import FedPer
from hpcfl.algorithms.fedrecon import FedRecon
from hpcfl.algorithms.fedrep import FedRep
from hpcfl.algorithms.local import Local
from hpcfl.algorithms.pflego import PFLEGO
from hpcfl.models.dense import MLP
from hpcfl.rng import Purpose, stream
from hpcfl.round import Round
from hpcfl.schedules import Exponential

HIDDEN, CLASSES = 5, 4
SIZES = [4, 9, 6, 17, 5]
OWN = [4, 2, 3, 1, 4]  # outputs of each client, where labels are local
DATA = classes(SIZES, number=CLASSES)
LOCAL = [(x, y % own) for (x, y), own in zip(DATA, OWN, strict=True)]
EQUAL = classes([6] * 5, number=CLASSES)
CLIENTS = len(SIZES)
COHORTS = [[0, 2, 3], [1, 3], None, [3], [0, 2, 4]]
SEED = 11
MODEL = MLP(hidden=(HIDDEN,))
NET = TwoLayers(HIDDEN)
RATES = {"lr": 0.2, "lr_schedule": Exponential(decay=0.9)}


def federation(algorithm, data=DATA, model=MODEL, own=None, **options):
    """An engine; own: the number of outputs that each client has."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        engine = make_engine(data, algorithm, model=model, number=CLASSES, **{"seed": SEED} | options)
    if own is not None:
        others = torch.arange(CLASSES) >= torch.tensor(own)[engine.group.ids, None]
        engine.group = replace(engine.group, mask=torch.zeros(others.shape).double().masked_fill(others, -torch.inf))
    return engine


def by_id(engine, rows: Tensor) -> Tensor:
    """[N, P] in the order of the clients' numbers."""
    found = torch.empty_like(rows)
    found[torch.from_numpy(engine.group.ids)] = rows
    return found


def batch(algorithm, data, i, t, s):
    return minibatch(data, i, t, s, algorithm.batch_size, SEED)


def slopes(algorithm, i, t, data=DATA, own=None):
    """(theta, W, s) -> client i's gradients by both, on its minibatch of step s of round t."""
    outputs = None if own is None else own[i]
    return lambda theta, W, s: NET.gradients(theta, W, *batch(algorithm, data, i, t, s), outputs)


def averaged(bodies: dict[int, Tensor], weighting: str, data=DATA) -> Tensor:
    p = {i: len(data[i][1]) if weighting == "sample" else 1 for i in bodies}
    return sum(p[i] / sum(p.values()) * theta for i, theta in bodies.items())


def fedper(a, theta, W, t, gradients):
    for s in range(a.local_steps):
        g, g_W = gradients(theta, W, s)
        theta, W = theta - 0.2 * 0.9**t * g, W - 0.2 * 0.9**t * g_W
    return theta, W


def fedrep(a, theta, W, t, gradients):
    for s in range(a.head_steps):
        W = W - 0.2 * 0.9**t * gradients(theta, W, s)[1]
    for s in range(a.body_steps):
        theta = theta - 0.2 * 0.9**t * gradients(theta, W, a.head_steps + s)[0]
    return theta, W


def fedbabu(a, theta, W, t, gradients):
    u = torch.zeros_like(theta)
    for s in range(a.local_steps):
        u = a.momentum * u + gradients(theta, W, s)[0]
        theta = theta - 0.2 * 0.9**t * u
    return theta, W


AVERAGING = [
    (FedPer(**RATES, local_steps=3), fedper),
    (FedPer(**RATES, local_steps=5, batch_size=4), fedper),
    (FedPer(**RATES, local_steps=2, weighting="client"), fedper),
    (FedRep(**RATES, head_steps=3), fedrep),
    (FedRep(**RATES, head_steps=1, body_steps=3, weighting="client"), fedrep),
    (FedRep(**RATES, head_steps=4, body_steps=3, batch_size=4), fedrep),
    (FedBABU(**RATES, local_steps=3, momentum=0.0), fedbabu),
    (FedBABU(**RATES, local_steps=4, momentum=0.9), fedbabu),
    (FedBABU(**RATES, local_steps=4, momentum=0.9, batch_size=4, weighting="client"), fedbabu),
]


def averaging(algorithm, client, start, W, data, own):
    """theta, W [N, P_head] after the rounds of an algorithm whose server averages bodies."""
    theta, W = start, W.clone()
    for t, cohort in enumerate(COHORTS):
        bodies = {}
        for i in range(CLIENTS) if cohort is None else cohort:
            bodies[i], W[i] = client(algorithm, theta, W[i], t, slopes(algorithm, i, t, data, own))
        theta = averaged(bodies, algorithm.weighting, data)
    return theta, W


def same(found, expected, rtol=1e-12) -> None:
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-13)


FEDERATIONS = pytest.mark.parametrize(("data", "own"), [(DATA, None), (LOCAL, OWN)], ids=["global", "local"])


@FEDERATIONS
@pytest.mark.parametrize(("algorithm", "client"), AVERAGING, ids=lambda x: x.__name__ if callable(x) else "")
def test_rounds_of_those_that_average_bodies(algorithm, client, data, own):
    engine = federation(algorithm, data, own=own)
    start = algorithm.init(engine.task, engine.group)
    theta, W = averaging(algorithm, client, start.shared["theta"], by_id(engine, start.local["W"]), data, own)
    state = play(engine, algorithm, COHORTS)
    assert set(state.shared) == {"theta"}
    assert set(state.local) == {"W"}
    same(state.shared["theta"], theta)
    same(by_id(engine, state.local["W"]), W)
    if client is not fedbabu:
        whole = torch.cat([theta.expand(CLIENTS, -1), W], 1)
        same(by_id(engine, personal(engine, algorithm, state, len(COHORTS))), whole)


@pytest.mark.parametrize(
    "algorithm", [FedPer(start_heads="drawn"), FedRep(start_heads="drawn"), FedRecon(start_heads="drawn"), PFLEGO()]
)
def test_heads_start_alike_or_drawn(algorithm):
    engine = federation(algorithm)
    state = algorithm.init(engine.task, engine.group)
    if algorithm.start_heads == "alike":
        assert all(same_bits(row, engine.task.split.parts(engine.task.start())[1]) for row in state.local["W"])
        return
    for i, row in zip(engine.group.ids.tolist(), state.local["W"], strict=True):
        same(row, new_head(i, 0))
    assert len({tuple(row.tolist()) for row in state.local["W"]}) == CLIENTS
    same(state.shared["theta"], engine.task.split.parts(engine.task.start())[0])  # bodies are the model's


@pytest.mark.parametrize("algorithm", [FedPer(**RATES, local_steps=2, local_epochs=None), FedRep(**RATES)], ids=repr)
def test_who_sits_out_keeps_its_head(algorithm):
    engine = federation(algorithm)
    before = play(engine, algorithm, 2)
    kept = by_id(engine, before.local["W"])
    after = by_id(engine, play(engine, algorithm, [[1, 3]], before, first=2).local["W"])
    assert [i for i in range(CLIENTS) if not same_bits(after[i], kept[i])] == [1, 3]


@pytest.mark.parametrize(
    "algorithm",
    [
        *(a for a, _ in AVERAGING[1::3]),
        FedPer(**RATES, local_steps=2, start_heads="drawn"),
        FedRecon(local_steps=2, reset=True),
        PFLEGO(local_steps=3, start_heads="drawn"),
    ],
    ids=repr,
)
def test_outputs_that_a_client_does_not_have_are_zero_and_cost_no_penalty(algorithm):
    engine = federation(algorithm, LOCAL, MLP(hidden=(HIDDEN,), l2=0.3), OWN)
    state = play(engine, algorithm, COHORTS)
    for i, W in enumerate(by_id(engine, state.local["W"])):
        weight, bias = W[: CLASSES * HIDDEN].view(CLASSES, HIDDEN), W[CLASSES * HIDDEN :]
        for part in (weight, bias):
            assert (part[: OWN[i]] != 0).all()
            assert (part[OWN[i] :] == 0).all()


# --- FedPer's limits --------------------------------------------------------------------------------------------------


class Headless(nn.Module):
    """Says that it has no head."""

    head = None

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def plugin(kind, *arguments) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(*arguments)


@pytest.mark.parametrize("backend", ["vmap", "loop"])
@pytest.mark.parametrize("size", [None, 4])
def test_fedper_with_an_empty_head_is_fedavg(backend, size):
    options = {**RATES, "local_steps": 3, "batch_size": size}
    models = []
    for algorithm in (FedPer(**options), FedAvg(**options)):
        engine = federation(algorithm, model=plugin(Headless), backend=backend)
        state = play(engine, algorithm, COHORTS)
        models.append(state.shared["theta" if isinstance(algorithm, FedPer) else "w"])
    same(*models)


@pytest.mark.parametrize("backend", ["vmap", "loop"])
@pytest.mark.parametrize("size", [None, 4])
def test_fedper_with_an_empty_body_is_local_training(backend, size):
    options = {**RATES, "local_steps": 3, "batch_size": size}
    models = []
    for algorithm in (FedPer(**options), Local(**options)):
        engine = federation(algorithm, model=plugin(nn.Linear, 4, CLASSES), backend=backend)
        state = play(engine, algorithm, COHORTS)
        models.append(personal(engine, algorithm, state, len(COHORTS)))
    same(*models)


@pytest.mark.parametrize(
    "algorithm",
    [PFLEGO(local_steps=3), FedRep(), FedBABU(local_steps=2), FedRecon(reset=True, local_steps=2)],
    ids=repr,
)
@pytest.mark.parametrize("module", [plugin(Headless), plugin(nn.Linear, 4, CLASSES)], ids=["empty head", "empty body"])
def test_empty_parts_are_no_trouble(algorithm, module):
    engine = federation(algorithm, model=module)
    state = play(engine, algorithm, COHORTS)
    assert personal(engine, algorithm, state, len(COHORTS)).isfinite().all()


# --- FedBABU ----------------------------------------------------------------------------------------------------------


def test_fedbabu_s_head_never_moves():
    algorithm = FedBABU(**RATES, local_steps=3)
    engine = federation(algorithm)
    head = engine.task.split.parts(engine.task.start())[1].numpy()
    matrix = np.concatenate([head[: CLASSES * HIDDEN].reshape(CLASSES, HIDDEN), head[CLASSES * HIDDEN :, None]], 1)
    u, _, v = np.linalg.svd(matrix, full_matrices=False)
    start = algorithm.init(engine.task, engine.group).local["W"].clone()
    expected = np.concatenate([(u @ v)[:, :HIDDEN].ravel(), (u @ v)[:, HIDDEN]])
    same(start, np.tile(expected, (CLIENTS, 1)))
    state = play(engine, algorithm, COHORTS)
    assert same_bits(state.local["W"], start)


@pytest.mark.parametrize("part", ["head", "all"])
@pytest.mark.parametrize("rate", [None, 0.05])
@pytest.mark.parametrize(("steps", "size"), [(0, None), (1, None), (5, None), (5, 4)])
def test_fedbabu_s_fine_tuning(part, rate, steps, size):
    """By the rate of training, without its schedule, and on minibatches of the round that comes next."""
    algorithm = FedBABU(
        **RATES, local_steps=2, batch_size=size, fine_tune=part, fine_tune_steps=steps, fine_tune_lr=rate
    )
    engine = federation(algorithm)
    state = play(engine, algorithm, COHORTS)
    kept = state.shared["theta"].clone(), state.local["W"].clone()
    expected = []
    for i in range(CLIENTS):
        theta, W = kept[0], by_id(engine, kept[1])[i]
        for s in range(steps):
            g, g_W = NET.gradients(theta, W, *batch(algorithm, DATA, i, len(COHORTS), s))
            theta, W = theta - (part == "all") * (rate or 0.2) * g, W - (rate or 0.2) * g_W
        expected.append(torch.cat([theta, W]))
    same(by_id(engine, personal(engine, algorithm, state, len(COHORTS))), torch.stack(expected))
    assert same_bits(state.shared["theta"], kept[0])
    assert same_bits(state.local["W"], kept[1])


# --- FedRecon ---------------------------------------------------------------------------------------------------------


def new_head(client: int, round: int) -> Tensor:
    """Uniform between +-1/sqrt(features), as torch's layers start."""
    draws = stream(SEED, Purpose.HEAD, client=client, round=round).random(CLASSES * (HIDDEN + 1))
    return torch.from_numpy((2 * draws - 1) / np.sqrt(HIDDEN))


def reconstructed(a, theta, W, t, i, data, own):
    if a.reset:
        W = new_head(i, t)
        for part in (W[: CLASSES * HIDDEN].view(CLASSES, HIDDEN), W[CLASSES * HIDDEN :]):
            part[CLASSES if own is None else own[i] :] = 0
    for s in range(a.local_steps):
        W = W - a.head_lr * slopes(a, i, t, data, own)(theta, W, s)[1]
    return W


def fedrecon(a, theta, W, cohorts, data, own):
    """theta, W [N, P_head] after the rounds."""
    W, m, v = W.clone(), torch.zeros_like(theta), torch.zeros_like(theta)
    for t, cohort in enumerate(cohorts):
        sums = {}
        for i in range(len(data)) if cohort is None else cohort:
            W[i] = reconstructed(a, theta, W[i], t, i, data, own)
            body, sums[i] = theta, torch.zeros_like(theta)
            for s in range(a.body_steps):
                g = slopes(a, i, t, data, own)(body, W[i], a.local_steps + s)[0]
                body, sums[i] = body - a.body_lr * g, sums[i] + a.body_lr * g
        d = averaged(sums, "sample", data)
        if a.server_optimizer == "adam":
            theta, m, v = adam(theta, m, v, d, t + 1, a.server_lr)
        else:
            theta = theta - a.server_lr * d
    return theta, W


@FEDERATIONS
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(("body_steps", "size"), [(1, None), (3, None), (3, 4)])
def test_rounds_of_fedrecon(reset, optimizer, body_steps, size, data, own):
    algorithm = FedRecon(
        head_lr=0.3,
        local_steps=3,
        body_steps=body_steps,
        body_lr=0.4,
        batch_size=size,
        reset=reset,
        server_lr=0.5,
        server_optimizer=optimizer,
    )
    engine, rtol = federation(algorithm, data, own=own), 1e-12 if optimizer == "sgd" else 1e-9
    start = algorithm.init(engine.task, engine.group)
    theta, W = fedrecon(algorithm, start.shared["theta"], by_id(engine, start.local["W"]), COHORTS, data, own)
    state = play(engine, algorithm, COHORTS)
    assert set(state.shared) == ({"theta", "m", "v"} if optimizer == "adam" else {"theta"})
    assert set(state.local) == {"W"}
    same(state.shared["theta"], theta, rtol)
    same(by_id(engine, state.local["W"]), W, rtol)
    used = [reconstructed(algorithm, theta, W[i], len(COHORTS), i, data, own) for i in range(CLIENTS)]
    whole = torch.cat([theta.expand(CLIENTS, -1), torch.stack(used)], 1)
    same(by_id(engine, personal(engine, algorithm, state, len(COHORTS))), whole, rtol)


def pair(variant="paper", tau=4, data=EQUAL, cohort=None):
    """Displacements of the body by FedRecon with tau - 1 steps and by PFLEGO with tau; both's heads; the first body."""
    server = {"server_lr": 0.2, "server_optimizer": "sgd"}
    recon = FedRecon(head_lr=0.3, local_steps=tau - 1, **server)
    pflego = PFLEGO(head_lr=0.3, local_steps=tau, variant=variant, **server)
    moves, heads = [], []
    for algorithm in (recon, pflego):
        engine = federation(algorithm, data)
        start = algorithm.init(engine.task, engine.group)
        theta = start.shared["theta"].clone()
        state = play(engine, algorithm, [cohort], start)
        moves.append(state.shared["theta"] - theta)
        heads.append(by_id(engine, state.local["W"]))
    return moves, heads, theta


@pytest.mark.parametrize("data", [EQUAL, DATA], ids=["equal", "uneven"])
def test_fedrecon_of_everyone_has_pflego_s_body_and_its_head_before_the_last_step(data):
    (recon, pflego), (before, after), theta = pair(data=data)
    same(pflego, recon)
    total = sum(len(y) for _, y in data)
    for i, (x, y) in enumerate(data):
        step = 0.2 * len(y) / total * NET.gradients(theta, before[i], x, y)[1]  # (3), I/r = 1
        same(after[i], before[i] - step)
        assert step.abs().max() > 1e-4


@pytest.mark.parametrize(("variant", "factor"), [("paper", 1.0), ("released", 2.5)])
def test_fedrecon_and_pflego_of_a_cohort_of_equal_clients(variant, factor):
    """(I/r) alpha_i = 1/r is the weight of a mean over the cohort; the released code multiplies that by I/r."""
    (recon, pflego), _, _ = pair(variant, cohort=[1, 4])
    same(pflego, factor * recon)


def test_fedrecon_and_pflego_of_a_cohort_of_uneven_clients():
    """PFLEGO divides by all samples and multiplies by I/r, FedRecon divides by the cohort's."""
    (recon, pflego), _, _ = pair(data=DATA, cohort=[1, 3])
    same(pflego, (CLIENTS / 2) * (SIZES[1] + SIZES[3]) / sum(SIZES) * recon)


# --- what is not used is not computed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "body", "head"),
    [
        (PFLEGO(local_steps=7), 1, 7),
        (FedPer(lr=0.1, local_steps=3), 3, 3),
        (FedRep(lr=0.1, head_steps=4, body_steps=2), 2, 4),
        (FedBABU(lr=0.1, local_steps=3), 3, 0),
        (FedRecon(local_steps=4, body_steps=2), 2, 4),
    ],
    ids=lambda x: type(x).__name__,
)
def test_gradients_of_body_and_head_that_are_computed(algorithm, body, head, monkeypatch):
    """As many back-propagations of each part as the counters of passes say, per block."""
    engine, accounts, calls = federation(algorithm), [], written_gradients(monkeypatch)
    play(engine, algorithm, 1, accounts=accounts)
    blocks = len(accounts[0].passes)
    assert (calls.count("body"), calls.count("head")) == (body * blocks, head * blocks)
    assert sum(backward for _, backward in accounts[0].passes) == body * CLIENTS


# --- what they hold after their local work ----------------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "client"), AVERAGING[:7:3], ids=["FedPer", "FedRep", "FedBABU"])
def test_a_participant_holds_the_body_that_it_trained(algorithm, client):
    found = held(algorithm)
    engine = federation(algorithm)
    start = algorithm.init(engine.task, engine.group)
    for i, w in found.items():
        right = client(algorithm, start.shared["theta"], start.local["W"][0], 0, slopes(algorithm, i, 0))
        same(w, torch.cat(right))


@pytest.mark.parametrize(
    "algorithm",
    [PFLEGO(local_steps=3, head_lr=0.3, server_lr=0.1), FedRecon(local_steps=3, head_lr=0.3, reset=True)],
    ids=lambda x: type(x).__name__,
)
def test_a_participant_holds_the_body_that_it_got_and_its_new_head(algorithm):
    found = held(algorithm)
    engine = federation(algorithm)
    start = algorithm.init(engine.task, engine.group)
    theta = start.shared["theta"].clone()
    state = play(engine, algorithm, [[0, 2, 3]], start)
    assert not torch.equal(state.shared["theta"], theta)
    W = by_id(engine, state.local["W"])
    for i, w in found.items():
        same(w, torch.cat([theta, W[i]]))


def held(algorithm) -> dict[int, Tensor]:
    """By client: the models that the participants of a first round hold after their local work."""
    found: dict[int, Tensor] = {}

    def watch(block, own, sent):
        models = algorithm.local_model(block, own, sent)
        found.update({int(i): models[k].clone() for k, i in enumerate(block.ids[: block.real])})
        return np.zeros((block.real, 2))

    engine = federation(algorithm)
    algorithm.round(algorithm.init(engine.task, engine.group), Round(engine, decide(engine, 0, [0, 2, 3]), watch))
    assert sorted(found) == [0, 2, 3]
    return found
