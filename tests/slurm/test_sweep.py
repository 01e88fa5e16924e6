"""hpcfl sweep without SLURM: the folder, running here, and what is told of members in every state."""

from __future__ import annotations

import csv
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hpcfl import results_file
from hpcfl.algorithms.fedavg import FedAvg
from hpcfl.cli import main
from hpcfl.config import load
from hpcfl.results import ResultsWriter, Schema
from hpcfl.results_folder import new_run_folder
from hpcfl.states import newest_results, states
from hpcfl.sweep import STOPPED, Sweep, member_name, parse_axis, run_here

ROOT = Path(__file__).resolve().parents[2]
JOB = str(ROOT / "jobs/quickstart/apfl.toml")


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("algorithm.lr=0.01, 1e-1", ("algorithm.lr", ["0.01", "1e-1"])),
        ("model.hidden=[8],[8, 4]", ("model.hidden", ["[8]", "[8, 4]"])),
        ("algorithm={name='a,b', x=[1,2]},{name=\"c\"}", ("algorithm", ["{name='a,b', x=[1,2]}", '{name="c"}'])),
    ],
)
def test_axis(text, axis):
    assert parse_axis(text) == axis


@pytest.mark.parametrize("text", ["algorithm.lr", "algorithm.lr=", "=1,2", "algorithm.lr=1,,2", "algorithm.lr=1,"])
def test_no_axis(text, capsys):
    assert main(["sweep", JOB, "--grid", text]) == 2
    assert f'--grid "{text}": expected part.key=value,value' in capsys.readouterr().err


def test_member_names():
    assert member_name(3, {"algorithm.lr": "0.1", "model.hidden": "[8, 4]"}) == "003-lr=0.1-hidden=8_4"
    assert member_name(12345, {"a.b.lr": "1", "a.c.lr": "2"}) == "12345-a.b.lr=1-a.c.lr=2"
    assert member_name(0, {}) == "000"
    assert len(member_name(0, {"a.b": "x" * 500})) == 100


def test_making(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.py").touch()
    given = ["--grid", "algorithm.lr=0.01,0.1", "--seeds", "2", "--set", "run.rounds=7", "--plugin", "p.py"]
    assert main(["sweep", JOB, *given, "--set", "run.out=here"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"sweep: {tmp_path}/here/apfl-sweep-001, 4 members\n")
    assert out.count(f"--plugin {tmp_path}/p.py --resume") == 4
    sweep = Sweep.open(tmp_path / "here/apfl-sweep-001")
    assert [member.changes for member in sweep.members] == [
        {"algorithm.lr": lr, "run.seed": seed} for lr in ("0.01", "0.1") for seed in ("1", "2")
    ]
    assert (sweep.directory, sweep.plugins) == (tmp_path, (str(tmp_path / "p.py"),))
    for member in sweep.members:  # each job file is the whole job
        changes = [f"{key}={value}" for key, value in {**member.changes, "run.rounds": 7}.items()]
        assert load(sweep.job_file(member)).text == load(Path(JOB), [*changes, "run.out=here/apfl-sweep-001"]).text
    assert main(["sweep", JOB, "--set", "run.out=here"]) == 0
    assert (tmp_path / "here/apfl-sweep-002/000.toml").exists()


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([JOB, "--grid", "algorithm.lr=0.1,-1"], "algorithm.lr"),
        ([JOB, "--grid", "run.seed=1,2", "--seeds", "2"], "run.seed: given twice"),
        ([JOB, "--grid", "algorithm.lr=0.1,0.10"], "members 000-lr=0.1 and 001-lr=0.10 would be the same run"),
        ([JOB, "--grid", "run.out=a,b"], "run.out: all members of a sweep write into its own folder"),
        ([JOB, "--grid", "run.block=1,2", "--seeds", "9000"], "a sweep of 18,000 members; expected at most 10,000"),
        ([JOB, "--submit", "--local"], "give one of the two"),
        ([JOB, "--submit", "--ranks", "2"], "--ranks is for --local"),
        ([JOB, "--time", "10"], "--time is for --submit"),
        ([JOB, "--local", "--", "--qos=high"], "--qos is for --submit"),
        ([JOB, "--local", "--dry-run"], "--dry-run is for --submit"),
        ([JOB, "--seeds", "0"], "--seeds"),
        ([JOB, "--out", str(ROOT)], "is not empty"),
        (["nowhere.toml"], "nowhere.toml: no such job file"),
        (["status", str(ROOT)], "sweep.toml: No such file or directory; expected the folder of a sweep"),
        (["missing", "nowhere", "--local"], "nowhere/sweep.toml: No such file"),
    ],
)
def test_wrong_use(args, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *args]) == 2
    assert text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["x", "job = 3", "[[member]]", 'job = "j"\nmember = 3\nsbatch = {}'])
