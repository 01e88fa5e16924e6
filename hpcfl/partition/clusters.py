"""Clusters of clients that the user asks for: a number of them, their sizes, or a file."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from hpcfl.errors import InputError
from hpcfl.options import shown, user_path

HEADER = ["client", "cluster"]
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
WHOLE = re.compile(r"[0-9]{1,18}")  # in 64 bits
LISTED = 5  # clients in a message


def cut(clusters: int | Sequence[int], clients: int, known: str) -> np.ndarray:
    """[N] cluster of each client, each cluster a stretch of consecutive clients.

    clusters: their number (their sizes differ by one at most), or their sizes. known: where the number of clients comes
    from. Raises InputError for more clusters than clients, and for sizes that do not sum up to the clients.
    """
    number = clusters if isinstance(clusters, int) else len(clusters)
    given = f"partition.clusters = {shown(clusters)}"
    if number > clients:
        raise InputError(f"{given}: more clusters than clients ({known}); every cluster needs one at least")
    if isinstance(clusters, int):
        return np.arange(clients) * number // clients
    if sum(clusters) != clients:
        raise InputError(f"{given}: sizes that sum up to {sum(clusters)}; expected {clients} ({known})")
    return np.repeat(np.arange(number), clusters)


def read_clusters(path: str, clients: int, known: str) -> np.ndarray:
    """[N] cluster of each client, from a CSV file. Raises InputError, one line that names the file and the mistake."""
    try:
        return _numbered(_lines(user_path(path), clients, known))
    except InputError as error:
        raise InputError(f'partition.cluster_file = "{path}": {error}') from None


def check_numbers(cluster: np.ndarray) -> None:
    """Raise InputError where a number below the highest one has no client."""
    present = np.unique(cluster)
    gaps = np.flatnonzero(present != np.arange(len(present)))
    if len(gaps):
        raise InputError(
            f"cluster {gaps[0]} has no client, but the highest cluster is {present[-1]}; number the clusters 0, 1, ... "
            "without gaps"
        )


def _lines(file: Path, clients: int, known: str) -> Mapping[int, tuple[int, str]]:
    """Client -> (line, cluster), for all clients of the run."""
    found: dict[int, tuple[int, str]] = {}
    for line, cells in _rows(file):
        if len(cells) != len(HEADER) or not all(cells):
            raise InputError(f"line {line}: {shown(','.join(cells))}; expected a client and a cluster")
        text, cluster = cells
        if not WHOLE.fullmatch(text) or int(text) >= clients:
            raise InputError(
                f"line {line}: client {shown(text)} is not in the run; expected 0..{clients - 1} ({known})"
            )
        client = int(text)
        if client in found:
            before, other = found[client]
            where = f"in cluster {other!r} twice" if cluster == other else f"in cluster {other!r} and in {cluster!r}"
            raise InputError(f"lines {before} and {line}: client {client} is {where}; expected one line per client")
        found[client] = line, cluster
    missing = [k for k in range(clients) if k not in found]
    if missing:
        first = ", ".join(map(str, missing[:LISTED])) + ", ..." * (len(missing) > LISTED)
        raise InputError(f"no line for {len(missing)} of {clients} clients: {first} ({known})")
    return found


def _rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of every line that is not empty, after the header."""
    try:
        if not file.is_file():
            raise InputError(f"no such file ({file.absolute()})")
        with file.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream, strict=True)
            rows = ([cell.strip() for cell in row] for row in reader)
            header = next((cells for cells in rows if any(cells)), None)
            if header is None:
                raise InputError("is empty; expected the header client,cluster and a line per client")
            if header != HEADER:
                raise InputError(f"the header is {shown(','.join(header))}; expected client,cluster")
            yield from ((reader.line_num, cells) for cells in rows if any(cells))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"not a CSV file in UTF-8: {error}") from None


def _numbered(lines: Mapping[int, tuple[int, str]]) -> np.ndarray:
    """[N] int64 from the clusters' numbers, or from their names in alphabetical order."""
    names = [lines[client][1] for client in range(len(lines))]
    if all(map(NUMBER.fullmatch, names)):
        for line, name in lines.values():
            if not WHOLE.fullmatch(name):
                raise InputError(
                    f"line {line}: cluster = {name}; expected a number 0, 1, ..., or names for all clusters"
                )
        cluster = np.array([int(name) for name in names])
        check_numbers(cluster)
        return cluster
    order = {name: number for number, name in enumerate(sorted(set(names)))}
    return np.array([order[name] for name in names])
