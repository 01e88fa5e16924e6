"""Checks of communicators and collectives on real ranks, in one launch: ``mpirun -n 3 python checks.py``.

Every check raises on the rank where it fails, which ends the job. Rank 0 prints the names of those that passed.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from same_engine import engine, rows_of

from hpcfl.algorithm import RoundDecision
from hpcfl.comm import Comm, world
from hpcfl.errors import Diverged, InputError
from hpcfl.placement import place
from hpcfl.reduce import Piece, column_sums, float64_sum, grid_bits, reproducible_sum
from hpcfl.round import CLUSTER, GLOBAL, LOCAL, Round
from hpcfl.topology import Topology

CPU = torch.device("cpu")


def check_arrays_travel(comm: Comm) -> None:
    parts = [{"x": np.full((r, 2), r, np.uint8), "y": np.arange(r, dtype=np.float32)} for r in range(comm.size)]
    mine = comm.scatter_arrays(parts if comm.rank == 0 else None)
    assert mine["x"].shape == (comm.rank, 2)
    assert (mine["x"] == comm.rank).all()
    assert mine["y"].dtype == np.float32
    gathered = comm.gather_rows(mine["x"])
    assert (gathered is None) == (comm.rank != 0)
    if gathered is not None:
        assert [len(g) for g in gathered] == list(range(comm.size))


def check_an_error_of_one_rank_is_raised_on_all(comm: Comm) -> None:
    for failing in range(comm.size):
        with pytest.raises(InputError, match=f"from rank {failing}"):
            comm.raise_together(InputError(f"from rank {failing}") if comm.rank == failing else None)
    assert comm.from_root(lambda: 7) == 7


def check_sums_do_not_depend_on_the_layout(comm: Comm) -> None:
    """Any distribution of the same rows over the ranks, also none on some rank, gives the bits of one process."""
    generator = np.random.default_rng(5)
    values = torch.from_numpy(generator.standard_normal((23, 301)) * 10.0 ** generator.integers(-9, 9, (23, 1)))
    weights = torch.from_numpy(generator.random((23, 1)))
    ids = np.arange(23)
    for dtype in (torch.float32, torch.float64):
        rows = values.to(dtype)
        for weighted in (None, weights):
            alone = reproducible_sum(Comm(), [Piece(rows, ids, weighted)], grid_bits(23), CPU)
            for owner in (ids % comm.size, ids * 0 + comm.size - 1, generator.integers(0, comm.size, 23)):
                mine = np.flatnonzero(owner == comm.rank)[::-1].copy()
                pieces = [m for m in np.array_split(mine, 3) if len(m)]
                terms = [Piece(rows[m], ids[m], None if weighted is None else weighted[m]) for m in pieces]
                total = reproducible_sum(comm, terms, grid_bits(23), CPU)
                assert torch.equal(total, alone)
                close = float64_sum(comm, terms, grid_bits(23), CPU)
                assert torch.allclose(close, alone, rtol=1e-9, atol=1e-9 * float(values.abs().max()))


def check_a_bad_value_on_any_rank_is_seen_by_all(comm: Comm) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        for rank in range(comm.size):
            rows = torch.ones(2, 5)
            if comm.rank >= rank:
                rows[1, 3] = bad
            ids = np.array([2 * comm.rank, 2 * comm.rank + 1])
            for reduce in (reproducible_sum, float64_sum):
                with pytest.raises(Diverged, match=f"client {2 * rank + 1}:"):
                    reduce(comm, [Piece(rows, ids)], grid_bits(2 * comm.size), CPU)
            columns = column_sums(comm, rows.double().numpy(), 2 * comm.size)
            assert np.isinf(columns[3])
            assert (columns[[0, 1, 2, 4]] == 2 * comm.size).all()


def check_cluster_means(comm: Comm) -> None:
    """Clusters that span ranks, several on one rank, more and fewer than ranks: against plain NumPy."""
    for clusters in (1, 2, 7):
        clients, width = 17, 4
        cluster = np.sort(np.arange(clients) * 5 % clusters)
        samples = 1 + np.arange(clients) % 4
        placement = place(cluster, samples, comm.size)
        topology = Topology.build(comm, comm, placement)
        machine = engine(topology)
        values = np.random.default_rng(1).standard_normal((clients, width))
        participants = np.array([i for i in range(clients) if i % 3 != 1])
        only = np.arange(clusters) % 3 != 1
        for by, weight in (("client", np.ones(clients)), ("sample", samples.astype(float))):
            r = Round(machine, RoundDecision(0, participants, {}, False, False, None))
            means = r.cluster_mean(rows_of(machine, values, participants), by=by, only=only)
            group = machine.group
            active = [c for c in np.unique(group.cluster) if only[c] and (cluster[participants] == c).any()]
            assert means.clusters[means.formed].tolist() == active
            for c, got in zip(active, means.values[means.formed].numpy(), strict=True):
                members = participants[cluster[participants] == c]
                expected = (values[members] * weight[members, None]).sum(0) / weight[members].sum()
                np.testing.assert_allclose(got, expected, atol=1e-12, err_msg=f"cluster {c}")
            assert r.account.kind == (CLUSTER if only[cluster[participants]].any() else LOCAL)


def check_weighted_means(comm: Comm) -> None:
    placement = place(np.zeros(9, int), 1 + np.arange(9), comm.size)
    machine = engine(Topology.build(comm, comm, placement))
    values = np.random.default_rng(2).standard_normal((9, 3))
    everyone = np.arange(9)
    sent = rows_of(machine, values, everyone)
    r = Round(machine, RoundDecision(4, everyone, {}, False, False, None))
    weight = rows_of(machine, (everyone[:, None] % 2).astype(float), everyone)
    np.testing.assert_allclose(r.mean(sent).numpy(), values.mean(0), atol=1e-12)
    np.testing.assert_allclose(r.mean(sent, by="sample").numpy(), np.average(values, 0, 1 + everyone), atol=1e-12)
    np.testing.assert_allclose(r.mean(sent, by=weight).numpy(), values[everyone % 2 == 1].mean(0), atol=1e-12)
    np.testing.assert_allclose(r.sum(sent).numpy(), values.sum(0), atol=1e-12)
    assert r.account.kind == GLOBAL
    nothing = rows_of(machine, np.zeros((9, 1)), everyone)
    unchanged = torch.full((3,), 5.0)
    assert torch.equal(r.mean(sent, by=nothing, unchanged=unchanged), unchanged)
    with pytest.raises(Diverged, match="round 4"):
        r.mean(sent, by=nothing)


def check_communicators_are_given_back(comm: Comm) -> None:
    """An MPI library has some thousands of them: MPICH two."""
    made = len(comm._family) if comm.size > 1 else 0
    for _ in range(2100):
        node, both = comm.node(), comm.group([0, 1]) if comm.size > 1 and comm.rank < 2 else None
        for one in (node, both):
            if one is not None:
                one.free()
    assert comm.size == 1 or len(comm._family) == made


def check_ranks_of_a_node(comm: Comm) -> None:
    assert comm.node().size == comm.size


def main() -> None:
    comm = world()
    passed = []
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check(comm)
            passed.append(name)
    comm.barrier()
    if comm.rank == 0:
        print("passed:", *passed)


if __name__ == "__main__":
    main()
