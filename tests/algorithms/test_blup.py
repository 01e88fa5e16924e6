"""Exact solvers of linear regressions, for known clusters and without, against dense algebra in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dense_example import Dense
from helpers import classes, decide, least_squares, on_ranks, play, ready, same_bits

from hpcfl.algorithms.async_l2gd import AsyncL2GD
from hpcfl.algorithms.blup import BLUP
from hpcfl.algorithms.least_squares import LeastSquares
from hpcfl.errors import InputError
from hpcfl.models.dense import MLP, Linear, Logistic
from hpcfl.round import GLOBAL, LOCAL, Round
from hpcfl.schedules import Exponential

OF = np.array([1, 0, 1, 0, 1, 2, 0, 3])  # cluster of each client; two are alone
SIZES = np.array([4, 9, 2, 17, 1, 3, 30, 12])  # some with fewer rows than the 4 columns
DATA = least_squares(SIZES, features=4)
GAMMA = (0.7, 0.2, 1.3, 0.4, 0.9, 0.5, 2.0, 1.1)
PLAIN = Linear(bias=False)
every_model = pytest.mark.parametrize("model", [PLAIN, Linear(), Linear(bias=False, l2=0.3), Linear(l2=0.02)])


def solved(o, data=DATA, rounds=1, **options):
    """[N, P], by client: zero for those who did not take part."""
    engine, algorithm = ready(data, o, **options)
    return play(engine, algorithm, rounds).local["theta"].numpy()[np.argsort(engine.group.ids)]


def close(found, expected, rtol=1e-10):
    """Up to a share of the largest number."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=rtol * abs(expected).max())


def lstsq(data, l2=0.0, bias=False):
    """Least squares of the mean loss and of l2/2 ||w||^2; the solution of least norm."""
    x, y = (np.concatenate([client[k] for client in data]) for k in (0, 1))
    x = np.hstack([x, np.ones((len(y), 1))]) if bias else x
    penalty = np.sqrt(l2 * len(y)) * np.eye(x.shape[1])
    return np.linalg.lstsq(np.vstack([x, penalty]), np.concatenate([y, np.zeros(len(penalty))]), rcond=1e-10)[0]


@pytest.mark.parametrize("objective", ["mean", "sum"])
@every_model
@pytest.mark.parametrize("alpha", [(0.6, 0.15, 0.9, 0.5), (0.0, 1.0, 0.3, 1.0), 1.0, 0.4])
def test_blup_minimises_F(alpha, model, objective):
    found = solved(BLUP(gamma=GAMMA, alpha=alpha, objective=objective), cluster=OF, model=model)
    dense = Dense(DATA, OF, GAMMA, np.broadcast_to(alpha, 4), objective=objective, l2=model.l2, bias=model.bias)
    assert abs(dense.gradient(found)).max() < 1e-12 * abs(dense.b).max()
    close(found, dense.minimiser())


def test_lam_is_that_of_the_hierarchical_objective():
    """alpha_j = lam_j/(lam_j + Gamma_j), and lam = 1 where nothing is given."""
    weights = np.bincount(OF, GAMMA)
    for lam in ((0.5, 3.0, 1.0, 0.0), 2.0, None):
        given = np.full(4, 1.0 if lam is None else lam) if not isinstance(lam, tuple) else np.array(lam)
        alpha = tuple((given / (given + weights)).tolist())
        a, b = (solved(BLUP(gamma=GAMMA, **options), cluster=OF) for options in ({"lam": lam}, {"alpha": alpha}))
        close(a, b, 1e-13)


def hierarchy(sizes, cluster, s_0, s, v, seed=0):
    """x, y of clients with theta_i ~ N(c_j, s_i), c_j ~ N(theta*, s_0j), y ~ N(x theta_i, v_i): variances."""
    g = np.random.default_rng(seed)
    centers = 3 + np.sqrt(s_0)[:, None] * g.normal(size=(len(s_0), 4))
    data = []
    for n, j, own, noise in zip(sizes, cluster, s, v, strict=True):
        x, theta = g.normal(size=(n, 4)), centers[j] + np.sqrt(own) * g.normal(size=4)
        data.append((x, x @ theta + np.sqrt(noise) * g.normal(size=n)))
    return data


