"""What killed jobs leave: results files that must be whole, and checkpoints, which can be damaged here."""

from __future__ import annotations

import random
from pathlib import Path

import h5py
import numpy as np

from hpcfl.analysis.reader import Run


def rounds_done(results: Path) -> int:
    """Counted rounds; -1 where there is no file yet."""
    if not results.exists():
        return -1
    with Run(results) as run:
        return run.rounds_done


def differences(results: Path, reference: Path) -> list[str]:
    """Names of what differs in the bits: all that is counted and, of a run that is done, that nothing is missing."""
    different = []
    with Run(results) as mine, Run(reference) as other:
        names: list[str] = []
        other.file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        for name in names:
            timed = name.startswith(("timing", "config")) or name.endswith("seconds")
            if timed or (mine.status != "done" and name.startswith("final")):
                continue
            a, b = (np.asarray(run.read(f"/{name}")) for run in (mine, other))
            if mine.status != "done" and b.ndim:
                b = b[: len(a)]
            if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
                different.append(name)
    return different


def doing(folder: Path) -> str:
    """What a killed run was about, as far as what it left can tell."""
    results = folder / "results.h5"
    if not results.exists():
        return "start"
    if [*folder.glob("checkpoints/.round-*")]:
        return "checkpoint"
    with Run(results) as run:
        if run.status == "done":
            return "end"
        for group, count in (("rounds", run.rounds_done), ("per_client/personal", run.evaluations_done)):
            for data in run.file[group].values():
                if data.shape and data.maxshape[0] is None and count < len(data):
                    row, fill = np.asarray(data[count]), np.asarray(data.fillvalue)
                    if not np.array_equal(row, np.broadcast_to(fill, row.shape), equal_nan=row.dtype.kind == "f"):
                        return "row"
    return "rounds"


def problems(results: Path, reference: Path, counted: int, *, done: int | None = None) -> list[str]:
    """What is wrong with a results file. counted: rounds that it had before. done: the run should be, with so many."""
    if not results.exists():
        return ["there is no results file"] if done or counted >= 0 else []
    found = [f"{name} differs" for name in differences(results, reference)]
    with Run(results) as run:
        if run.rounds_done < counted:
            found.append(f"{counted} rounds were counted, {run.rounds_done} are")
        if done and (run.status != "done" or run.rounds_done != done):
            found.append(f"status {run.status} after {run.rounds_done} rounds")
    return found


def restarts(results: Path) -> int:
    """Starts after the first one."""
    with Run(results) as run:
        return int(run.attributes["restarts"])


def damage(folder: Path, dice: random.Random) -> int:
    """Changes a bit in the newest checkpoint, or cuts a file of it off; 0 where there is none."""
    there = sorted(folder.glob("checkpoints/round-*"), key=lambda path: int(path.name.partition("-")[2]))
    if not there:
        return 0
    file = dice.choice(
        sorted(path for path in there[-1].iterdir() if path.suffix != ".txt")
    )  # not the note of a damage
    content = bytearray(file.read_bytes())
    at = dice.randrange(len(content))
    if dice.random() < 0.5:
        content[at] ^= 1 << dice.randrange(8)
    else:
        del content[at:]
    file.write_bytes(content)
    return 1
