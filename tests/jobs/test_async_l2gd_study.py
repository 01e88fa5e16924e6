"""The study of the Async-L2GD paper, very short: its tables say what its results say, and nothing is run twice."""

from __future__ import annotations

import re
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcfl.analysis.reader import Run
from hpcfl.comm import Comm
from hpcfl.errors import Diverged

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "jobs/papers/async-l2gd/study.py"
SIMULATED = ["simulated", "--observations", "1,3", "--iterated", "3", "--seeds", "1", "--rounds", "20"]
RUNS = 2 * (3 + 20) + 3  # blup, local, pooled and 20 gammas for each number of observations; async, sync, vr for one
CHEM97 = ["chem97", "--seeds", "1", "--rounds", "2"]
DONORS = ["donors", "--clients", "150", "--rounds", "3", "--seeds", "2"]


def cells(table: str) -> list[list[str]]:
    """The rows below the header, cell by cell."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert set(lines[1]) <= set("|-: ")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def number(cell: str) -> float:
    """The first number of a cell; a percentage as a share."""
    value = float(cell.split()[0].rstrip("%").replace(",", ""))
    return value / 100 if cell.endswith("%") else value


def study(launch, ranks, options, out):
    """Standard output, and runs made and found."""
    done = launch(ranks, STUDY, *options, "--out", out, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    made, found = re.search(r"^(\d+) runs made, (\d+) found$", done.stderr, re.MULTILINE).groups()
    assert (out / options[0] / "table.md").read_text() + "\n" == done.stdout
    return done.stdout, int(made), int(found)


def last(folder: Path, dataset: str) -> np.ndarray:
    with Run(folder) as run:
        return run.last(dataset)


def configured(folder: Path, option: str) -> float:
    with Run(folder) as run:
        return run.config["algorithm"][option]


@pytest.fixture(scope="module")
def simulated(launch, tmp_path_factory):
    out = tmp_path_factory.mktemp("simulated")
    text, made, found = study(launch, None, SIMULATED, out)
    assert (made, found) == (RUNS, 0)
    return out, text


def test_errors_of_what_can_be_solved_for(simulated):
    out, text = simulated
    closed_form, _ = text.split("Iterative methods")
    rows = cells(closed_form)
    assert [row[0] for row in rows] == ["1", "3"]
    for row in rows:
        folder = out / f"simulated/{row[0]}-observations/seed-0"
        for name, column in {"blup": 1, "local": 3, "pooled": 5}.items():
            error = last(folder / f"{name}-001", "per_client/personal/estimation_error").mean()
            assert number(row[column]) == pytest.approx(error, abs=5.1e-4)
        tried = {
            configured(run, "gamma"): float(last(run, "per_client/personal/estimation_error").mean())
            for run in folder.glob("single-*")
        }
        assert sorted(tried) == pytest.approx(np.linspace(0.01, 2, 20))
        best = min(tried, key=tried.get)
        assert number(row[7]) == pytest.approx(tried[best], abs=5.1e-4)
        assert number(row[9]) == pytest.approx(best, abs=5.1e-3)
        assert number(row[1]) < number(row[7])  # who knows the clusters is nearer to the truth
    assert [row[2] for row in rows] == ["5.578", "-"]  # reference: there is none for 3 observations


def test_iterative_methods(simulated):
    out, text = simulated
    rows = {row[1]: row for row in cells(text.split("Iterative methods")[1])}
    folder = out / "simulated/3-observations/seed-0"
    with Run(folder / "blup-001") as run:
        minimiser = run.read("/final/models/personal")
    for name, word in {"async": "Async-L2GD", "sync": "one coin", "vr": "accelerated"}.items():
        with Run(folder / f"{name}-001") as run:
            assert run.rounds_done == 20
            apart = np.sqrt(((run.read("/final/models/personal") - minimiser) ** 2).sum(1)).mean()
            error = run.last("/evaluations/personal_estimation_error")
            both, own = run.read("/rounds/coins_global")[:, 0], run.read("/rounds/coins_cluster")
        assert number(rows[word][2]) == pytest.approx(error, abs=5.1e-4)
        assert number(rows[word][4]) == pytest.approx(apart, abs=5.1e-4)
        assert number(rows[word][6]) == both.sum()
        assert number(rows[word][7]) == pytest.approx((own * (1 - both[:, None])).sum(0).mean(), abs=0.51)


def test_nothing_is_repeated_on_other_ranks(simulated, launch):
    out, text = simulated
    before = sorted(out.rglob("results.h5"))
    assert len(before) == RUNS
    again, made, found = study(launch, 2, SIMULATED, out)
    assert (made, found) == (0, RUNS)
    assert again == text
    assert sorted(out.rglob("results.h5")) == before


def test_only_what_is_missing_is_run(simulated, launch):
    """A run that was killed, one that cannot be read, and those of other options."""
    out, text = simulated
    folder = out / "simulated/3-observations/seed-0"
    with h5py.File(folder / "single-007/results.h5", "r+") as file:
        file.attrs["status"] = np.bytes_("running")
    with (folder / "local-001/results.h5").open("r+b") as file:
        file.truncate(1000)
    again, made, found = study(launch, None, SIMULATED, out)
    assert (made, found) == (2, RUNS - 2)
    assert again == text
    with Run(folder / "single-007") as run:
        assert (run.status, run.attributes["restarts"]) == ("done", 1)
    assert not (folder / "single-021").exists()
    assert (folder / "local-002/results.h5").exists()
    shorter = [*SIMULATED[:-1], "10"]
    other, made, found = study(launch, None, shorter, out)
    assert (made, found) == (3, RUNS - 3)
    assert cells(other)[:2] == cells(text)[:2]
    assert other != text


FAILING = """
import sys
sys.path.append("jobs/papers")
from command import start
from hpcfl.errors import InputError

