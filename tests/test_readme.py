"""The README's worked example does what the README says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hpcfl.analysis.reader import Run
from hpcfl.cli import main
from hpcfl.config import load

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def block(language: str, first_line: str) -> str:
    """The code block of a language that starts with a line."""
    found = [b for b in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if b.startswith(first_line)]
    assert len(found) == 1
    return found[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files of the README, which is the current one."""
    (tmp_path / "my.toml").write_text(block("toml", "# my.toml"))
    (tmp_path / "fedprox.py").write_text(block("python", "# fedprox.py"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_job_of_the_readme(folder):
    job = load(Path("my.toml"))
    assert job.algorithm_name == "apfl"
    assert job.run.participation == 0.5


def test_plugin_of_the_readme(folder):
    (command,) = re.findall(r"^hpcfl (run my.toml --plugin .*)$", README, re.MULTILINE)
    assert main([*shlex.split(command), "--set", "run.rounds=30", "--set", "run.eval_every=1"]) == 0
    with Run(folder / "results/my-001/results.h5") as run:
        assert run.status == "done"
        assert run.algorithm == "fedprox"
        course = run.read("evaluations/global_test_accuracy")
        assert course[-1] > course[0] + 0.1
        assert run.read("rounds/vectors_up")[0] == run.read("rounds/vectors_down")[0] == 10


def test_fedprox_without_its_term_is_fedavg(folder):
    """The example is right: with mu = 0 it has FedAvg's bits."""
    short = ["--set", "run.rounds=5", "--set", "run.participation=1.0"]
    for name in ("fedprox", "fedavg"):
        table = f'algorithm={{name="{name}", local_steps=5, batch_size=10{", mu=0" if name == "fedprox" else ""}}}'
        assert main(["run", "my.toml", "--plugin", "fedprox.py", "--set", table, *short]) == 0
    with Run(folder / "results/my-001/results.h5") as a, Run(folder / "results/my-002/results.h5") as b:
        assert a.last("evaluations/global_test_loss") == pytest.approx(b.last("evaluations/global_test_loss"), rel=1e-5)
