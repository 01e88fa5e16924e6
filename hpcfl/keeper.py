"""Saves the state of a run, and brings it back: on any number of ranks, since every row goes with its client's id."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from hpcfl.algorithm import State
from hpcfl.checkpoint import load, newest, save
from hpcfl.engine import Engine
from hpcfl.errors import InputError, RunError
from hpcfl.reduce import to_device, to_host
from hpcfl.rows import compact
from hpcfl.store import fetch, restore

CHECKPOINTS = "checkpoints"  # folder in that of a run


class Keeper:
    """The checkpoints of one run, and which clients have rows that differ from the first ones."""

    def __init__(self, folder: Path, engine: Engine, origin: str):
        """folder: of the run. origin: what tells its checkpoints from those of another run."""
        self.folder, self.engine, self.origin = folder / CHECKPOINTS, engine, origin
        self.world = engine.topology.world
        self.arithmetic = f"torch {torch.__version__} on {engine.task.device.type}"
        self.visited = np.zeros(engine.group.clients, bool)  # [C] who took part, ever
        self.round: int | None = None  # of the last good checkpoint

    def newest(self, state: State, at_most: int) -> tuple[State, int, float, list[str]]:
        """Collective over the world: the state of the newest good checkpoint of at most so many rounds.

        state: before the first round; its local rows are overwritten in place. Returns the state, rounds done, seconds
        that the run had taken, and warnings; the state as it is and 0 where there is no good checkpoint. Raises
        InputError where that is another run's.
        """
        found, warnings = newest(self.folder, self.world, at_most=at_most)
        if found is None:
            return state, 0, 0.0, warnings
        if found.facts["origin"] != self.origin:
            raise InputError(
                f"{found.path}: of another run, with other options or a model of another size; put this run's own "
                "checkpoints there, or run without --resume for a new one"
            )

        def put(positions: np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
            restore(state.local, positions, rows)
            self.visited[positions] = True

        shared = self.world.together(lambda: load(found, self.engine.group.ids, put))
        self.round = found.round
        if found.facts["arithmetic"] != self.arithmetic:
            warnings.append(
                f"{found.path}: written with {found.facts['arithmetic']}, this is {self.arithmetic}: the last bits may "
                "differ from those of an undisturbed run"
            )
        device = self.engine.task.device
        values = {name: to_device(array, device) for name, array in shared.items()}
        return State(values, state.local), found.round, float(found.facts["seconds"]), warnings

    def save(self, state: State, done: int, elapsed: float) -> tuple[float, str | None]:
        """Collective over the world: a checkpoint after so many rounds, and seconds since the run's first start.

        Returns how long it took, and why it could not be written, the same on all ranks; the run can go on without it.
        """
        start = time.perf_counter()
        mine = np.flatnonzero(self.visited) if state.local else np.zeros(0, np.int64)
        problem = None
        try:
            save(
                self.folder,
                self.world,
                round=done,
                ids=self.engine.group.ids[mine],
                rows=lambda piece: fetch(state.local, compact(mine[piece])),
                shared={name: to_host(values) for name, values in state.shared.items()},
                facts={"seconds": elapsed, "arithmetic": self.arithmetic, "origin": self.origin},
            )
            self.round = done
        except RunError as error:
            problem = str(error)
        return time.perf_counter() - start, problem

    def size(self, state: State) -> int:
        """Bytes of this rank's part of a checkpoint."""
        row = sum(values.dtype.itemsize * int(np.prod(values.shape[1:])) for values in state.local.values())
        return row * int(np.count_nonzero(self.visited)) + sum(v.nbytes for v in state.shared.values())