def study(options, comm, asked):
    if comm.rank == {rank}:
        raise InputError("no table from this")
    comm.bcast(None)

sys.exit(start([], lambda given: None, study))
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_ends_a_study(launch, rank):
    done = launch(2, "-c", FAILING.format(rank=rank), timeout=20)
    assert done.returncode != 0
    assert done.stderr.count("study.py: no table from this") == 1


def test_a_run_that_diverges_is_marked_as_failed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "jobs/papers")
    from runs import Runs

    for made in (1, 2):
        runs = Runs(Comm(), ROOT / "jobs/quickstart", tmp_path)
        with pytest.raises(Diverged, match=f"fedavg-00{made}: "):
            runs.run("fedavg.toml", "x", "algorithm.lr=1e30", "run.rounds=3")
        with Run(tmp_path / f"x/fedavg-00{made}") as run:
            assert run.status.startswith("failed:")


def test_chem97(launch, tmp_path):
    text, made, found = study(launch, None, CHEM97, tmp_path)
    assert (made, found) == (5 * 5 + 5 + 3, 0)
    folder = tmp_path / "chem97/seed-0"
    rows = {row[0]: row for row in cells(text)}

    def validation(run):
        return float(last(run, "/evaluations/personal_validation_squared_error"))

    several = min(folder.glob("blup-*"), key=validation)
    chosen = {
        "multi-cluster (exact)": several,
        "Async-L2GD": folder / "async-001",
        "single cluster (exact)": min(folder.glob("single-*"), key=validation),
        "local": folder / "local-001",
        "pooled": folder / "pooled-001",
    }
    assert list(rows) == list(chosen)
    gamma, lam = (configured(several, option) for option in ("gamma", "lam"))
    assert f"seed 0: gamma {gamma:.3g} and lam {lam:g}; " in text
    assert [configured(chosen["Async-L2GD"], option) for option in ("gamma", "lam")] == [gamma, lam]
    with Run(several) as run:
        pupils = run.read("/clients/n_test")
    tested, first = pupils > 0, last(several, "per_client/personal/test_squared_error")
    assert f"{tested.sum():,} schools" in text
    assert 2000 < tested.sum() < 2410  # schools of one pupil have no test
    for name, run in chosen.items():
        error = last(run, "per_client/personal/test_squared_error")
        assert number(rows[name][1]) == pytest.approx(error[tested].mean(), abs=5.1e-5)
        sem = error[tested].std(ddof=1) / np.sqrt(tested.sum())
        assert number(rows[name][1].split("±")[1]) == pytest.approx(sem, abs=5.1e-5)
        by_pupil = (error * pupils)[tested].sum() / pupils.sum()
        assert number(rows[name][2]) == pytest.approx(by_pupil, abs=5.1e-5)
        if run != several:
            assert number(rows[name][4]) == pytest.approx((error - first)[tested].mean(), abs=5.1e-6)
    assert number(rows["multi-cluster (exact)"][1]) < number(rows["pooled"][1]) < number(rows["local"][1])
    assert study(launch, None, CHEM97, tmp_path) == (text, 0, made)


def test_donors(launch, tmp_path):
    text, made, found = study(launch, 2, DONORS, tmp_path)
    assert (made, found) == (8, 0)
    rows = {row[0]: row[1:] for row in cells(text)}
    accuracies = {}
    for word, job, model in [
        ("Async-L2GD", "async", "personal"),
        ("single cluster", "single", "personal"),
        ("local", "local", "personal"),
        ("pooled", "pooled", "global"),
    ]:
        expected = []
        for seed in (0, 1):
            folder = tmp_path / f"donors/seed-{seed}/{job}-001"
            names = ("test_accuracy", "test_loss", "estimation_error")
            a, e, d = (last(folder, f"per_client/{model}/{name}").astype(float) for name in names)
            assert len(a) == 150
            accuracies[job, seed], e = a, np.minimum(e, 6)
            statistics = [a.mean(), np.median(a), a.std(ddof=1), np.quantile(a, 0.25), e.max()]
            expected.append([*statistics, (e > 0.9).mean(), (a > 0.9).mean(), e.mean(), d.mean()])
        found = [number(cell) for cell in rows[f"{word}, surrogate"]]
        assert found == pytest.approx(np.mean(expected, 0), abs=5.1e-4)
    assert [number(cell) for cell in rows["pooled, published"][:2]] == [0.9423, 0.9485]  # rounded
    assert rows["local, published"][5:] == ["4.09%", "83.5%", "-", "-"]
    for other, published in (("pooled", "98.57%"), ("local", "97.17%")):
        share = np.mean([accuracies["async", s] >= accuracies[other, s] for s in (0, 1)])
        assert f"{other} in {share:.2%} of the clients (published: {published})" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["simulated", "--observations", "5,0"], 'argument --observations: "0" is not a whole number >= 1'),
        (["donors", "--clients", "20"], "data.clusters = 51, data.clients = 20: more clusters than clients"),
    ],
)
def test_bad_options(launch, tmp_path, options, message):
    done = launch(None, STUDY, *options, "--out", tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("study.py: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
