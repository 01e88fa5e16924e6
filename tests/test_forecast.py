"""``hpcfl theory``: what is predicted, and what a run measured beside it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hpcfl.analysis.reader import Run
from hpcfl.build import build
from hpcfl.cli import main
from hpcfl.comm import Comm
from hpcfl.config import load
from hpcfl.theory.async_l2gd import optimal_probabilities
from hpcfl.theory.katyusha import Katyusha

JOB = """
[run]
rounds = 400
eval_every = 400
dtype = "float64"
save_models = true
seed = 3
out = "OUT"
[data]
name = "hierarchical-linear"
clusters = 3
clients_per_cluster = 4
dim = 3
observations = 8
[partition]
name = "natural"
[model]
name = "linear"
bias = false
[algorithm]
name = "async_l2gd"
p_global = 0.2
p_cluster = [0.1, 0.3, 0.0]
"""

PFLEGO = """
[run]
rounds = 6
participation = 0.2
out = "OUT"
[data]
name = "synthetic"
clients = 15
dim = 4
classes = 3
samples = 10
[partition]
name = "natural"
test_share = 0.2
[model]
name = "mlp"
hidden = [5]
[algorithm]
name = "pflego"
local_steps = 10
head_lr = 0.25
server_lr = 0.125
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job file and the results of its run."""
    folder = tmp_path_factory.mktemp("theory")
    file = folder / "small.toml"
    file.write_text(JOB.replace("OUT", str(folder)))
    assert main(["run", str(file)]) == 0
    return file, folder / "small-001"


def lines(capsys, *arguments) -> dict[str, list[str]]:
    """What is printed: first column -> the others."""
    assert main(["theory", *map(str, arguments)]) == 0
    out = capsys.readouterr().out
    rows = [re.split(r" {2,}", line.strip()) for line in out.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) > 1}


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_what_is_predicted(job, capsys):
    file, _ = job
    found = lines(capsys, file, "--accuracy", "1e-3")
    built = build(load(file), Comm())
    s, eta = built.algorithm.setting, built.algorithm.eta
    L, mu = number(found["smoothness of the clients' losses, L"][0]), number(found["their strong convexity, mu"][0])
    group = built.engine.group
    hessians = []
    for k in range(group.clients):
        x = group.x[group.start[k, 0] : group.start[k, 0] + 8].numpy()
        hessians.append(np.linalg.eigvalsh(x.T @ x / 8))
    np.testing.assert_allclose([L, mu], [np.max(hessians), np.min(hessians)], rtol=1e-5)
    smooth = s.expected_smoothness(np.max(hessians))
    np.testing.assert_allclose(number(found["expected smoothness, their maximum, Lcal"][0]), smooth, rtol=1e-5)
    np.testing.assert_allclose([number(found["step size of this job, eta"][0]), eta], 0.5 / smooth, rtol=1e-5)
    best = optimal_probabilities(L, s.c1, s.c2)
    np.testing.assert_allclose([number(found[f"optimal {p}"][0]) for p in ("p_0", "p_j")], best, rtol=1e-4)
    iterations = 2 * smooth / np.min(hessians) * np.log(1e3)
    np.testing.assert_allclose(
        number(found["iterations to accuracy 0.001 at eta = 1/(2 Lcal)"][0]), iterations, rtol=1e-4
    )
    assert number(found["global rounds of 400"][0]) == 80
    up = 400 * (0.2 * (12 + 3) + 0.8 * (0.1 + 0.3) * 4)
    assert number(found["vectors up"][0]) == pytest.approx(up, abs=0.5)
    assert number(found["megabytes up"][0]) == pytest.approx(up * 3 * 8 / 1e6, rel=1e-4)
    assert found["tau_j"][0].endswith("1")  # of the cluster with p_j = 0


def test_what_was_measured(job, capsys):
    file, folder = job
    found = lines(capsys, file, folder)
    with Run(folder) as run:
        coins = run.read("/rounds/coins_global")[:, 0] == 1
        assert number(found["global rounds of 400"][1]) == coins.sum()
        assert number(found["vectors up"][1]) == run.read("/rounds/vectors_up").sum()
        merged = (coins & ~np.concatenate([[False], coins[:-1]])).sum()
        assert number(found["global rounds, consecutive ones merged"][1]) == merged
        models = run.read("/final/models/personal")
    built = build(load(file), Comm())
    theta = built.algorithm.minimiser(built.engine)
    distance = ((models - theta) ** 2).sum()
    predicted, measured = map(number, found["distance after 400 iterations at most"])
    assert measured == pytest.approx(distance, rel=1e-4)
    assert measured < predicted


def test_other_algorithms(job, capsys):
    file, _ = job
    found = lines(capsys, file, "--set", 'algorithm={name="async_l2gd_vr", p_refresh=0.1}')
    eta, mu = number(found["accelerated steps, eta"][0]), number(found["their strong convexity, mu"][0])
    assert number(found["accelerated steps, theta1"][0]) == pytest.approx(Katyusha(eta, mu, 0.1).theta1, rel=1e-3)
    single = lines(capsys, file, "--set", 'algorithm={name="single_cluster", p_global=0.25}')
    assert number(single["vectors up"][0]) == number(single["vectors down"][0]) == 400 * 0.25 * 12


def test_megabytes_are_those_of_the_job_s_numbers(job, capsys):
    file, _ = job
    long, short = (lines(capsys, file, "--set", f"run.dtype={d}")["megabytes up"][0] for d in ("float64", "float32"))
    assert number(long) == pytest.approx(2 * number(short), rel=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('algorithm={name="local"}', "no theory"),
        ('model={name="mlp"}', "algorithm.smoothness"),
        ("algorithm.gamma=0", "algorithm.gamma"),
        ("run.participation=0.5", "every client takes part"),
    ],
)
def test_what_has_no_theory(job, change, message, capsys):
    file, _ = job
    assert main(["theory", str(file), "--set", change]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_no_bound_where_the_theorem_does_not_hold(job, capsys):
    file, _ = job
    change = 'algorithm={name="async_l2gd", lr_schedule={name="exponential", decay=0.9}}'
    assert lines(capsys, file, "--set", change)["distance after 400 iterations at most"] == ["-"]
    found = lines(capsys, file, "--set", 'algorithm={name="async_l2gd", batch_size=2}')
    assert not any(name.startswith("distance after") for name in found)  # nothing is known of the minibatches' noise


def test_losses_that_are_not_strongly_convex(job, capsys):
    file, _ = job
    found = lines(capsys, file, "--set", "data.observations=2")
    assert found["iterations to accuracy 1e-06 at eta = 1/(2 Lcal)"] == ["inf"]


def test_a_run_of_another_job_is_refused(job, capsys):
    file, folder = job
    assert main(["theory", str(file), str(folder), "--set", "data.observations=9"]) == 2
    assert "data.observations is 8, the job's is 9" in " ".join(capsys.readouterr().err.split())
    assert main(["theory", str(file), str(folder), "--set", "run.seed=4"]) == 2
    assert "run.seed is 3, the job's is 4" in " ".join(capsys.readouterr().err.split())
    assert main(["theory", str(file), str(folder), "--set", "run.rounds=9"]) == 0


@pytest.fixture(scope="module")
def pflego(tmp_path_factory):
    """A job file of PFLEGO, a fifth of whose clients take part, and the results of its run."""
    folder = tmp_path_factory.mktemp("pflego")
    file = folder / "small.toml"
    file.write_text(PFLEGO.replace("OUT", str(folder)))
    assert main(["run", str(file)]) == 0
    return file, folder / "small-001"


def test_pflego(pflego, capsys):
    file, folder = pflego
    found = lines(capsys, file, folder)
    L = number(found["L, an estimate at the start and no bound"][0])
    assert L > 0
    assert number(found["samples that L is from, of 120"][0]) == 120
    assert number(found["samples that L_W is from, of 120"][0]) == 120
    assert number(found["Proposition 2's limit of beta, < 2/L"][0]) == pytest.approx(2 / L, rel=1e-4)
    server = number(found["step-size limit of the server, rho < (2/L)(r/I)"][0])
    assert server == pytest.approx(2 / L * 3 / 15, rel=1e-4)
    assert number(found["step size of this job's heads, beta"][0]) == 0.25
    assert number(found["step size of this job's server, rho"][0]) == 0.125
    L_W = number(found["L_W, curvature of the heads' losses at the start"][0])
    safe = number(found["step-size limit of the heads, beta < 2/L_W"][0])
    assert "below it no head step of round 1 increases a loss" in found
    assert safe == pytest.approx(2 / L_W, rel=1e-4)
    assert number(found["cost of FedPer by PFLEGO's, a backward pass as two"][0]) == 7.5
    for way, passes in (("forward", 2), ("backward", 1)):
        row = found[f"{way} passes of the body, per client and round"]
        assert list(map(number, row)) == [passes, passes]
    body = 5 * 4 + 5
    for way in ("up", "down"):
        assert list(map(number, found[f"vectors {way} in 6 rounds"])) == [18, 18]
        sent = pytest.approx([18 * body * 4 / 1e6] * 2, rel=1e-4)
        assert list(map(number, found[f"megabytes {way} in 6 rounds"])) == sent
    assert "that limit of rho is SGD's: this server takes Adam" in found


def test_pflego_s_notes(pflego, capsys):
    file, folder = pflego
    assert main(["theory", str(file), str(folder)]) == 0
    assert "minimiser" not in capsys.readouterr().out
    found = lines(capsys, file, "--set", "algorithm.batch_size=4", "--set", 'algorithm.server_optimizer="sgd"')
    assert not any(name.startswith(("below it no head step", "that limit")) for name in found)
    assert number(found["forward passes of the body, per client and round"][0]) == 10
    released = lines(capsys, file, "--set", 'algorithm.variant="released"')
    assert 'that limit of rho is of variant = "paper"' in released


def test_pflego_without_a_body_or_with_wild_data(pflego, capsys):
    file, _ = pflego
    found = lines(capsys, file, "--set", 'model={name="logistic"}')
    assert number(found["megabytes up in 6 rounds"][0]) == 0
    assert number(found["L_W, curvature of the heads' losses at the start"][0]) > 0
    assert main(["theory", str(file), "--set", "model.l2=1e308"]) == 2
    assert "not finite" in capsys.readouterr().err


def test_under_a_launcher(job, hpcfl):
    file, _ = job
    done = hpcfl("theory", file, env={"OMPI_COMM_WORLD_SIZE": "4"})
    assert done.returncode == 2
    assert "one process" in done.stderr
