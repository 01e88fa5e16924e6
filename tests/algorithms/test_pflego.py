"""PFLEGO against Algorithm 1 of the paper, written once more client by client, and against what its theory says."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from helpers import TwoLayers, adam, classes, cloned, make_engine, minibatch, personal, play, same_bits

from hpcfl.algorithm import State
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.algorithms.fedbabu import FedBABU
from hpcfl.algorithms.fedper import FedPer
from hpcfl.algorithms.fedrecon import FedRecon
from hpcfl.algorithms.fedrep import FedRep
from hpcfl.algorithms.pflego import PFLEGO
from hpcfl.models.dense import MLP
from hpcfl.round import GLOBAL

HIDDEN, CLASSES = 5, 4
SIZES = [4, 9, 6, 17, 5]
OWN = [4, 2, 3, 1, 4]  # outputs of each client, where labels are local
DATA = classes(SIZES, number=CLASSES)
LOCAL = [(x, y % own) for (x, y), own in zip(DATA, OWN, strict=True)]
N, CLIENTS = sum(SIZES), len(SIZES)
ALPHA = [n / N for n in SIZES]
COHORTS = [[0, 2, 3], [1, 3], None, [3], [0, 2, 4]]
MODEL = MLP(hidden=(HIDDEN,))
NET = TwoLayers(HIDDEN)


def federation(algorithm, data=DATA, own=None, model=MODEL, **options):
    """An engine; own: the number of outputs that each client has."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        engine = make_engine(data, algorithm, model=model, number=CLASSES, **options)
    if own is not None:
        others = torch.arange(CLASSES) >= torch.tensor(own)[engine.group.ids, None]
        engine.group = replace(engine.group, mask=torch.zeros(others.shape).double().masked_fill(others, -torch.inf))
    return engine


def heads(engine, state):
    """[N, P_head] by client id."""
    found = torch.empty_like(state.local["W"])
    found[torch.from_numpy(engine.group.ids)] = state.local["W"]
    return found


def pflego(data, theta, W, cohorts, algorithm, own=None, net=NET):
    """theta, W [N, P_head] after the rounds."""
    W, own, sizes = W.clone(), own or [CLASSES] * len(data), [len(y) for _, y in data]
    total, rho, released = sum(sizes), algorithm.server_lr, algorithm.variant == "released"
    m = v = torch.zeros_like(theta)
    for t, cohort in enumerate(cohorts):
        cohort = range(len(data)) if cohort is None else cohort
        inverse, g = len(data) / len(cohort), torch.zeros_like(theta)
        for i in cohort:
            *first, last = [minibatch(data, i, t, s, algorithm.batch_size) for s in range(algorithm.local_steps)]
            for x, y in first:
                W[i] = W[i] - algorithm.head_lr * net.gradients(theta, W[i], x, y, own[i])[1]
            by_theta, by_W = net.gradients(theta, W[i], *last, own[i])
            alpha = sizes[i] / total
            W[i] = W[i] - rho * inverse * (1.0 if released else alpha) * by_W
            g = g + (sizes[i] / sum(sizes[j] for j in cohort) if released else alpha) * by_theta
        if algorithm.server_optimizer == "adam":
            theta, m, v = adam(theta, m, v, inverse * g, t + 1, rho)
        else:
            theta = theta - rho * inverse * g
    return theta, W


def same(found, expected, rtol=1e-12) -> None:
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-13)


# --- Algorithm 1 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("tau", "size", "own"),
    [(1, None, None), (2, None, None), (5, None, None), (5, None, OWN), (2, 4, None), (5, 4, OWN), (4, 1, None)],
)
def test_rounds_of_uneven_clients_with_partial_participation(variant, optimizer, tau, size, own):
    algorithm = PFLEGO(
        head_lr=0.3, server_lr=0.2, local_steps=tau, batch_size=size, variant=variant, server_optimizer=optimizer
    )
    data = DATA if own is None else LOCAL
    engine = federation(algorithm, data, own)
    start = algorithm.init(engine.task, engine.group)
    theta, W = pflego(data, start.shared["theta"], heads(engine, start), COHORTS, algorithm, own)
    state = play(engine, algorithm, COHORTS)
    # Adam divides by the root of a second moment, which magnifies the rounding of small gradients
    same(state.shared["theta"], theta, 1e-12 if optimizer == "sgd" else 1e-9)
    same(heads(engine, state), W, 1e-12 if optimizer == "sgd" else 1e-9)
    whole = torch.cat([theta.expand(CLIENTS, -1), W], 1)[torch.from_numpy(engine.group.ids)]
    same(personal(engine, algorithm, state, len(COHORTS)), whole, 1e-12 if optimizer == "sgd" else 1e-9)


