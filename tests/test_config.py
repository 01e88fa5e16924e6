"""Job files: every kind of mistake gets one clear line, and the resolved text is the same job again."""

from __future__ import annotations

import dataclasses
import tomllib
from copy import deepcopy
from pathlib import Path

import pytest

from hpcfl.algorithms.apfl import APFL
from hpcfl.config import RunOptions, load, resolve, to_toml
from hpcfl.errors import InputError
from hpcfl.schedules import Theory

BASE = {
    "run": {"rounds": 3},
    "data": {"name": "digits"},
    "partition": {"name": "iid", "clients": 4},
    "model": {"name": "mlp"},
    "algorithm": {"name": "apfl"},
}
REMOVE = object()


def changed(changes: dict[str, object]) -> dict:
    """BASE with "part.key" set; REMOVE takes a key or a whole part away."""
    tables = deepcopy(BASE)
    for path, value in changes.items():
        part, _, key = path.partition(".")
        if not key:
            tables[part] = value
        elif value is REMOVE:
            del tables[part][key]
        else:
            tables.setdefault(part, {})[key] = value
    return {part: table for part, table in tables.items() if table is not REMOVE}


def mistakes(changes: dict[str, object]) -> list[str]:
    with pytest.raises(InputError) as caught:
        resolve(changed(changes), "job", "job.toml")
    assert caught.value.exit_code == 2
    lines = str(caught.value).splitlines()
    assert all(line.startswith("job.toml: ") for line in lines)
    return [line.removeprefix("job.toml: ") for line in lines]


CASES = [
    # tables
    ({"algoritm": {}}, '[algoritm]: unknown table; did you mean "algorithm"?'),
    ({"model": REMOVE}, "[model]: table is missing"),
    ({"data": 3}, "data: expected a table [data]"),
    # keys
    ({"algorithm.learning_rate": 0.1}, "algorithm.learning_rate: unknown option"),
    ({"algorithm.local_step": 2}, 'algorithm.local_step: unknown option; did you mean "local_steps"?'),
    ({"run.round": 2}, 'run.round: unknown option; did you mean "rounds"?'),
    ({"partition.classes_per_client": 2}, "partition.classes_per_client: unknown option"),
    ({"algorithm.lr_schedule": {"name": "constant", "decay": 0.9}}, "algorithm.lr_schedule.decay: unknown option"),
    ({"run.rounds": REMOVE}, "run.rounds: required, but not given"),
    ({"partition.clients": REMOVE}, "partition.clients: required, but not given"),
    # names
    ({"algorithm.name": "apfel"}, 'algorithm.name = "apfel": unknown algorithm; did you mean "apfl"?'),
    ({"model.name": "xyz"}, 'model.name = "xyz": unknown model; valid: cnn, linear, logistic, mlp'),
    ({"data.name": REMOVE}, "data.name: required"),
    ({"partition.name": 3}, "partition.name: required, a string"),
    (
        {"algorithm.lr_schedule": {"name": "exponentiel"}},
        'algorithm.lr_schedule.name = "exponentiel": unknown; did you',
    ),
    # types
    ({"run.rounds": "3"}, 'run.rounds = "3": expected a whole number'),
    ({"run.rounds": 3.5}, "run.rounds = 3.5: expected a whole number"),
    ({"run.rounds": True}, "run.rounds = true: expected a whole number"),
    ({"algorithm.lr": "0.1"}, 'algorithm.lr = "0.1": expected a number'),
    ({"algorithm.lr": [0.1]}, "algorithm.lr = [0.1]: expected a number"),
    ({"algorithm.average": 1}, "algorithm.average = 1: expected true or false"),
    ({"run.out": 7}, "run.out = 7: expected a string"),
    ({"model.hidden": 64}, "model.hidden = 64: expected a list"),
    ({"algorithm.alpha": "half"}, 'algorithm.alpha = "half": expected a list or a number'),
    ({"algorithm.lr_schedule": "theory"}, 'algorithm.lr_schedule = "theory": expected a table'),
    # ranges
    ({"run.rounds": 0}, "run.rounds = 0: expected greater than or equal to 1"),
    ({"run.seed": -1}, "run.seed = -1: expected greater than or equal to 0"),
    ({"run.seed": 2**64}, "run.seed = 18446744073709551616: expected "),
    ({"run.participation": 0.0}, "run.participation = 0.0: expected greater than 0"),
    ({"run.participation": 1.1}, "run.participation = 1.1: expected less than or equal to 1"),
    ({"algorithm.lr": 0}, "algorithm.lr = 0: expected greater than 0"),
    ({"algorithm.lr": float("nan")}, "algorithm.lr = NaN: expected a finite number"),
    ({"algorithm.lr": float("inf")}, "algorithm.lr = Infinity: expected a finite number"),
    ({"algorithm.alpha": 1.5}, "algorithm.alpha = 1.5: expected less than or equal to 1"),
    ({"algorithm.alpha": [0.5, -0.1]}, "algorithm.alpha.1 = -0.1: expected greater than or equal to 0"),
    ({"algorithm.alpha": []}, "algorithm.alpha = []: expected "),
    ({"model.hidden": [8, 0]}, "model.hidden.1 = 0: expected greater than or equal to 1"),
    (
        {"algorithm.lr_schedule": {"name": "theory", "mu": 0, "a": 1}},
        "algorithm.lr_schedule.mu = 0: expected greater than",
    ),
    # choices
    ({"run.dtype": "float16"}, "run.dtype = \"float16\": expected 'float32' or 'float64'"),
    ({"algorithm.variant": "papers"}, "algorithm.variant = \"papers\": expected 'paper' or 'released'"),
    # what contradicts itself
    ({"run.participation": 0.5, "run.clients_per_round": 2}, "run.participation and run.clients_per_round: give one"),
    (
        {"algorithm.local_steps": 2, "algorithm.local_epochs": 2},
        "algorithm.local_steps and algorithm.local_epochs: give",
    ),
    ({"algorithm.average": True, "algorithm.local_epochs": 2}, "algorithm.average = true"),
    (
        {"algorithm.local_epochs": 1, "algorithm.lr_schedule": {"name": "theory", "mu": 1, "a": 1}},
        'algorithm.lr_schedule = "theory"',
    ),
]


