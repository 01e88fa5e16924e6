"""A job file: one TOML table per part, checked whole before anything runs."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hpcfl.duration import seconds
from hpcfl.errors import InputError, nearest
from hpcfl.options import Count, PositiveShare, Seed, Threads, make, options
from hpcfl.registry import build

PARTS = ("run", "data", "partition", "model", "algorithm")


@options
@dataclass(frozen=True)
class RunOptions:
    """The ``[run]`` table.

    protocol: "clients" evaluates all clients every ``eval_every`` rounds. "participants" also tests, in every round,
    its participants with the models that they hold after their local work, over all of their test samples.
    """

    rounds: Count
    seed: Seed = 0
    participation: PositiveShare | None = None  # share of the clients that take part in a round; absent: all
    clients_per_round: Count | None = None  # or their number
    eval_every: Count = 10  # rounds; the last round is always evaluated
    protocol: Literal["clients", "participants"] = "clients"
    save_models: bool = False
    dtype: Literal["float32", "float64"] = "float32"
    device: str = "auto"  # auto, cpu, cuda, cuda:K
    threads: Threads = 1  # per rank; another number gives other bits
    backend: Literal["auto", "model", "vmap", "loop"] = "auto"
    block: Count | None = None  # clients computed at once; absent: a rule of model, batch and device
    reduction: Literal["reproducible", "float64"] = "reproducible"
    eval_clients: Count | None = None  # evaluate a fixed random sample of so many clients; absent: all
    state: Literal["device", "host", "disk"] = "device"  # where the clients' rows of the algorithm's state live
    scratch: str | None = None  # folder for state = "disk", best on a disk of the node; absent: the run's own folder
    checkpoint_every: Count | str = "auto"  # rounds, a time ("10min"), "off"; "auto": at most a tenth of the run's time
    max_walltime: str | None = None  # "2h", "90min", "1-12:00:00": checkpoint and stop before it is over
    on_rank_loss: Literal["abort", "shrink"] = "abort"  # shrink: go on without a rank that died (Open MPI's ULFM)
    out: str = "results"

    def __post_init__(self) -> None:
        for name, folder in (("out", self.out), ("scratch", self.scratch)):
            if folder is not None and (not folder.strip() or "\0" in folder):
                raise InputError(f"run.{name} = {json.dumps(folder)}: expected the path of a folder")
        if self.max_walltime is not None:
            seconds("run.max_walltime", self.max_walltime)
        if isinstance(self.checkpoint_every, str) and self.checkpoint_every not in ("auto", "off"):
            seconds("run.checkpoint_every", self.checkpoint_every)
        if self.participation is not None and self.clients_per_round is not None:
            raise InputError("run.participation and run.clients_per_round: give one of the two, not both")

    def cohort(self, clients: int) -> int:
        """Number of participants per round. Raises InputError when more are asked for than there are."""
        if self.clients_per_round is not None:
            if self.clients_per_round > clients:
                raise InputError(f"run.clients_per_round = {self.clients_per_round}: there are only {clients} clients")
            return self.clients_per_round
        return clients if self.participation is None else max(1, math.floor(self.participation * clients + 0.5))


@dataclass(frozen=True)
class Job:
    """A whole experiment, every option resolved."""

    name: str
    run: RunOptions
    data: Any
    partition: Any
    model: Any
    algorithm: Any
    text: str  # the resolved TOML

    @property
    def algorithm_name(self) -> str:
        return tomllib.loads(self.text)["algorithm"]["name"]


def load(file: Path, changes: Sequence[str] = ()) -> Job:
    """The job of a TOML file, with changes "part.key=value" applied. Raises InputError that lists every mistake."""
    return resolve(read(file, changes), file.stem, str(file))


def read(file: Path, changes: Sequence[str] = ()) -> dict[str, Any]:
    """The tables of a TOML file, with changes applied, unchecked. Raises InputError for what is no such file."""
    try:
        tables = tomllib.loads(file.read_text())
    except (FileNotFoundError, IsADirectoryError):
        raise InputError(f"{file}: no such job file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{file}: not valid TOML: {error}") from None
    for change in changes:
        _apply(tables, change)
    return tables


def resolve(tables: Mapping[str, Any], name: str, where: str) -> Job:
    """The job of parsed tables. where: for messages. Collects the mistakes of all parts before it raises InputError."""
    mistakes = [f"[{part}]: unknown table{nearest(part, PARTS)}" for part in tables if part not in PARTS]
    mistakes += [f"[{part}]: table is missing" for part in PARTS if part not in tables]
    mistakes += [f"{part}: expected a table [{part}]" for part in PARTS if not isinstance(tables.get(part, {}), dict)]
    parts: dict[str, Any] = {}
    for part in PARTS:
        if isinstance(tables.get(part), dict):
            try:
                parts[part] = make(RunOptions, tables[part], part) if part == "run" else build(part, tables[part])
            except InputError as error:
                mistakes += str(error).splitlines()
    if mistakes:
        raise InputError("\n".join(f"{where}: {m}" for m in mistakes))
    resolved = {
        part: {**({"name": tables[part]["name"]} if part != "run" else {}), **asdict(parts[part])} for part in PARTS
    }
    return Job(name, **parts, text=to_toml(resolved))


def _apply(tables: dict[str, Any], change: str) -> None:
    """One --set part.key=value, or part={table}; the value is TOML, or else a string."""
    path, equals, text = change.partition("=")
    part, _, key = path.strip().partition(".")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    if part and not key and isinstance(value, dict):
        tables[part] = value
        return
    if not (equals and part and key):
        raise InputError(
            f'--set "{change}": expected part.key=value, e.g. algorithm.lr=0.05, or part={{a whole table}}'
        )
    table = tables.setdefault(part, {})
    for step in key.split(".")[:-1]:
        table = table.setdefault(step, {}) if isinstance(table, dict) else table
    if not isinstance(table, dict):
        raise InputError(f'--set "{change}": {path} is not in a table')
    table[key.split(".")[-1]] = value


def to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of scalars, lists and inline tables as TOML text; absent (None) options are left out."""
    lines = []
    for part, table in tables.items():
        lines.append(f"[{part}]")
        lines += [
            f"{_toml_key(key)} = {_option(part, key, value)}" for key, value in table.items() if value is not None
        ]
        lines.append("")
    return "\n".join(lines)


def _option(part: str, key: str, value: Any) -> str:
    try:
        return toml_value(value)
    except InputError as error:
        raise InputError(f"{part}.{key}: {error}; use numbers, strings, lists and tables for options") from None


def toml_value(value: Any) -> str:
    """A value as TOML text."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(k)} = {toml_value(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str | bool | int | float):
        raise InputError(f"a {type(value).__name__} cannot be written into a job file")
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else toml_value(key)