@pytest.mark.parametrize(("bias", "l2"), [(False, 0.0), (True, 0.3)])
@pytest.mark.parametrize("backend", ["auto", "vmap", "loop"])
def test_heads_without_bias_and_penalised_models(bias, l2, backend):
    algorithm = PFLEGO(head_lr=0.3, server_lr=0.2, local_steps=3, server_optimizer="sgd")
    model = MLP(hidden=(HIDDEN,), head_bias=bias, l2=l2)
    engine = federation(algorithm, model=model, backend=backend)
    start = algorithm.init(engine.task, engine.group)
    net = TwoLayers(HIDDEN, bias, l2)
    theta, W = pflego(DATA, start.shared["theta"], heads(engine, start), COHORTS, algorithm, net=net)
    state = play(engine, algorithm, COHORTS)
    same(state.shared["theta"], theta)
    same(heads(engine, state), W)


def test_all_heads_start_alike():
    engine = federation(algorithm := PFLEGO())
    state = algorithm.init(engine.task, engine.group)
    theta, W = engine.task.split.parts(engine.task.start())
    assert same_bits(state.shared["theta"], theta)
    assert all(same_bits(row, W) for row in state.local["W"])


def test_one_client_descends_the_head_then_both_parts():
    algorithm = PFLEGO(head_lr=0.3, server_lr=0.2, local_steps=3, server_optimizer="sgd")
    engine = federation(algorithm, DATA[:1])
    start = algorithm.init(engine.task, engine.group)
    theta, W = start.shared["theta"], start.local["W"][0].clone()
    for _ in range(4):
        for _ in range(2):
            W = W - 0.3 * NET.gradients(theta, W, *DATA[0])[1]
        by_theta, by_W = NET.gradients(theta, W, *DATA[0])
        theta, W = theta - 0.2 * by_theta, W - 0.2 * by_W
    state = play(engine, algorithm, 4)
    same(state.shared["theta"], theta)
    same(state.local["W"][0], W)


def test_who_sits_out_keeps_its_head():
    engine = federation(algorithm := PFLEGO(local_steps=3, head_lr=0.3))
    before = play(engine, algorithm, 2)
    kept = heads(engine, before)
    after = heads(engine, play(engine, algorithm, [[1, 3]], before, first=2))
    assert [i for i in range(CLIENTS) if not same_bits(after[i], kept[i])] == [1, 3]


@pytest.mark.parametrize(("optimizer", "names"), [("sgd", {"theta"}), ("adam", {"theta", "m", "v"})])
def test_the_server_s_moments_are_the_server_s_alone(optimizer, names):
    engine = federation(algorithm := PFLEGO(local_steps=3, server_optimizer=optimizer))
    for state in (algorithm.init(engine.task, engine.group), play(engine, algorithm, COHORTS)):
        assert set(state.shared) == names
        assert set(state.local) == {"W"}
        assert all(values.shape == (engine.task.split.body_size,) for values in state.shared.values())


# --- exact SGD: section 3.3 of the design notes -----------------------------------------------------------------------

EXACT = PFLEGO(server_lr=0.2, local_steps=1, server_optimizer="sgd")


def objective_gradient(theta, W):
    """Gradient of L = sum_i alpha_i l_i by theta, and by all W [N, P_head], in one piece."""
    leaves = [v.detach().clone().requires_grad_() for v in (theta, W)]
    L = sum(a * NET.loss(leaves[0], row, *client) for a, row, client in zip(ALPHA, leaves[1], DATA, strict=True))
    return torch.autograd.grad(L, leaves)


def somewhere(engine) -> State:
    """Where heads differ and no gradient is zero."""
    start = PFLEGO(head_lr=0.5, local_steps=8, server_lr=0.05)
    state = play(engine, start, 3)
    return State({"theta": state.shared["theta"]}, state.local)


