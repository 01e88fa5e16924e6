"""What holds for every algorithm of the registry: tiny runs in one process, on ranks that are threads."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from helpers import classes, cloned, drawn, least_squares, on_ranks, personal, play, ready, same_bits

from hpcfl.comm import Comm
from hpcfl.config import resolve
from hpcfl.errors import Diverged
from hpcfl.evaluate import evaluate
from hpcfl.members import ClusterMeans
from hpcfl.models import Spec
from hpcfl.models.dense import MLP, Linear
from hpcfl.registry import build, registered
from hpcfl.round import Round
from hpcfl.run import run

USUAL = {  # where an algorithm has such options
    "batch_size": 3,
    "local_steps": 3,
    "lr": 0.05,
    "p_global": 0.3,
    "p_cluster": 0.5,
    "p_refresh": 0.4,
    "smoothness": 5.0,
    "strong_convexity": 0.1,
}
MORE = [  # options that take another way through an algorithm
    {"name": "apfl", "average": True},
    {"name": "apfl", "variant": "released", "alpha_update": "step"},
    {"name": "async_l2gd", "batch_size": None},
    {"name": "async_l2gd", "objective": "sum", "lr": 0.002},
    {"name": "async_l2gd", "p_cluster": 0.0},
    {"name": "async_l2gd", "tau": "bound"},
    {"name": "async_l2gd_vr", "batch_size": None},
    {"name": "async_l2gd_vr", "p_cluster": 0.0},
    {"name": "blup", "objective": "sum"},
    {"name": "fedavg", "server_momentum": 0.5, "weighting": "client"},
    {"name": "fedbabu", "fine_tune": "all", "momentum": 0.0},
    {"name": "fedrecon", "reset": True, "body_steps": 2, "server_optimizer": "sgd"},
    {"name": "fedrep", "head_steps": 2, "body_steps": 2, "weighting": "client"},
    {"name": "least_squares", "pooled": True},
    {"name": "local", "local_epochs": 2},
    {"name": "pflego", "batch_size": None, "server_optimizer": "sgd"},
    {"name": "pflego", "variant": "released", "start_heads": "drawn"},
    {"name": "single_cluster", "objective": "sum", "lr": 0.002},
]
CASES = [{"name": name} for name in registered("algorithm")] + MORE
SIZES = [5, 1, 8, 3, 19, 2, 7]
CLUSTER = [0, 0, 1, 1, 0, 1, 1]
OWN_CLASSES = [3, 1, 2, 3, 2, 3, 1]  # where heads are the clients' own
PULL = {"gamma": [0.5, 1.0, 1.5, 0.3, 0.7, 1.2, 0.4], "alpha": [0.1, 0.7]}
LISTS = [  # one number per client or cluster of this federation
    {"name": "apfl", "alpha": [0.0, 0.2, 0.4, 0.5, 0.7, 0.9, 1.0]},
    {"name": "async_l2gd", "p_cluster": [0.4, 0.5], "tau": [0.3, 0.9], **PULL},
    {"name": "async_l2gd", "lam": [0.5, 3.0]},
    {"name": "async_l2gd_vr", "p_cluster": [0.4, 0.5], **PULL},
    {"name": "blup", **PULL},
    {"name": "single_cluster", "gamma": PULL["gamma"]},
]
COHORTS = [[0, 1, 4], [2, 3, 5, 6], None]


def of(case: dict[str, Any]) -> type:
    return registered("algorithm")[case["name"]]


def known(case: dict[str, Any]) -> set[str]:
    """Names of the options that the algorithm has."""
    return {f.name for f in dataclasses.fields(of(case))}


def cohorts(work: Any) -> list[list[int] | None]:
    """The participants of each round; more rounds for coins, so that they fall on every side."""
    return COHORTS * (3 if work.coins(2) else 1)


def dtypes(case: dict[str, Any]) -> list[torch.dtype]:
    """That it can compute in, the shortest first."""
    return [torch.float64] if of(case).least_squares else [torch.float32, torch.float64]


def algorithm(case: dict[str, Any], **more: Any) -> Any:
    """Its options: the usual ones and ``more``, where it has such, and those of the case."""
    options = {k: v for k, v in (USUAL | more).items() if k in known(case)}
    if "local_epochs" in case:
        del options["local_steps"]
    return build("algorithm", options | case)


def network(inputs: int = 4, outputs: int = 3) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return MLP(hidden=(5,)).build(Spec((inputs,), outputs))


def federation(case: dict[str, Any], **options: Any) -> tuple[Any, dict[str, Any]]:
    """Seven clients in two clusters: their samples, and what an engine needs; they train a network where they may."""
    options = {"cluster": CLUSTER, "dtype": dtypes(case)[0]} | options
    if of(case).least_squares:
        return least_squares(SIZES), options
    options |= {"model": network(), "number": 3}
    if not of(case).own_heads:
        return classes(SIZES), options
    data = [(x, y % own) for (x, y), own in zip(classes(SIZES), OWN_CLASSES, strict=True)]
    return data, options | {"own_classes": OWN_CLASSES}


def named(case: dict[str, Any]) -> str:
    return "-".join(k if isinstance(v, list) else str(v) for k, v in case.items())


every_algorithm = pytest.mark.parametrize("case", CASES + LISTS, ids=named)
every_algorithm_anywhere = pytest.mark.parametrize("case", CASES, ids=named)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(case, dtype, id=f"{named(case)}-{dtype}") for case in CASES + LISTS for dtype in dtypes(case)],
)
def test_rounds(case, dtype):
    data, options = federation(case, dtype=dtype)
    engine, work = ready(data, algorithm(case), **options)
    clients, parameters = len(SIZES), engine.task.layout.size
    start = cloned(work.init(engine.task, engine.group))
    state = play(engine, work, cohorts(work))
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

    rounds = len(cohorts(work))
    metrics = evaluate(engine, work, state, rounds, ("train",))
    score = engine.task.metrics[1]
    for model in work.evaluated:
        models = personal(engine, work, state, rounds) if model == "personal" else work.global_model(state)[None]
        assert models.shape == (clients if model == "personal" else 1, parameters)
        assert models.dtype == dtype
        assert models.isfinite().all()
        assert np.isfinite(metrics[f"{model}/train_loss"]).all()
        found = metrics[f"{model}/train_{score}"]
        assert ((found >= 0) & (found <= (1 if score == "accuracy" else np.inf))).all()
    assert set(work.evaluated) <= {"personal", "global"}
    assert work.evaluated
    assert all(metrics[name].shape == (clients,) for name in work.exposed)


@every_algorithm
def test_coins_fall_on_both_sides_in_these_rounds(case):
    """So that the other tests see every kind of round."""
    data, options = federation(case)
    engine, work = ready(data, algorithm(case), **options)
    rounds = cohorts(work)
    for name, probability in work.coins(2).items():
        fell = np.array([decision.coins[name] for decision in drawn(engine, work, rounds)])
        assert fell.shape == (len(rounds), len(probability))
        assert (fell.any(0) == (probability > 0)).all()
        assert not fell.all(0).any()


class Watched(Round):
    """A round that notices when a client's work changes what it was given."""

    def clients(self, work, state, **options):
        def watched(block, own):
            shared = {**state.shared, **(options.get("given") or {})}
            inputs = {f"shared {k}": v.values if isinstance(v, ClusterMeans) else v for k, v in shared.items()} | own
            copies = {name: values.clone() for name, values in inputs.items()}
            out = work(block, own)
            for name, values in inputs.items():
                assert same_bits(values, copies[name]), f"{name} was written to"
            return out

        return super().clients(watched, state, **options)


