"""The study of the PFLEGO paper: its settings are the paper's, its tables say what its results say."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from tiny_sets import ALPHABETS, JOBS, as_files, write_sets

from hpcfl.analysis.reader import Run
from hpcfl.build import build
from hpcfl.comm import Comm
from hpcfl.config import load
from hpcfl.errors import STOPPED, InputError
from hpcfl.models import Spec
from hpcfl.registry import _registered, load_plugins
from hpcfl.registry import build as build_model

STUDY = JOBS / "study.py"
BODIES = {"mnist": 157_000, "fashion-mnist": 157_000, "emnist": 157_000, "cifar10": 1_754_496, "omniglot": 111_424}
FEATURES = {"mnist": 200, "fashion-mnist": 200, "emnist": 200, "cifar10": 192, "omniglot": 64}
CLASSES = {"mnist": 10, "fashion-mnist": 10, "emnist": 62, "cifar10": 10}
METHODS = ["fedavg", "fedper", "fedrep", "fedbabu", "fedrecon", "pflego"]
TABLE = ["table", "--data", "mnist", "--degrees", "high,none", "--methods", "fedavg,pflego"]
ACCURACY = "/rounds/participants_test_accuracy"
SHORT = ["--rounds", "2"]


@pytest.fixture(scope="module")
def study():
    """The study as a module."""
    sys.path.append(str(JOBS))
    spec = importlib.util.spec_from_file_location("pflego_study", STUDY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The folder of tiny data sets."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        write_sets(folder, patch)
        yield folder


def lines(study, capsys, *options):
    """What ``list`` prints."""
    study.study(study.arguments(["list", *options]), Comm())
    return capsys.readouterr().out.splitlines()


def job_of(line, *more):
    """The job that a printed command runs."""
    hpcfl, run, file, *sets = shlex.split(line)
    assert (hpcfl, run, set(sets[::2])) == ("hpcfl", "run", {"--set"})
    return load(Path(file), [*sets[1::2], *more])


def jobs(study, capsys, *options):
    return [job_of(line) for line in lines(study, capsys, *options)]


def work(job):
    """Local steps of a participant."""
    return int(job.algorithm.local_work(np.array([30]))[0])


def rates(job):
    """beta and, where there is one, rho."""
    a = job.algorithm
    beta = a.head_lr if hasattr(a, "head_lr") else a.lr
    return (beta, a.server_lr) if hasattr(a, "server_optimizer") else (beta,)


def test_the_table_has_the_papers_settings(study, capsys):
    found = jobs(study, capsys, "table")
    names = [(j.name, j.partition.degree, j.algorithm_name) for j in found]
    assert names == [(d, g, m) for d in CLASSES for g in ("high", "medium", "none") for m in METHODS]
    for job in found:
        assert (job.run.rounds, job.run.cohort(100), job.partition.clients) == (200, 20, 100)
        assert (job.run.protocol, job.partition.labels, job.model.head_init) == ("participants", "local", "uniform")
        assert job.algorithm.batch_size is None
        assert work(job) == (51 if job.algorithm_name == "fedrecon" else 50)
        assert rates(job) == ((0.007, 0.001) if job.algorithm_name in ("fedrecon", "pflego") else (0.007,))
    by_name = {job.algorithm_name: job.algorithm for job in found}
    assert (by_name["fedrep"].head_steps, by_name["fedrep"].body_steps) == (25, 25)
    assert by_name["fedrecon"].local_steps == 50
    assert by_name["fedbabu"].momentum == 0.9
    assert {by_name[m].server_optimizer for m in ("fedrecon", "pflego")} == {"adam"}


def test_rates_of_the_table(study, capsys):
    chosen = ["--beta", ".01", "--rho", ".002", "--rates", "high:0.02:0.003,none:.05:.06"]
    for job in jobs(study, capsys, "table", "--data", "emnist", "--seeds", "2", *chosen):
        own = {"high": (0.02, 0.003), "none": (0.05, 0.06)} if job.algorithm_name == "pflego" else {}
        assert rates(job) == own.get(job.partition.degree, (0.01, 0.002))[: len(rates(job))]


def test_participation_has_the_papers_settings(study, capsys):
    found = jobs(study, capsys, "participation")
    assert [(j.algorithm_name, j.run.cohort(100)) for j in found] == [
        (m, r) for m in ("fedavg", "fedper", "pflego") for r in (20, 40, 60, 100)
    ]
    assert {job.name for job in found} == {"cifar10"}
    assert {job.run.rounds for job in found} == {200}
    assert {value for job in found for value in rates(job)} == {0.001}
    assert {job.name for job in jobs(study, capsys, "participation", "--data", "mnist")} == {"mnist"}


def test_grids_of_rates(study, capsys):
    grid = ["--beta", ".001,.02", "--rho", ".003", "--data", "fashion-mnist"]
    found = jobs(study, capsys, "rates", *grid, "--degree", "medium")
    assert [(*rates(j), j.partition.degree, j.run.rounds) for j in found] == [
        (beta, 0.003, "medium", 200) for beta in (0.001, 0.02)
    ]
    tuned = jobs(study, capsys, "tune", *grid, "--degrees", "none,high")
    assert [(*rates(j), j.partition.degree) for j in tuned] == [
        (beta, 0.003, g) for g in ("none", "high") for beta in (0.001, 0.02)
    ]
    assert {(j.run.rounds, j.partition.validation_share) for j in tuned} == {(100, 0.1)}
    assert {j.partition.validation_share for j in found} == {0.0}


def test_omniglot_has_the_papers_settings(study, capsys):
    found = jobs(study, capsys, "omniglot", "--taus", "10,50")
    assert [j.algorithm_name for j in found] == [*METHODS, "fedrecon", "pflego", "fedrecon", "pflego"]
    assert [j.run.cohort(50) for j in found] == [10] * 6 + [16] * 4
    assert [j.algorithm.local_steps for j in found[6:]] == [10, 10, 50, 50]
    for job in found:
        assert (job.run.rounds, job.run.protocol, job.partition.labels) == (5000, "participants", "local")
        assert rates(job) == (0.007, 0.003)[: len(rates(job))]


def test_every_run_is_listed_once(study, capsys):
    found = lines(study, capsys)
    in_table = 1  # of the grid of rates
    assert len(set(found)) == len(found) == 72 + 12 + 12 + 12 + 36 - in_table
    assert all(line in found for line in lines(study, capsys, "rates"))


def test_a_listed_command_is_a_run_of_the_study(study, capsys):
    """Also one that was written by hand, whose data lie elsewhere."""
    (line,) = lines(study, capsys, "table", "--data", "mnist", "--degrees", "high", "--methods", "fedper")
    by_hand = ['data={name="mnist", root="elsewhere"}', "partition.degree=high", "run.out=anywhere"]
    by_hand += ['algorithm={name="fedper", start_heads="drawn", local_steps=50, lr=0.007}']
    experiment = sys.modules["runs"].experiment
    assert experiment(job_of(line).text) == experiment(load(JOBS / "mnist.toml", by_hand).text)
    assert experiment(job_of(line).text) != experiment(job_of(line, "partition.degree=none").text)
    one = ["table", "--data", "mnist", "--degrees", "high", "--methods", "pflego"]
    assert job_of(*lines(study, capsys, *one, "--rounds", "5")).run.rounds == 5
    assert job_of(*lines(study, capsys, *one, "--rounds", "500")).run.rounds == 200


@pytest.mark.parametrize("data", [*CLASSES, "omniglot"])
def test_every_setting_builds(study, capsys, root, data):
    """On tiny sets in the original formats; bodies of the paper's sizes, heads as large as clients need."""
    if data == "omniglot":
        found = lines(study, capsys, data, "--root", str(root), "--taus", "10")
    else:
        grid = ["--beta", ".02", "--rho", ".003"]
        several = [["table"], ["participation"], ["rates", *grid], ["tune", *grid]]
        found = [
            line
            for experiment in (several if data == "mnist" else several[:1])
            for line in lines(study, capsys, *experiment, "--data", data, "--root", str(root))
        ]
    for line in found:
        job = job_of(line)
        built = build(job, Comm())
        if data == "omniglot":
            clients, outputs = ALPHABETS, 5
        else:
            classes = CLASSES[data]
            clients, outputs = 100, {"high": 2, "medium": classes // 2, "none": classes}[job.partition.degree]
            outputs = outputs if data != "fashion-mnist" else built.population.classes  # too few images for all
        assert len(built.population.cluster) == clients
        assert built.population.classes == outputs
        assert built.engine.task.layout.size == BODIES[data] + outputs * (FEATURES[data] + 1)


@pytest.fixture(scope="module")
def made(study, root, tmp_path_factory):
    """A short table: where its results lie, and its text."""
    out = tmp_path_factory.mktemp("study")
    study.study(study.arguments([*TABLE, *SHORT, "--out", str(out), "--root", str(root)]), Comm())
    return out, (out / "table.md").read_text()


def tables(text):
    """Each table's header, and its rows by their first cell."""
    blocks = re.findall(r"^\|.*?(?=\n\n|\n*\Z)", text, re.MULTILINE | re.DOTALL)
    split = [[[cell.strip() for cell in row.strip("|").split("|")] for row in block.splitlines()] for block in blocks]
    return [(header, {row[0]: row[1:] for row in rows}) for header, _, *rows in split]


def results(out, **wanted):
    """Runs below OUT whose algorithm, degree, ... are as wanted, in the order of their seeds."""
    found = []
    for file in sorted(out.rglob("results.h5")):
        with Run(file) as run:
            has = {"method": run.algorithm, **run.config["partition"], **run.config["algorithm"], **run.config["run"]}
            if all(has[name] == value for name, value in wanted.items()):
                found.append((run.seed, file.parent))
    return [folder for _, folder in sorted(found)]


def read(folders, dataset):
    """[runs, rows] of a dataset."""
    values = []
    for folder in folders:
        with Run(folder) as run:
            values.append(run.read(dataset))
    return np.array(values)


def test_the_table_says_what_the_results_say(made):
    out, text = made
    (header, scores), (_, costs) = tables(text)
    columns = ["High-Pers", "published", "difference", "No-Pers", "published", "difference"]
    assert header == ["MNIST", *columns]
    assert list(scores) == list(costs) == ["FedAvg", "PFLEGO"]
    published = {"FedAvg": (97.54, 93.12), "PFLEGO": (98.43, 90.68)}
    for method, model, passes in (("FedAvg", "global", "50 + 50"), ("PFLEGO", "personal", "2 + 1")):
        for column, degree in enumerate(("high", "none")):
            runs = results(out, method=method.lower(), degree=degree)
            assert len(runs) == 1
            accuracy = 100 * read(runs, ACCURACY)
            assert accuracy.shape == (1, 2)
            mean, deviation = accuracy.mean(), accuracy.std(axis=1).mean()
            ours, other, apart = scores[method][3 * column : 3 * column + 3]
            assert [float(x) for x in ours.split(" ± ")] == pytest.approx([mean, deviation], abs=5.1e-3)
            assert float(other.split(" ± ")[0]) == published[method][column]
            assert apart[0] in "+-"
            assert float(apart) == pytest.approx(mean - published[method][column], abs=5.1e-3)
            everyone, seconds, counted = costs[method][3 * column : 3 * column + 3]
            last = 100 * read(runs, f"/evaluations/{model}_test_accuracy")[:, -1].mean()
            assert float(everyone) == pytest.approx(last, abs=5.1e-3)
            median = np.median(read(runs, "/rounds/seconds"), axis=1).mean()
            assert float(seconds) == pytest.approx(median, rel=5.1e-3)
            assert counted == passes
    assert "seed 0; beta = 0.007, rho = 0.001." in text


def test_nothing_is_repeated_on_other_ranks(made, launch):
    out, text = made
    done = launch(2, STUDY, *TABLE, *SHORT, "--out", out)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == f"{text}\n"
    assert "0 runs made, 4 found, 0 missing" in done.stderr


def test_a_study_goes_on_with_a_run_that_was_stopped_or_killed(study, root, tmp_path, capsys):
    short = ["table", "--data", "mnist", "--degrees", "high", "--methods", "fedper", "--rounds", "14"]
    line = [*short, "--root", str(root), "--out"]
    path, rows = tmp_path / "a/mnist/mnist-001/results.h5", 0
    for number, code, more in ((signal.SIGUSR1, STOPPED, 3), (signal.SIGKILL, -signal.SIGKILL, 2)):
        process = subprocess.Popen([sys.executable, STUDY, *line, tmp_path / "a"], stderr=subprocess.PIPE, text=True)
        while process.poll() is None and rounds_done(path) < rows + more:
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert process.returncode == code, said
        rows = rounds_done(path)
    assert "going on after round" in said
    for out in ("a", "b"):
        study.study(study.arguments([*line, str(tmp_path / out)]), Comm())
        assert "1 runs made, 0 found" in capsys.readouterr().err
    folders = results(tmp_path)
    assert [f.relative_to(tmp_path).parts[0] for f in folders] == ["a", "b"]  # nothing was begun anew
    for dataset in (ACCURACY, "/rounds/train_loss", "/per_client/personal/test_loss"):
        one, other = read(folders, dataset)
        assert np.array_equal(one, other)
    with Run(folders[0]) as run:
        assert (run.status, run.rounds_done, run.attributes["restarts"]) == ("done", 14, 2)


def rounds_done(path):
    """Of a run that goes on; 0 before it has its file."""
    try:
        with Run(path) as run:
            return run.rounds_done
    except InputError:
        return 0


def test_missing_runs_are_left_out(study, made, capsys):
    out, text = made
    more = ["table", "--data", "mnist,cifar10", "--methods", "pflego,fedrep", "--missing", "skip"]
    rated = ["--rates", "medium:0.1:0.2"]
    before = sorted(out.rglob("results.h5"))
    study.study(study.arguments([*more, *rated, *SHORT, "--seeds", "2", "--out", str(out)]), Comm())
    shown = capsys.readouterr()
    assert "0 runs made, 2 found, 22 missing" in shown.err
    assert sorted(out.rglob("results.h5")) == before
    (_, scores), (_, costs) = tables(shown.out)
    whole = tables(text)[0][1]["PFLEGO"]
    assert scores["PFLEGO"] == [*whole[:3], "-", "94.22 ± 0.43", "-", *whole[3:]]
    assert scores["FedRep"] == ["-"] * 9
    assert costs["FedRep"] == ["-"] * 9
    assert "(PFLEGO: Medium-Pers beta = 0.1, rho = 0.2)" in shown.out
    study.study(study.arguments(["omniglot", "--missing", "skip", "--out", str(out)]), Comm())
    assert capsys.readouterr().out == ""
    assert not (out / "omniglot.md").exists()


def test_results_without_newer_options_are_taken(made, study, tmp_path, capsys):
    """A configuration that was written before an option existed."""
    out, _ = made
    (folder,) = results(out, method="pflego", degree="high", seed=0)
    shutil.copytree(folder, tmp_path / "mnist/old")
    with h5py.File(tmp_path / "mnist/old/results.h5", "r+") as file:
        config = file["/config/toml"][()].decode()
        del file["/config/toml"]
        older = config.replace('server_optimizer = "adam"\n', "")
        assert older != config
        file["/config/toml"] = older
    one = ["table", "--data", "mnist", "--degrees", "high", "--methods", "pflego", "--missing", "skip"]
    study.study(study.arguments([*one, "--rounds", "2", "--out", str(tmp_path)]), Comm())
    assert "1 found, 0 missing" in capsys.readouterr().err


def test_the_start_of_the_released_code(monkeypatch):
    monkeypatch.setattr("hpcfl.registry._registered", {kind: dict(known) for kind, known in _registered.items()})
    load_plugins([JOBS / "glorot.py"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model("model", {"name": "mlp-glorot", "head_init": "uniform"}).build(Spec((784,), 10))
    weight, bias, head, _ = (parameter.detach() for parameter in model.parameters())
    assert float(weight.std()) == pytest.approx((2 / 984) ** 0.5, rel=0.02)
    assert float(bias.std()) == pytest.approx(0.01, rel=0.2)
    assert 0 <= float(head.min()) < 0.01 < 0.99 < float(head.max()) < 1


def test_participation_and_rates(study, root, tmp_path, capsys):
    common = ["--data", "mnist", "--rounds", "4", "--out", str(tmp_path), "--root", str(root)]
    study.study(study.arguments(["participation", "--shares", "1,20", "--methods", "pflego", *common]), Comm())
    ((header, _),) = tables(capsys.readouterr().out)
    assert header[2:] == ["after 1 rounds", "after 2 rounds", "after 4 rounds", "training loss"]
    text = (tmp_path / "participation.md").read_text()
    for percent in (1, 20):
        (run,) = results(tmp_path, participation=percent / 100)
        (accuracy,), (loss,) = (read([run], f"/rounds/{n}") for n in ("participants_test_accuracy", "train_loss"))
        shown = [100 * accuracy[0], 100 * accuracy[:2].mean(), 100 * accuracy.mean()]
        row = re.search(rf"PFLEGO \| {percent} % \| (.*) \|", text).group(1).split(" | ")
        assert [float(cell) for cell in row[:3]] == pytest.approx(shown, abs=5.1e-3)
        assert float(row[3]) == pytest.approx(loss.mean(), abs=5.1e-5)
    study.study(study.arguments(["rates", "--beta", ".001,.02", "--rho", ".001,.003", *common]), Comm())
    shown = capsys.readouterr()
    assert "3 runs made, 1 found" in shown.err  # beta = rho = 0.001 with 20 % is in both
    pairs = [line.split(" | ")[:3] for line in shown.out.splitlines()[4:8]]
    assert pairs == [
        ["| 0.02", "0.001", "20"],
        ["| 0.02", "0.003", "6.67"],
        ["| 0.001", "0.001", "1"],
        ["| 0.001", "0.003", "0.333"],
    ]
    early = {
        (beta, rho): 100 * read(results(tmp_path, participation=0.2, head_lr=beta, server_lr=rho), ACCURACY)[0, 0]
        for beta in (0.001, 0.02)
        for rho in (0.001, 0.003)
    }
    faster = (early[0.02, 0.001] + early[0.02, 0.003]) / 2
    means = re.search(
        r"Mean after 1 rounds: (.*) where beta > rho, (.*) where .* = rho, (.*) where .* < rho", shown.out
    )
    expected = [faster, early[0.001, 0.001], early[0.001, 0.003]]
    assert [float(x) for x in means.groups()] == pytest.approx(expected, abs=5.1e-3)


def test_rates_are_chosen_by_validation(study, root, tmp_path, capsys):
    grid = ["--beta", ".001,.03", "--rho", ".002", "--degrees", "high,none"]
    options = ["tune", *grid, "--rounds", "2", "--out", str(tmp_path), "--root", str(root)]
    study.study(study.arguments(options), Comm())
    text = capsys.readouterr().out
    best = []
    for (header, rows), degree in zip(tables(text), ("high", "none"), strict=True):
        assert header[1:] == ["rho = 0.002"]
        found = {}
        for beta in (0.001, 0.03):
            (run,) = results(tmp_path, degree=degree, head_lr=beta)
            found[beta] = 100 * read([run], "/evaluations/personal_validation_accuracy")[0, -1]
            assert float(rows[f"{beta:g}"][0]) == pytest.approx(found[beta], abs=5.1e-3)
        best.append(f"{degree}:{max(found, key=found.get):g}:0.002")
    assert f"The best pairs: --rates {','.join(best)}" in text
    study.arguments(["table", "--rates", ",".join(best)])


def test_omniglot(study, made):
    """With the runs of the table in place of Omniglot's."""
    out, text = made
    report = sys.modules["tables"].omniglot
    runs = {m: results(out, method=m, degree="high")[0] for m in ("fedavg", "pflego")}
    found = {("20 %", 50, m, 0): run for m, run in runs.items()}
    found |= {(16, 10, "fedrecon", 0): runs["fedavg"], (16, 10, "pflego", 0): runs["pflego"]}
    text = report(found, methods=["fedavg", "fedper", "pflego"], taus=[10, 25], seeds=1, rates=(0.007, 0.003))
    (header, methods), (_, beside) = tables(text)
    score = {m: 100 * read([run], ACCURACY)[0] for m, run in runs.items()}
    cells = {m: f"{a.mean():.2f} ± {a.std():.2f}" for m, a in score.items()}
    assert header == ["Omniglot", "participants", "all clients", "s per round", "passes"]
    assert [methods[m][0] for m in ("FedAvg", "FedPer", "PFLEGO")] == [cells["fedavg"], "-", cells["pflego"]]
    assert methods["PFLEGO"][3] == "2 + 1"
    apart = f"{score['pflego'].mean() - score['fedavg'].mean():+.2f}"
    assert beside == {"10": [cells["fedavg"], cells["pflego"], apart], "25": ["-", "-", "-"]}


def test_accuracies_are_those_of_the_last_ten_rounds(study, monkeypatch):
    module = sys.modules["tables"]
    of = {"a": [0.0, 0.0, *[0.98, 0.99] * 5], "b": [1.0, *[0.9] * 10]}
    monkeypatch.setattr(module, "whole", lambda run, _: np.array(of[run]))
    assert module.beside(["a"], (98.43, 0.21)) == ["98.50 ± 0.50", "98.43 ± 0.21", "+0.07"]
    assert module.beside(["a", "b"], (98.43, 0.21)) == ["94.25 ± 0.25", "98.43 ± 0.21", "-4.18"]
    assert module.beside(["b"]) == ["90.00 ± 0.00", "-", "-"]
    assert module.beside([], (98.43, 0.21)) == ["-", "98.43 ± 0.21", "-"]


def test_published_numbers(study):
    """As in the workshop version's table; of other sets and methods nothing is known."""
    published = sys.modules["tables"].published
    table = """
        mnist fedper 97.88 0.25 92.83 0.46 87.23 0.33
        mnist fedavg 97.54 0.25 92.83 0.52 93.12 0.24
        mnist pflego 98.43 0.21 94.22 0.43 90.68 0.17
        cifar10 fedper 85.15 1.08 61.01 0.84 37.88 0.59
        cifar10 fedavg 85.18 0.96 64.53 0.75 61.33 0.52
        cifar10 pflego 87.81 0.94 74.83 0.66 58.98 0.81
    """
    known = {}
    for data, method, *numbers in (line.split() for line in table.split("\n") if line.strip()):
        values = [float(x) for x in numbers]
        known |= {(data, method, g): (*values[2 * k : 2 * k + 2],) for k, g in enumerate(["high", "medium", "none"])}
    for data in CLASSES:
        for method in METHODS:
            for degree in ("high", "medium", "none"):
                assert published(data, method, degree) == known.get((data, method, degree))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["table", "--data", "digits"], 'argument --data: "digits" is unknown; valid: cifar10, emnist'),
        (["table", "--methods", "fedavg,flego"], '"flego" is unknown; did you mean "pflego"?'),
        (["table", "--beta", "0"], 'argument --beta: "0" is not a number > 0'),
        (["table", "--rho", "inf"], 'argument --rho: "inf" is not a number > 0'),
        (["table", "--rates", "high:0.1"], '"high:0.1": expected DEGREE:BETA:RHO, e.g. high:0.02:0.003'),
        (["table", "--rates", "hihg:0.1:1"], '"hihg" is unknown; did you mean "high"?'),
        (["table", "--rates", "high:1:1,high:1:2"], "has two pairs for high"),
        (["table", "--degrees", "none", "--rates", "high:1:1"], "--rates: of high, which is not among --degrees"),
        (["tune", "--degree", "high"], "unrecognized arguments: --degree high"),
        (["tune", "--rho", ".1,x"], 'argument --rho: "x" is not a number > 0'),
        (["participation", "--shares", "20,101"], "101 % of the clients; expected at most 100"),
        (["list", "omniglot", "--taus", "0"], '"0" is not a whole number >= 1'),
        (["list", "list"], "invalid choice: 'list'"),
        ([], "arguments are required"),
    ],
    ids=str,
)
def test_bad_options(study, options, message):
    with pytest.raises(InputError) as raised:
        study.arguments(options)
    assert message in str(raised.value)
    assert str(raised.value).endswith("(see: study.py --help)")


def test_missing_data(study, tmp_path):
    options = study.arguments([*TABLE, "--out", str(tmp_path), "--root", str(tmp_path / "nowhere")])
    with pytest.raises(InputError, match=r'^data.name = "mnist", data.root = "[^"]*nowhere": no .*$'):
        study.study(options, Comm())


def test_jobs_whose_data_are_files(root, tmp_path):
    """For runs in other processes, which do not accept the tiny sets' checksums."""
    for copy in as_files(root, tmp_path):
        original, job = load(JOBS / copy.name), load(copy)
        parts = ("run", "partition", "model", "algorithm")
        assert [getattr(job, part) for part in parts] == [getattr(original, part) for part in parts]
        own = build(load(JOBS / copy.name, [f'data.root="{root}"']), Comm())
        built = build(job, Comm())
        np.testing.assert_array_equal(built.population.count, own.population.count)
        assert built.population.classes == own.population.classes
        assert built.population.scale == own.population.scale
        assert copy.is_relative_to(tmp_path / "pflego")
