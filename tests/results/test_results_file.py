"""The file as a whole: complete before the first round, as documented, and open to every kind of reader."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from results_example import EVERYTHING, SMALL, rows, values

from hpcfl.errors import RunError
from hpcfl.results import FORMAT_VERSION

ROOT = Path(__file__).resolve().parents[2]


def contents(path):
    """Every object with its shape, every attribute with its type."""
    found = {}
    with h5py.File(path, "r", swmr=True) as file:
        file.visititems_links(lambda name, link: found.setdefault(f"/{name}", None))
        for name in ["/", *found]:
            item = file[name]
            attributes = {key: item.attrs.get_id(key).dtype.str for key in item.attrs}
            found[name] = (getattr(item, "shape", None), getattr(item, "dtype", None), attributes)
    return found


@pytest.mark.parametrize("base", [EVERYTHING, SMALL])
def test_everything_is_there_at_full_size_before_the_first_round(create, tmp_path, base):
    path = tmp_path / "results.h5"
    writer = create(base)
    size, before = path.stat().st_size, contents(path)
    assert path.stat().st_blocks * 512 >= size  # on the disk: no holes that a full disk could refuse later
    writer.rounds(0, rows(base, 0, 6))
    for row in range(3):
        writer.evaluation(row, row, 1.0, values(base))
    if "parameters" in base:
        writer.models("personal", 0, np.zeros((4, 9)))
        writer.models("global", 0, np.zeros(9))
    writer.timing(np.zeros((base["ranks"], 5)))
    writer.final()
    writer.status("stopped:" + "x" * 2000)
    assert (path.stat().st_size, contents(path)) == (size, before)
    writer.close()
    writer.close()
    assert (path.stat().st_size, contents(path)) == (size, before)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("base", [EVERYTHING, SMALL])
def test_no_field_stays_unfilled(create, tmp_path, base):
    writer = create(base)
    writer.rounds(0, rows(base, 0, 6))
    for row in range(3):
        writer.evaluation(row, row, 1.0, values(base))
    if "parameters" in base:
        writer.models("personal", 0, np.zeros((1, 9)))
        writer.models("personal", 1, np.ones((3, 9)))
        writer.models("global", 0, np.zeros(9))
    writer.timing(np.zeros((base["ranks"], 5)))
    writer.final()
    writer.close()
    with h5py.File(tmp_path / "results.h5") as file:
        fields = []
        file.visititems(lambda name, item: fields.append(name) if isinstance(item, h5py.Dataset) else None)
        for name in fields:
            if file[name].dtype.kind != "S":
                assert not np.any(file[name][()] == file[name].fillvalue), name
                assert not np.any(np.isnan(file[name][()])), name


def test_what_was_written_is_what_is_read(create, tmp_path):
    text = "[run]\nseed = 1\n# Größe\n"
    writer = create(EVERYTHING, config=text, dtype="float64")
    writer.rounds(0, rows(EVERYTHING, 0, 4))
    writer.rounds(4, rows(EVERYTHING, 4, 1))
    writer.evaluation(0, 0, 0.0, values(EVERYTHING, 0.1))
    writer.evaluation(1, 5, 2.5, values(EVERYTHING, 0.3))
    writer.models("personal", 0, np.arange(9)[None])
    writer.models("personal", 1, 100 + np.arange(27).reshape(3, 9))
    writer.models("global", 0, -np.arange(9))
    writer.timing(np.arange(10).reshape(2, 5))
    with h5py.File(tmp_path / "results.h5", "r", swmr=True) as file:  # still open for writing
        assert file.attrs["filetype"] == b"hpcfl results"
        assert tuple(file.attrs["format_version"]) == FORMAT_VERSION
        assert (file.attrs["rounds_done"], file.attrs["evaluations_done"]) == (5, 2)
        assert (file.attrs["pid"], file.attrs["status"], file.attrs["job"]) == (os.getpid(), b"running", b"test")
        assert file["config/toml"][()].decode() == text
        assert file["config/sha256"][()].decode() == hashlib.sha256(text.encode()).hexdigest()
        for name, column in rows(EVERYTHING, 0, 5).items():
            assert np.array_equal(file[f"rounds/{name}"][:5], column), name
        assert np.isnan(file["rounds/seconds"][5])
        assert file["rounds/kind"][5] == 255
        assert file["rounds/vectors_up"][5] == -1
        assert np.isnan(file["rounds/forward_passes"][5])
        assert np.isnan(file["rounds/participants_test_loss"][5])
        assert list(file["evaluations/round"]) == [0, 5, -1]
        assert list(file["evaluations/seconds"][:2]) == [0.0, 2.5]
        assert np.array_equal(file["per_client/alpha"][:2], [[0.1] * 4, [0.3] * 4])
        assert np.array_equal(file["per_client/global/validation_loss"][:2], [[0.1] * 4, [0.3] * 4])
        assert list(file["timing/wait"]) == [2, 7]
        assert file["clients"].attrs["clusters"] == 2
        assert list(file["clients/client"]) == [0, 1, 2, 3]
        assert np.array_equal(file["clients/class_counts"][3], [4, 4, 4])
        assert list(file["clients/n_classes"]) == [1, 2, 3, 1]
        assert list(file["clusters/cluster"]) == [0, 1]
        assert list(file["clusters/n_clients"]) == [2, 2]
        assert list(file["clusters/n_train"]) == [1 + 3, 2 + 4]
        assert np.array_equal(file["per_client/personal/estimation_error"][:2], [[0.1] * 4, [0.3] * 4])

        models = file["final/models"]  # as the documentation says
        tensors = {}
        for p in json.loads(models.attrs["parameters"]):
            size = np.prod(p["shape"], dtype=int)
            tensors[p["name"]] = models["personal"][2][p["offset"] : p["offset"] + size].reshape(p["shape"])
        assert np.array_equal(tensors["body.weight"], [[109, 110, 111], [112, 113, 114]])
        assert np.array_equal(tensors["head.bias"], [115, 116, 117])
        assert list(models["global"]) == list(-np.arange(9))


def test_status_is_cut_at_a_whole_character_and_knows_the_end(create, tmp_path):
    def attributes():
        with h5py.File(tmp_path / "results.h5", "r", swmr=True) as file:
            return dict(file.attrs)

    writer = create(SMALL)
    assert attributes()["end"] == b""
    writer.status("failed:" + "ß" * 400)  # 7 + 800 bytes into 512
    after = attributes()
    assert after["status"].decode() == "failed:" + "ß" * 252
    assert after["start"] <= after["end"]
    writer.status("running")
    assert (attributes()["status"], attributes()["end"]) == (b"running", b"")
    with pytest.raises(ValueError, match="expected running, done"):
        writer.status("finished")


def test_many_parameters_and_long_attributes_fit(create, tmp_path):
    parameters = tuple((f"blocks.{k}.a.rather.long.name.of.a.tensor", (2, 3)) for k in range(3000))
    create(EVERYTHING, clients=1, parameters=parameters).close()
    with h5py.File(tmp_path / "results.h5") as file:
        tensors = json.loads(file["final/models"].attrs["parameters"])
    assert [tensors[-1][key] for key in ("name", "shape", "offset")] == [parameters[-1][0], [2, 3], 6 * 2999]


@pytest.mark.parametrize(
    ("clients", "evaluations", "chunks"), [(29_490, 50, (1, 29_490)), (1_000_000, 3, (1, 250_000)), (5, 7, (1, 5))]
)
def test_chunks_are_a_row_or_part_of_one(create, tmp_path, clients, evaluations, chunks):
    writer = create(SMALL, clients=clients, evaluations=evaluations)
    writer.evaluation(0, 0, 0.0, values(SMALL | {"clients": clients}))
    writer.close()
    with h5py.File(tmp_path / "results.h5") as file:
        data = file["per_client/global/test_loss"]
        assert data.chunks == chunks
        assert data.shape == (evaluations, clients)


@pytest.mark.parametrize("base", [EVERYTHING, SMALL])
def test_xarray_reads_every_group_without_options(create, tmp_path, base):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf")
    create(base).close()
    path = tmp_path / "results.h5"
    groups = ["/"]
    with h5py.File(path) as file:
        file.visititems(lambda name, item: groups.append(name) if isinstance(item, h5py.Group) else None)
    assert len(groups) == (12 if base is EVERYTHING else 10)
    for group in groups:
        with xarray.open_dataset(path, engine="h5netcdf", group=group) as data:
            for name, variable in data.variables.items():
                assert set(variable.dims) <= set(data.coords), (group, name)  # each axis has its coordinate
                assert variable.attrs.get("long_name"), (group, name)
    with xarray.open_dataset(path, engine="h5netcdf", group="per_client/global") as data:
        metric = base["metrics"][1]
        assert data[f"test_{metric}"].dims == ("evaluation", "client")
        assert list(data["client"].values) == [0, 1, 2, 3]
    with xarray.open_datatree(path, engine="h5netcdf") as tree:
        assert "per_client" in tree.children


@pytest.mark.parametrize("base", [EVERYTHING, SMALL])
def test_viewers_find_what_to_plot(create, tmp_path, base):
    create(base).close()
    with h5py.File(tmp_path / "results.h5") as file:
        default = file[file.attrs["default"].decode()]
        assert default.attrs["NX_class"] == b"NXdata"
        plots = []
        file.visititems(lambda name, item: plots.append(item) if item.attrs.get("NX_class") == b"NXdata" else None)
        for group in plots:
            signal = group[group.attrs["signal"].decode()]
            axes = [group[axis.decode()] for axis in group.attrs["axes"]]
            assert signal.shape == tuple(len(axis) for axis in axes), group.name
            for name in group.attrs.get("auxiliary_signals", ()):
                assert group[name.decode()].shape == signal.shape
        for item in (file["rounds/bytes_up"], file["rounds/seconds"], file["evaluations/global_test_loss"]):
            assert item.attrs["units"] in (b"byte", b"s", b"1")
        name = f"evaluations/global_test_{base['metrics'][1]}"
        assert b"mean over clients, sum_i m_i / N" in file[name].attrs["long_name"]
        assert b"sum_i n_i m_i / sum_i n_i" in file[f"{name}_by_sample"].attrs["long_name"]
        assert file["rounds/kind"].attrs["flag_meanings"] == b"local cluster global"


def documented(schema):
    """The fields and root attributes that results/README.md lists, for a schema; and the types it gives."""
    text = (ROOT / "results" / "README.md").read_text()
    fields = {}
    for name, axes, kind in re.findall(r"^\| `(/[^`]*)` \| ([^|]*)\| ([^|]*) \|", text, re.MULTILINE):
        names = [(name, axes)]
        for place, words in (
            ("model", schema["models"]),
            ("split", schema["splits"]),
            ("metric", schema["metrics"]),
            ("exposed", schema.get("exposed", ())),
            ("coin", tuple(schema.get("coins", ()))),
        ):
            if f"<{place}>" in name:
                names = [tuple(x.replace(f"<{place}>", word) for x in pair) for pair in names for word in words]
        kind = kind.replace("float", schema.get("dtype", "float32")) if kind == "float" else kind
        fields |= {n: ([a.strip() for a in x.split(",") if a.strip()], kind) for n, x in names}
    attributes = re.findall(r"^\| `(\w+)` \| (?:string|integer|2 integers) \|", text, re.MULTILINE)
    return fields, attributes


@pytest.mark.parametrize("base", [EVERYTHING, SMALL])
def test_the_documentation_lists_exactly_what_is_there(create, tmp_path, base):
    create(base).close()
    fields, attributes = documented(base)
    if base is SMALL:  # what the documentation calls conditional
        for name in ("class", "class_counts", "n_classes"):
            del fields[f"/clients/{name}"]
        for metric in SMALL["metrics"]:
            del fields[f"/rounds/participants_test_{metric}"]
            for name in ("mean", "std"):
                del fields[f"/final/participants_test_{metric}_{name}"]
        for name in ("personal", "global", "client", "parameter"):
            del fields[f"/final/models/{name}"]
        for name in ("evaluation", "client", "global/estimation_error"):
            del fields[f"/per_client/{name}"]
        for name in ("mean", "std"):
            del fields[f"/final/global_estimation_error_{name}"]
        for name in ("global_rounds", "cluster_rounds", "mean_rounds", "cluster"):
            del fields[f"/final/{name}"]
        del fields["/evaluations/global_estimation_error"]
    found = {}

    def note(name, _):
        if isinstance(file[name], h5py.Dataset):
            axes = [dim[0].name.rpartition("/")[2] for dim in file[name].dims if len(dim)]
            axes = axes or ([name.rpartition("/")[2]] if file[name].is_scale else [])
            found[f"/{name}"] = (axes, "string" if file[name].dtype.kind == "S" else file[name].dtype.name)

    with h5py.File(tmp_path / "results.h5") as file:
        file.visititems_links(note)
        assert sorted(file.attrs) == sorted([*attributes, "job"])
    assert found == fields
    assert f"version {FORMAT_VERSION[0]}.{FORMAT_VERSION[1]}**" in (ROOT / "results" / "README.md").read_text()


def test_an_existing_file_is_never_overwritten(create, tmp_path):
    create(SMALL).close()
    before = (tmp_path / "results.h5").read_bytes()
    with pytest.raises(RunError, match="exists already"):
        create(SMALL)
    assert (tmp_path / "results.h5").read_bytes() == before


def test_reserved_attributes_and_wrong_schemas_are_refused(tmp_path):
    code = """
