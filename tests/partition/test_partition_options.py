"""Options as users write them in a job file: names, defaults, ranges, misspellings."""

import pytest

from hpcfl.errors import InputError
from hpcfl.registry import build

SHARED = {"test_share": None, "validation_share": 0.0, "min_samples": 1}


@pytest.mark.parametrize(
    ("kind", "table", "options"),
    [
        ("partition", {"name": "iid", "clients": 3}, SHARED | {"clients": 3}),
        ("partition", {"name": "classes", "clients": 3}, SHARED | {"clients": 3, "classes_per_client": 2}),
        ("partition", {"name": "dirichlet", "clients": 3}, SHARED | {"clients": 3, "alpha": 0.5}),
        (
            "partition",
            {"name": "natural", "test_share": 0, "min_samples": 2},
            SHARED | {"test_share": 0, "min_samples": 2},
        ),
        ("data", {"name": "digits"}, {}),
        ("data", {"name": "mnist"}, {"root": "data"}),
        ("data", {"name": "fashion-mnist", "root": "x"}, {"root": "x"}),
        ("data", {"name": "file", "path": "d.h5"}, {"path": "d.h5", "scale": None, "shift": 0.0}),
        (
            "data",
            {"name": "synthetic", "beta": 0},
            {"alpha": 1, "beta": 0, "clients": 100, "dim": 60, "classes": 10, "samples": None, "iid": False},
        ),
    ],
)
def test_names_and_defaults(kind, table, options):
    assert vars(build(kind, table)) == options


@pytest.mark.parametrize(
    ("kind", "table", "message"),
    [
        ("partition", {"name": "iid"}, "partition.clients: required"),
        ("partition", {"name": "iid", "clients": 0}, "partition.clients = 0: expected greater than or equal to 1"),
        ("partition", {"name": "iid", "clients": 2.5}, "partition.clients = 2.5: expected"),
        ("partition", {"name": "iid", "clients": 2, "test_share": 1.0}, "partition.test_share = 1.0"),
        ("partition", {"name": "iid", "clients": 2, "validation_share": -0.1}, "partition.validation_share = -0.1"),
        ("partition", {"name": "iid", "clients": 2, "min_samples": 0}, "partition.min_samples = 0"),
        ("partition", {"name": "classes", "clients": 2, "class_per_client": 1}, 'did you mean "classes_per_client"?'),
        ("partition", {"name": "dirichlet", "clients": 2, "alpha": 0}, "partition.alpha = 0: expected greater than 0"),
        ("partition", {"name": "natural", "clients": 2}, "partition.clients: unknown option"),
        ("partition", {"name": "dirichlett", "clients": 2}, 'did you mean "dirichlet"?'),
        ("data", {"name": "file"}, "data.path: required"),
        ("data", {"name": "file", "path": 3}, "data.path = 3: expected"),
        ("data", {"name": "file", "path": "d.h5", "scale": 0}, "data.scale = 0: expected greater than 0"),
        ("data", {"name": "synthetic", "alpha": -1}, "data.alpha = -1: expected greater than or equal to 0"),
        ("data", {"name": "synthetic", "iid": True}, "data.iid = true"),
    ],
)
def test_mistakes(kind, table, message):
    with pytest.raises(InputError) as error:
        build(kind, table)
    assert message in str(error.value)
