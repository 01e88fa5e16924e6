"""Reads results files of any state: finished, running, killed. Only counted rows are ever returned."""

from __future__ import annotations

import os
import re
import socket
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np

from hpcfl.errors import InputError
from hpcfl.results_open import open_to_read, root_attributes, text
from hpcfl.results_schema import HIGHER_IS_BETTER

COINS = ("global", "cluster")


class Run:
    """One results file, as it was when it was opened: to follow a running job, open it again.

    path: the file or its run folder. Raises InputError for what is not a readable results file.
    """

    def __init__(self, path: Path) -> None:
        path = Path(path)
        self.path = path / "results.h5" if os.path.isdir(path) else path
        self.file = open_to_read(self.path)
        try:
            self.attributes = root_attributes(self.path, self.file)
            self.rounds_done = int(self.attributes["rounds_done"])
            self.evaluations_done = int(self.attributes["evaluations_done"])
            self.config: Mapping[str, Any] = tomllib.loads(self.text("/config/toml"))
        except (KeyError, OSError, tomllib.TOMLDecodeError) as error:
            self.file.close()
            raise InputError(f"{self.path}: damaged ({error})") from None
        except BaseException:
            self.file.close()
            raise

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.file.close()

    def read(self, path: str) -> np.ndarray:
        """A dataset by its path, e.g. "/rounds/train_loss": of /rounds, /evaluations, /per_client the counted rows."""
        group = path.strip("/").partition("/")[0]
        counts = {"rounds": self.rounds_done, "evaluations": self.evaluations_done, "per_client": self.evaluations_done}
        data = self.file[path]
        by_row = group in counts and data.maxshape[0] is None  # not the scales of the other axes
        return data[: counts[group]] if by_row else data[()]

    def last(self, path: str) -> np.ndarray | None:
        """The last counted row of a dataset of /evaluations or /per_client; None before the first evaluation."""
        return self.file[path][self.evaluations_done - 1] if self.evaluations_done else None

    def text(self, path: str) -> str:
        return text(self.file, path)

    @property
    def status(self) -> str:
        """running, done, stopped:why or failed:why."""
        return str(self.attributes["status"])

    @property
    def stale(self) -> bool:
        """The status says running, but the process on this host is dead. Of other hosts nothing is known: False."""
        return (
            self.status == "running"
            and self.attributes["host"] == socket.gethostname()
            and not _alive(int(self.attributes["pid"]))
        )

    @property
    def name(self) -> str:
        """Name of the run's folder; of the file where it lies elsewhere."""
        return self.path.resolve().parent.name if self.path.name == "results.h5" else self.path.stem

    @property
    def algorithm(self) -> str:
        return str(self.config.get("algorithm", {}).get("name", "-"))

    @property
    def seed(self) -> int | None:
        return self.config.get("run", {}).get("seed")

    @property
    def clients(self) -> int:
        return len(self.file["/clients/client"])

    @property
    def evaluated(self) -> np.ndarray:
        """Numbers of the clients that evaluations cover, ascending: those of /per_client."""
        return self.file[f"/per_client/{self.models[0]}/client"][()]

    def samples(self, split: str) -> np.ndarray:
        """Their numbers of samples in a split."""
        return self.file[f"/clients/n_{split}"][()][self.evaluated]

    @property
    def models(self) -> tuple[str, ...]:
        """Which models were evaluated: "personal", "global"."""
        return tuple(model for model in ("personal", "global") if model in self.file["/per_client"])

    @property
    def splits(self) -> tuple[str, ...]:
        group = self.file[f"/per_client/{self.models[0]}"]
        return tuple(split for split in ("train", "validation", "test") if f"{split}_loss" in group)

    @property
    def metrics(self) -> tuple[str, ...]:
        group = self.file[f"/per_client/{self.models[0]}"]
        return tuple(metric for metric in HIGHER_IS_BETTER if f"test_{metric}" in group)

    @property
    def metric(self) -> str:
        """The metric to show first: accuracy, or squared_error for regression."""
        return self.metrics[-1]

    @property
    def truth(self) -> bool:
        """Whether the clients' true parameters were known: read("/per_client/<model>/estimation_error")."""
        return "estimation_error" in self.file[f"/per_client/{self.models[0]}"]

    @property
    def protocol(self) -> str:
        """Either "clients", or "participants": read("/rounds/participants_test_<metric>") has those of every round."""
        return str(self.attributes.get("protocol", "clients"))

    @property
    def clusters(self) -> int:
        return int(self.file["/clients"].attrs["clusters"])

    @property
    def averages_by_coins(self) -> bool:
        """Whether one coin "global" and a coin "cluster" of each cluster say who averages in a round."""
        shapes = [
            self.file[f"/rounds/coins_{name}"].shape[1:] for name in COINS if f"coins_{name}" in self.file["/rounds"]
        ]
        return shapes == [(1,), (self.clusters,)]

    @property
    def exposed(self) -> tuple[str, ...]:
        """Scalars per client that the algorithm exposed; read("/per_client/<name>")."""
        group = self.file["/per_client"]
        return tuple(n for n in group if isinstance(group[n], h5py.Dataset) and n not in ("client", "evaluation"))


def find(files: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """Results files by name, or all below a folder in the order of their run numbers; with whether it was named.

    Raises InputError for a folder without any and for what does not exist.
    """
    for path in map(Path, files):
        if not os.path.isdir(path) or os.path.exists(path / "results.h5"):  # False where one may not look
            yield path, True
            continue
        found = sorted(path.rglob("results.h5"), key=lambda file: [_natural(part) for part in file.parts])
        if not found:
            raise InputError(f"{path}: no results.h5 in or below this folder")
        yield from ((file, False) for file in found)


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", text)]


def _alive(pid: int) -> bool:
    """Whether a process of this host runs; one that has ended does not, even if nobody has waited for it yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is there, and someone else's
        pass
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # a system without /proc
        return True
