"""The fixture that writes small results files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from results_example import clients

from hpcfl.results import ResultsWriter, Schema


@pytest.fixture
def create(tmp_path: Path) -> Iterator[Callable[..., ResultsWriter]]:
    """``create(EVERYTHING, rounds=9, n_test=[1, 2, 0, 5])``: a writer of tmp_path/results.h5, closed with the test."""
    writers = []

    def make(base: dict, *, config: str = "[run]\nseed = 1\n", **changes) -> ResultsWriter:
        names = set(Schema.__dataclass_fields__)
        schema = Schema(**base | {k: v for k, v in changes.items() if k in names})
        columns = clients(schema) | {k: np.asarray(v) for k, v in changes.items() if k not in names}
        writer = ResultsWriter.create(
            tmp_path / "results.h5", schema, clients=columns, config=config, attributes={"job": "test"}
        )
        writers.append(writer)
        return writer

    yield make
    for writer in writers:
        writer.close()
