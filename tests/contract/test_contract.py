"""What holds for every algorithm of the registry, and for the rounds that they are written in."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import classes, cloned, decide, least_squares, make_engine, on_ranks, personal, play, same_bits

from hpcfl.algorithm import State
from hpcfl.algorithms.local import Local
from hpcfl.errors import Diverged
from hpcfl.evaluate import evaluate
from hpcfl.models import Spec
from hpcfl.models.dense import MLP, Linear
from hpcfl.registry import build, registered
from hpcfl.round import Round, Sent

USUAL = {"batch_size": 3, "local_steps": 3, "lr": 0.05}  # where an algorithm has such options
MORE = [  # options that take another way through an algorithm
    {"name": "apfl", "average": True},
    {"name": "apfl", "variant": "released", "alpha_update": "step"},
    {"name": "fedavg", "server_momentum": 0.5, "weighting": "client"},
    {"name": "local", "local_epochs": 2},
]
CASES = [{"name": name} for name in registered("algorithm")] + MORE
DTYPES = [torch.float32, torch.float64]
SIZES = [5, 1, 8, 3, 19, 2, 7]
COHORTS = [[0, 1, 4], [2, 3, 5, 6], None]


def algorithm(case: dict[str, Any]) -> Any:
    cls = registered("algorithm")[case["name"]]
    options = {k: v for k, v in USUAL.items() if k in {f.name for f in dataclasses.fields(cls)}}
    if "local_epochs" in case:
        del options["local_steps"]
    return build("algorithm", options | case)


def network(inputs: int = 4, outputs: int = 3) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return MLP(hidden=(5,)).build(Spec((inputs,), outputs))


every_algorithm = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))


@every_algorithm
@pytest.mark.parametrize("dtype", DTYPES)
def test_three_rounds(case, dtype):
    work = algorithm(case)
    engine = make_engine(classes(SIZES), work, model=network(), number=3, dtype=dtype)
    clients, parameters = len(SIZES), engine.task.layout.size
    start = cloned(work.init(engine.task, engine.group))
    state = play(engine, work, COHORTS)
    for before, after in ((start.shared, state.shared), (start.local, state.local)):
        assert before.keys() == after.keys()
        for name in before:
            assert (after[name].shape, after[name].dtype) == (before[name].shape, before[name].dtype), name
            assert after[name].isfinite().all(), name
            assert after[name].dtype in (dtype, torch.int64), name
    assert all(len(rows) == clients for rows in state.local.values())
    assert not all(
        same_bits(a, b)
        for a, b in zip(
            [*start.shared.values(), *start.local.values()],
            [*state.shared.values(), *state.local.values()],
            strict=True,
        )
    )

    metrics = evaluate(engine, work, state, len(COHORTS), ("train",))
    for model in work.evaluated:
        models = personal(engine, work, state, 3) if model == "personal" else work.global_model(state)[None]
        assert models.shape == (clients if model == "personal" else 1, parameters)
        assert models.dtype == dtype
        assert models.isfinite().all()
        assert np.isfinite(metrics[f"{model}/train_loss"]).all()
        assert ((metrics[f"{model}/train_accuracy"] >= 0) & (metrics[f"{model}/train_accuracy"] <= 1)).all()
    assert set(work.evaluated) <= {"personal", "global"}
    assert work.evaluated
    assert all(metrics[name].shape == (clients,) for name in work.exposed)


class Watched(Round):
    """A round that notices when a client's work changes what it was given."""

    def clients(self, work, state):
        def watched(block, own):
            given = {**own, **{f"shared {name}": state.shared[name] for name in state.shared}}
            copies = {name: values.clone() for name, values in given.items()}
            out = work(block, own)
            for name, values in given.items():
                assert same_bits(values, copies[name]), f"{name} was written to"
            return out

        return super().clients(watched, state)


@every_algorithm
def test_arguments_are_not_written_to(case):
    work = algorithm(case)
    engine = make_engine(least_squares(SIZES), work)
    state = work.init(engine.task, engine.group)
    for index, participants in enumerate(COHORTS):
        shared = cloned(state).shared
        new = work.round(state, Watched(engine, decide(engine, index, participants)))
        assert all(same_bits(state.shared[name], shared[name]) for name in shared)
        state = new


@every_algorithm
def test_all_memory_is_in_the_state(case):
    work, data = algorithm(case), least_squares(SIZES)
    whole = play(make_engine(data, work), work, COHORTS + COHORTS)
    half = cloned(play(make_engine(data, work), work, COHORTS))
    other = algorithm(case)
    engine = make_engine(data, other)
    state = play(engine, other, COHORTS, state=half, first=len(COHORTS))
    for a, b in ((whole.shared, state.shared), (whole.local, state.local)):
        assert all(same_bits(a[name], b[name]) for name in a)
    if "personal" in work.evaluated:
        assert same_bits(personal(engine, other, state, 6), personal(make_engine(data, work), work, whole, 6))


