"""Collects what a run produced from all ranks, and writes it on rank 0."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import torch

import hpcfl
from hpcfl.algorithm import Algorithm, State
from hpcfl.coordinator import Plan
from hpcfl.engine import Engine
from hpcfl.errors import Diverged
from hpcfl.evaluate import evaluate, gathered, personal_models
from hpcfl.reduce import LARGEST, column_sums, to_host
from hpcfl.results import ResultsWriter
from hpcfl.results_schema import PHASES
from hpcfl.round import Account, Watch
from hpcfl.rows import Index
from hpcfl.splits import TEST

NOBODY = np.iinfo(np.int64).max  # beyond all client ids


class Recorder:
    """Collective bookkeeping of a run. Every method is called by all ranks; only rank 0 holds a writer."""

    def __init__(
        self,
        engine: Engine,
        algorithm: Algorithm,
        splits: tuple[str, ...],
        writer: ResultsWriter | None,
        eval_every: int,
        elapsed: float = 0.0,
        watch: Watch | None = None,
    ):
        """elapsed: seconds that a run that goes on had taken. watch: what measures the participants of rounds."""
        self.engine, self.algorithm, self.splits, self.writer = engine, algorithm, splits, writer
        self.eval_every, self.watched = eval_every, watch is not None
        self.world = engine.topology.world
        self.started = time.perf_counter() - elapsed
        self.write_seconds = 0.0

    @cached_property
    def _before(self) -> np.ndarray | float:
        """[ranks, 5] seconds of earlier starts of the run."""
        return self.writer.timing_so_far()[: self.world.size] if self.writer else 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the first start of the run, without those between its starts."""
        return time.perf_counter() - self.started

    def rounds(self, plan: Plan, accounts: Sequence[Account], seconds: Sequence[float]) -> None:
        """Collective over the world: the rows of a plan's rounds. Raises Diverged where a loss is not finite."""
        population = self.engine.topology.placement.clients
        participants = np.full(plan.count, population)
        if plan.participants is not None:
            participants[:] = [len(p) for p in plan.participants]
        loss = self._train_loss(plan.first, accounts)
        kind = np.array([a.kind for a in accounts])
        sent = np.array([_total(a.up) + _total(a.down) + _total(a.passes) for a in accounts])
        self.world.allreduce(sent, "sum")
        vectors_up, bytes_up, vectors_down, bytes_down, forward, backward = sent.T
        tests = self._tests(accounts) if self.watched else {}
        if self.writer:
            start = time.perf_counter()
            columns = {
                "kind": kind,
                "n_participants": participants,
                "seconds": np.array(seconds),
                "train_loss": loss,
                "vectors_up": vectors_up,
                "vectors_down": vectors_down,
                "bytes_up": bytes_up,
                "bytes_down": bytes_down,
                "forward_passes": forward / participants,
                "backward_passes": backward / participants,
            }
            columns |= tests
            self.writer.rounds(plan.first, columns | {f"coins_{name}": fell for name, fell in plan.coins.items()})
            self.write_seconds += time.perf_counter() - start

    def evaluation(self, state: State, done: int) -> Mapping[str, float] | None:
        """Collective over the world: evaluates after ``done`` rounds; the means on rank 0, None elsewhere."""
        engine = self.engine
        mine = evaluate(engine, self.algorithm, state, done, self.splits)
        everyone = np.arange(engine.group.population) if engine.eval_sample is None else engine.eval_sample
        ids = engine.group.ids[engine.evaluated]
        table = gathered(self.world, ids, np.stack(list(mine.values()), 1), everyone)
        means = None
        if self.writer and table is not None:
            start = time.perf_counter()
            per_client = dict(zip(mine, table.T, strict=True))
            row = -(-done // self.eval_every) - 1  # by the round alone: a run that is made longer writes over its last
            means = self.writer.evaluation(row, done, start - self.started, per_client)
            self.write_seconds += time.perf_counter() - start
        self._timing()
        losses = np.stack([values for name, values in mine.items() if name.endswith("/train_loss")])
        self._check(ids[~np.isfinite(losses).all(0)], f"round {done - 1}", "its model's loss")
        return means

    def models(self, state: State, done: int) -> None:
        """Collective over the world: the final models, a block of clients at a time."""
        if "global" in self.algorithm.evaluated and self.writer:
            self.writer.models("global", 0, to_host(self.algorithm.global_model(state)))
        if "personal" not in self.algorithm.evaluated:
            return
        blocks = personal_models(self.engine, self.algorithm, state, done)
        more = np.array([1])
        while True:
            rows, models = next(blocks, (np.zeros(0, np.int64), None))
            more[0] = len(rows)
            self.world.allreduce(more, "max")
            if not more[0]:
                return
            values = np.zeros((0, self.engine.task.layout.size)) if models is None else to_host(models)
            pieces, ids = (
                self.world.gather_rows(values.astype(to_host(self.engine.task.start()).dtype)),
                self.world.gather_rows(self.engine.group.ids[rows]),
            )
            for piece, clients in zip(pieces or [], ids or [], strict=True):
                for first, stop in _stretches(clients):
                    assert self.writer is not None
                    self.writer.models("personal", int(clients[first]), piece[first:stop])

    def finish(self, status: str) -> None:
        """Collective over the world: summary, timing, status; closes the file."""
        self._timing()
        if self.writer:
            self.writer.final()
            self.writer.status(status)
            self.writer.close()

    def _train_loss(self, first: int, accounts: Sequence[Account]) -> np.ndarray:
        """Collective over the world: mean over each round's participants [count], NaN where none took a gradient."""
        count, group = len(accounts), self.engine.group
        some = Some(group.clients, (rows for account in accounts for rows, _, _ in account.losses))
        values = np.zeros((2, count, len(some)))  # losses, and 1 where there is one
        for k, account in enumerate(accounts):
            for positions, loss, counted in account.losses:
                rows = some.rows(positions)
                mine = True if counted is None else counted  # of several passes over the clients the last one counts
                values[0, k, rows] = np.where(mine, to_host(loss), values[0, k, rows])
                values[1, k, rows] = np.where(mine, 1.0, values[1, k, rows])
        sums = column_sums(self.world, values.reshape(2 * count, len(some)).T, group.population)
        bad = np.flatnonzero(np.isinf(sums[:count]))
        if len(bad):
            wrong = ~(np.abs(values[0, bad[0]]) < LARGEST)
            self._check(group.ids[some.positions][wrong], f"round {first + bad[0]}", "the training loss")
        with np.errstate(invalid="ignore"):
            return sums[:count] / sums[count:]

    def _check(self, clients: np.ndarray, when: str, what: str) -> None:
        """Collective over the world: raises Diverged, on all ranks, where any has such clients. what: is not finite."""
        lowest = np.array([clients.min(initial=NOBODY)])
        self.world.allreduce(lowest, "min")
        if lowest[0] != NOBODY:
            raise Diverged(f"{when}, client {lowest[0]}: {what} is not finite")

    def _tests(self, accounts: Sequence[Account]) -> dict[str, np.ndarray]:
        """Collective over the world: each round's means over the test samples of its participants, [count] each."""
        count, group, metrics = len(accounts), self.engine.group, self.engine.task.metrics
        some = Some(group.clients, (rows for account in accounts for rows, _ in account.scores))
        values = np.zeros((len(metrics) + 1, count, len(some)))  # sums of the metrics, and samples
        for k, account in enumerate(accounts):
            for positions, found in account.scores:
                samples, rows = group.count[positions, TEST], some.rows(positions)
                values[:-1, k, rows] = np.where(samples > 0, samples * found.T, 0.0)
                values[-1, k, rows] = samples
        sums = column_sums(self.world, values.reshape((len(metrics) + 1) * count, len(some)).T, group.population)
        *means, samples = sums.reshape(len(metrics) + 1, count)
        with np.errstate(invalid="ignore"):
            return {f"participants_test_{m}": mean / samples for m, mean in zip(metrics, means, strict=True)}

    def _timing(self) -> None:
        seconds = {**self.engine.seconds, **self.world.seconds, "write": self.write_seconds}
        table = self.world.gather([seconds[phase] for phase in PHASES])
        if self.writer:
            self.writer.timing(np.array(table) + self._before)


class Some:
    """The clients of a group who took part in some rounds: a table of them has no rows of the others."""

    def __init__(self, clients: int, parts: Iterable[Index]):
        """clients: of the group. parts: positions in the group."""
        there = np.zeros(clients, bool)
        for part in parts:
            there[part] = True
        self.positions = np.flatnonzero(there)
        self._everyone = len(self.positions) == clients

    def __len__(self) -> int:
        return len(self.positions)

    def rows(self, part: Index) -> Index:
        """Their rows of the table."""
        if self._everyone:
            return part
        if isinstance(part, slice):  # all of these are there, side by side
            first = int(np.searchsorted(self.positions, part.start))
            return slice(first, first + part.stop - part.start)
        return np.searchsorted(self.positions, part)


def run_attributes(engine: Engine, hosts: Sequence[str], seed: int, algorithm: str) -> dict[str, str | int | float]:
    """Root attributes of a results file: versions, machine, command."""
    return {
        "algorithm": algorithm,
        "seed": seed,
        "torch_version": torch.__version__,
        "hdf5_version": h5py.version.hdf5_version,
        "python_version": platform.python_version(),
        "mpi_version": engine.topology.world.mpi(),
        "git_commit": _commit(Path(hpcfl.__file__).parent),
        "command": shlex.join(sys.argv),
        "hosts": ",".join(dict.fromkeys(hosts)),
        "ranks": engine.topology.world.size,
        "threads": torch.get_num_threads(),
        "device": str(engine.task.device),
        "backend": engine.task.backend,
        "folder": os.getcwd(),
    }


def _commit(folder: Path) -> str:
    """Of the repository that a folder lies in; empty where there is none, or no git."""
    try:
        git = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return git.stdout.strip()


def _total(sent: Sequence[tuple[int, int]]) -> list[int]:
    """[vectors, bytes] of all that an account lists."""
    return [sum(column) for column in zip((0, 0), *sent, strict=True)]


def _stretches(ids: np.ndarray) -> list[tuple[int, int]]:
    """[first, stop) of every run of consecutive ids."""
    if len(ids) == 0:
        return []
    edges = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)]
    return list(pairwise(edges))