@every_algorithm
def test_arguments_are_not_written_to(case):
    engine, work = ready(least_squares(SIZES), algorithm(case), cluster=CLUSTER)
    state = work.init(engine.task, engine.group)
    for decision in drawn(engine, work, cohorts(work)):
        shared = cloned(state).shared
        new = work.round(state, Watched(engine, decision))
        assert all(same_bits(state.shared[name], shared[name]) for name in shared)
        state = new


@every_algorithm
def test_all_memory_is_in_the_state(case):
    data = least_squares(SIZES)
    (engine, work), (one, first), (other, second) = (ready(data, algorithm(case), cluster=CLUSTER) for _ in range(3))
    rounds = cohorts(work)
    whole = play(engine, work, rounds + rounds)
    half = cloned(play(one, first, rounds))
    state = play(other, second, rounds, state=half, first=len(rounds))
    for a, b in ((whole.shared, state.shared), (whole.local, state.local)):
        assert all(same_bits(a[name], b[name]) for name in a)
    if "personal" in work.evaluated:
        done = 2 * len(rounds)
        assert same_bits(personal(other, second, state, done), personal(engine, work, whole, done))


def everything(options: Any, data: Any, world: Any = None, **engine_options: Any) -> dict[str, np.ndarray]:
    """One rank after its rounds: the shared state, and by client id the local state, personal models and metrics."""
    engine, work = ready(data, options, world=world, **engine_options)
    rounds = cohorts(work)
    state = play(engine, work, rounds if len(data) == len(SIZES) else len(rounds))
    out = {f"shared {name}": values.numpy() for name, values in state.shared.items()}
    rows = {f"local {name}": values.numpy() for name, values in state.local.items()}
    rows |= evaluate(engine, work, state, len(rounds), ("train", "test"))
    if "personal" in work.evaluated:
        rows["personal"] = personal(engine, work, state, len(rounds)).numpy()
    return out | {
        f"{name} of {i}": row for name, values in rows.items() for i, row in zip(engine.group.ids, values, strict=True)
    }


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert [name for name in found if not same_bits(np.asarray(found[name]), np.asarray(expected[name]))] == []