def test_damaged_list(text, capsys, tmp_path):
    (tmp_path / "sweep.toml").write_text(text)
    assert main(["sweep", "status", str(tmp_path)]) == 2
    assert "sweep.toml: not the list of a sweep" in capsys.readouterr().err


def test_script_of_an_array(tmp_path, capsys):
    given = ["--seeds", "5", "--out", str(tmp_path / "s"), "--submit", "--dry-run", "--parallel", "2", "--mem", "4G"]
    assert main(["sweep", JOB, *given]) == 0
    out = capsys.readouterr().out
    assert out.startswith("#!/bin/bash\n")
    for line in ("array=0-4%2", "mem=4G", "job-name=s", "ntasks=1", f"output={tmp_path}/s/log-%A_%a.out"):
        assert f"#SBATCH --{line}\n" in out
    assert f"\nset -- {tmp_path}/s\n" in out
    again = ["missing", str(tmp_path / "s"), "--submit", "--dry-run", "--ntasks=2", "--launcher", "srun"]
    assert main(["sweep", *again]) == 0
    out = capsys.readouterr().out
    for line in ("array=0-4", "mem=4G", "ntasks=2"):
        assert f"#SBATCH --{line}\n" in out
    assert "export HPCFL_GIVEN_LAUNCHER=srun\n" in out


def results(folder: Path, name: str, status: str, evaluated: bool = True, planned: int = 20) -> Path:
    """A results file of a run, 10 rounds done, with this status; without an evaluation /final stays empty, too."""
    schema = Schema(2, planned, 2, 1, 1, 2, ("personal",), ("train", "test"), ("loss", "accuracy"))
    clients = {"id": np.arange(2), "cluster": np.zeros(2, int), "n_train": np.full(2, 5), "n_test": np.full(2, 5)}
    path = new_run_folder(folder, name) / "results.h5"
    writer = ResultsWriter.create(
        path, schema, clients=clients | {"class_counts": np.zeros((2, 2), int)}, config="[run]\n", attributes={}
    )
    columns = (
        "n_participants",
        "seconds",
        "train_loss",
        "kind",
        "vectors_up",
        "vectors_down",
        "bytes_up",
        "bytes_down",
    )
    writer.rounds(0, {name: np.ones(10) for name in (*columns, "forward_passes", "backward_passes")})
    if evaluated:
        keys = [f"personal/{split}_{metric}" for split in schema.splits for metric in schema.metrics]
        writer.evaluation(0, 10, 0.1, {key: np.array([0.5, 1.0]) for key in keys})
        writer.final()
    writer.status(status)
    writer.close()
    return path


@pytest.fixture
def sweep(tmp_path, monkeypatch) -> Sweep:
    """A sweep whose members 0 to 8 are in every state there is."""
    folder = tmp_path / "s"
    assert main(["sweep", JOB, "--seeds", "9", "--out", str(folder)]) == 0
    made = Sweep.open(folder)
    names = [member.name for member in made.members]
    results(folder, names[0], "failed:old")
    results(folder, names[0], "done")  # the newest counts
    results(folder, names[1], "running")
    gone = subprocess.Popen(["true"])
    gone.wait()
    with monkeypatch.context() as other:
        other.setattr(os, "getpid", lambda: gone.pid)
        results(folder, names[2], "running")
    results(folder, names[3], "stopped:walltime", evaluated=False)
    results(folder, names[4], "failed:diverged")
    with monkeypatch.context() as other:
        other.setattr(results_file.socket, "gethostname", lambda: "elsewhere")
        results(folder, names[5], "running")
    damaged = new_run_folder(folder, names[6]) / "results.h5"
    damaged.write_bytes(b"x" * 5000)
    new_run_folder(folder, names[7])
    return made


