"""Labels of each client's own: their numbers, the outputs of the model, evaluation; tests of a round's participants."""

from __future__ import annotations

import io

import h5py
import numpy as np
import pytest
import torch
from helpers import TwoLayers, play
from rich.console import Console
from torch import Tensor

from hpcfl.analysis.table import table
from hpcfl.batch import Batch
from hpcfl.build import build, load
from hpcfl.comm import Comm
from hpcfl.config import resolve
from hpcfl.data import Dataset
from hpcfl.errors import InputError
from hpcfl.evaluate import evaluate, personal_models
from hpcfl.models import Spec
from hpcfl.models.dense import Logistic
from hpcfl.partition import deal
from hpcfl.partition.iid import Iid
from hpcfl.partition.natural import Natural
from hpcfl.round import Round
from hpcfl.run import run
from hpcfl.splits import TEST, TRAIN, VALIDATION
from hpcfl.task import Task

HIDDEN = 6
OWNED = [[7, 2, 5], [1], [0, 9, 2, 3, 5], [4, 3], [6, 8, 2, 1]]  # classes of each client; in all 10
MOST = 5
NET = TwoLayers(HIDDEN)


def samples(seed=0, per_class=7) -> Dataset:
    """Five clients, each with its own split: the last sample of a class is for validation, the two before for tests."""
    g = np.random.default_rng(seed)
    client, y, split = (
        np.array(column)
        for column in zip(
            *(
                (i, c, VALIDATION if k == per_class - 1 else TEST if k >= per_class - 3 else TRAIN)
                for i, own in enumerate(OWNED)
                for c in own
                for k in range(per_class)
            ),
            strict=True,
        )
    )
    x = g.normal(size=(10, 4))[y] + 0.8 * g.normal(size=(len(y), 4)) + 0.3 * client[:, None]
    order = g.permutation(len(y))
    return Dataset(x[order], y[order], 10, client=client[order], split=split[order].astype(np.uint8))


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_a_label_is_the_place_among_the_sorted_classes_of_the_owner():
    data = samples()
    shares = deal(Natural(labels="local"), data, 0)
    assert shares.classes.tolist() == [len(own) for own in OWNED]
    assert shares.label.dtype == np.int64
    assert shares.label.tolist() == [
        sorted(OWNED[i]).index(c) for i, c in zip(shares.client.tolist(), data.y.tolist(), strict=True)
    ]
    plain = deal(Natural(), data, 0)
    assert plain.label is None
    assert plain.classes is None
    for name in ("client", "split", "cluster"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(shares, name))


@pytest.mark.parametrize("part", [TRAIN, VALIDATION, TEST])
def test_classes_of_all_splits_count(part):
    """Class 0 is only in one part of the client; the classes after it are numbered as if it were in all."""
    y = np.array([0, 4, 4, 4, 9, 9, 9])
    split = np.array([part, TRAIN, VALIDATION, TEST, TRAIN, VALIDATION, TEST], np.uint8)
    data = Dataset(np.zeros((7, 2)), y, 10, client=np.zeros(7, np.int64), split=split)
    shares = deal(Natural(labels="local"), data, 0)
    assert shares.classes.tolist() == [3]
    assert shares.label.tolist() == [0, 1, 1, 1, 2, 2, 2]


def test_drawn_owners():
    data = samples()
    shares = deal(Iid(clients=9, labels="local", test_share=0.3), data, 4)
    for i in range(9):
        mine = shares.client == i
        own = np.unique(data.y[mine])
        assert shares.classes[i] == len(own)
        np.testing.assert_array_equal(own[shares.label[mine]], data.y[mine])


def test_a_regression_has_no_classes():
    data = Dataset(np.zeros((4, 2)), np.zeros(4), None, client=np.array([0, 0, 1, 1]))
    with pytest.raises(InputError, match=r'^partition.labels = "local": .* a regression set has none'):
        deal(Natural(labels="local", test_share=0), data, 0)


# --- runs -------------------------------------------------------------------------------------------------------------


def job(folder, algorithm, data=None, labels="local", model=None, **options):
    """By tables; every client's samples are in a file."""
    data = samples() if data is None else data
    np.savez(folder / "data.npz", x=data.x, y=data.y, client=data.client, split=data.split)
    tables = {
        "run": {"rounds": 3, "eval_every": 2, "seed": 5, "dtype": "float64", "out": str(folder)} | options,
        "data": {"name": "file", "path": str(folder / "data.npz")},
        "partition": {"name": "natural", "labels": labels},
        "model": model or {"name": "mlp", "hidden": [HIDDEN]},
        "algorithm": algorithm,
    }
    return resolve(tables, "job", "job.toml")