@pytest.mark.parametrize(("changes", "expected"), CASES, ids=[", ".join(changes) for changes, _ in CASES])
def test_a_mistake_is_one_line(changes, expected):
    (line,) = mistakes(changes)
    assert line.startswith(expected)


def test_all_mistakes_are_told_at_once():
    lines = mistakes({"run.rounds": 0, "run.sed": 1, "algorithm.lr": "x", "model.name": "mpl", "extra": {}})
    assert [line.split(":")[0].split(" =")[0] for line in lines] == [
        "[extra]", "run.rounds", "run.sed", "model.name", "algorithm.lr"
    ]  # fmt: skip


def test_numbers_may_be_written_without_a_point():
    algorithm = resolve(changed({"algorithm.lr": 1, "algorithm.alpha": 1}), "job", "job.toml").algorithm
    assert (algorithm.lr, algorithm.alpha) == (1.0, 1.0)
    assert isinstance(algorithm.alpha, float)
    assert resolve(changed({"algorithm.alpha": [0, 1, 0.5, 1]}), "job", "job.toml").algorithm.alpha == (
        0.0,
        1.0,
        0.5,
        1.0,
    )


# --- files and --set --------------------------------------------------------------------------------------------------

TEXT = """
[run]
rounds = 3
[data]
name = "digits"
[partition]
name = "iid"
clients = 4
[model]
name = "mlp"
[algorithm]
name = "apfl"
"""


@pytest.fixture
def job(tmp_path) -> Path:
    (tmp_path / "job.toml").write_text(TEXT)
    return tmp_path / "job.toml"


def test_defaults(job):
    loaded = load(job)
    assert loaded.name == "job"
    assert loaded.algorithm_name == "apfl"
    assert loaded.run == RunOptions(rounds=3)
    assert loaded.algorithm == APFL()
    assert (loaded.run.seed, loaded.run.dtype, loaded.run.threads, loaded.run.reduction) == (
        0,
        "float32",
        1,
        "reproducible",
    )


def test_set(job):
    loaded = load(
        job,
        [
            "run.rounds=7",
            "run.dtype=float64",
            'run.out = "a b"',
            "algorithm.alpha=[0, 0.5, 1, 1]",
            "algorithm.lr_schedule.name=theory",
            "algorithm.lr_schedule.mu=2",
            "algorithm.lr_schedule.a = 1e3",
            "algorithm.average=true",
            "model.hidden=[]",
        ],
    )
    assert (loaded.run.rounds, loaded.run.dtype, loaded.run.out) == (7, "float64", "a b")
    assert loaded.algorithm == APFL(alpha=(0.0, 0.5, 1.0, 1.0), lr_schedule=Theory(mu=2.0, a=1000.0), average=True)
    assert loaded.model.hidden == ()