def best_linear_unbiased(data, cluster, s_0, s, v):
    """E theta_i given y, with a flat prior on theta*: generalised least squares of theta*, then kriging. [N, P]."""
    sizes, n = [len(y) for _, y in data], len(data)
    y, owner = np.concatenate([y for _, y in data]), np.repeat(np.arange(n), sizes)
    design = np.zeros((len(y), n, 4))  # y = design theta + noise
    design[np.arange(len(y)), owner] = np.concatenate([x for x, _ in data])
    prior = np.diag(s) + np.where(np.equal.outer(cluster, cluster), s_0[cluster], 0.0)  # of theta_i - theta*, [N, N]
    covariance = np.einsum("anp,nm,bmp->ab", design, prior, design) + np.diag(np.array(v)[owner])
    total = design.sum(1)  # y = total theta* + ...
    weighted = np.linalg.solve(covariance, total)
    center = np.linalg.solve(total.T @ weighted, weighted.T @ y)
    rest = np.linalg.solve(covariance, y - total @ center)
    return center + np.einsum("nm,amp,a->np", prior, design, rest)


@pytest.mark.parametrize("even", [True, False])
def test_blup_is_the_posterior_mean_of_the_hierarchical_model(even):
    """f_i = ||y - x theta||^2/(2 v_i), gamma_i = 1/s_i, lam_j = 1/s_0j. Noise v_i is divided out of x and y."""
    g = np.random.default_rng(1)
    s_0 = np.full(4, 0.5) if even else g.uniform(0.3, 2, 4)
    s, v = (np.full(8, number) if even else g.uniform(0.3, 2, 8) for number in (0.8, 1.0))
    data = hierarchy(SIZES, OF, s_0, s, v)
    scaled = [(x / np.sqrt(noise), y / np.sqrt(noise)) for (x, y), noise in zip(data, v, strict=True)]
    o = BLUP(gamma=tuple(1 / s), lam=tuple(1 / s_0), objective="sum")
    close(solved(o, scaled, cluster=OF), best_linear_unbiased(data, OF, s_0, s, v))


def test_blup_is_nearer_to_the_truth_than_its_rivals():
    """In the mean over many federations, as the statistics say."""
    errors = np.zeros(3)
    for seed in range(20):
        g = np.random.default_rng(seed)
        truth = np.repeat(g.normal(size=(4, 4)), 5, axis=0) + 0.5 * g.normal(size=(20, 4))
        data = []
        for theta in truth:
            x = g.normal(size=(6, 4))
            data.append((x, x @ theta + g.normal(size=6)))
        rivals = BLUP(gamma=4.0, lam=1.0, objective="sum"), LeastSquares(), LeastSquares(pooled=True)
        for k, o in enumerate(rivals):
            errors[k] += ((solved(o, data, cluster=np.repeat(np.arange(4), 5)) - truth) ** 2).mean()
    assert errors[0] < 0.8 * min(errors[1:])