def results(folder, *arguments, **options) -> h5py.File:
    run(job(folder, *arguments, **options), Comm(), opened=lambda *_: None, progress=lambda *_: None)
    (path,) = folder.glob("job-001/results.h5")
    return h5py.File(path)


SPLIT = [
    {"name": "pflego", "local_steps": 4, "head_lr": 0.3, "server_lr": 0.05},
    {"name": "fedper", "lr": 0.3, "local_steps": 3},
    {"name": "fedrep", "lr": 0.3, "head_steps": 3},
    {"name": "fedbabu", "lr": 0.3, "local_steps": 3},
    {"name": "fedrecon", "local_steps": 3},
]
LOCAL = {"name": "local", "lr": 0.3, "local_steps": 3}
FEDAVG = {"name": "fedavg", "lr": 0.3, "local_steps": 3}


@pytest.mark.parametrize("algorithm", [*SPLIT, LOCAL], ids=lambda a: a["name"])
def test_a_client_never_predicts_an_output_that_it_does_not_have(algorithm, tmp_path):
    """Even where the head prefers it: such rows of every head are made the largest."""
    built = build(job(tmp_path, algorithm), Comm())
    engine, work = built.engine, built.algorithm
    assert built.population.classes == MOST
    assert built.population.own_classes.tolist() == [len(own) for own in OWNED]
    assert engine.task.layout.size == HIDDEN * 5 + MOST * (HIDDEN + 1)
    state = play(engine, work, 2)
    name = "w" if algorithm["name"] == "local" else "W"
    bias = state.local[name][:, -MOST:]
    for row, i in enumerate(engine.group.ids):
        bias[row, len(OWNED[i]) :] = 1e6
    models = models_of(engine, work, state)
    found = evaluate(engine, work, state, 2, ("train", "test"))
    data, shares = load(job(tmp_path, algorithm))
    for row, i in enumerate(engine.group.ids):
        for split, part in (("train", TRAIN), ("test", TEST)):
            mine = (shares.client == i) & (shares.split == part)
            theta, W = models[row][: HIDDEN * 5], models[row][HIDDEN * 5 :]
            outputs = NET.outputs(theta, W, data.x[mine], len(OWNED[i]))
            right = (outputs.argmax(1).numpy() == shares.label[mine]).mean()
            assert found[f"personal/{split}_accuracy"][row] == pytest.approx(right, abs=1e-12)
            loss = float(NET.loss(theta, W, data.x[mine], shares.label[mine], len(OWNED[i])))
            assert found[f"personal/{split}_loss"][row] == pytest.approx(loss, rel=1e-10, abs=1e-12)
    alone = list(engine.group.ids).index(1)  # who has one class is always right
    assert found["personal/test_accuracy"][alone] == 1
    assert found["personal/train_loss"][alone] == 0


def models_of(engine, work, state) -> Tensor:
    models = torch.zeros(engine.group.clients, engine.task.layout.size, dtype=torch.float64)
    for rows, w in personal_models(engine, work, state, 2):
        models[torch.from_numpy(rows)] = w
    return models


@pytest.mark.parametrize("algorithm", [FEDAVG, {"name": "apfl", "lr": 0.3}], ids=lambda a: a["name"])
def test_a_shared_head_keeps_all_outputs(algorithm, tmp_path):
    built = build(job(tmp_path, algorithm), Comm())
    assert built.population.classes == MOST
    assert built.engine.group.mask is None
    engine, state = built.engine, play(built.engine, built.algorithm, 2)
    w = built.algorithm.global_model(state)
    found = evaluate(engine, built.algorithm, state, 2, ("test",))
    data, shares = load(job(tmp_path, algorithm))
    for row, i in enumerate(engine.group.ids):
        mine = (shares.client == i) & (shares.split == TEST)
        loss = float(NET.loss(w[: HIDDEN * 5], w[HIDDEN * 5 :], data.x[mine], shares.label[mine]))
        assert found["global/test_loss"][row] == pytest.approx(loss, rel=1e-10)


