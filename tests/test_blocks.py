"""How a rank's clients become blocks, and a client's samples minibatches; nothing may depend on who shares a block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import least_squares, make_engine, minibatch

from hpcfl.algorithms.local import Local
from hpcfl.group import bucket, cut
from hpcfl.rng import Purpose, stream

SIZES = [5, 1, 8, 3, 19, 2, 7, 8, 33, 17]


# --- buckets and cuts -------------------------------------------------------------------------------------------------


def test_buckets():
    n = np.arange(1, 20_000)
    padded = bucket(n)
    assert (padded >= n).all()
    assert (np.diff(padded) >= 0).all()
    assert ((padded - n) / n <= 1 / 8).all()
    assert np.array_equal(padded[:16], n[:16])  # small ones are not padded
    assert np.array_equal(bucket(padded), padded)
    assert len(np.unique(padded)) <= 8 * np.log2(n[-1])
    shuffled = np.random.default_rng(0).permutation(n)  # of each n alone
    assert np.array_equal(bucket(shuffled), padded[shuffled - 1])


def test_fewer_buckets():
    n = np.arange(1, 20_000)
    padded = bucket(n, 4)
    assert ((padded - n >= 0) & ((padded - n) / n <= 1 / 4)).all()
    assert (np.diff(padded) >= 0).all()
    assert len(np.unique(padded)) <= 4 * np.log2(n[-1]) + 1


def test_a_larger_model_is_padded_less():
    data = least_squares([17, 18, 19, 20], features=100)
    engine = make_engine(data, Local())
    assert [b.batch(0).x.shape[1] for b in engine.blocks(engine.everyone, {}, 0)] == [18, 20]
    data = least_squares([17, 18, 19, 20])
    engine = make_engine(data, Local())
    assert [b.batch(0).x.shape[1] for b in engine.blocks(engine.everyone, {}, 0)] == [20]


def test_cut():
    g = np.random.default_rng(0)
    for _ in range(200):
        n, limit, least = int(g.integers(0, 60)), int(g.integers(1, 12)), int(g.integers(1, 6))
        keys = [g.integers(3, size=n), g.integers(2, size=n)]
        blocks = cut(keys, limit, least)
        real = [positions[:count] for positions, count in blocks]
        assert np.array_equal(np.sort(np.concatenate([*real, np.zeros(0, int)])), np.arange(n))  # exact cover
        assert [tuple(k[p[0]] for k in keys) for p in real] == sorted(tuple(k[p[0]] for k in keys) for p in real)
        for positions, count in blocks:
            assert 1 <= count <= limit
            assert all(len(set(key[positions])) == 1 for key in keys)
            assert len(positions) == max(count, least)
            assert (positions[count:] == positions[count - 1]).all()  # the last one, repeated
            assert (np.diff(positions[:count]) > 0).all()
        for combination in {
            tuple(k[p[0]] for k in keys) for p in real
        }:  # nearly equal in size, and no more than needed
            sizes = [len(p) for p in real if tuple(k[p[0]] for k in keys) == combination]
            assert max(sizes) - min(sizes) <= 1
            assert len(sizes) == -(-sum(sizes) // limit)


# --- minibatches ------------------------------------------------------------------------------------------------------


def batches(algorithm, round=0, limit=None, dtype=torch.float64, seed=0):
    """Per client and step: (x [n, ...], y [n]) of the samples that count; every batch's weights are checked."""
    data = least_squares(SIZES)
    engine = make_engine(data, algorithm, block=limit, dtype=dtype, seed=seed)
    found = {}
    for block in engine.blocks(engine.everyone, {}, round):
        for t in block.steps:
            batch = block.batch(t)
            assert batch.weight.dtype == batch.x.dtype == dtype
            for k, client in enumerate(block.ids[: block.real]):
                counts = batch.weight[k] > 0
                n = int(counts.sum())
                assert counts[:n].all()
                assert (batch.weight[k, :n] == torch.tensor(1 / n, dtype=dtype)).all()
                found[client, t] = batch.x[k, :n].numpy(), batch.y[k, :n].numpy()
    return data, found


def position(data, client, x):
    """Which of the client's samples these are."""
    return [int(np.flatnonzero((data[client][0] == row).all(1))[0]) for row in x]