@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize("gamma", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("alpha", [0.0, (0.0, 0.4, 1.0)])
def test_directions_without_data(alpha, gamma, size):
    """Fewer rows than columns in a whole cluster: of many minimisers that of least norm, not the roundings of one."""
    of, sizes = [0, 0, 1, 1, 2, 0], [1, 2, 1, 1, 3, 1]
    for seed in range(6):
        data = [(x, size * y) for x, y in least_squares(sizes, features=6, seed=seed)]
        gammas = np.full(6, gamma)
        found = solved(BLUP(gamma=gamma, alpha=alpha), data, cluster=of)
        close(found, Dense(data, of, gammas, np.broadcast_to(alpha, 3)).minimiser(), 1e-7)


def test_a_large_gamma_is_one_model_per_cluster_and_a_small_one_is_none():
    pooled = [lstsq([DATA[i] for i in np.flatnonzero(j == OF)]) for j in range(4)]
    tight = solved(BLUP(gamma=1e11, alpha=0.0, objective="sum"), cluster=OF)
    close(tight, np.array(pooled)[OF], 1e-7)
    data = least_squares([9, 12, 7, 20])
    alone = [lstsq([client]) for client in data]
    close(solved(BLUP(gamma=1e-9, alpha=0.5), data, cluster=[0, 1, 0, 1]), np.array(alone), 1e-7)


def on(ranks, o, data, **options):
    """theta of every client, from so many ranks."""

    def rank(comm):
        engine, algorithm = ready(data, o, world=comm, **options)
        return dict(zip(engine.group.ids.tolist(), play(engine, algorithm, 1).local["theta"].numpy(), strict=True))

    found = {i: row for part in on_ranks(ranks, rank) for i, row in part.items()}
    return np.array([found[i] for i in range(len(data))])


SOLVERS = [BLUP(gamma=GAMMA, objective="sum"), BLUP(alpha=(0.0, 1.0, 0.3, 0.0)), LeastSquares()]
SOLVERS.append(LeastSquares(pooled=True))


@pytest.mark.parametrize("o", SOLVERS)
@pytest.mark.parametrize("features", [4, 25])
def test_same_bits_on_any_ranks_and_in_any_blocks(o, features):
    data = least_squares(SIZES, features)
    alone = solved(o, data, cluster=OF, model=Linear())
    assert abs(alone).min() > 0
    for ranks in (1, 2, 3, 9):
        assert same_bits(on(ranks, o, data, cluster=OF, model=Linear()), alone), ranks
    for block in (1, 2, 3, 5):
        assert same_bits(solved(o, data, cluster=OF, model=Linear(), block=block), alone), block


@pytest.mark.parametrize("ranks", [1, 2, 3, 9])
def test_blup_of_whole_clusters_is_that_of_a_federation_of_these(ranks):
    """The others keep their models."""
    cohort, alpha = np.flatnonzero(np.isin(OF, [0, 2])), np.array([0.6, 0.15, 0.9, 0.5])

    def rank(comm):
        engine, algorithm = ready(DATA, BLUP(gamma=GAMMA, alpha=tuple(alpha)), cluster=OF, world=comm)
        theta = play(engine, algorithm, [cohort]).local["theta"].numpy()
        return dict(zip(engine.group.ids.tolist(), theta, strict=True))

    found = {i: row for part in on_ranks(ranks, rank) for i, row in part.items()}
    inside = [DATA[i] for i in cohort]
    expected = Dense(inside, OF[cohort] // 2, np.array(GAMMA)[cohort], alpha[[0, 2]]).minimiser()
    close(np.array([found[i] for i in cohort]), expected)
    assert not any(found[i].any() for i in range(8) if i not in cohort)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("o", SOLVERS)
def test_every_cohort_is_solved(o, ranks):
    def rank(comm):
        engine, algorithm = ready(DATA, o, cluster=OF, world=comm)
        return play(engine, algorithm, [[4], [0, 5], [1, 2, 3], [7], [6]]).local["theta"]

    for theta in on_ranks(ranks, rank):
        assert theta.isfinite().all()
        assert theta.any(1).all()


@pytest.mark.parametrize("o", SOLVERS)
def test_further_rounds_do_the_same_again(o):
    assert same_bits(solved(o, rounds=3, cluster=OF), solved(o, cluster=OF))


def test_async_l2gd_comes_to_the_same():
    data = least_squares([12] * 8)
    pull = {"gamma": GAMMA, "alpha": (0.6, 0.15, 0.9, 0.5)}
    o = AsyncL2GD(lr=0.1, lr_schedule=Exponential(decay=0.9955), p_global=0.4, p_cluster=0.3, **pull)
    exact, found = solved(BLUP(**pull), data, cluster=OF), solved(o, data, rounds=1500, cluster=OF)
    assert ((found - exact) ** 2).sum() < 1e-3 * (exact**2).sum()


@pytest.mark.parametrize("size", [1.0, 1e6])
@every_model
def test_least_squares_of_each_client(model, size):
    """Also where columns are the same, zero, or more than the rows: the solution of least norm."""
    data = [(x, size * y) for x, y in least_squares([9, 1, 4, 3, 20, 2], features=5)]
    data[0][0][:, 3] = data[0][0][:, 1]
    data[4][0][:, 2] = 0.0
    found = solved(LeastSquares(), data, cluster=[0, 1, 0, 1, 1, 1], model=model)
    for theta, client in zip(found, data, strict=True):
        close(theta, lstsq([client], model.l2, model.bias))
    assert model.l2 or np.linalg.matrix_rank(data[0][0]) == 4


@pytest.mark.parametrize("size", [1.0, 1e6])
@pytest.mark.parametrize("cohort", [None, [0, 2, 5]])
@every_model
def test_pooled_least_squares(model, cohort, size):
    """Of all the samples there, however they are spread."""
    for features, same in ((5, False), (5, True), (60, False)):  # the last with more columns than rows
        data = [(x, size * y) for x, y in least_squares([9, 1, 4, 3, 20, 2], features)]
        for x, _ in data:
            x[:, 3] = x[:, 1] if same else x[:, 3]
        engine, algorithm = ready(data, LeastSquares(pooled=True), model=model)
        found = play(engine, algorithm, [cohort]).local["theta"].numpy()
        there = range(6) if cohort is None else cohort
        expected = lstsq([data[i] for i in there], model.l2, model.bias)
        for theta, i in zip(found, engine.group.ids, strict=True):
            close(theta, expected if i in there else np.zeros_like(expected), 1e-9)


def test_least_squares_does_not_pull_out_small_directions():
    """Columns of very different size, which are no roundings."""
    data = [(x * [1e-3, 1.0, 1e2], y) for x, y in least_squares([30, 20, 40])]
    for found, client in zip(solved(LeastSquares(), data), data, strict=True):
        np.testing.assert_allclose(found, lstsq([client]), rtol=1e-5)
    for found in solved(LeastSquares(pooled=True), data):
        np.testing.assert_allclose(found, lstsq(data), rtol=1e-5)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("o", "kind", "up", "down"),
    [  # numbers of P = 4: a matrix and a vector up, a vector down; those of clusters up, their equations' sums down
        (BLUP(), GLOBAL, (8 + 4) * (16 + 4), (8 + 0) * 4 + 4 * (16 + 4)),
        (LeastSquares(), LOCAL, 0, 0),
        (LeastSquares(pooled=True), GLOBAL, 8 * (16 + 4), 8 * 4),
    ],
)
def test_what_is_sent(o, kind, up, down, ranks):
    def rank(comm):
        engine, algorithm = ready(DATA, o, cluster=OF, world=comm)
        r = Round(engine, decide(engine, 0))
        algorithm.round(algorithm.init(engine.task, engine.group), r)
        return r.account

    accounts = on_ranks(ranks, rank)
    assert {account.kind for account in accounts} == {kind}
    for way, numbers in (("up", up), ("down", down)):
        assert sum(size for account in accounts for _, size in getattr(account, way)) == 8 * numbers


@pytest.mark.parametrize("name", ["blup", "least_squares"])
@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"model": Logistic(), "number": 3}, 'solves linear regressions only; give model.name = "linear"'),
        ({"model": MLP(hidden=(3,))}, 'solves linear regressions only; give model.name = "linear"'),
        ({"dtype": torch.float32}, 'solves exactly, which needs run.dtype = "float64"'),
    ],
)
def test_what_is_refused(name, options, line):
    data = classes(SIZES) if "number" in options else DATA
    with pytest.raises(InputError) as error:
        ready(data, {"blup": BLUP(), "least_squares": LeastSquares()}[name], cluster=OF, **options)
    assert str(error.value).startswith(f'algorithm.name = "{name}": {line}')
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"alpha": 0.5, "lam": 1.0}, "algorithm.alpha and algorithm.lam: give one of the two, not both"),
        ({"lam": (1.0, 2.0)}, "algorithm.lam: 2 values, expected one, or one per cluster (4)"),
        ({"gamma": (1.0, 2.0)}, "algorithm.gamma: 2 values, expected one, or one per client (8)"),
    ],
)
def test_lists_of_another_length(options, line):
    with pytest.raises(InputError) as error:
        ready(DATA, BLUP(**options), cluster=OF)
    assert str(error.value) == line
