"""Distance of the models from the true parameters: in the results of a run, on any ranks, in the progress lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from helpers import least_squares, make_engine, on_ranks, play, same_bits

from hpcfl.algorithms.apfl import APFL
from hpcfl.cli import main
from hpcfl.comm import Comm
from hpcfl.config import resolve, to_toml
from hpcfl.evaluate import evaluate
from hpcfl.run import run

JOB: dict[str, dict[str, Any]] = {
    "run": {"rounds": 4, "eval_every": 3, "save_models": True, "participation": 0.5},
    "data": {"name": "hierarchical-linear", "clusters": 2, "clients_per_cluster": 4, "dim": 6, "observations": 5},
    "partition": {"name": "natural"},
    "model": {"name": "linear", "bias": False},
    "algorithm": {"name": "apfl", "lr": 0.05},
}


def ran(out: Path, **changes: dict[str, Any]) -> Path:
    tables = {part: {**table, **changes.get(part, {})} for part, table in JOB.items()}
    tables["run"]["out"] = str(out)
    run(resolve(tables, "job", "job"), Comm(), opened=lambda *_: None, progress=lambda *_: None)
    return out / "job-001" / "results.h5"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("algorithm", "models"), [("apfl", ["personal", "global"]), ("fedavg", ["global"]), ("async_l2gd", ["personal"])]
)
def test_errors_in_the_results_are_those_of_the_saved_models(tmp_path, algorithm, models, dtype):
    """Differences are taken in float64, and stored in the run's precision."""
    path = ran(tmp_path, algorithm={"name": algorithm}, run={"dtype": dtype})
    truth = resolve(JOB, "job", "job").data.load(0).truth
    with h5py.File(path) as file:
        assert [name for name in ("personal", "global") if f"per_client/{name}/estimation_error" in file] == models
        for name in models:
            saved = file[f"final/models/{name}"][()].astype(np.float64)
            errors = np.sqrt(((saved - truth) ** 2).sum(1))
            course = file[f"per_client/{name}/estimation_error"]
            assert course.dtype == dtype
            assert course.shape == (2, 8)
            np.testing.assert_allclose(course[1], errors, rtol=6e-8 if dtype == "float32" else 1e-14)
            assert (course[0] != course[1]).any()
            means = file[f"evaluations/{name}_estimation_error"]
            np.testing.assert_allclose(means, course[()].astype(np.float64).mean(1), rtol=1e-14)
            assert file[f"final/{name}_estimation_error_mean"][()] == means[1]
            np.testing.assert_allclose(file[f"final/{name}_estimation_error_std"], np.std(errors), rtol=1e-6)


@pytest.mark.parametrize("changes", [{"model": {"bias": True}}, {"partition": {"name": "iid", "clients": 8}}])
def test_no_errors_without_known_parameters(tmp_path, changes):
    names: list[str] = []
    with h5py.File(ran(tmp_path, **changes)) as file:
        file.visit(names.append)
    assert names
    assert not [name for name in names if "estimation" in name]


def errors(truth: np.ndarray, comm: Comm | None = None, **options: Any) -> dict[int, dict[str, np.ndarray]]:
    """Of this rank's clients, by id."""
    work, data = APFL(lr=0.01, local_steps=2), least_squares([5, 1, 8, 3, 9, 2, 7], features=truth.shape[1])
    engine = make_engine(data, work, world=comm, cluster=[0, 1, 0, 1, 1, 0, 0], dtype=torch.float32, **options)
    engine.group = replace(engine.group, truth=torch.from_numpy(truth[engine.group.ids]))
    found = evaluate(engine, work, play(engine, work, [[0, 1, 4], None]), 2, ("train",))
    assert found.keys() >= {f"{model}/estimation_error" for model in work.evaluated}
    return {i: {name: values[k] for name, values in found.items()} for k, i in enumerate(engine.group.ids.tolist())}


@pytest.mark.parametrize("parameters", [1, 203])
def test_bits_depend_neither_on_ranks_nor_on_blocks(parameters):
    truth = np.random.default_rng(0).normal(size=(7, parameters))
    alone = errors(truth)
    ways = [[errors(truth, block=block)] for block in (1, 2, 3)]
    ways += [on_ranks(ranks, lambda comm: errors(truth, comm)) for ranks in (2, 3, 9)]
    for parts in ways:
        together = {i: values for part in parts for i, values in part.items()}
        assert together.keys() == alone.keys()
        for i, values in together.items():
            for name, value in values.items():
                assert same_bits(np.asarray(value), np.asarray(alone[i][name])), (i, name)


def test_progress_lines_have_the_personal_error(tmp_path, capsys):
    job = tmp_path / "job.toml"
    job.write_text(to_toml(JOB))
    assert main(["run", str(job), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("round ")]
    with h5py.File(tmp_path / "job-001" / "results.h5") as file:
        means = file["evaluations/personal_estimation_error"][()]
    assert [line.partition("  ")[0] for line in lines] == ["round 3/4", "round 4/4"]
    for line, mean in zip(lines, means, strict=True):
        assert f"  personal estimation error {mean:.4f}" in line
        assert "global estimation" not in line
