"""hpcfl submit without SLURM: what the script becomes, and what is refused before it is handed over."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from hpcfl import slurm
from hpcfl.cli import main
from hpcfl.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
JOB = str(ROOT / "jobs/quickstart/apfl.toml")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """No site file, no SLURM of this machine, results in a folder of our own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HPCFL_SITE", raising=False)
    monkeypatch.chdir(tmp_path)


def printed(capsys, *args: str) -> tuple[dict[str, str | None], str]:
    """The #SBATCH options and the text of the script that would be submitted."""
    assert main(["submit", JOB, "--dry-run", *args]) == 0
    text = capsys.readouterr().out
    return slurm.directives(text, "script"), text


def test_defaults(capsys):
    options, text = printed(capsys)
    assert options == {
        "job-name": "apfl",
        "ntasks": "8",
        "cpus-per-task": "1",
        "time": "01:00:00",
        "signal": "B:USR1@120",
        "requeue": None,
        "open-mode": "append",
        "output": "%x-%j.out",
    }
    assert f"\nset -- {shlex.quote(JOB)}\n" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_options_and_arguments(capsys, tmp_path):
    (tmp_path / "p.py").touch()
    given = ["--nodes", "2", "--ntasks-per-node=4", "--gpus-per-node", "a100:4", "--set", "run.threads=2"]
    given += ["--plugin", "p.py", "--out", "o o", "--launcher", "srun --mpi=pmix", "--job-name", "my job"]
    options, text = printed(capsys, *given, "--", "--no-requeue", "--mail-type=END", "-w", "n1", "--exclusive", "-Aacc")
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "4", "a100:4")
    assert "ntasks" not in options
    assert "requeue" not in options
    assert options["cpus-per-task"] == "2"  # as the job's threads
    assert options["job-name"] == "my job"
    more = {"no-requeue": None, "mail-type": "END", "nodelist": "n1", "exclusive": None, "account": "acc"}
    assert options.items() >= more.items()
    assert f"\nset -- {shlex.quote(JOB)} --set run.threads=2 --plugin p.py --out 'o o'\n" in text
    assert "export HPCFL_GIVEN_LAUNCHER='srun --mpi=pmix'\n" in text


def test_site_file_is_between_script_and_command_line(capsys, tmp_path, monkeypatch):
    site = tmp_path / "site.sh"
    site.write_text("#SBATCH --account=lab --partition=cpu # ours\n#SBATCH -t 20\n#SBATCH --cpus-per-task=4\n")
    monkeypatch.setenv("HPCFL_SITE", "site.sh")
    options, text = printed(capsys, "--partition=gpu")
    assert [options[name] for name in ("account", "partition", "time", "cpus-per-task")] == ["lab", "gpu", "20", "4"]
    assert f"export HPCFL_SITE={site}\n" in text
    monkeypatch.setenv("HPCFL_SITE", "nowhere.sh")
    assert main(["submit", JOB, "--dry-run"]) == 2
    assert "HPCFL_SITE=nowhere.sh: no such file" in capsys.readouterr().err
    site.write_text("#SBATCH --comment='ours\n")
    monkeypatch.setenv("HPCFL_SITE", "site.sh")
    assert main(["submit", JOB, "--dry-run"]) == 2
    assert f"{site}: #SBATCH --comment='ours: No closing quotation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--set", "algorithm.lr=-1"], "algorithm.lr"),
        (["--plugin", "nowhere.py"], "nowhere.py: no such file"),
        (["--", "high"], '"high" is not an option of sbatch'),
        (["--nods", "3"], "--nods"),
    ],
)
def test_refused_before_submission(capsys, args, text):
    assert main(["submit", JOB, *args]) == 2
    assert text in capsys.readouterr().err


def test_no_slurm(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["submit", JOB]) == 2
    assert "sbatch not found: this machine has no SLURM" in capsys.readouterr().err


def test_what_sbatch_says_is_shown(capsys, monkeypatch, tmp_path):
    fake = tmp_path / "sbatch"
    fake.write_text('#!/bin/sh\ncat >script\necho "sbatch: error: invalid partition specified: x" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert main(["submit", JOB, "--partition", "x"]) == 2
    assert "sbatch refused the job: sbatch: error: invalid partition" in capsys.readouterr().err
    assert "#SBATCH --partition=x\n" in (tmp_path / "script").read_text()
    fake.write_text("#!/bin/sh\ncat >script\necho '12;cluster'\n")
    assert main(["submit", JOB, "--job-name", "x"]) == 0
    assert capsys.readouterr().out == "submitted job 12; log: x-12.out\n"


def test_done_already(capsys, tmp_path):
    short = ["--set", "run.rounds=1", "--out", str(tmp_path)]
    assert main(["status", JOB, *short]) == 1
    assert main(["run", JOB, *short]) == 0
    capsys.readouterr()
    assert main(["status", JOB, "--max-walltime", "2h", *short]) == 0
    assert capsys.readouterr().out.startswith(f"done in {tmp_path}/apfl-001/results.h5, written 20")
    assert main(["submit", JOB, "--dry-run", *short]) == 2
    assert (
        "apfl-001 is this job, and done already; for another run give another folder: --out" in capsys.readouterr().err
    )
    assert main(["submit", JOB, "--dry-run", *short, "--set", "run.rounds=2"]) == 0
    assert main(["submit", JOB, "--dry-run", *short, "--set", "run.seed=2"]) == 2
    err = capsys.readouterr().err
    assert "run.seed: was 1, is 2 now" in err
    assert "for another run give another folder: --out" in err


@pytest.mark.parametrize("words", [["x"], ["-"], ["--"], ["---a"], ["--A"], ["-zq"]])
def test_no_option_of_sbatch(words):
    with pytest.raises(InputError, match="is not an option of sbatch"):
        slurm.parse(words, "here")


@pytest.mark.parametrize(
    ("numbers", "at_once", "text"), [([5], None, "5"), ([2, 0, 1, 5], None, "0-2,5"), ([0, 1], 4, "0-1%4")]
)
def test_array(numbers, at_once, text):
    assert slurm.array(numbers, at_once) == text
