"""What averaging by coins costs: by hand, against real runs, and that merging is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from analysis_example import finished
from helpers import decide, least_squares, make_engine

from hpcfl.algorithms.async_l2gd import AsyncL2GD
from hpcfl.analysis.communication import communication
from hpcfl.analysis.reader import Run
from hpcfl.comm import Comm
from hpcfl.config import resolve
from hpcfl.errors import InputError
from hpcfl.round import Round
from hpcfl.run import run as run_job

# Ten rounds of the clusters {0} and {1, 2, 3}, of vectors of 8 bytes.
EVERYONE = [0, 1, 1, 0, 0, 0, 1, 0, 0, 0]
OWN = [[1, 0], [0, 0], [0, 1], [1, 0], [0, 0], [0, 1], [0, 0], [1, 0], [0, 0], [0, 1]]
UP = np.array([1, 6, 6, 1, 0, 3, 6, 1, 0, 3])
DOWN = np.array([1, 10, 10, 1, 0, 3, 10, 1, 0, 3])


def written(out: Path, options: str = "", **columns: np.ndarray) -> Path:
    coins = {"coins_global": np.array(EVERYONE)[:, None], "coins_cluster": np.array(OWN)}
    sent = {"vectors_up": UP, "vectors_down": DOWN, "bytes_up": 8 * UP, "bytes_down": 8 * DOWN}
    changes: dict[str, Any] = {"clusters": 2, "coins": {"global": 1, "cluster": 2}}
    return finished(out, columns=coins | sent | columns, options=options, **changes)


def shown(found):
    """(global rounds, rounds per cluster, vectors up, down, bytes up, down)."""
    sent = (found.vectors_up, found.vectors_down, found.bytes_up, found.bytes_down)
    return found.global_rounds, found.mean_rounds.tolist(), *sent


def test_counts_by_hand(tmp_path):
    with Run(written(tmp_path)) as run:
        assert shown(communication(run)) == (3, [6, 5], 27, 39, 8 * 27, 8 * 39)
        # Cluster 0 forms its mean in rounds 0 and 6, cluster 1 in 1, 5 and 9, and all clusters together in 1 and 6.
        assert shown(communication(run, merged=True)) == (2, [2, 3], 2 + 9 + 4, 2 + 9 + 12, 8 * 15, 8 * 23)


def test_a_run_without_averagings_costs_nothing(tmp_path):
    none = {name: np.zeros(10) for name in ("vectors_up", "vectors_down", "bytes_up", "bytes_down")}
    with Run(written(tmp_path, coins_global=np.zeros((10, 1)), coins_cluster=np.zeros((10, 2)), **none)) as run:
        for merged in (False, True):
            assert shown(communication(run, merged=merged)) == (0, [0, 0], 0, 0, 0, 0)


ONE_MORE = np.eye(10, dtype=int)[4]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"n_participants": np.full(10, 3)}, "rounds with partial participation"),
        ({"vectors_up": UP + ONE_MORE, "bytes_up": 8 * (UP + ONE_MORE)}, "round 4 took 1 vectors (8 bytes) up, but"),
        ({"vectors_down": 2 * DOWN, "bytes_down": 16 * DOWN}, "its coins say 1 vectors of 8 bytes; its algorithm"),
        ({"bytes_down": 8 * DOWN + ONE_MORE}, "round 4 took 0 vectors (1 bytes) down"),
    ],
)
def test_what_does_not_follow_from_the_coins_is_refused(tmp_path, columns, message):
    with Run(written(tmp_path, **columns)) as run:
        for merged in (False, True):
            with pytest.raises(InputError) as error:
                communication(run, merged=merged)
            assert str(error.value).startswith(f"{run.path}: ")
            assert message in str(error.value)


def test_other_coins_are_refused(tmp_path):
    with Run(finished(tmp_path)) as run, pytest.raises(InputError, match='no coins "global" and "cluster"'):
        communication(run)


def test_unequal_gamma_is_not_merged(tmp_path):
    for gamma, merges in (("[2.0, 1.0, 1.0, 1.0]", True), ("1.0", True), ("[1.0, 1.0, 2.0, 1.0]", False)):
        with Run(written(tmp_path, f"gamma = {gamma}")) as run:
            assert communication(run).global_rounds == 3
            if merges:
                assert communication(run, merged=True).global_rounds == 2
            else:
                with pytest.raises(InputError, match=r"algorithm\.gamma differs between the clients of cluster 1"):
                    communication(run, merged=True)


JOB: dict[str, dict[str, Any]] = {
    "run": {"rounds": 120, "eval_every": 50},
    "data": {"name": "hierarchical-linear", "clusters": 3, "clients_per_cluster": 2, "dim": 4},
    "partition": {"name": "natural", "clusters": [1, 3, 2]},
    "model": {"name": "linear", "bias": False},
    "algorithm": {"name": "async_l2gd", "lr": 1e-3, "p_global": 0.3, "p_cluster": [0.2, 0.5, 0.7]},
}


def ran(out: Path, **options: Any) -> Run:
    """The results of the job, with other options of its table run."""
    job = resolve(JOB | {"run": JOB["run"] | options | {"out": str(out)}}, "job", "job")
    run_job(job, Comm(), opened=lambda *_: None, progress=lambda *_: None)
    return Run(out / "job-001")


def one_by_one(members: list[int], everyone: np.ndarray, own: np.ndarray, merged: bool) -> np.ndarray:
    """(vectors up, vectors down) of every round, from what each cluster and the server do in it."""
    sent, before, before_everyone = [], [False] * len(members), False
    for xi_0, xi in zip(everyone[:, 0], own, strict=True):
        now, up, down = [bool(xi_0 or xi_j) for xi_j in xi], 0, 0
        for n, averages, averaged in zip(members, now, before, strict=True):
            if averages and not (merged and averaged):
                up, down = up + n, down + n
        if xi_0 and not (merged and before_everyone):
            for n in members:
                up, down = up + 1, down + 1 + n
        sent.append((up, down))
        before, before_everyone = now, bool(xi_0)
    return np.array(sent)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4 * 4), ("float64", 4 * 8)])
def test_a_run_s_rounds_hold_the_plain_numbers(tmp_path, dtype, size):
    members = [1, 3, 2]
    with ran(tmp_path, dtype=dtype) as run:
        everyone, own = (run.read(f"/rounds/coins_{name}") for name in ("global", "cluster"))
        plain, merged = (one_by_one(members, everyone, own, merged) for merged in (False, True))
        for way, column in zip(("up", "down"), plain.T, strict=True):
            assert np.array_equal(run.read(f"/rounds/vectors_{way}"), column)
            assert np.array_equal(run.read(f"/rounds/bytes_{way}"), size * column)
        found = communication(run)
        assert (found.vectors_up, found.vectors_down) == tuple(plain.sum(0))
        assert found.global_rounds == run.file["/final/global_rounds"][()] == everyone.sum() > 10
        assert np.array_equal(found.mean_rounds, run.file["/final/mean_rounds"])
        assert np.array_equal(found.mean_rounds - found.global_rounds, run.file["/final/cluster_rounds"])
        assert np.array_equal(found.mean_rounds, (everyone | own).sum(0))

        less = communication(run, merged=True)
        assert (less.vectors_up, less.vectors_down) == tuple(merged.sum(0))
        assert (less.bytes_up, less.bytes_down) == tuple(size * merged.sum(0))
        assert 0 < less.global_rounds < found.global_rounds
        assert (less.mean_rounds < found.mean_rounds).all()


def test_rounds_with_partial_participation_are_not_merged(tmp_path):
    with ran(tmp_path, clients_per_round=4) as run, pytest.raises(InputError, match="partial participation"):
        communication(run, merged=True)


def test_merged_averagings_need_one_mean_per_cluster_and_where_it_comes_to_lie():
    """With one gamma in a cluster, averagings in a row shrink the distances from its mean by one known factor."""
    options = AsyncL2GD(gamma=(2.0, 1.0, 1.0, 1.0, 0.5, 0.5), alpha=(0.2, 0.9, 0.5), lr=0.05, p_global=0.3)
    cluster = np.array([0, 1, 1, 1, 2, 2])
    engine = make_engine(least_squares([4] * 6), options, cluster=cluster)
    algorithm = options.prepare(engine)
    s, state = algorithm.setting, algorithm.init(engine.task, engine.group)
    start = np.random.default_rng(0).normal(size=(6, 3))
    state.local["theta"].copy_(torch.from_numpy(start))
    gamma = s.gamma[[0, 1, 4]]
    within = 0.05 * gamma * (1 - s.tau) * (1 - s.alpha) / ((1 - s.p_global) * s.p_cluster)
    between = 0.05 * gamma * (s.alpha + s.tau * (1 - s.alpha)) / s.p_global
    factor = np.ones(3)
    for index, xi_0 in enumerate([0, 1, 1, 0, 1]):
        decision = decide(engine, index, **{"global": [xi_0], "cluster": [True] * 3})
        state = algorithm.round(state, Round(engine, decision))
        factor *= 1 - (between if xi_0 else within)
    end = state.local["theta"].numpy()
    first, last = (np.array([theta[cluster == j].mean(0) for j in range(3)]) for theta in (start, end))
    assert abs(last - first).min() > 1e-3
    np.testing.assert_allclose(end, last[cluster] + factor[cluster, None] * (start - first[cluster]), rtol=1e-10)
