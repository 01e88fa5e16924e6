"""The build phase: what reaches which rank, and nodes that do not read the same."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import ONE_AT_A_TIME, ThreadComm, on_ranks, same_bits

import hpcfl.build
from hpcfl.build import build
from hpcfl.comm import Comm
from hpcfl.config import Job, resolve
from hpcfl.data import Dataset
from hpcfl.data.hierarchical_linear import HierarchicalLinear
from hpcfl.errors import InputError

LINEAR: dict[str, dict[str, Any]] = {
    "run": {"rounds": 1},
    "data": {"name": "hierarchical-linear", "clusters": 2, "clients_per_cluster": 3, "dim": 5, "observations": 4},
    "partition": {"name": "natural"},
    "model": {"name": "linear", "bias": False},
    "algorithm": {"name": "local"},
}
LOGISTIC = LINEAR | {
    "data": {"name": "hierarchical-logistic", "clients": 7, "clusters": 2},
    "model": {"name": "logistic", "bias": False, "reference": True},
}


def job_of(tables: dict[str, dict[str, Any]], **changes: dict[str, Any]) -> Job:
    return resolve(tables | changes, "job", "job")


@pytest.fixture(autouse=True)
def models_one_at_a_time(monkeypatch):
    """Ranks that are threads share torch's global random numbers, which models are made from."""
    fork, task = torch.random.fork_rng, hpcfl.build.Task

    @contextmanager
    def forked(**options):
        with ONE_AT_A_TIME, fork(**options):
            yield

    def make_task(*args, **options):
        with ONE_AT_A_TIME:
            return task(*args, **options)

    monkeypatch.setattr(torch.random, "fork_rng", forked)
    monkeypatch.setattr(hpcfl.build, "Task", make_task)


@pytest.mark.parametrize("tables", [LINEAR, LOGISTIC], ids=["linear", "logistic"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 9])
def test_every_rank_gets_the_true_parameters_of_its_clients(tables, ranks):
    """In group order, in float64 whatever the run's precision; of no client on a rank without clients."""
    job = job_of(tables, partition={"name": "natural", "clusters": [1, 5] if tables is LINEAR else 3})
    truth = job.data.load(job.run.seed).truth
    seen = []
    for group in on_ranks(ranks, lambda comm: build(job, comm).engine.group):
        assert same_bits(group.truth, truth[group.ids])
        seen += group.ids.tolist()
    assert sorted(seen) == list(range(len(truth)))


def test_true_parameters_on_two_nodes(monkeypatch):
    monkeypatch.setattr(ThreadComm, "node", lambda comm: comm.group([0, 1] if comm.rank < 2 else [2]))
    truth = HierarchicalLinear(**{k: v for k, v in LINEAR["data"].items() if k != "name"}).load(0).truth
    groups = on_ranks(3, lambda comm: build(job_of(LINEAR), comm).engine.group)
    assert all(same_bits(group.truth, truth[group.ids]) for group in groups)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"name": "linear"}},  # with a bias
        {"model": {"name": "mlp", "hidden": [2]}},
        {"partition": {"name": "iid", "clients": 6}},  # as many clients, but others
        {"data": LOGISTIC["data"], "model": {"name": "logistic", "bias": False}},  # two weights per feature
        {"data": {"name": "synthetic"}, "model": {"name": "logistic"}},  # not known
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_other_parameters_or_clients_have_no_truth(changes, ranks):
    job = job_of(LINEAR, **changes)
    assert [built.engine.group.truth for built in on_ranks(ranks, lambda comm: build(job, comm))] == [None] * ranks


@pytest.fixture
def each_rank_a_node(monkeypatch):
    monkeypatch.setattr(ThreadComm, "node", lambda comm: comm.group([comm.rank]))


def built(comm: Comm, jobs: list[Job]) -> str:
    build(jobs[comm.rank], comm)
    return "built"


def test_nodes_that_read_other_clusters_are_told_on_all_ranks(each_rank_a_node, tmp_path):
    """Files of one name on different nodes: here, files of different names."""
    jobs = []
    for rank, clusters in enumerate(["001111", "001111", "000111"]):
        file = tmp_path / f"{rank}.csv"
        file.write_text("client,cluster\n" + "".join(f"{k},{c}\n" for k, c in enumerate(clusters)))
        jobs.append(job_of(LINEAR, partition={"name": "natural", "cluster_file": str(file)}))
    assert on_ranks(2, lambda comm: built(comm, jobs[:2])) == ["built"] * 2
    for error in on_ranks(2, lambda comm: built(comm, jobs[1:]), fails=InputError):
        assert str(error).startswith("data: the nodes of this job read different data or clusters; ")


class Shifted:
    """A data set whose true parameters are off, and nothing else."""

    def __init__(self, data: HierarchicalLinear, by: float):
        self.data, self.by = data, by

    def load(self, seed: int) -> Dataset:
        data = self.data.load(seed)
        return replace(data, truth=data.truth + self.by)


def test_nodes_with_other_true_parameters_are_told_on_all_ranks(each_rank_a_node):
    jobs = [replace(job_of(LINEAR), data=Shifted(job_of(LINEAR).data, by)) for by in (0.0, 0.0, 1e-9)]
    assert on_ranks(2, lambda comm: built(comm, jobs[:2])) == ["built"] * 2
    errors = on_ranks(2, lambda comm: built(comm, jobs[1:]), fails=InputError)
    assert ["different data" in str(error) for error in errors] == [True, True]
