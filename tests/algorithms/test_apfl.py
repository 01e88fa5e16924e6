"""APFL against the paper's formulas and numbers worked by hand. Equation numbers are those of the paper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import (
    decide,
    least_squares,
    least_squares_gradient,
    make_engine,
    minibatch,
    personal,
    play,
    same_bits,
)

from hpcfl.algorithm import State
from hpcfl.algorithms import apfl
from hpcfl.algorithms.apfl import APFL
from hpcfl.errors import InputError
from hpcfl.round import GLOBAL, Round
from hpcfl.schedules import Constant, Exponential, Theory

SIZES = [4, 9, 6, 17, 5]
DATA = least_squares(SIZES)
COHORTS = [[0, 2, 3], [1, 3], [0, 2, 3], [3], None]
TAU = 3
ALPHAS = (0.125, 0.375, 0.5, 0.75, 1.0)


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- numbers worked by hand: half the squared error at x = (2, 1), y = 1 ----------------------------------------------


@pytest.mark.parametrize(
    ("variant", "w", "v", "alpha"),
    [
        # vbar = (.7, -.1), grad = .3 x = (.6, .3), <v - w, grad> = -.15; at w: grad = .5 x
        ("paper", [0.4, 0.45], [0.976, -1.012], 0.415),
        # w first; vbar = (.64, -.13), grad = .15 x; v - w = (.588, -1.456), slope = .52 (-.042) + .02 (.4) = -.01384
        ("released", [0.4, 0.45], [0.988, -1.006], 0.401384),
    ],
)
def test_one_step_by_hand(variant, w, v, alpha):
    algorithm = APFL(lr=0.1, variant=variant)
    engine = make_engine([(np.array([[2.0, 1.0]]), np.array([1.0]))], algorithm)
    start = State({"w": tensor([0.5, 0.5])}, {"v": tensor([[1.0, -1.0]]), "alpha": tensor([[0.4]])})
    state = play(engine, algorithm, 1, start)
    np.testing.assert_allclose(state.shared["w"], w, rtol=1e-14)
    np.testing.assert_allclose(state.local["v"], [v], rtol=1e-14)
    np.testing.assert_allclose(state.local["alpha"], [[alpha]], rtol=1e-14)
    mixed = alpha * np.array(v) + (1 - alpha) * np.array(w)
    np.testing.assert_allclose(personal(engine, algorithm, state, 1), [mixed], rtol=1e-14)


def test_released_rule_by_hand():
    a, v, w, g = tensor([[0.4]]), tensor([[1.0, -1.0]]), tensor([[0.5, 0.5]]), tensor([[0.6, 0.3]])
    assert (a - 0.1 * apfl.released_slope(a, v, w, g)).item() == pytest.approx(0.407, rel=1e-14)


# --- (6), (7), (8), (10) in NumPy -------------------------------------------------------------------------------------


def reference(cohorts, eta, *, alpha=ALPHAS, update="round", alpha_lr=None, variant="paper", size=None, lr=0.1):
    """w, v [N, P], alpha [N] after the rounds, and per iteration (v [N, P], mean of w_j) for the averages."""
    n = len(DATA)
    w, v, a, course = np.zeros(3), np.zeros((n, 3)), np.array(alpha, float), []
    for r, cohort in enumerate(cohorts):
        cohort = range(n) if cohort is None else cohort
        mine = dict.fromkeys(cohort, w)
        for t in range(TAU):
            for i in cohort:
                batch, step = minibatch(DATA, i, r, t, size), eta(r, t)
                old_w, old_v = mine[i], v[i].copy()
                mine[i] = old_w - step * least_squares_gradient(old_w, *batch)
                if variant == "paper":
                    g = least_squares_gradient(a[i] * old_v + (1 - a[i]) * old_w, *batch)
                    v[i] = old_v - step * a[i] * g
                    slope = (old_v - old_w) @ g
                else:
                    g = least_squares_gradient(a[i] * old_v + (1 - a[i]) * mine[i], *batch)
                    v[i] = old_v - lr * a[i] * g  # the personal optimiser keeps the initial step size
                    slope = (a[i] ** 2 + (1 - a[i]) ** 2) * ((v[i] - mine[i]) @ g) + 0.02 * a[i]
                if update == "step" or (update == "round" and t == 0):
                    a[i] = min(max(a[i] - (alpha_lr or step) * slope, 0), 1)
            course.append((v.copy(), np.mean(list(mine.values()), 0)))
        w = np.mean(list(mine.values()), 0)
    return w, v, a, course


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize(
    "options",
    [{}, {"update": "step"}, {"update": "off"}, {"alpha_lr": 0.7}, {"size": 4}, {"size": 1, "update": "step"}],
    ids=str,
)
def test_rounds_of_uneven_clients_with_partial_participation(variant, options):
    algorithm = APFL(
        lr=0.1,
        lr_schedule=Exponential(decay=0.9),
        local_steps=TAU,
        batch_size=options.get("size"),
        alpha=ALPHAS,
        alpha_update=options.get("update", "round"),
        alpha_lr=options.get("alpha_lr"),
        variant=variant,
    )
    engine = make_engine(DATA, algorithm)
    state = play(engine, algorithm, COHORTS)
    w, v, a, _ = reference(COHORTS, lambda r, t: 0.1 * 0.9**r, variant=variant, **options)
    np.testing.assert_allclose(state.shared["w"], w, rtol=1e-10)
    np.testing.assert_allclose(state.local["v"], v, rtol=1e-10)
    np.testing.assert_allclose(state.local["alpha"][:, 0], a, rtol=1e-10)
    expected = a[:, None] * v + (1 - a[:, None]) * w
    np.testing.assert_allclose(personal(engine, algorithm, state, len(COHORTS)), expected, rtol=1e-10)


def test_who_sits_out_keeps_v_and_alpha():
    algorithm = APFL(lr=0.1, local_steps=2, alpha=ALPHAS)
    engine = make_engine(DATA, algorithm)
    before = play(engine, algorithm, 2)
    kept = {name: rows.clone() for name, rows in before.local.items()}
    after = play(engine, algorithm, [[0, 3]], before, first=2)
    for name in ("v", "alpha"):
        moved = [i for i in range(5) if not same_bits(after.local[name][i], kept[name][i])]
        assert moved == [0, 3]


@pytest.mark.parametrize(
    ("schedule", "eta"),
    [
        (Constant(), lambda r, t: 0.1),
        (Exponential(decay=0.7), lambda r, t: 0.1 * 0.7**r),
        (Theory(mu=2.0, a=90.0), lambda r, t: 16 / (2.0 * (TAU * r + t + 90.0))),
    ],
    ids=["constant", "exponential", "theory"],
)
def test_schedules(schedule, eta):
    algorithm = APFL(lr=0.1, lr_schedule=schedule, local_steps=TAU, alpha=ALPHAS)
    state = play(make_engine(DATA, algorithm), algorithm, COHORTS)
    w, v, a, _ = reference(COHORTS, eta)
    np.testing.assert_allclose(state.shared["w"], w, rtol=1e-10)
    np.testing.assert_allclose(state.local["v"], v, rtol=1e-10)
    np.testing.assert_allclose(state.local["alpha"][:, 0], a, rtol=1e-10)


# --- alpha ------------------------------------------------------------------------------------------------------------


def test_when_alpha_moves():
    """ "round": at the first of the local steps alone; "step": at every one; "off": at none."""
    found = {}
    for update, steps in [("off", TAU), ("round", TAU), ("step", TAU), ("step", 1)]:
        start = APFL(lr=0.1, local_steps=TAU, batch_size=4, alpha=ALPHAS, alpha_update="off")
        engine = make_engine(DATA, start)
        state = play(engine, start, 1)  # from here on v and w differ
        algorithm = replace(start, alpha_update=update, local_steps=steps)
        state = play(make_engine(DATA, algorithm), algorithm, 1, state, first=1)
        found[update, steps] = state.local["alpha"][:-1]  # the last one may stay at its wall
    assert same_bits(found["off", TAU][:, 0], tensor(ALPHAS[:-1]))
    assert same_bits(found["round", TAU], found["step", 1])
    assert (found["round", TAU] != found["off", TAU]).all()
    assert (found["round", TAU] != found["step", TAU]).all()


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_alpha_stays_between_0_and_1(variant):
    algorithm = APFL(lr=0.1, local_steps=TAU, alpha_update="step", alpha_lr=500.0, variant=variant, batch_size=2)
    engine = make_engine(DATA, algorithm)
    seen, state = [], algorithm.init(engine.task, engine.group)
    for r in range(12):
        state = play(engine, algorithm, 1, state, first=r)
        seen.append(state.local["alpha"].clone())
    seen = torch.cat(seen)
    assert seen.min() == 0  # both walls are met
    assert seen.max() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [0.3, (0.1, 0.2, 0.3, 0.6, 0.7)], ids=["one", "per client"])
def test_initial_alpha_is_exact_in_the_run_s_precision(dtype, alpha):
    engine = make_engine(DATA, APFL(), dtype=dtype, cluster=[1, 0, 1, 0, 1])  # so that the rows are not in order of ids
    found = APFL(alpha=alpha).init(engine.task, engine.group).local["alpha"]
    expected = torch.tensor([alpha if isinstance(alpha, float) else alpha[i] for i in engine.group.ids], dtype=dtype)
    assert same_bits(found, expected[:, None])


def test_a_wrong_number_of_alphas_is_refused():
    engine = make_engine(DATA, APFL())
    with pytest.raises(InputError, match=r"algorithm.alpha: 2 values, expected one, or one per client \(5\)"):
        APFL(alpha=(0.1, 0.2)).init(engine.task, engine.group)


# --- averaged outputs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "shift"),
    [
        ({}, 0.0),
        ({"average_shift": 7.5}, 7.5),
        ({"lr_schedule": Theory(mu=2.0, a=90.0)}, 90.0),
        ({"lr_schedule": Theory(mu=2.0, a=90.0), "average_shift": 0.0}, 0.0),
    ],
    ids=["plain", "shift", "theory", "both"],
)
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_averages_are_the_direct_sums(options, shift, rounds):
    algorithm = APFL(lr=0.1, local_steps=TAU, alpha=ALPHAS, alpha_update="off", average=True, **options)
    engine = make_engine(DATA, algorithm)
    state = play(engine, algorithm, COHORTS[:rounds])
    schedule = options.get("lr_schedule", Constant())
    *_, course = reference(COHORTS[:rounds], lambda r, t: schedule.at(0.1, r, TAU * r + t), update="off")

    p = [(t + shift) ** 2 for t in range(1, len(course) + 1)]
    assert algorithm.weights.total(len(course)) == pytest.approx(sum(p), rel=1e-14)
    a = np.array(ALPHAS)[:, None]
    v_hat = sum(pt * (a * v + (1 - a) * mean) for pt, (v, mean) in zip(p, course, strict=True)) / sum(p)
    w_hat = sum(pt * mean for pt, (_, mean) in zip(p, course, strict=True)) / sum(p)
    np.testing.assert_allclose(algorithm.global_model(state), w_hat, rtol=1e-10)
    np.testing.assert_allclose(personal(engine, algorithm, state, rounds), v_hat, rtol=1e-10)


def test_averaging_changes_no_iterate():
    plain = APFL(lr=0.1, local_steps=TAU, alpha=ALPHAS, batch_size=4)
    a, b = (play(make_engine(DATA, x), x, COHORTS) for x in (plain, replace(plain, average=True)))
    assert same_bits(a.shared["w"], b.shared["w"])
    assert all(same_bits(a.local[name], b.local[name]) for name in ("v", "alpha"))


# --- what travels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("average", "up"), [(False, 1), (True, 2)])
def test_only_w_travels(average, up):
    algorithm = APFL(lr=0.1, local_steps=TAU, average=average)
    engine, accounts = make_engine(DATA, algorithm, dtype=torch.float32), []
    play(engine, algorithm, COHORTS, accounts=accounts)
    for account, cohort in zip(accounts, COHORTS, strict=True):
        n = len(cohort or DATA)
        assert account.kind == GLOBAL
        assert np.sum(account.up, axis=0).tolist() == [up * n, up * n * 3 * 4]  # 3 parameters of 4 bytes
        assert np.sum(account.down, axis=0).tolist() == [n, n * 3 * 4]


def test_training_loss_is_that_of_the_personal_model_before_the_step():
    algorithm = APFL(lr=0.1, alpha=0.5)
    engine = make_engine(DATA, algorithm)
    round = Round(engine, decide(engine, 0))
    algorithm.round(algorithm.init(engine.task, engine.group), round)
    for rows, loss, _ in round.account.losses:
        np.testing.assert_allclose(loss, [np.mean(DATA[i][1] ** 2) / 2 for i in np.arange(len(DATA))[rows]], rtol=1e-12)