WORDS = ["done", "running", "killed", "stopped", "failed", "running", "failed", "pending", "pending"]


def test_states(sweep):
    found = states(sweep)
    assert [state.word for state in found] == WORDS
    assert [state.member.number for state in found if state.missing] == [2, 3, 4, 6, 7, 8]
    assert found[0].rounds == "10/20"
    assert found[0].metric == "personal test accuracy 0.7500"
    assert found[0].results == newest_results(sweep.folder, sweep.members[0].name)
    assert "is gone; last written" in found[2].why
    assert (found[3].why, found[3].metric) == ("walltime", "")
    assert found[4].why == "diverged"
    assert found[5].why.startswith("on elsewhere, last written")
    assert "not an HDF5 file" in found[6].why


def test_states_with_a_queue(sweep, tmp_path, monkeypatch):
    """Members 1, 4, 5, 7, 8 were submitted; of these 4, 5 (again), 7 are still in the queue."""
    (sweep.folder / "submissions.txt").write_text("30 4 5\n31 1 2 5 7 8\n")
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\nprintf "30_4 PENDING\\n31_7 RUNNING\\n31_5 RUNNING\\n9 RUNNING\\n"\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = states(sweep)
    words = ["done", "running", "killed", "stopped", "pending", "running", "failed", "running", "failed"]
    assert [state.word for state in found] == words
    assert found[4].why == "job 30_4, PENDING; before: failed diverged"
    assert found[8].why == "job 31_8 left no results; see its log"
    assert [state.member.number for state in found if state.missing] == [2, 3, 6, 8]
    squeue.write_text("#!/bin/sh\n")
    found = states(sweep)
    assert found[5].word == "killed"  # the process on the other host is not in the queue any more
    assert found[1].word == "running"  # this one is here, and alive