@every_algorithm
@pytest.mark.parametrize("ranks", [2, 3, 9])
def test_ranks_without_participants_and_without_clients(case, ranks):
    """Every rank has the values of a single process, bit for bit. In each cohort some rank has no participant."""
    work, (data, options) = algorithm(case), federation(case)
    alone = everything(work, data, **options)
    parts = on_ranks(ranks, lambda comm: everything(work, data, comm, **options))
    for part in parts:
        assert_same(part, alone)
    assert set().union(*parts) == set(alone)


@every_algorithm
def test_bits_do_not_depend_on_where_a_client_lies_in_memory(case):
    """61 parameters: in another block a client's row has another alignment, where a library may add differently."""
    work, data = algorithm(case, batch_size=20), least_squares([30, 7, 20, 41, 25, 1, 60], features=60)
    options = {"model": Linear(), "dtype": dtypes(case)[0], "cluster": CLUSTER}
    alone = everything(work, data, **options)
    assert_same(everything(work, data, block=2, **options), alone)
    for part in on_ranks(3, lambda comm: everything(work, data, comm, **options)):
        assert_same(part, alone)


@every_algorithm
@pytest.mark.parametrize("block", [1, 2, 3, 100])
def test_block_size_changes_no_bit(case, block):
    work, (data, options) = algorithm(case), federation(case)
    assert_same(everything(work, data, block=block, **options), everything(work, data, **options))


@every_algorithm_anywhere
@pytest.mark.parametrize(
    "sizes", [[6], [1, 1, 1, 1, 1, 1, 1], [1]], ids=["one client", "one sample each", "one sample"]
)
def test_smallest_federations(case, sizes):
    values = everything(algorithm(case), least_squares(sizes))
    assert all(np.isfinite(v).all() for name, v in values.items() if "/test" not in name)


@every_algorithm_anywhere
@pytest.mark.parametrize("block", [None, 2])
def test_metrics_are_those_of_each_client_s_own_data(case, block):
    """Half the squared error and l2/2 |w|^2, for clients of one sample and of more than one piece."""
    data = least_squares([5, 1, 2500, 3, 4])
    engine, work = ready(data, algorithm(case), model=Linear(bias=False, l2=0.3), block=block)
    state = play(engine, work, [[0, 2, 4], [1, 2]])
    found = evaluate(engine, work, state, 2, ("train", "test"))
    for model in work.evaluated:
        models = personal(engine, work, state, 2) if model == "personal" else work.global_model(state).expand(5, -1)
        for k, ((x, y), w) in enumerate(zip(data, models.numpy(), strict=True)):
            error = ((x @ w - y) ** 2).mean()
            np.testing.assert_allclose(found[f"{model}/train_squared_error"][k], error, rtol=1e-10)
            np.testing.assert_allclose(found[f"{model}/train_loss"][k], error / 2 + 0.15 * (w**2).sum(), rtol=1e-10)
        assert np.isnan(found[f"{model}/test_loss"]).all()  # there are no such samples


@pytest.mark.parametrize("case", [case for case in CASES if "lr" in known(case)], ids=named)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_run_that_diverges_names_round_and_client(case, dtype, tmp_path):
    x, y = least_squares([40])[0]
    np.savez(tmp_path / "data.npz", x=x, y=y)
    tables = {
        "run": {"rounds": 1000, "dtype": dtype, "out": str(tmp_path)},
        "data": {"name": "file", "path": str(tmp_path / "data.npz")},
        "partition": {"name": "iid", "clients": 4},
        "model": {"name": "mlp", "hidden": [4]} if of(case).own_heads else {"name": "linear"},  # something to share
        "algorithm": case
        | {"lr": 1e200 if of(case).own_heads else 5.0}
        | ({"gamma": 1e-3} if "gamma" in known(case) else {}),  # a small pull
    }
    with pytest.raises(Diverged, match=r"^round \d+, client [0-3]: "):
        run(resolve(tables, "job", "job.toml"), Comm(), opened=lambda *_: None, progress=lambda *_: None)