def everything(work: Any, data: Any, world: Any = None, **options: Any) -> dict[str, np.ndarray]:
    """One rank after three rounds: the shared state, and by client id the local state, personal models and metrics."""
    engine = make_engine(data, work, world=world, **options)
    state = play(engine, work, COHORTS if len(data) == len(SIZES) else len(COHORTS))
    out = {f"shared {name}": values.numpy() for name, values in state.shared.items()}
    rows = {f"local {name}": values.numpy() for name, values in state.local.items()}
    rows |= evaluate(engine, work, state, len(COHORTS), ("train", "test"))
    if "personal" in work.evaluated:
        rows["personal"] = personal(engine, work, state, len(COHORTS)).numpy()
    return out | {
        f"{name} of {i}": row for name, values in rows.items() for i, row in zip(engine.group.ids, values, strict=True)
    }


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert [name for name in found if not same_bits(np.asarray(found[name]), np.asarray(expected[name]))] == []


@every_algorithm
@pytest.mark.parametrize("ranks", [2, 3, 9])
def test_ranks_without_participants_and_without_clients(case, ranks):
    """Every rank has the values of a single process, bit for bit. In each cohort some rank has no participant."""
    work, data, model = algorithm(case), classes(SIZES), network()
    options = {"model": model, "number": 3, "dtype": torch.float32, "cluster": [0, 0, 1, 1, 0, 1, 1]}
    alone = everything(work, data, **options)
    parts = on_ranks(ranks, lambda comm: everything(work, data, comm, **options))
    for part in parts:
        assert_same(part, alone)
    assert set().union(*parts) == set(alone)


@every_algorithm
def test_bits_do_not_depend_on_where_a_client_lies_in_memory(case):
    """61 parameters: in another block a client's row has another alignment, where a library may add differently."""
    work, data = replace(algorithm(case), batch_size=20), least_squares([30, 7, 20, 41, 25, 1, 60], features=60)
    options = {"model": Linear(), "dtype": torch.float32}
    alone = everything(work, data, **options)
    assert_same(everything(work, data, block=2, **options), alone)
    for part in on_ranks(3, lambda comm: everything(work, data, comm, **options)):
        assert_same(part, alone)


@every_algorithm
@pytest.mark.parametrize("block", [1, 2, 3, 100])
def test_block_size_changes_no_bit(case, block):
    work, data, model = algorithm(case), classes(SIZES), network()
    options = {"model": model, "number": 3, "dtype": torch.float32}
    assert_same(everything(work, data, block=block, **options), everything(work, data, **options))


@every_algorithm
@pytest.mark.parametrize(
    "sizes", [[6], [1, 1, 1, 1, 1, 1, 1], [1]], ids=["one client", "one sample each", "one sample"]
)
def test_smallest_federations(case, sizes):
    values = everything(algorithm(case), least_squares(sizes))
    assert all(np.isfinite(v).all() for name, v in values.items() if "/test" not in name)


@every_algorithm
@pytest.mark.parametrize("block", [None, 2])
def test_metrics_are_those_of_each_client_s_own_data(case, block):
    """Half the squared error and l2/2 |w|^2, for clients of one sample and of more than one piece."""
    work, data = algorithm(case), least_squares([5, 1, 2500, 3, 4])
    engine = make_engine(data, work, model=Linear(bias=False, l2=0.3), block=block)
    state = play(engine, work, [[0, 2, 4], [1, 2]])
    found = evaluate(engine, work, state, 2, ("train", "test"))
    for model in work.evaluated:
        models = personal(engine, work, state, 2) if model == "personal" else work.global_model(state).expand(5, -1)
        for k, ((x, y), w) in enumerate(zip(data, models.numpy(), strict=True)):
            error = ((x @ w - y) ** 2).mean()
            np.testing.assert_allclose(found[f"{model}/train_squared_error"][k], error, rtol=1e-10)
            np.testing.assert_allclose(found[f"{model}/train_loss"][k], error / 2 + 0.15 * (w**2).sum(), rtol=1e-10)
        assert np.isnan(found[f"{model}/test_loss"]).all()  # there are no such samples


# --- what a round promises to all of them ----------------------------------------------------------------------------


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
        means = r.cluster_mean(sent["x"], by=sent["k"] if by == "k" else by, only=only)
        return r._engine.group, means.rows(
            r._engine.group.cluster, torch.full((r._engine.group.clients, 3), -1.0, dtype=dtype)
        )

    for group, rows in on_ranks(ranks, lambda comm: probed(dtype, form, participants, comm, block=2)):
        for cluster, row in zip(group.cluster, rows, strict=True):
            members = participants[CLUSTER[participants] == cluster]
            right = expected_mean(members, weights[members]) if len(members) else [-1.0] * 3
            np.testing.assert_allclose(row, right, rtol=1e-6)


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