def test_the_last_set_wins_and_makes_tables(tmp_path):
    (tmp_path / "short.toml").write_text(TEXT.replace('[algorithm]\nname = "apfl"\n', ""))
    assert load(tmp_path / "short.toml", ["algorithm.name=apfl", "algorithm.name=local"]).algorithm_name == "local"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("algorithm.lr", '--set "algorithm.lr": expected part.key=value'),
        ("lr=0.1", '--set "lr=0.1": expected part.key=value'),
        ("=1", '--set "=1": expected part.key=value'),
        ("algorithm.=1", '--set "algorithm.=1": expected part.key=value'),
        (".lr=1", '--set ".lr=1": expected part.key=value'),
        ("algorithm.lr.x=1", "algorithm.lr"),
        ("algorithm.name.x=1", '--set "algorithm.name.x=1": algorithm.name.x is not in a table'),
        ("algorithm.lrr=1", 'algorithm.lrr: unknown option; did you mean "lr"?'),
        ("algoritm.lr=1", '[algoritm]: unknown table; did you mean "algorithm"?'),
        ("algorithm.lr=fast", 'algorithm.lr = "fast": expected a number'),
        ("algorithm.lr=", 'algorithm.lr = "": expected a number'),
        ("run.rounds=-1", "run.rounds = -1: expected greater than or equal to 1"),
    ],
)
def test_mistakes_in_set(job, change, expected):
    with pytest.raises(InputError) as caught:
        load(job, [change])
    (line,) = str(caught.value).splitlines()
    assert expected in line


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no such job file"),
        (b"[run\nrounds = 1", "not valid TOML"),
        (b"[run]\nrounds = 1\nrounds = 2", "not valid TOML"),
        (b"\xff\xfe", "cannot be read"),
        (b"", "[run]: table is missing"),
    ],
)
def test_files_that_are_no_job(tmp_path, content, expected):
    file = tmp_path / "x.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load(file)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{file}: {expected}")
    assert len(lines) == (5 if content == b"" else 1)


def test_a_folder_is_no_job(tmp_path):
    with pytest.raises(InputError, match="no such job file"):
        load(tmp_path)


# --- the resolved text ------------------------------------------------------------------------------------------------

JOBS = [
    {},
    {"run.out": 'quo"te \\ back\tslash \u00e9 \u4e2d', "run.seed": 2**63 - 1, "run.participation": 0.1},
    {"run.clients_per_round": 2, "run.dtype": "float64", "run.block": 5, "run.save_models": True},
    {"algorithm.alpha": [0.1, 1e-7, 1.0, 0.0], "algorithm.lr": 1e-300, "algorithm.alpha_lr": 1e22},
    {"algorithm.lr_schedule": {"name": "theory", "mu": 0.1, "a": 3}, "algorithm.average": True},
    {"algorithm.lr_schedule": {"name": "exponential"}, "algorithm.local_epochs": 2, "algorithm.batch_size": 7},
    {"model": {"name": "cnn", "channels": [4], "dropout": 0.5, "l2": 0.1}, "algorithm": {"name": "fedavg"}},
    {"data": {"name": "synthetic"}, "partition": {"name": "natural", "test_share": 0}, "model": {"name": "logistic"}},
    {"data": {"name": "file", "path": "C:\\x\n.h5"}, "partition": {"name": "dirichlet", "clients": 3, "alpha": 0.3}},
]


@pytest.mark.parametrize("changes", JOBS, ids=[", ".join(job) or "defaults" for job in JOBS])
def test_the_resolved_text_is_the_same_job(tmp_path, changes):
    first = resolve(changed(changes), "job", "job.toml")
    file = tmp_path / "job.toml"
    file.write_text(first.text)
    second = load(file)
    assert second == first
    assert list(tomllib.loads(first.text)) == ["run", "data", "partition", "model", "algorithm"]


def test_text_of_unusual_values():
    table = {"weights": {"a b": 1.5, "ü": [1, True]}, "folder": Path("/tmp/x\x7f𝄞"), "none": None}
    found = tomllib.loads(to_toml({"data": table}))["data"]
    assert found == {"weights": {"a b": 1.5, "ü": [1, True]}, "folder": "/tmp/x\x7f𝄞"}
    with pytest.raises(InputError, match=r"^data.z: a complex cannot be written into a job file"):
        to_toml({"data": {"z": 1j}})


def test_the_resolved_text_names_every_default():
    resolved = tomllib.loads(resolve(BASE, "job", "job.toml").text)
    for part, made in (("run", RunOptions(rounds=3)), ("algorithm", APFL())):
        for field in dataclasses.fields(made):
            assert (field.name in resolved[part]) == (getattr(made, field.name) is not None), field.name
