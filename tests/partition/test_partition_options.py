"""Options as users write them in a job file: names, defaults, ranges, misspellings."""

import pytest

from hpcfl.errors import InputError
from hpcfl.registry import build

SHARED = {
    "test_share": None,
    "validation_share": 0.0,
    "min_samples": 1,
    "clusters": None,
    "cluster_file": None,
    "labels": "global",
}


@pytest.mark.parametrize(
    ("kind", "table", "options"),
    [
        ("partition", {"name": "iid", "clients": 3}, SHARED | {"clients": 3}),
        ("partition", {"name": "classes", "clients": 3}, SHARED | {"clients": 3, "classes_per_client": 2}),
        ("partition", {"name": "degrees", "clients": 3}, SHARED | {"clients": 3, "degree": "high"}),
        ("partition", {"name": "iid", "clients": 3, "labels": "local"}, SHARED | {"clients": 3, "labels": "local"}),
        ("partition", {"name": "dirichlet", "clients": 3}, SHARED | {"clients": 3, "alpha": 0.5}),
        (
            "partition",
            {"name": "natural", "test_share": 0, "min_samples": 2},
            SHARED | {"test_share": 0, "min_samples": 2},
        ),
        ("partition", {"name": "natural", "clusters": 3}, SHARED | {"clusters": 3}),
        (
            "partition",
            {"name": "iid", "clients": 3, "clusters": [2, 1]},
            SHARED | {"clients": 3, "clusters": (2, 1)},
        ),
        ("partition", {"name": "natural", "cluster_file": "c.csv"}, SHARED | {"cluster_file": "c.csv"}),
        ("data", {"name": "digits"}, {}),
        ("data", {"name": "chem97"}, {}),
        ("data", {"name": "mnist"}, {"root": "data"}),
        ("data", {"name": "fashion-mnist", "root": "x"}, {"root": "x"}),
        ("data", {"name": "file", "path": "d.h5"}, {"path": "d.h5", "scale": None, "shift": 0.0, "lazy": False}),
        (
            "data",
            {"name": "synthetic", "beta": 0},
            {
                "alpha": 1,
                "beta": 0,
                "clients": 100,
                "dim": 60,
                "classes": 10,
                "samples": None,
                "iid": False,
                "lazy": False,
            },
        ),
        (
            "data",
            {"name": "hierarchical-linear", "dim": 2, "center": [1, -0.5], "test_observations": 0},
            {
                "clusters": 20,
                "clients_per_cluster": 20,
                "dim": 2,
                "observations": 10,
                "test_observations": 0,
                "center": (1.0, -0.5),
                "cluster_variance": 1.0,
                "client_variance": 1.0,
                "noise_variance": 1.0,
            },
        ),
        (
            "data",
            {"name": "hierarchical-logistic", "success": 0.5},
            {
                "clients": 29490,
                "clusters": 51,
                "cluster_variance": 0.1,
                "client_variance": 0.1,
                "success": 0.5,
                "min_rows": 10,
                "max_rows": 400,
            },
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
        (
            "partition",
            {"name": "natural", "clusters": 0},
            "partition.clusters = 0: expected greater than or equal to 1",
        ),
        ("partition", {"name": "natural", "clusters": [2, 0]}, "partition.clusters.1 = 0: expected greater than"),
        ("partition", {"name": "natural", "clusters": []}, "partition.clusters = []: expected"),
        ("partition", {"name": "natural", "clusters": "2"}, 'partition.clusters = "2": expected'),
        ("partition", {"name": "natural", "cluster": 2}, 'did you mean "clusters"?'),
        (
            "partition",
            {"name": "natural", "clusters": 2, "cluster_file": "c.csv"},
            "partition.clusters and partition.cluster_file: give one of the two, not both",
        ),
        ("data", {"name": "file"}, "data.path: required"),
        ("data", {"name": "file", "path": 3}, "data.path = 3: expected"),
        ("data", {"name": "file", "path": "d.h5", "scale": 0}, "data.scale = 0: expected greater than 0"),
        ("data", {"name": "synthetic", "alpha": -1}, "data.alpha = -1: expected greater than or equal to 0"),
        ("data", {"name": "synthetic", "iid": True}, "data.iid = true"),
        ("data", {"name": "hierarchical-linear", "observations": 0}, "data.observations = 0: expected greater than"),
        ("data", {"name": "hierarchical-linear", "test_observations": -1}, "data.test_observations = -1: expected"),
        ("data", {"name": "hierarchical-linear", "noise_variance": -1}, "data.noise_variance = -1: expected"),
        ("data", {"name": "hierarchical-linear", "client_variance": [1, -1]}, "data.client_variance.1 = -1: expected"),
        (
            "data",
            {"name": "hierarchical-linear", "center": [1, 2]},
            "data.center: 2 values, expected one, or one per coordinate (data.dim = 20)",
        ),
        (
            "data",
            {"name": "hierarchical-linear", "client_variance": [1, 2, 3], "clusters": 2},
            "data.client_variance: 3 values, expected one, or one per cluster (data.clusters = 2)",
        ),
        ("data", {"name": "hierarchical-logistic", "success": 1}, "data.success = 1: expected less than 1"),
        ("data", {"name": "hierarchical-logistic", "success": 0}, "data.success = 0: expected greater than 0"),
        (
            "data",
            {"name": "hierarchical-logistic", "clients": 50},
            "data.clusters = 51, data.clients = 50: more clusters than clients",
        ),
        (
            "data",
            {"name": "hierarchical-logistic", "max_rows": 9},
            "data.min_rows = 10, data.max_rows = 9: expected min_rows <= max_rows",
        ),
    ],
)
def test_mistakes(kind, table, message):
    with pytest.raises(InputError) as error:
        build(kind, table)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