def test_global_labels_keep_all_outputs(tmp_path):
    built = build(job(tmp_path, SPLIT[0], labels="global"), Comm())
    assert built.population.classes == 10
    assert built.population.own_classes is None
    assert built.engine.group.mask is None


def test_clients_with_equally_many_classes_need_no_mask(tmp_path):
    data = samples()
    mine = np.isin(data.client, [0])  # three classes; a second client has the same samples
    twice = Dataset(
        np.tile(data.x[mine], (2, 1)),
        np.tile(data.y[mine], 2),
        10,
        client=np.repeat([0, 1], mine.sum()),
        split=np.tile(data.split[mine], 2),
    )
    built = build(job(tmp_path, SPLIT[0], twice), Comm())
    assert (built.population.classes, built.engine.group.mask) == (3, None)


@pytest.mark.parametrize("backend", ["model", "vmap", "loop"])
def test_a_logistic_model_of_two_classes_and_a_client_of_one(backend):
    """Its only output has probability one: neither a loss nor a gradient, whatever the arithmetic."""
    module = Logistic(reference=True).build(Spec((3,), 2))
    task = Task(module, (3,), 2, backend=backend, device=torch.device("cpu"), dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((2, 4, 3), (2, 4)))
    y, mask = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0]]), torch.tensor([[[0.0, 0.0]], [[0.0, -torch.inf]]]).double()
    loss, gradient = task.gradient(w, Batch(x, y, torch.full((2, 4), 0.25).double(), 2, mask=mask))
    assert loss[0] > 0.1
    assert gradient.tensor()[0].norm() > 0.01
    assert loss[1] == 0
    assert gradient.tensor()[1].norm() == 0


@pytest.mark.parametrize("labels", ["local", "global"])
def test_results_say_how_many_classes_clients_have(labels, tmp_path):
    with results(tmp_path, SPLIT[0], labels=labels) as file:
        assert file.attrs["labels"].decode() == labels
        assert file.attrs["protocol"].decode() == "clients"
        assert ("n_classes" in file["clients"]) == (labels == "local")
        if labels == "local":
            assert file["/clients/n_classes"][:].tolist() == [len(own) for own in OWNED]
        counts = file["/clients/class_counts"][:]  # in the classes of the data
        assert counts.shape == (5, 10)
        assert [np.flatnonzero(row).tolist() for row in counts] == [sorted(own) for own in OWNED]


# --- run.protocol = "participants" ------------------------------------------------------------------------------------


def halves(w: Tensor) -> tuple[Tensor, Tensor]:
    return w[: HIDDEN * 5], w[HIDDEN * 5 :]


def cohorts(built, rounds):
    decisions = built.coordinator.plan(0, None)
    everyone, done = built.coordinator.everyone, 0
    while done < rounds:
        for decision in decisions.decisions(everyone):
            yield decision
            done += 1
        if done < rounds:
            decisions = built.coordinator.plan(done, None)


def by_hand(folder, algorithm, rounds, **options) -> np.ndarray:
    """[rounds, 2] mean loss and accuracy over the pooled test samples of each round's participants.

    PFLEGO: the body that they got with their new heads. FedAvg: what three steps make of the model that they got.
    """
    made = job(folder, algorithm, rounds=rounds, **options)
    built, (data, shares) = build(made, Comm()), load(made)
    engine, work = built.engine, built.algorithm
    state, course = work.init(engine.task, engine.group), []
    for decision in cohorts(built, rounds):
        old = {name: values.clone() for name, values in state.shared.items()}
        state = work.round(state, Round(engine, decision))
        total, right, count = 0.0, 0, 0
        for i in decision.participants.tolist():
            own = None
            if algorithm["name"] == "fedavg":
                theta, W = halves(old["w"])
                train = (shares.client == i) & (shares.split == TRAIN)
                for _ in range(algorithm["local_steps"]):
                    g, g_W = NET.gradients(theta, W, data.x[train], shares.label[train])
                    theta, W = theta - algorithm["lr"] * g, W - algorithm["lr"] * g_W
            else:
                theta, own = old["theta"], len(OWNED[i])
                W = state.local["W"][list(engine.group.ids).index(i)]
            mine = (shares.client == i) & (shares.split == TEST)
            if mine.any():
                outputs = NET.outputs(theta, W, data.x[mine], own)
                total += mine.sum() * float(NET.loss(theta, W, data.x[mine], shares.label[mine], own))
                right += int((outputs.argmax(1).numpy() == shares.label[mine]).sum())
                count += int(mine.sum())
        course.append((total / count, right / count))
    return np.array(course)


