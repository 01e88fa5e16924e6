"""Evaluation of the personal and the global model on every client's own data.

Samples are computed in shapes that depend on one client alone, so that the values do not depend on the layout.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import add

import numpy as np
import torch
from torch import Tensor

from hpcfl.algorithm import Algorithm, Rows, State
from hpcfl.batch import Batch
from hpcfl.block import Block
from hpcfl.comm import Comm
from hpcfl.engine import Engine
from hpcfl.group import bucket, cut
from hpcfl.members import block_size
from hpcfl.reduce import to_host
from hpcfl.round import Watch
from hpcfl.rows import take
from hpcfl.splits import SPLITS, TEST

PIECE = 1024  # samples of a client per forward pass


def evaluate(
    engine: Engine, algorithm: Algorithm, state: State, rounds_done: int, splits: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Metrics of this rank's clients, [C] each, in group order.

    "<model>/<split>_<metric>", NaN for a client without samples in a split; "<model>/estimation_error" where the true
    parameters are known; every exposed scalar.
    """
    start = time.perf_counter()
    group, task = engine.group, engine.task
    out: dict[str, np.ndarray] = {name: to_host(state.local[name]).reshape(group.clients) for name in algorithm.exposed}
    keys = [f"{model}/{split}_{metric}" for model in algorithm.evaluated for split in splits for metric in task.metrics]
    keys += [f"{model}/estimation_error" for model in algorithm.evaluated if group.truth is not None]
    out |= {key: np.full(group.clients, np.nan) for key in keys}
    if "global" in algorithm.evaluated:
        w = algorithm.global_model(state)
        _measure(engine, w.expand(group.clients, -1), engine.everyone, "global", splits, out)
    if "personal" in algorithm.evaluated:
        for rows, models in personal_models(engine, algorithm, state, rounds_done):
            _measure(engine, models, rows, "personal", splits, out)
    engine.seconds["evaluate"] += time.perf_counter() - start
    return out


def personal_models(
    engine: Engine, algorithm: Algorithm, state: State, rounds_done: int
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """(positions in the group [c], models [c, P]) of all clients of this rank, block by block."""
    for block in engine.blocks(engine.everyone, state.shared, rounds_done):
        yield block.rows[: block.real], algorithm.personal(block, block.own(state.local))[: block.real]


def _measure(
    engine: Engine, models: Tensor, rows: np.ndarray, model: str, splits: tuple[str, ...], out: Mapping[str, np.ndarray]
) -> None:
    """Fills in the metrics of the clients at these rows of the group, models [len(rows), P]."""
    group, task = engine.group, engine.task
    if group.truth is not None:
        error = np.subtract(to_host(models), group.truth.numpy()[rows], dtype=np.float64, order="C")
        out[f"{model}/estimation_error"][rows] = np.linalg.norm(error, axis=1)
    for split in splits:
        values = measured(engine, models, rows, SPLITS.index(split))
        for metric, column in zip(task.metrics, values.T, strict=True):
            out[f"{model}/{split}_{metric}"][rows] = column


def measured(engine: Engine, models: Tensor, rows: np.ndarray, split: int) -> np.ndarray:
    """[len(rows), metrics] float64: means over each client's samples of a split, NaN where it has none.

    models: [len(rows), P] of the clients at these rows of the group.
    """
    group, task = engine.group, engine.task
    features = int(np.prod(group.x.shape[1:]))
    found = np.full((len(rows), len(task.metrics)), np.nan)
    count = group.count[rows, split]
    filled = np.flatnonzero(count)
    length = bucket(count[filled])
    for width in np.unique(length):
        mine = filled[length == width]
        limit = engine.limit or block_size(task, min(int(width), PIECE), features)
        for part, real in cut([np.zeros(len(mine), int)], limit, task.least):
            index = mine[part]
            w = take(models, index)
            pieces = _pieces(engine, rows[index], split, int(width), real)
            sums = reduce(add, (task.evaluate(w, piece) for piece in pieces))
            values = sums[:real] / torch.from_numpy(count[index[:real], None]).to(sums)
            values[:, 0] += task.penalty(w)[:real]
            found[index[:real]] = to_host(values)
    return found


def test_of_participants(engine: Engine, algorithm: Algorithm) -> Watch:
    """What measures a block's participants on their test samples, with the models that they hold after their work."""

    def watch(block: Block, own: Rows, sent: Rows) -> np.ndarray:
        start = time.perf_counter()
        models = algorithm.local_model(block, own, sent)[: block.real]
        found = measured(engine, models, block.rows[: block.real], TEST)
        seconds = time.perf_counter() - start
        engine.seconds["evaluate"] += seconds
        engine.seconds["compute"] -= seconds  # the round counts all of its time as that
        return found

    return watch


def _pieces(engine: Engine, rows: np.ndarray, split: int, width: int, real: int) -> Iterator[Batch]:
    """The samples of a split of the clients at these rows, ``width`` after padding, in pieces."""
    group = engine.group
    count = group.count[rows, split, None]
    for first in range(0, width, PIECE):
        column = np.arange(first, min(first + PIECE, width))
        index = torch.from_numpy(np.minimum(column, count - 1) + group.start[rows, split, None]).to(group.x.device)
        weight = torch.from_numpy(column < count).to(group.x.device)
        yield Batch(group.inputs(index), group.y[index], weight, real, mask=group.outputs(rows))


def gathered(world: Comm, ids: np.ndarray, values: np.ndarray, population: int) -> np.ndarray | None:
    """Collective over the world: the rows of all ranks' clients, by client id, on rank 0; None elsewhere."""
    pieces, where = world.gather_rows(np.ascontiguousarray(values)), world.gather_rows(ids)
    if pieces is None or where is None:
        return None
    out = np.empty((population, *values.shape[1:]), values.dtype)
    for rows, clients in zip(pieces, where, strict=True):
        out[clients] = rows
    return out
