"""Whatever a user types wrong gives one clear line each, exit code 2, and no traceback."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from hpcfl.cli import main
from hpcfl.registry import _registered

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "jobs/quickstart/apfl.toml"

WRONG_SETTINGS = [
    (["algorithm.alhpa=0.5"], 'algorithm.alhpa: unknown option; did you mean "alpha"?'),
    (["run.ruonds=5"], 'run.ruonds: unknown option; did you mean "rounds"?'),
    (["modle.name=5"], '[modle]: unknown table; did you mean "model"?'),
    (['algorithm.name="afpl"'], 'algorithm.name = "afpl": unknown algorithm; did you mean "apfl"?'),
    (['model.name="mpl"'], 'did you mean "mlp"?'),
    (['data.name="digit"'], 'did you mean "digits"?'),
    (['partition.name="clases"'], 'did you mean "classes"?'),
    (["algorithm.alpha=1.5"], "algorithm.alpha = 1.5: expected less than or equal to 1"),
    (["algorithm.alpha=-0.1"], "algorithm.alpha = -0.1: expected greater than or equal to 0"),
    (["algorithm.alpha=[0.5, 0.2]"], "algorithm.alpha: 2 values, expected one, or one per client (40)"),
    (['algorithm.alpha_update="often"'], "'round', 'step' or 'off'"),
    (['algorithm.lr="big"'], 'algorithm.lr = "big": expected a number'),
    (["algorithm.lr=0"], "algorithm.lr = 0: expected greater than 0"),
    (["algorithm.lr=nan"], "expected a finite number"),
    (["algorithm.local_steps=1.5"], "algorithm.local_steps = 1.5: expected a whole number"),
    (["algorithm.local_epochs=1"], "algorithm.local_steps and algorithm.local_epochs: give one of the two"),
    (['algorithm.lr_schedule={name="linear"}'], 'algorithm.lr_schedule.name = "linear": unknown'),
    (['algorithm.lr_schedule={name="theory", mu=0.1}'], "algorithm.lr_schedule.a: required"),
    (["run.participation=0"], "run.participation = 0: expected greater than 0"),
    (["run.participation=1.1"], "run.participation = 1.1: expected less than or equal to 1"),
    (["run.participation=0.5", "run.clients_per_round=3"], "give one of the two, not both"),
    (["run.clients_per_round=41"], "run.clients_per_round = 41: there are only 40 clients"),
    (["run.rounds=0"], "run.rounds = 0: expected greater than or equal to 1"),
    (["run.seed=-1"], "run.seed = -1: expected greater than or equal to 0"),
    (['run.dtype="bfloat16"'], "'float32' or 'float64'"),
    (['run.device="gpu"'], 'run.device = "gpu"'),
    (['run.device="cuda:99"'], 'run.device = "cuda:99"'),
    (['run.backend="model"', 'model={name="cnn"}'], "brings no batched arithmetic"),
    (["partition.classes_per_client=11"], "11"),
    (["partition.clients=5000"], "5000"),
    (["partition.test_share=1.0"], "partition.test_share = 1.0: expected less than 1"),
    (['partition={name="natural"}'], "client"),
    (["partition.clusters=0"], "partition.clusters = 0: expected greater than or equal to 1"),
    (["partition.clusters=[]"], "partition.clusters = []: expected a list that is not empty or a whole number"),
    (["partition.clusters=41"], "partition.clusters = 41: more clusters than clients (partition.clients = 40)"),
    (
        ["partition.clusters=[20, 21]"],
        "partition.clusters = [20, 21]: sizes that sum up to 41; expected 40 (partition.clients = 40)",
    ),
    (["partition.clusters=2", 'partition.cluster_file="c.csv"'], "give one of the two, not both"),
    (['partition.cluster_file="nowhere.csv"'], 'partition.cluster_file = "nowhere.csv": no such file (/'),
    (['partition.cluster_file="setup.cfg"'], 'partition.cluster_file = "setup.cfg": the header is "[metadata]"'),
    (
        ['data={name="hierarchical-logistic", clients=9, clusters=10}', 'partition={name="natural"}'],
        "data.clusters = 10, data.clients = 9: more clusters than clients",
    ),
    (['model={name="linear"}'], 'model.name = "linear": is a regression, but the data have 10 classes'),
    (
        ['model={name="cnn", channels=[2, 2, 2, 2]}'],
        "model.channels = [2, 2, 2, 2]: 4 poolings need images of at least 16",
    ),
    (['data={name="mnist", root="nowhere"}'], "tests/get_data.sh"),
    (['data={name="file", path="nowhere.npz"}'], "nowhere.npz"),
    (['run.scratch=" "'], 'run.scratch = " ": expected the path of a folder'),
    (['run.scratch="\\u0000"'], 'run.scratch = "\\u0000": expected the path of a folder'),
    (
        ['run.state="disk"', 'run.scratch="/nowhere/at/all"'],
        'run.scratch = "/nowhere/at/all": cannot make a file there',
    ),
    (['run.state="disk"', f'run.scratch="{JOB}"'], "Not a directory; give a folder that every node has"),
    (['run.state="disk"', 'run.scratch="~nobody-of-this-name"'], "there is no such user"),
    (['run.state="ram"'], "'device', 'host' or 'disk'"),
    (['run.max_walltime=""'], 'run.max_walltime = "": expected a length of time'),
    (["run.max_walltime=5"], "run.max_walltime = 5: expected a string"),
    (["run.checkpoint_every=0"], "run.checkpoint_every = 0: expected greater than or equal to 1"),
    (["run.checkpoint_every=1.5"], "run.checkpoint_every = 1.5: expected a string or a whole number"),
    (["run.eval_clients=0"], "run.eval_clients = 0: expected greater than or equal to 1"),
    (['run.on_rank_loss="ignore"'], "'abort' or 'shrink'"),
    (["algorithm=5"], "--set"),
    (["algorithm.lr"], "expected part.key=value"),
]

WRONG_SETTINGS += [
    (['algorithm={name="fedrecon", reset=true, start_heads="drawn"}'], 'algorithm.start_heads = "drawn": with'),
    (['algorithm={name="pflego"}', 'model={name="logistic", reference=true}'], "model.reference = true: such a model"),
    (
        ['run.protocol="participants"', "partition.test_share=0"],
        "no client has a test sample; give partition.test_share",
    ),
]

KNOWN_CLUSTERS = ['algorithm={name="async_l2gd"}', "partition.clusters=4", 'model={name="logistic"}']
WRONG_SETTINGS += [
    ([*KNOWN_CLUSTERS, *changes], expected)
    for changes, expected in [
        (
            ["algorithm.alpha=0.5", "algorithm.lam=1"],
            "algorithm.alpha and algorithm.lam: give one of the two, not both",
        ),
        (["algorithm.alpha=1.5"], "algorithm.alpha = 1.5: expected less than or equal to 1"),
        (["algorithm.alpha=[0.5, 0.2]"], "algorithm.alpha: 2 values, expected one, or one per cluster (4)"),
        (["algorithm.lam=-1"], "algorithm.lam = -1: expected greater than or equal to 0"),
        (["algorithm.lam=[1, 2]"], "algorithm.lam: 2 values, expected one, or one per cluster (4)"),
        (["algorithm.gamma=0"], "algorithm.gamma = 0: expected greater than 0"),
        (["algorithm.gamma=[1.0, -2.0]"], "algorithm.gamma.1 = -2.0: expected greater than 0"),
        (["algorithm.gamma=[1.0, 2.0]"], "algorithm.gamma: 2 values, expected one, or one per client (40)"),
        (['algorithm.gamma="big"'], 'algorithm.gamma = "big": expected a list or a number'),
        (['algorithm.objective="total"'], "algorithm.objective = \"total\": expected 'mean' or 'sum'"),
        (["algorithm.p_global=1"], "algorithm.p_global = 1: expected less than 1"),
        (["algorithm.p_global=-0.1"], "algorithm.p_global = -0.1: expected greater than or equal to 0"),
        (["algorithm.p_global=0"], "algorithm.p_global = 0: clusters would never be averaged with each other"),
        (['algorithm.p_global="optimal"'], 'algorithm.p_global and algorithm.p_cluster: "optimal" finds both together'),
        (["algorithm.p_cluster=1.0"], "algorithm.p_cluster = 1.0: expected less than 1"),
        (["algorithm.p_cluster=[0.1, 1.0]"], "algorithm.p_cluster.1 = 1.0: expected less than 1"),
        (["algorithm.p_cluster=[0.1, 0.2]"], "algorithm.p_cluster: 2 values, expected one, or one per cluster (4)"),
        (["algorithm.p_cluster=[]"], "algorithm.p_cluster = []: expected"),
        (['algorithm.p_cluster="best"'], 'algorithm.p_cluster = "best": expected'),
        (
            ["algorithm.p_cluster=0", "algorithm.tau=0.5"],
            "algorithm.tau = 0.5: for cluster 0 (and 3 others), with p_cluster",
        ),
        (
            ['algorithm={name="async_l2gd_vr"}', "run.participation=0.5", 'model={name="logistic", l2=0.1}'],
            "run.participation: 20 of 40 clients a round, but async_l2gd_vr needs all of them in every round",
        ),
        (['algorithm.tau="often"'], "algorithm.tau = \"often\": expected a list or a number or 'balance'"),
        (['algorithm.tau=[0.1, "balance"]'], 'algorithm.tau.1 = "balance": expected a number'),
        (["algorithm.tau=true"], "algorithm.tau = true: expected a list or a number"),
        (["algorithm.p_global=[0.1]"], "algorithm.p_global = [0.1]: expected a number"),
        (["algorithm.p_cluster={a=1}"], 'algorithm.p_cluster = {"a": 1}: expected a list or a number'),
        (["algorithm.batch_size=10000000000000000000000"], "algorithm.batch_size"),
        (["algorithm.tau=1.5"], "algorithm.tau = 1.5: expected less than or equal to 1"),
        (["algorithm.tau=[0.1, 0.2, 0.3]"], "algorithm.tau: 3 values, expected one, or one per cluster (4)"),
        (
            [f"algorithm.gamma={[1.0] * 39 + [2.0]}", 'algorithm.tau="exact"'],
            'algorithm.tau = "exact": gamma differs inside cluster 3, so the best tau would change with the models',
        ),
        (["algorithm.smoothness=0"], "algorithm.smoothness = 0: expected greater than 0"),
        (["algorithm.lr=50"], "algorithm.lr = 50: averaging would overshoot the means"),
        (["algorithm.local_steps=3"], "algorithm.local_steps: unknown option; valid: alpha, "),
        (['model={name="mlp"}'], "algorithm.smoothness: can be found for linear and logistic models only; give it"),
        (["model.reference=1"], "model.reference = 1: expected true or false"),
    ]
]


def complaints(capsys, *arguments: object) -> list[str]:
    """Runs the command line; checks exit code 2 and the form of what it says; returns the lines."""
    assert main([str(a) for a in arguments]) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert lines
    assert all(line.startswith("hpcfl: ") for line in lines), captured.err
    assert "Traceback" not in captured.err + captured.out
    return lines


@pytest.mark.parametrize(
    ("changes", "expected"), WRONG_SETTINGS, ids=lambda v: v if isinstance(v, str) else " ".join(v)
)
def test_wrong_setting_is_one_clear_line(capsys, tmp_path, changes, expected):
    arguments = [word for change in changes for word in ("--set", change)]
    lines = complaints(capsys, "run", JOB, "--out", tmp_path / "out", "--set", "run.rounds=1", *arguments)
    assert any(expected in line for line in lines), lines
    assert len(lines) == 1
    assert not list(tmp_path.glob("out/*/results.h5"))


def test_all_mistakes_of_a_file_are_listed(capsys, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text('[run]\nrounds = "many"\n[data]\nname = "digits"\n[modle]\n[algorithm]\nname = "apfl"\nalpha = 2\n')
    lines = complaints(capsys, "run", job)
    text = "\n".join(lines)
    for expected in (
        "run.rounds",
        "[modle]",
        "[partition]: table is missing",
        "[model]: table is missing",
        "alpha = 2",
    ):
        assert expected in text
    assert all(str(job) in line for line in lines)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no such job file"),
        ("rounds = = 1", "not valid TOML"),
        ("", "table is missing"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_bad_job_file(capsys, tmp_path, content, expected):
    job = tmp_path / "job.toml"
    if content is not None:
        job.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert expected in complaints(capsys, "run", job)[0]


def test_folder_as_job_file(capsys, tmp_path):
    assert "no such job file" in complaints(capsys, "run", tmp_path)[0]


def test_unwritable_output(capsys, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert str(tmp_path / "file") in complaints(capsys, "run", JOB, "--out", tmp_path / "file")[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_output(capsys, tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert "cannot create" in complaints(capsys, "run", JOB, "--out", tmp_path / "out")[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "no such file"),
        ("x = = 1", "line 1: SyntaxError"),
        ("\nimport nothing_of_this_name", "line 2: ModuleNotFoundError"),
        (
            "from dataclasses import dataclass\nfrom hpcfl.registry import register\n"
            "@register('algorithm', 'apfl')\n@dataclass\nclass A: pass",
            "the name is taken",
        ),
        ("from hpcfl.registry import register\n@register('model', 'm')\nclass M: pass", "M is no dataclass"),
        ("from hpcfl.registry import register\n@register('algorihm', 'x')\nclass A: pass", 'did you mean "algorithm"?'),
    ],
)
def test_bad_plugin(capsys, tmp_path, text, expected):
    plugin = tmp_path / "plugin.py"
    if text is not None:
        plugin.write_text(text)
    assert expected in complaints(capsys, "run", JOB, "--plugin", plugin)[0]


PLUGINS = """
from dataclasses import dataclass
from pathlib import Path
from torch import nn
from hpcfl.data import Dataset
from hpcfl.registry import register