def without_tests(client: int) -> Dataset:
    """A client all of whose samples are for training."""
    data = samples()
    split = np.where((data.client == client) & (data.split == TEST), TRAIN, data.split)
    return Dataset(data.x, data.y, 10, client=data.client, split=split.astype(np.uint8))


@pytest.mark.parametrize("algorithm", [SPLIT[0], FEDAVG], ids=lambda a: a["name"])
@pytest.mark.parametrize("rounds", [4, 13])
def test_participants_are_tested_after_their_local_work(algorithm, rounds, tmp_path):
    options = {"data": without_tests(3), "clients_per_round": 2}
    expected = by_hand(tmp_path, algorithm, rounds, **options)
    with results(tmp_path, algorithm, rounds=rounds, protocol="participants", **options) as file:
        assert file.attrs["protocol"].decode() == "participants"
        for metric, column in zip(("loss", "accuracy"), expected.T, strict=True):
            found = file[f"/rounds/participants_test_{metric}"][:]
            assert found.shape == (rounds,)
            np.testing.assert_allclose(found, column, rtol=1e-10)
            assert len(np.unique(found)) > 2
            last = column[-10:]
            mean, std = (file[f"/final/participants_test_{metric}_{name}"][()] for name in ("mean", "std"))
            assert mean == pytest.approx(last.mean(), rel=1e-10)
            assert std == pytest.approx(np.sqrt(((last - last.mean()) ** 2).mean()), rel=1e-8)


def test_the_other_protocol_has_no_such_rows(tmp_path):
    with results(tmp_path, SPLIT[0]) as file:
        assert not [name for name in [*file["rounds"], *file["final"]] if name.startswith("participants_test")]
        assert file["/rounds/forward_passes"][:].tolist() == [2, 2, 2]
        assert file["/rounds/backward_passes"][:].tolist() == [1, 1, 1]


def test_watching_changes_no_number(tmp_path):
    """Nor what is counted."""
    files = []
    for protocol in ("clients", "participants"):
        (tmp_path / protocol).mkdir()
        files.append(results(tmp_path / protocol, SPLIT[0], protocol=protocol, clients_per_round=2, save_models=True))
    for name in ("train_loss", "bytes_up", "bytes_down", "vectors_up", "vectors_down", "forward_passes"):
        np.testing.assert_array_equal(files[0][f"/rounds/{name}"][:], files[1][f"/rounds/{name}"][:])
    for name in ("test_accuracy", "test_loss"):
        np.testing.assert_array_equal(*(f[f"/per_client/personal/{name}"][:] for f in files))


@pytest.mark.parametrize("name", ["async_l2gd", "async_l2gd_vr", "single_cluster"])
def test_an_algorithm_that_does_not_say_what_participants_hold_is_refused(name, tmp_path):
    algorithm = {"name": name, "lr": 0.01, "smoothness": 5.0, "gamma": 1.0, "p_global": 0.3}
    algorithm |= {} if name == "single_cluster" else {"p_cluster": 0.3}
    algorithm |= {"strong_convexity": 0.1, "p_refresh": 0.4} if name == "async_l2gd_vr" else {}
    with pytest.raises(InputError) as error:
        build(job(tmp_path, algorithm, labels="global", protocol="participants"), Comm())
    message = str(error.value)
    assert message.startswith(f'run.protocol = "participants": {name} does not say which model a participant holds')
    assert message.endswith("leave run.protocol out")
    assert "\n" not in message
    assert list(tmp_path.glob("job-*")) == []


def test_show_has_a_column_of_the_participants(tmp_path):
    for protocol in ("clients", "participants"):
        (tmp_path / protocol).mkdir()
        with results(tmp_path / protocol, SPLIT[0], protocol=protocol) as file:
            if protocol == "participants":
                mean, std = (file[f"/final/participants_test_accuracy_{name}"][()] for name in ("mean", "std"))
    texts = []
    for paths in ([tmp_path / "participants"], [tmp_path], [tmp_path / "clients"]):
        out = io.StringIO()
        Console(file=out, width=200).print(table(paths))
        texts.append(out.getvalue())
    for text in texts[:2]:
        assert "participants" in text
        assert "last 10 rounds" in text
        assert f"{mean:.4f}" in text
        assert f"±{std:.4f}" in text
    assert "last 10 rounds" not in texts[2]