def test_everyone_and_one_step_is_gradient_descent():
    engine = federation(EXACT)
    state = EXACT.init(engine.task, engine.group)
    theta, W = state.shared["theta"], heads(engine, state)
    for t in range(4):
        by_theta, by_W = objective_gradient(theta, W)
        theta, W = theta - 0.2 * by_theta, W - 0.2 * by_W
        state = play(engine, EXACT, 1, state, first=t)
        same(state.shared["theta"], theta)
        same(heads(engine, state), W)


@pytest.mark.parametrize("r", [1, 2, 4])
def test_mean_and_second_moment_over_all_cohorts(r):
    """E g = grad L; E |g_W|^2 = (I/r) |grad_W L|^2; E |g_theta|^2 = |grad_theta L|^2 + (I^2/r) (1 - r/I) S^2."""
    engine = federation(EXACT)
    start = somewhere(engine)
    theta, W = start.shared["theta"].clone(), heads(engine, start)
    g_theta, g_W = [], []
    for cohort in combinations(range(CLIENTS), r):
        state = play(engine, EXACT, [list(cohort)], cloned(start))
        g_theta.append((theta - state.shared["theta"]) / EXACT.server_lr)
        g_W.append((W - heads(engine, state)) / EXACT.server_lr)
    by_theta, by_W = objective_gradient(theta, W)
    np.testing.assert_allclose(torch.stack(g_theta).mean(0), by_theta, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(torch.stack(g_W).mean(0), by_W, rtol=1e-10, atol=1e-13)
    assert (by_W**2).sum(1).min() > 1e-8

    second = np.mean([(g**2).sum() for g in g_W])
    np.testing.assert_allclose(second, CLIENTS / r * (by_W**2).sum(), rtol=1e-10)
    own = [a * NET.gradients(theta, W[i], *DATA[i])[0] for i, a in enumerate(ALPHA)]
    spread = sum(((g - by_theta / CLIENTS) ** 2).sum() for g in own) / (CLIENTS - 1)
    expected = (by_theta**2).sum() + CLIENTS**2 / r * (1 - r / CLIENTS) * spread
    np.testing.assert_allclose(np.mean([(g**2).sum() for g in g_theta]), expected, rtol=1e-10)


def test_the_released_server_is_a_ratio_estimator():
    """Its mean over the cohorts is not the gradient: about I/r times it."""
    released = replace(EXACT, variant="released")
    engine = federation(released)
    start = somewhere(engine)
    theta, W = start.shared["theta"].clone(), heads(engine, start)
    cohorts = list(combinations(range(CLIENTS), 2))
    found = [(theta - play(engine, released, [list(c)], cloned(start)).shared["theta"]) / 0.2 for c in cohorts]
    own = [NET.gradients(theta, W[i], *DATA[i])[0] for i in range(CLIENTS)]
    shares = [{i: SIZES[i] / sum(SIZES[j] for j in c) for i in c} for c in cohorts]
    expected = [2.5 * sum(share * own[i] for i, share in mine.items()) for mine in shares]
    same(torch.stack(found), torch.stack(expected), 1e-10)
    ratio = torch.stack(found).mean(0).norm() / objective_gradient(theta, W)[0].norm()
    assert 1.5 < ratio < 3.5


@pytest.mark.parametrize("own", [None, OWN], ids=["all outputs", "own outputs"])
def test_steps_of_the_head_never_increase_a_client_s_loss(own):
    """For beta < 2/L_W. The softmax's Hessian is at most 1/2: L_W is at most half the largest eigenvalue of the mean of
    [phi, 1]^T [phi, 1].
    """
    engine = federation(EXACT, DATA if own is None else LOCAL, own)
    data = DATA if own is None else LOCAL
    start = somewhere(engine)
    theta = start.shared["theta"].clone()
    largest = 0.0
    for x, _ in data:
        first = theta[: HIDDEN * 4].view(HIDDEN, 4)
        phi = torch.relu(torch.from_numpy(x) @ first.T + theta[HIDDEN * 4 :])
        phi = torch.cat([phi, torch.ones(len(phi), 1)], 1)
        largest = max(largest, float(torch.linalg.eigvalsh(phi.T @ phi / len(phi))[-1]) / 2)
    course = []
    for tau in (1, 2, 3, 5, 9, 17):
        algorithm = PFLEGO(head_lr=1.99 / largest, server_lr=1e-12, local_steps=tau, server_optimizer="sgd")
        W = heads(engine, play(federation(algorithm, data, own), algorithm, 1, cloned(start)))
        with torch.no_grad():
            course.append([float(NET.loss(theta, W[i], *data[i], own and own[i])) for i in range(CLIENTS)])
    steps = np.diff(course, axis=0)
    assert (steps <= 1e-10).all()
    assert (steps < -1e-6).any(0).tolist() == [own is None or k > 1 for k in own or SIZES]


# --- what it costs ----------------------------------------------------------------------------------------------------


def passes(algorithm, cohorts=COHORTS):
    """Forward and backward passes per participant of each round."""
    engine, accounts = federation(algorithm), []
    play(engine, algorithm, cohorts, accounts=accounts)
    per_round = {
        tuple(np.sum(account.passes, axis=0) / len(SIZES if cohort is None else cohort))
        for account, cohort in zip(accounts, cohorts, strict=True)
    }
    (found,) = per_round  # the same in every round
    return found


@pytest.mark.parametrize(
    ("algorithm", "forward", "backward"),
    [
        (PFLEGO(local_steps=1), 1, 1),
        (PFLEGO(local_steps=2), 2, 1),
        (PFLEGO(local_steps=10), 2, 1),
        (PFLEGO(local_steps=50), 2, 1),
        (PFLEGO(local_steps=7, variant="released"), 2, 1),
        (PFLEGO(local_steps=7, batch_size=3), 7, 1),
        (FedAvg(local_steps=7), 7, 7),
        (FedPer(local_steps=7), 7, 7),
        (FedPer(local_steps=7, batch_size=3), 7, 7),
        (FedRep(head_steps=7, body_steps=1), 2, 1),
        (FedRep(head_steps=7, body_steps=3), 4, 3),
        (FedRep(head_steps=7, body_steps=3, batch_size=3), 10, 3),
        (FedBABU(local_steps=7), 7, 7),
        (FedRecon(local_steps=7), 2, 1),
        (FedRecon(local_steps=7, body_steps=3, reset=True), 4, 3),
        (FedRecon(local_steps=7, body_steps=3, batch_size=3), 10, 3),
    ],
    ids=repr,
)
def test_passes_through_the_body(algorithm, forward, backward):
    assert passes(algorithm) == (forward, backward)


@pytest.mark.parametrize(
    "algorithm",
    [
        PFLEGO(local_steps=3),
        PFLEGO(local_steps=1, variant="released", server_optimizer="sgd"),
        FedPer(local_steps=2),
        FedRep(head_steps=2),
        FedBABU(local_steps=2),
        FedRecon(local_steps=2),
        FedRecon(local_steps=2, reset=True, body_steps=2, server_optimizer="sgd"),
    ],
    ids=repr,
)
def test_only_the_body_travels(algorithm):
    engine, accounts = federation(algorithm, dtype=torch.float32), []
    play(engine, algorithm, COHORTS, accounts=accounts)
    body = HIDDEN * 4 + HIDDEN
    assert engine.task.layout.size == body + CLASSES * (HIDDEN + 1)
    for account, cohort in zip(accounts, COHORTS, strict=True):
        n = len(SIZES if cohort is None else cohort)
        assert account.kind == GLOBAL
        assert np.sum(account.up, axis=0).tolist() == [n, n * body * 4]
        assert np.sum(account.down, axis=0).tolist() == [n, n * body * 4]


def test_training_loss_is_the_mean_over_the_steps():
    """At the heads of every step, and the body that the client got."""
    engine, accounts = federation(algorithm := PFLEGO(local_steps=3, head_lr=0.3)), []
    state = play(engine, algorithm, 2)
    theta, W = state.shared["theta"].clone(), heads(engine, state)
    play(engine, algorithm, 1, state, first=2, accounts=accounts)
    seen = []
    for rows, loss, _ in accounts[0].losses:
        for i, found in zip(engine.group.ids[rows], loss, strict=True):
            head, course = W[i], []
            for _ in range(3):
                course.append(float(NET.loss(theta, head, *DATA[i])))
                head = head - 0.3 * NET.gradients(theta, head, *DATA[i])[1]
            assert float(found) == pytest.approx(np.mean(course), rel=1e-12)
            seen.append(i)
    assert sorted(seen) == list(range(CLIENTS))
