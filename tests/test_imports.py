"""The layers of the package, by parsing its imports, and what the light commands may not import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import pytest

import hpcfl
from hpcfl.results import ResultsWriter, Schema

PACKAGE = Path(hpcfl.__file__).parent

LAYERS = [  # a module imports only from its own layer or an earlier one
    "errors rng options registry vectors splits duration signals launcher names",
    "comm reduce",
    "placement topology group on_demand task split head network dense losses batch device dropout gradient",
    "algorithm schedules server members block rows store engine round averages models data partition",
    "algorithms theory known_clusters personal_heads quadratics",
    "coordinator agenda evaluate checkpoint record results results_file results_folder results_means results_open "
    "results_resume results_schema",
    "config",
    "build keeper start run",
    "session cli cli_options cli_sweep catalogue doctor probe analysis forecast slurm states submit sweep __main__",
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names.split()}
FILES = {
    ".".join(["hpcfl", *file.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__"): file
    for file in sorted(PACKAGE.rglob("*.py"))
}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below this one, but what is for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from (other, *statements(other))
        else:
            yield from (child, *statements(child))


def imports(module: str) -> set[str]:
    """Full names of the modules that a module imports, inside functions, too."""
    found = set()
    for node in statements(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {part if part in FILES else str(node.module) for part in parts}
    return found


IMPORTS = {module: imports(module) for module in FILES}


def inside(module: str) -> set[str]:
    return {name for name in IMPORTS[module] if name.split(".")[0] == "hpcfl"}


def layer(module: str) -> int:
    parts = module.split(".")
    return 0 if len(parts) == 1 else LAYER[parts[1]]  # the package itself holds the version only


@pytest.mark.parametrize("module", FILES)
def test_layers(module):
    assert len(module.split(".")) == 1 or module.split(".")[1] in LAYER, (
        f"{module} has no layer: see DESIGN.md, section 2"
    )
    assert [name for name in sorted(inside(module)) if name not in FILES] == []
    assert [name for name in sorted(inside(module)) if layer(name) > layer(module)] == []


def test_no_cycles():
    order = list(TopologicalSorter({module: inside(module) for module in FILES}).static_order())
    assert set(order) == set(FILES)


def test_the_parser_sees_imports():
    assert "hpcfl.rng" in inside("hpcfl.coordinator")
    assert "hpcfl.session" in inside("hpcfl.cli")  # inside a function
    assert "hpcfl.block" not in inside("hpcfl.algorithm")  # for type checkers alone
    assert "mpi4py" in IMPORTS["hpcfl.comm"]


def test_only_comm_imports_mpi():
    users = {module for module in FILES if any(name.split(".")[0] == "mpi4py" for name in IMPORTS[module])}
    assert users == {"hpcfl.comm"}


def opens_for_writing(call: ast.Call) -> bool:
    """h5py.File(...) with a mode other than the constant "r", or the low-level calls that make files or datasets."""
    name = ast.unparse(call.func)
    if name in ("h5py.File", "File"):
        modes = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "mode")]
        return not (len(modes) == 1 and isinstance(modes[0], ast.Constant) and modes[0].value == "r")
    return name.startswith(("h5py.h5f.", "h5py.h5d.")) or name.endswith((".create_dataset", ".create_group"))


def test_only_results_write_hdf5():
    users = {
        module
        for module, file in FILES.items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and opens_for_writing(node)
    }
    assert users
    assert all(module.startswith(("hpcfl.results", "hpcfl.checkpoint")) for module in users), users


LIGHT = """
import sys
from hpcfl.cli import main
folder = sys.argv[1]
for command in (["--help"], ["run", "--help"], ["show", folder], ["plot", folder, "-o", folder + "/x.png"]):
    assert main(command) == 0, command
    assert not {"torch", "torchvision", "mpi4py.MPI"} & set(sys.modules), command
    assert ("matplotlib" in sys.modules) == (command[0] == "plot"), command
print("light")
"""


def test_light_commands_do_not_import_torch(tmp_path):
    schema = Schema(2, 1, 1, 1, 1, 3, ("personal",), ("train", "test"), ("loss", "accuracy"))
    clients = {"id": np.arange(2), "cluster": np.zeros(2, int), "n_train": np.full(2, 5), "n_test": np.full(2, 5)}
    clients["class_counts"] = np.zeros((2, 3), int)
    writer = ResultsWriter.create(tmp_path / "results.h5", schema, clients=clients, config="[run]\n", attributes={})
    keys = [f"personal/{split}_{metric}" for split in schema.splits for metric in schema.metrics]
    writer.evaluation(0, 1, 0.1, {key: np.full(2, 0.5) for key in keys})
    writer.final()
    writer.status("done")
    writer.close()
    done = subprocess.run([sys.executable, "-c", LIGHT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("light\n")
    assert (tmp_path / "x.png").stat().st_size > 0