import numpy as np, sys
from pathlib import Path
from hpcfl.results import ResultsWriter, Schema
from results_example import SMALL, clients
schema = Schema(**SMALL)
try:
    ResultsWriter.create(Path(sys.argv[1]), schema, clients=clients(schema), config="", attributes={"status": "x"})
except ValueError as error:
    print(error)
for wrong in ({"models": ("mine",)}, {"splits": ("train",)}, {"metrics": ()}, {"exposed": ("client",)}):
    try:
        Schema(**SMALL | wrong)
    except ValueError as error:
        print(error)
print("torch" in sys.modules, "mpi4py" in sys.modules)
"""
    out = python(code, tmp_path / "results.h5").stdout.splitlines()
    assert out[0] == "attributes ['status']: written by the results file itself"
    assert [line.partition(" =")[0] for line in out[1:5]] == [
        f"Schema.{n}" for n in ("models", "splits", "metrics", "exposed")
    ]
    assert out[5] == "False False"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_with_path_and_reason_and_leaves_nothing_half_made(tmp_path):
    # A limit on the size of files stands in for the full disk; the prints go to a pipe, where there is no limit.
    code = """
import numpy as np, os, resource, sys
from pathlib import Path
from hpcfl.errors import RunError
from hpcfl.results import ResultsWriter, Schema
from results_example import SMALL, clients, rows, values
path, schema = Path(sys.argv[1]), Schema(**SMALL)
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
def attempt(work):
    try:
        return work()
    except RunError as error:
        print(error)
