"""Where the clients' rows live changes no bit of any algorithm that allows it, also on ranks without participants."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import on_ranks, personal, play, ready
from test_contract import CASES, LISTS, algorithm, assert_same, cohorts, federation, named, of

from hpcfl.comm import Comm
from hpcfl.evaluate import evaluate
from hpcfl.store import DiskRows, fetch, first_state

every_algorithm = pytest.mark.parametrize(
    "case", [case for case in CASES + LISTS if not of(case).whole_cohort], ids=named
)


def everything(options, data, where, folder, comm=None, **engine_options) -> dict[str, np.ndarray]:
    """One rank after its rounds: shared state, and by client id the local state, personal models and metrics."""
    engine, work = ready(data, options, world=comm or Comm(), **engine_options)
    state = first_state(work, engine, where, folder)
    assert all(isinstance(rows, DiskRows) == (where == "disk") for rows in state.local.values())
    rounds = cohorts(work)
    state = play(engine, work, rounds, state)
    out = {f"shared {name}": values.numpy() for name, values in state.shared.items()}
    rows = {f"local {name}": values for name, values in fetch(state.local, slice(0, engine.group.clients)).items()}
    rows |= evaluate(engine, work, state, len(rounds), ("train", "test"))
    if "personal" in work.evaluated:
        rows["personal"] = personal(engine, work, state, len(rounds)).numpy()
    return out | {
        f"{name} of {i}": row for name, values in rows.items() for i, row in zip(engine.group.ids, values, strict=True)
    }


@every_algorithm
def test_on_disk(case, tmp_path):
    work, (data, options) = algorithm(case), federation(case)

    def found(where, comm=None, **more):
        return everything(work, data, where, tmp_path, comm, **options, **more)

    expected = found("device")
    for values in (found("disk"), found("disk", block=2), found("host")):
        assert_same(values, expected)
    parts = on_ranks(3, lambda comm: found("disk", comm))
    for part in parts:
        assert_same(part, expected)
    assert set().union(*parts) == set(expected)
    assert list(tmp_path.iterdir()) == []