@register("model", "nothing")
@dataclass(frozen=True)
class Nothing:
    def build(self, spec):
        return 5

@register("model", "mistaken")
@dataclass(frozen=True)
class Mistaken:
    folder: Path = Path("/tmp")

    def build(self, spec):
        return nn.Linear(64, "ten")  # line 20

@register("data", "none")
@dataclass(frozen=True)
class NoData:
    def load(self, seed):
        return {}

@register("algorithm", "alone")
@dataclass(frozen=True)
class Alone:
    pass

@register("model", "odd")
@dataclass(frozen=True)
class Odd:
    value: object = 1j

    def build(self, spec):
        return nn.Linear(64, 10)
"""


@pytest.mark.parametrize(
    ("change", "code", "expected"),
    [
        ('model={name="nothing"}', 2, "Nothing.build gave a int, expected a torch.nn.modules.module.Module"),
        ('data={name="none"}', 2, "NoData.load gave a dict, expected a hpcfl.data.Dataset"),
        ('algorithm={name="alone"}', 2, "the class of the algorithm must inherit from hpcfl.algorithm.Work"),
        ('model={name="odd"}', 2, "model.value: a complex cannot be written into a job file"),
        ('model={name="mistaken"}', 1, "(plugin.py line 20); traceback in hpcfl-error"),
    ],
)
@pytest.mark.parametrize("command", ["run", "theory"])
def test_mistakes_in_a_plugin(capsys, tmp_path, monkeypatch, command, change, code, expected):
    (tmp_path / "plugin.py").write_text(PLUGINS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hpcfl.registry._registered", {kind: dict(known) for kind, known in _registered.items()})
    out = ["--out", "out"] if command == "run" else ["--set", 'run.out="out"']
    assert main([command, str(JOB), "--plugin", "plugin.py", "--set", change, *out]) == code
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_model_with_running_buffers_is_refused(capsys, tmp_path):
    plugin = tmp_path / "normed.py"
    plugin.write_text(
        "from dataclasses import dataclass\nfrom torch import nn\nfrom hpcfl.registry import register\n"
        "@register('model', 'normed')\n@dataclass(frozen=True)\nclass Normed:\n"
        "    def build(self, spec):\n        return "
        "nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))\n"
    )
    lines = complaints(capsys, "run", JOB, "--plugin", plugin, "--out", tmp_path, "--set", 'model={name="normed"}')
    assert "use GroupNorm instead" in lines[0]


def test_natural_partition_of_a_bad_file(capsys, tmp_path):
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 3)), y=np.array([0, 1, 0, -1]), client=[0, 0, 1, 1])
    changes = ["--set", f'data={{name="file", path="{tmp_path}/data.npz"}}', "--set", 'partition={name="natural"}']
    assert "y" in complaints(capsys, "run", JOB, "--out", tmp_path / "out", *changes)[0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rnu"], "rnu"),
        (["run"], "'job'"),
        (["show"], "'files'"),
        (["run", JOB, "--uot", "x"], "--uot"),
        (["run", JOB, "--out", ""], 'run.out = "": expected the path of a folder'),
        (["run", JOB, "--max-walltime", ""], 'run.max_walltime = "": expected a length of time'),
        (["run", JOB, "--stop-signal", ""], '--stop-signal "": expected one of USR1, USR2, HUP'),
        (["show", "nowhere.h5"], "nowhere.h5"),
        (["plot", "nowhere.h5", "-o", "x.png"], "nowhere.h5"),
        (["list", "modles"], 'did you mean "models"?'),
        (["show", JOB], "apfl.toml"),
    ],
    ids=str,
)
def test_wrong_call(capsys, arguments, expected):
    assert expected in "\n".join(complaints(capsys, *arguments))


def test_two_runs_never_overwrite_each_other(tmp_path):
    for _ in range(2):
        assert main(["run", str(JOB), "--out", str(tmp_path), "--set", "run.rounds=1"]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["apfl-001", "apfl-002"]


def test_help_and_no_arguments(capsys):
    assert main(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out
    assert main([]) == 2


def test_list_names_every_option(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for word in ("apfl", "alpha_update", "fedavg", "server_momentum", "dirichlet", "mnist", "logistic", "local_steps"):
        assert word in out