def create():
    return ResultsWriter.create(path, schema, clients=clients(schema), config="", attributes={})
limit(20_000)
attempt(create)
print(os.listdir(path.parent))
limit(resource.RLIM_INFINITY)
writer = create()
writer.rounds(0, rows(SMALL, 0, 2))
limit(10)
attempt(lambda: writer.rounds(2, rows(SMALL, 2, 2)))
attempt(lambda: writer.evaluation(0, 2, 0.0, values(SMALL)))
attempt(lambda: writer.status("failed:disk"))
attempt(writer.close)
limit(resource.RLIM_INFINITY)
"""
    done = python(code, tmp_path / "results.h5")
    assert done.returncode == 0, done.stderr  # a failed close must not crash the interpreter's exit either
    lines = done.stdout.splitlines()
    assert lines[0] == f"{tmp_path / 'results.h5'}: cannot write the results: File too large"
    assert lines[1] == "[]"
    assert lines[2:4] == [lines[0]] * 2
    with h5py.File(tmp_path / "results.h5", "r", swmr=True) as file:
        assert (file.attrs["rounds_done"], file.attrs["evaluations_done"]) == (2, 0)
        assert list(file["rounds/bytes_up"][:2]) == [0, 4]


def python(code, *args):
    search = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": search}, capture_output=True, text=True, timeout=120
    )
