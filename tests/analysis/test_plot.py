"""The figures: files of the right kind, names that tell runs apart, and clear refusals."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from analysis_example import finished

from hpcfl.analysis.plot import _colours, labels, plot
from hpcfl.analysis.reader import Run
from hpcfl.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


def test_one_to_many_runs_become_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    for seed in range(9):
        finished(tmp_path / "runs", seed=seed)
    finished(tmp_path / "runs", job="local", algorithm="local", models=("personal",))
    finished(tmp_path / "runs", job="fedavg", algorithm="fedavg", models=("global",))
    for k, files in enumerate(
        ([tmp_path / "runs" / "job-001"], [tmp_path / "runs" / "fedavg-001"], [tmp_path / "runs"])
    ):
        plot(files, tmp_path / f"{k}.png")
        assert (tmp_path / f"{k}.png").read_bytes().startswith(PNG)
        assert (tmp_path / f"{k}.png").stat().st_size > 20_000
    ridge = finished(tmp_path / "more", job="ridge", metrics=("loss", "squared_error"))
    plot([ridge], tmp_path / "ridge.pdf")
    assert (tmp_path / "ridge.pdf").read_bytes().startswith(b"%PDF")


def test_every_run_has_a_colour_of_its_own():
    to_rgb = pytest.importorskip("matplotlib.colors").to_rgb
    for runs in (1, 8, 9, 40):
        assert len({tuple(to_rgb(colour)) for colour in _colours(runs)}) == runs


def test_names_shared_by_tables_are_told_apart(tmp_path):
    """Of algorithm.alpha and partition.alpha, the latter differs."""
    folders = [finished(tmp_path, options="alpha = 0.2", extra=f"[partition]\nalpha = {a}") for a in (0.1, 5.0)]
    with ExitStack() as opened:
        names = labels([opened.enter_context(Run(folder)) for folder in folders])
    assert names == ["apfl, partition.alpha=0.1", "apfl, partition.alpha=5.0"]


def test_what_cannot_be_drawn_is_one_clear_line(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    accuracy = finished(tmp_path)
    ridge = finished(tmp_path, job="ridge", metrics=("loss", "squared_error"))
    for files, out, message in (
        ([accuracy, ridge], "x.png", "do not fit into one figure"),
        ([accuracy], "x.nothing", "cannot write the figure .*nothing"),
        ([accuracy], "no/x.png", "No such file or directory"),
        ([tmp_path / "none"], "x.png", "no such file"),
    ):
        with pytest.raises(InputError, match=message):
            plot(files, tmp_path / out)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"pip install 'hpcfl\[analysis\]'"):
        plot([accuracy], tmp_path / "x.png")


def test_names_say_what_differs(tmp_path):
    folders = [
        finished(tmp_path, algorithm="fedavg", seed=3),
        finished(tmp_path, seed=1, extra="rounds = 10"),
        finished(tmp_path, seed=2, extra="rounds = 10"),
        finished(tmp_path, algorithm="ditto"),
        finished(tmp_path, algorithm="ditto", extra='out = "elsewhere"'),
    ]
    with ExitStack() as opened:
        names = labels([opened.enter_context(Run(folder)) for folder in folders])
    assert names == ["fedavg", "apfl, seed=1", "apfl, seed=2", "ditto (job-004)", "ditto (job-005)"]


@pytest.mark.parametrize(
    "changes",
    [
        {"exposed": ("alpha",)},
        {"models": ("global",)},
        {"metrics": ("loss", "squared_error")},
        {"participants": True, "own_classes": True},
    ],
)
def test_the_analysis_script_runs_without_hpcfl(tmp_path, changes):
    pytest.importorskip("matplotlib")
    script = ROOT / "jobs" / "analysis" / "plot_clients.py"
    assert "import hpcfl" not in script.read_text()
    folder = finished(tmp_path, **changes)
    command = [sys.executable, script, folder / "results.h5", tmp_path / "x.png"]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, "MPLBACKEND": "Agg"})
    assert (tmp_path / "x.png").read_bytes().startswith(PNG)
    wrong = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("usage:")
