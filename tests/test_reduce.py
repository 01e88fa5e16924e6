"""Sums whose bits depend on the terms alone: not on their order, their cut into pieces, or the ranks that hold them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import CPU, on_ranks, same_bits

from hpcfl.comm import Comm
from hpcfl.errors import Diverged
from hpcfl.reduce import Piece, column_sums, float64_sum, grid_bits, magnitude, reproducible_sum

DTYPES = [torch.float32, torch.float64]
SUMS = [reproducible_sum, float64_sum]
TERM_ERROR = 2.0**-51  # of the largest term


def terms(n=60, columns=7, dtype=torch.float32, seed=0):
    """Rows [n, columns] and weights [n, 1] of widely different magnitudes."""
    g = np.random.default_rng(seed)
    rows = g.normal(size=(n, columns)) * 10.0 ** g.uniform(-8, 3, (n, 1))
    return torch.from_numpy(rows).to(dtype), torch.from_numpy(10.0 ** g.uniform(-3, 3, (n, 1)))


def total(rows, weights=None, function=reproducible_sum, comm=None, participants=None, **options):
    """The sum of one piece on one rank."""
    n = len(rows) if participants is None else participants
    return function(comm or Comm(), [Piece(rows, np.arange(len(rows)), weights, **options)], grid_bits(n), CPU)[0]


def spread(rows, weights, ranks, seed, function=reproducible_sum):
    """The sum by every rank, with the rows in random order, on random ranks, in random pieces."""
    g = np.random.default_rng(seed)
    owner = g.integers(ranks, size=len(rows))
    if seed % 3 == 0:
        owner[owner == ranks - 1] = 0  # a rank without rows
    pieces = []
    for r in range(ranks):
        mine = g.permutation(np.flatnonzero(owner == r))
        cuts = np.sort(g.integers(len(mine) + 1, size=3))
        pieces.append([piece for piece in np.split(mine, cuts) if len(piece)])

    def rank(comm):
        mine = pieces[comm.rank]
        terms = [Piece(rows[p], p, None if weights is None else weights[p]) for p in mine]
        return function(comm, terms, grid_bits(len(rows)), CPU)[0]

    return on_ranks(ranks, rank)


def exact(rows, weights=None) -> np.ndarray:
    """Correctly rounded sum of the weighted terms, each rounded to float64."""
    values = rows.double() if weights is None else rows.double() * weights
    return np.array([math.fsum(column) for column in values.T.tolist()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("columns", [1, 7, 5000])  # 60 x 5000: in parts
def test_the_same_bits_for_any_layout(dtype, weighted, columns):
    rows, weights = terms(columns=columns, dtype=dtype)
    weights = weights if weighted else None
    expected = total(rows, weights)
    for seed in range(9):
        for found in spread(rows, weights, 1 + seed % 4, seed):
            assert same_bits(found, expected)


@pytest.mark.parametrize("function", SUMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n", [1, 60, 2048])
def test_close_to_the_exact_sum(function, dtype, weighted, n):
    rows, weights = terms(n, dtype=dtype)
    weights = weights if weighted else None
    largest = (rows.double() if weights is None else rows.double() * weights).abs().max().item()
    bound = n * TERM_ERROR * largest if function is reproducible_sum else n * n * 2.0**-53 * largest
    for found in (total(rows, weights, function), *spread(rows, weights, 3, 1, function)):
        assert found.dtype == torch.float64
        assert (abs(found.numpy() - exact(rows, weights)) <= bound + 2.0**-53 * abs(found.numpy())).all()


def test_documented_error_of_a_term():
    """Wherever the terms lie on the grid."""
    small = np.linspace(2.0**-53, 2.0**-48, 500)
    for largest in (1.0, 1.25, 1.9, 2.0):
        for value in small * largest:
            rows = torch.tensor([[largest], [value]], dtype=torch.float64)
            assert abs(total(rows).item() - math.fsum([largest, value])) <= largest * TERM_ERROR + math.ulp(largest) / 2


def test_what_cancels_leaves_the_rest():
    rows = torch.tensor([[1e8], [1.0], [-1e8], [2.0**-20]])
    assert total(rows).item() == 1 + 2.0**-20


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_headroom_for_many_participants(dtype, sign):
    n = 100_000
    value = 2 - 2.0**-20  # just below a power of two: the largest that its grid takes
    rows = torch.full((n, 2), sign * value, dtype=dtype)
    np.testing.assert_allclose(total(rows), sign * n * value, rtol=1e-12)
    rows = torch.full((2048, 2), sign * (2 - 2.0**-52 if dtype == torch.float64 else value), dtype=dtype)
    np.testing.assert_allclose(total(rows), exact(rows), rtol=1e-15)
    rows[::2] *= -1
    np.testing.assert_allclose(total(rows), 0)


def test_many_columns():
    rows = torch.arange(3_000_000, dtype=torch.float32).reshape(3, -1)
    assert torch.equal(total(rows), rows.double().sum(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", SUMS)
def test_inputs_are_not_written_to(dtype, function):
    rows, weights = terms(dtype=dtype)
    before = rows.clone(), weights.clone()
    total(rows, weights, function)
    total(rows, None, function)
    assert same_bits(rows, before[0])
    assert same_bits(weights, before[1])


@pytest.mark.parametrize("function", SUMS)
def test_extremes(function):
    assert same_bits(total(torch.zeros(3, 2), None, function), torch.zeros(2, dtype=torch.float64))
    assert total(torch.full((7, 1), 2.0**-149), None, function).item() == 7 * 2.0**-149  # float32's smallest
    assert total(torch.full((4, 1), 3.4e38), None, function).item() > 1.3e39  # beyond float32
    tiny = total(torch.full((7, 1), 5e-324, dtype=torch.float64), None, function).item()
    assert 0 <= tiny <= 1e-280
    huge = torch.tensor([[2.0**899], [-(2.0**898)]], dtype=torch.float64)
    assert total(huge, None, function).item() == 2.0**898


def test_magnitudes_that_are_known_already():
    rows, weights = terms(columns=20)
    assert same_bits(total(rows, weights, magnitudes=magnitude(rows)), total(rows, weights))


@pytest.mark.parametrize("columns", [3, 5000])
def test_magnitude(columns):
    rows, _ = terms(columns=columns)
    rows[3, 1], rows[4, 2], rows[5, 0] = torch.nan, -torch.inf, -1e9
    expected = rows.double().abs().amax(1)
    assert same_bits(magnitude(rows).isnan(), expected.isnan())
    assert torch.equal(magnitude(rows).nan_to_num(7), expected.nan_to_num(7))
    assert magnitude(rows[:0]).shape == (0,)


# --- values that are not finite ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", SUMS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_divergence_is_raised_by_all_ranks(function, weighted, where, value, dtype):
    """Rank r holds clients 10 r .. 10 r + 4, and the last rank more bad ones."""
    rows, weights = terms(15, dtype=dtype)
    rows[5 * where + 3, 2] = value
    rows[14, 6] = -value

    def rank(comm):
        mine = slice(5 * comm.rank, 5 * comm.rank + 5)
        piece = Piece(rows[mine], 10 * comm.rank + np.arange(5), weights[mine] if weighted else None)
        return function(comm, [piece], grid_bits(15), CPU)[0]

    errors = on_ranks(3, rank, fails=Diverged)
    assert {str(error) for error in errors} == {f"client {10 * where + 3}: what it sends is not finite"}


def test_a_float64_beyond_the_grid_counts_as_diverged():
    with pytest.raises(Diverged, match="client 1"):
        total(torch.tensor([[1.0], [2.0**1000]], dtype=torch.float64))


@pytest.mark.parametrize("function", SUMS)
@pytest.mark.parametrize("holder", [0, 1, 2])
def test_ranks_without_rows(function, holder):
    rows, _ = terms(8)

    def rank(comm):
        if comm.rank == holder:
            pieces = [Piece(rows[:3], np.arange(3)), Piece(rows[3:], np.arange(3, 8))]
            return function(comm, pieces, grid_bits(8), CPU)[0]
        return function(comm, [], grid_bits(8), CPU)[0]

    for found in on_ranks(3, rank):
        np.testing.assert_allclose(found, exact(rows), rtol=1e-12)


# --- many scalars -----------------------------------------------------------------------------------------------------


def test_columns_have_grids_of_their_own():
    g = np.random.default_rng(0)
    values = g.normal(size=(50, 5)) * 10.0 ** np.array([-30, -3, 0, 9, 30])
    values[:, 2] = 0
    np.testing.assert_allclose(column_sums(Comm(), values, 50), [math.fsum(c) for c in values.T], rtol=1e-13)


def test_columns_do_not_depend_on_the_layout_or_on_other_columns():
    g = np.random.default_rng(1)
    values = g.normal(size=(50, 4)) * 10.0 ** g.uniform(-9, 9, (50, 4))
    expected = column_sums(Comm(), values, 50)
    for k in range(4):
        assert same_bits(column_sums(Comm(), values[:, k : k + 1], 50), expected[k : k + 1])
    for trial in range(6):
        owner, shuffled = g.integers(3 if trial else 1, size=50), g.permutation(values)
        parts = [shuffled[owner == rank] for rank in range(3)]
        for found in on_ranks(3, lambda comm, parts=parts: column_sums(comm, parts[comm.rank], 50)):
            assert same_bits(found, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_bad_column_leaves_the_others_right(bad, where):
    values = np.random.default_rng(2).normal(size=(9, 3))
    right = column_sums(Comm(), values, 9)
    values[3 * where + 1, 1] = bad
    for found in on_ranks(3, lambda comm: column_sums(comm, values[3 * comm.rank : 3 * comm.rank + 3], 9)):
        assert np.isinf(found[1])
        assert same_bits(found[[0, 2]], right[[0, 2]])


def test_columns_have_headroom():
    values = np.full((100_000, 1), 2 - 2.0**-52)
    np.testing.assert_allclose(column_sums(Comm(), values, 100_000), 100_000 * values[0], rtol=1e-12)
