"""Which of a round's clients a rank hosts, and tables of the clients who took part: nothing grows with all clients."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import least_squares, make_engine, on_ranks, same_bits

from hpcfl.algorithms.local import Local
from hpcfl.record import Some


@pytest.mark.parametrize("ranks", [1, 3, 9])
def test_hosted(ranks):
    """As by searching the whole group, in the group's order, whatever that of the clients."""
    g = np.random.default_rng(0)
    cohorts = [g.choice(7, n, replace=False) for n in (0, 1, 3, 6, 6)]

    def check(comm):
        engine = make_engine(least_squares([2] * 7), Local(), world=comm, cluster=[1, 0, 2, 0, 1, 1, 0])
        assert engine.hosted(np.arange(7)) is engine.everyone
        for clients in cohorts:
            assert same_bits(engine.hosted(clients), np.flatnonzero(np.isin(engine.group.ids, clients)))
        return engine.group.ids[engine.hosted(cohorts[2])]

    assert sorted(np.concatenate(on_ranks(ranks, check)).tolist()) == sorted(cohorts[2].tolist())


@pytest.mark.parametrize(
    ("parts", "positions"),
    [
        ([], []),
        ([slice(2, 4), np.array([7, 4]), slice(3, 5)], [2, 3, 4, 7]),
        ([slice(0, 9)], list(range(9))),
        ([np.zeros(0, int)], []),
    ],
)
def test_the_table_has_the_rows_of_those_who_took_part(parts, positions):
    some = Some(9, parts)
    assert some.positions.tolist() == positions
    assert len(some) == len(positions)
    for part in parts:
        assert some.positions[some.rows(part)].tolist() == np.arange(9)[part].tolist()


def test_blocks_of_a_round_are_kept_beside_those_of_evaluations():
    engine = make_engine(least_squares([2, 3, 4, 2]), Local(), eval_clients=2)
    for_rounds, for_evaluations = engine.members(engine.everyone), engine.members(engine.evaluated)
    assert engine.members(engine.everyone) is for_rounds
    assert engine.members(engine.evaluated) is for_evaluations
    assert engine.members(engine.everyone, full_batch=True) is not for_rounds
