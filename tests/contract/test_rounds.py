"""What a round promises to all algorithms: means and sums of what clients sent, on any ranks, in either precision."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from helpers import decide, least_squares, make_engine, on_ranks, same_bits

import hpcfl.round
from hpcfl.algorithm import State
from hpcfl.algorithms.local import Local
from hpcfl.errors import Diverged
from hpcfl.round import Round, Sent

DTYPES = [torch.float32, torch.float64]


@dataclass(frozen=True)
class Probe(Local):
    """Sends what it holds, and a weight; ``replaces`` it by something else in the same round."""

    replaces: bool = False

    def init(self, task, group):
        ids = torch.as_tensor(group.ids, dtype=task.dtype)[:, None]
        return State({"w": task.start()}, {"x": ids + torch.tensor([[0.0, 10.0, 20.0]], dtype=task.dtype), "k": ids})

    def client(self, b, own):
        return {"x": own["x"] + 100} if self.replaces else {}, {"x": own["x"], "k": own["k"]}


PROBE = Probe(batch_size=1)  # so that clients of all sizes share a block
CLUSTER = np.array([1, 0, 1, 0, 1, 2])


def probed(dtype, form, participants=None, world=None, probe=PROBE, **options):
    """form(round, sent) of a round in which every client i sends x_i = (i, 10 + i, 20 + i) and the weight k_i = i."""
    engine = make_engine(least_squares([2, 3, 1, 4, 2, 1]), probe, dtype=dtype, world=world, cluster=CLUSTER, **options)
    round = Round(engine, decide(engine, 0, participants))
    _, sent = round.clients(probe.client, probe.init(engine.task, engine.group))
    return form(round, sent)


def expected_mean(ids, weights):
    return np.average(np.asarray(ids)[:, None] + np.array([0.0, 10.0, 20.0]), axis=0, weights=weights)


def test_what_was_sent_does_not_change_when_the_state_does():
    probe = replace(PROBE, replaces=True)
    for participants in ([0, 2, 5], [0, 1, 2, 3, 4, 5]):  # rows that are consecutive in memory only the second time
        mean = probed(torch.float32, lambda r, sent: r.mean(sent["x"]), participants, probe=probe)
        np.testing.assert_allclose(mean, expected_mean(participants, None), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["reproducible", "float64"])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("participants", [[0, 1, 2, 3, 4, 5], [1, 4]])
def test_means_and_sums(dtype, reduction, ranks, participants):
    samples = np.array([2, 3, 1, 4, 2, 1])[participants]

    def form(r: Round, sent: dict[str, Sent]):
        ways = [r.mean(sent["x"]), r.mean(sent["x"], by="sample"), r.mean(sent["x"], by=sent["k"])]
        return [*ways, r.sum(sent["x"]), r.mean(sent["x"])]

    def rank(comm):
        return probed(dtype, form, participants, comm, reduction=reduction, block=2)

    total = expected_mean(participants, None) * len(participants)
    expected = [expected_mean(participants, weights) for weights in (None, samples, participants)]
    for found in on_ranks(ranks, rank):
        for got, right in zip(found, [*expected, total, expected[0]], strict=True):
            assert got.dtype == dtype
            np.testing.assert_allclose(got, right, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("by", ["client", "sample", "k"])
def test_cluster_means(dtype, ranks, by):
    participants, samples = np.array([0, 2, 3, 4]), np.array([2, 3, 1, 4, 2, 1])  # of cluster 1, 1, 0, 1; none of 2
    weights = {"client": np.ones(6), "sample": samples, "k": np.arange(6)}[by]
    only = np.array([True, True, True])

    def form(r: Round, sent: dict[str, Sent]):
        return r.cluster_mean(sent["x"], by=sent["k"] if by == "k" else by, only=only), r.account

    found, seen = on_ranks(ranks, lambda comm: probed(dtype, form, participants, comm, block=2)), set()
    for means, account in found:
        assert account.kind == hpcfl.round.CLUSTER
        for place in np.flatnonzero(means.formed):
            members = participants[CLUSTER[participants] == means.clusters[place]]
            right = expected_mean(members, weights[members])
            np.testing.assert_allclose(means.values[place], right, rtol=1e-6)
        seen |= set(means.clusters[means.formed].tolist())
        assert not means.formed[means.clusters == 2].any()
    assert seen == {0, 1}
    assert sum(vectors for _, account in found for vectors, _ in account.up) == len(participants)


def test_weights_that_sum_to_zero():
    assert same_bits(
        probed(torch.float32, lambda r, sent: r.mean(sent["x"], by=sent["k"], unchanged=torch.ones(3)), [0]),
        torch.ones(3),
    )
    with pytest.raises(Diverged, match=r"round 0.*zero"):
        probed(torch.float32, lambda r, sent: r.mean(sent["x"], by=sent["k"]), [0])


def test_a_name_that_was_not_sent():
    with pytest.raises(KeyError, match=r'"y" was not sent; sent: x, k'):
        probed(torch.float32, lambda r, sent: sent["y"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_divergence_names_round_and_client_on_all_ranks(ranks):
    def form(r: Round, sent: dict[str, Sent]):
        for piece in (sent["x"], sent["k"]):
            for ids, rows, top in zip(piece.clients, piece.rows, piece.magnitudes, strict=True):
                rows[ids >= 2, 0] = torch.nan
                top[ids >= 2] = torch.nan
        return r.mean(sent["x"])

    def rank(comm):
        return probed(torch.float32, form, world=comm)

    assert [str(error) for error in on_ranks(ranks, rank, fails=Diverged)] == [
        "round 0, client 2: what it sends is not finite"
    ] * ranks