@pytest.mark.parametrize("size", [1, 3, 5, 100])
def test_an_epoch_takes_every_sample_once(size):
    data, found = batches(Local(batch_size=size, local_epochs=3))
    for client, n in enumerate(SIZES):
        per_epoch = -(-n // size)
        orders = []
        for epoch in range(3):
            steps = [found[client, epoch * per_epoch + k] for k in range(per_epoch)]
            lengths = [len(y) for _, y in steps]
            assert lengths[:-1] == [size] * (per_epoch - 1)
            assert lengths[-1] == (n - 1) % size + 1  # the short last batch keeps its true size
            orders.append(tuple(i for x, _ in steps for i in position(data, client, x)))
            assert sorted(orders[-1]) == list(range(n))
        assert len(set(orders)) == 3 or n < 7
        assert (client, 3 * per_epoch) not in found


@pytest.mark.parametrize("size", [2, 4])
def test_the_documented_order(size):
    for round in (0, 1, 9):
        data, found = batches(Local(batch_size=size, local_steps=7), round)
        for (client, t), (x, y) in found.items():
            expected = minibatch(data, client, round, t, size)
            assert np.array_equal(x, expected[0])
            assert np.array_equal(y, expected[1])


def test_every_round_starts_a_new_permutation():
    orders = set()
    for round in range(4):
        data, found = batches(Local(batch_size=100), round)
        orders.add(tuple(position(data, 4, found[4, 0][0])))
    _, found = batches(Local(batch_size=100), 0, seed=1)
    orders.add(tuple(position(data, 4, found[4, 0][0])))
    assert len(orders) == 5
    assert tuple(stream(0, Purpose.BATCHES, client=4, round=2).permutation(19)) in orders


@pytest.mark.parametrize("work", [{"local_steps": 5}, {"local_epochs": 2}])
@pytest.mark.parametrize("size", [None, 3])
def test_minibatches_do_not_depend_on_the_block(work, size):
    _, expected = batches(Local(batch_size=size, **work))
    for limit in (1, 2, 3, 100):
        _, found = batches(Local(batch_size=size, **work), limit=limit)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(a, b) for key in found for a, b in zip(found[key], expected[key], strict=True))


def test_full_batch():
    data, found = batches(Local(local_steps=2))
    for (client, _), (x, y) in found.items():
        assert np.array_equal(x, data[client][0])
        assert np.array_equal(y, data[client][1])


def steps(algorithm) -> list[int]:
    engine = make_engine(least_squares(SIZES), algorithm)
    found = {int(i): len(b.steps) for b in engine.blocks(engine.everyone, {}, 0) for i in b.ids}
    return [found[i] for i in range(len(SIZES))]


def test_number_of_local_steps():
    assert steps(Local()) == [1] * len(SIZES)
    assert steps(Local(local_steps=4, batch_size=2)) == [4] * len(SIZES)
    assert steps(Local(local_epochs=3)) == [3] * len(SIZES)
    assert steps(Local(local_epochs=2, batch_size=4)) == [2 * -(-n // 4) for n in SIZES]


@pytest.mark.parametrize("work", [{"local_steps": 5, "batch_size": 3}, {"local_epochs": 2, "batch_size": 4}, {}])
def test_blocks_cover_the_clients(work):
    engine = make_engine(least_squares(SIZES), Local(**work), block=3)
    rows = np.array([0, 2, 3, 6, 7, 9])
    blocks = list(engine.blocks(rows, {}, 0))
    assert sorted(int(r) for b in blocks for r in b.rows[: b.real]) == rows.tolist()
    for b in blocks:
        assert b.real <= 3
        assert len(b.rows) == max(b.real, engine.task.least)
        assert np.array_equal(b.samples, np.array(SIZES)[b.ids])
        length = b.batch(0).x.shape[1]  # padded to what each of its clients alone asks for
        sizes = [bucket(n, 4) for n in b.samples]  # of a tiny model
        assert all(length == min(work.get("batch_size", size), size) for size in sizes)


def test_iterations_count_over_the_run():
    engine = make_engine(least_squares(SIZES), Local(local_steps=4))
    block = next(engine.blocks(engine.everyone, {}, 3))
    assert [block.iteration(t) for t in block.steps] == [12, 13, 14, 15]
