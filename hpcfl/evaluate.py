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
from hpcfl.rows import compact, take
from hpcfl.splits import SPLITS, TEST

PIECE = 1024  # samples of a client per forward pass


def evaluate(
    engine: Engine, algorithm: Algorithm, state: State, rounds_done: int, splits: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Metrics of those of this rank's clients that evaluations cover (``engine.evaluated``), [c] each, in that order.

    "<model>/<split>_<metric>", NaN for a client without samples in a split; "<model>/estimation_error" where the true
    parameters are known; every exposed scalar.
    """
    start = time.perf_counter()
    task, everyone = engine.task, compact(engine.evaluated)
    exposed = {name: to_host(take(state.local[name], everyone)) for name in algorithm.exposed}
    out = {name: values.reshape(len(engine.evaluated)) for name, values in exposed.items()}
    keys = [f"{model}/{split}_{metric}" for model in algorithm.evaluated for split in splits for metric in task.metrics]
    keys += [f"{model}/estimation_error" for model in algorithm.evaluated if engine.group.truth is not None]
    out |= {key: np.full(len(engine.evaluated), np.nan) for key in keys}
    if "global" in algorithm.evaluated:
        w = algorithm.global_model(state)
        _measure(engine, w.expand(len(engine.evaluated), -1), engine.evaluated, "global", splits, out)
    if "personal" in algorithm.evaluated:
        for rows, models in personal_models(engine, algorithm, state, rounds_done, engine.evaluated):
            _measure(engine, models, rows, "personal", splits, out)
    engine.seconds["evaluate"] += time.perf_counter() - start
    return out


def personal_models(
    engine: Engine, algorithm: Algorithm, state: State, rounds_done: int, rows: np.ndarray | None = None
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """(positions in the group [c], models [c, P]) of this rank's clients, block by block.

    rows: positions of those that are wanted; None: all.
    """
    for block in engine.blocks(engine.everyone if rows is None else rows, state.shared, rounds_done):
        yield block.rows[: block.real], algorithm.personal(block, block.own(state.local))[: block.real]


def _measure(
    engine: Engine, models: Tensor, rows: np.ndarray, model: str, splits: tuple[str, ...], out: Mapping[str, np.ndarray]
) -> None:
    """Fills in the metrics of the clients at these rows of the group, models [len(rows), P]."""
    group, task = engine.group, engine.task
    place = rows if engine.evaluated is engine.everyone else np.searchsorted(engine.evaluated, rows)
    if group.truth is not None:
        error = np.subtract(to_host(models), group.truth.numpy()[rows], dtype=np.float64, order="C")
        out[f"{model}/estimation_error"][place] = np.linalg.norm(error, axis=1)
    for split in splits:
        values = measured(engine, models, rows, SPLITS.index(split))
        for metric, column in zip(task.metrics, values.T, strict=True):
            out[f"{model}/{split}_{metric}"][place] = column


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
        x, y = group.gather(rows, np.minimum(column, count - 1), split)
        weight = torch.from_numpy(column < count).to(group.x.device)
        yield Batch(x, y, weight, real, mask=group.outputs(rows))


def gathered(world: Comm, ids: np.ndarray, values: np.ndarray, everyone: np.ndarray) -> np.ndarray | None:
    """Collective over the world: the rows of all ranks' clients, in the order of everyone, on rank 0; None elsewhere.

    ids [c]: of this rank's clients, whose rows [c, ...] these are. everyone: all of those ids, ascending.
    """
    pieces, where = world.gather_rows(np.ascontiguousarray(values)), world.gather_rows(ids)
    if pieces is None or where is None:
        return None
    out = np.empty((len(everyone), *values.shape[1:]), values.dtype)
    for rows, clients in zip(pieces, where, strict=True):
        out[np.searchsorted(everyone, clients)] = rows
    return out