def test_status_missing_collect(sweep, tmp_path, capsys):
    capsys.readouterr()
    assert main(["sweep", "status", str(sweep.folder)]) == 0
    out = capsys.readouterr().out
    assert "1 done, 2 running, 2 pending, 1 stopped, 2 failed, 1 killed" in out
    assert "004-seed=5" in out
    assert main(["sweep", "missing", str(sweep.folder)]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        sweep.members[k].name for k in (2, 3, 4, 6, 7, 8)
    ]
    assert main(["sweep", "collect", str(sweep.folder), "-o", str(tmp_path / "all.csv")]) == 0
    with (tmp_path / "all.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == WORDS
    assert [row["run.seed"] for row in rows] == [str(seed) for seed in range(1, 10)]
    assert [row["personal_test_accuracy_mean"] for row in rows] == [
        "0.75",
        "0.75",
        "0.75",
        "",
        "0.75",
        "0.75",
        "",
        "",
        "",
    ]
    assert rows[0]["rounds"] == "10"
    assert main(["sweep", "collect", str(sweep.folder), "-o", str(tmp_path)]) == 2
    capsys.readouterr()
    assert main(["sweep", "collect", str(sweep.folder)]) == 0
    assert capsys.readouterr().out == (tmp_path / "all.csv").read_text()


LIGHT = """
import sys
from hpcfl.cli import main
folder = sys.argv[1]
for command in ("status", "missing", "missing --submit --dry-run", "collect"):
    name, *options = command.split()
    assert main(["sweep", name, folder, *options]) == 0, command
assert main(["status", sys.argv[2]]) == 1
assert not {"torch", "torchvision", "mpi4py.MPI"} & set(sys.modules)
print("light")
"""


def test_no_torch(sweep, tmp_path):
    command = [sys.executable, "-c", LIGHT, str(sweep.folder), JOB]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("light\n")


def test_running_here(launch, tmp_path, capfd, monkeypatch):
    """Of two members one fails, on two ranks; ``missing`` runs it again when its reason is gone."""
    monkeypatch.setattr(FedAvg, "round", FedAvg.round)  # which the plug-in replaces in this process, too
    plugin = tmp_path / "p.py"
    plugin.write_text(
        "import pathlib\n"
        "if not (pathlib.Path(__file__).parent / 'repaired').exists():\n"
        "    from hpcfl.algorithms.fedavg import FedAvg\n"
        "    plain = FedAvg.round\n"
        "    def fails(self, state, r):\n"
        "        if self.lr == 0.2:\n"
        "            raise ValueError('no such luck')\n"
        "        return plain(self, state, r)\n"
        "    FedAvg.round = fails\n"
    )
    given = ["--grid", "algorithm.lr=0.1,0.2", "--set", "run.rounds=2", "--plugin", str(plugin)]
    job = str(ROOT / "jobs/quickstart/fedavg.toml")
    assert main(["sweep", job, *given, "--out", str(tmp_path / "s"), "--local", "--ranks", "2"]) == 1
    assert "1 of 2 members done" in capfd.readouterr().out
    sweep = Sweep.open(tmp_path / "s")
    assert [state.word for state in states(sweep)] == ["done", "failed"]
    assert "no such luck" in states(sweep)[1].why
    (tmp_path / "repaired").touch()
    assert main(["sweep", "missing", str(tmp_path / "s"), "--local"]) == 0
    assert [state.word for state in states(sweep)] == ["done"] * 2
    assert main(["sweep", "missing", str(tmp_path / "s"), "--local"]) == 0
    assert "none is missing" in capfd.readouterr().out


@pytest.mark.parametrize("end", [f"exit {STOPPED}", "kill -USR1 $PPID; while :; do sleep 0.05; done"])
def test_stopped_here(sweep, monkeypatch, tmp_path, end):
    """A member that stops early ends the sweep; a SIGUSR1 to the sweep stops its member."""
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/bash\ntrap "exit {STOPPED}" USR1\necho "$*" >>{tmp_path}/calls\n{end}\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    assert run_here(sweep, [2, 3], None) == STOPPED
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call == f"-m hpcfl run {sweep.folder}/002-seed=3.toml --out {sweep.folder} --resume"


def test_ctrl_c_here(tmp_path):
    """The terminal sends it to the member, too, which gets the time to stop with a checkpoint."""
    (tmp_path / "python").write_text(
        f"#!/bin/bash\ntrap 'sleep 0.7; exit {STOPPED}' INT\ntrap 'exit 9' TERM\ntouch {tmp_path}/up\n"
        "while :; do sleep 0.05; done\n"
    )
    (tmp_path / "python").chmod(0o755)
    assert main(["sweep", JOB, "--seeds", "2", "--out", str(tmp_path / "s")]) == 0
    text = (
        f"import sys; from pathlib import Path; from hpcfl.sweep import Sweep, run_here; "
        f"sys.executable = '{tmp_path}/python'; sys.exit(run_here(Sweep.open(Path('{tmp_path}/s')), [0, 1], None))"
    )
    process = subprocess.Popen([sys.executable, "-c", text], start_new_session=True, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "up").exists() and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == STOPPED, out
    assert f"stopped; hpcfl sweep missing {tmp_path}/s --local goes on" in out


def test_a_folder_in_the_home_and_names_beyond_the_basic_plane(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["sweep", JOB, "--grid", "run.scratch=𝄞,b", "--out", "~/𝄞"]) == 0
    sweep = Sweep.open(tmp_path / "𝄞")
    assert sweep.members[0].changes == {"run.scratch": "𝄞"}
    (sweep.folder / "submissions.txt").write_text("12 0\n13\n")
    capsys.readouterr()
    assert main(["sweep", "status", str(sweep.folder)]) == 2
    assert 'submissions.txt: "13": expected the number of a SLURM job' in capsys.readouterr().err


def test_commands_of_the_readme(tmp_path, monkeypatch, capsys):
    """They are as they should be; none is submitted or run here."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shutil.copy(JOB, "my.toml")
    section = (ROOT / "README.md").read_text().partition("## On a cluster\n")[2].partition("\n## ")[0]
    commands = [shlex.split(line, comments=True)[1:] for line in section.splitlines() if line.startswith("hpcfl ")]
    assert [command[0] for command in commands] == ["submit"] + ["sweep"] * 4
    ran = list[int]()
    monkeypatch.setattr("hpcfl.sweep.run_here", lambda made, numbers, ranks: ran.extend([*numbers, ranks]) or 0)
    for command in commands:
        assert main([*command, *(["--dry-run"] if "--submit" in command else [])]) == 0, command
    assert ran == [0, 1, 2, 3, 4, 5, 2]
    assert capsys.readouterr().out.count("#!/bin/bash\n") == 2
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 7
