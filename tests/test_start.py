"""Going on with a run: what is refused, each in one clear line, and what may change."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from hpcfl import results_resume
from hpcfl.analysis.reader import Run
from hpcfl.results_folder import lock
from hpcfl.start import differences
from hpcfl.states import status

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "jobs/quickstart/local.toml"


@pytest.fixture
def run(hpcfl_here):
    return hpcfl_here


@pytest.fixture
def folder(run, tmp_path):
    """Of a run that is done."""
    code, errors, out = run()
    assert (code, errors) == (0, []), errors
    assert "checkpoints: 2 in" in out
    return tmp_path / "local-001"


def test_differences():
    before = {"run": {"rounds": 5, "seed": 1, "out": "a"}, "model": {"name": "mlp", "hidden": [3]}, "data": {}}
    assert differences(before, before, 5) == []
    free = {"out": "b", "state": "disk", "checkpoint_every": 3, "max_walltime": "1h", "on_rank_loss": "shrink"}
    assert differences(before, {**before, "run": before["run"] | free | {"rounds": 9, "scratch": "/x"}}, 5) == []
    assert differences(before, {**before, "data": {"root": "/x"}}, 5) == []
    changed = {"run": {"rounds": 4, "seed": 1}, "model": {"name": "mlp", "hidden": [4], "l2": 0.1}, "data": {}}
    assert differences(before, changed, 5) == [
        "model.hidden: was [3], is [4] now",
        "model.l2: was not given, is 0.1 now",
        "run.rounds: was 5 (5 are done), is 4 now; it may only be raised",
    ]


def test_another_configuration_is_refused_with_the_differences(run, folder):
    content = (folder / "results.h5").read_bytes()
    code, errors, _ = run("--resume", "algorithm.lr=0.2", "run.seed=7", "run.rounds=3")
    assert code == 2
    assert errors == [
        f"hpcfl: --resume: {folder} was started from another configuration; run without --resume for a new one",
        "hpcfl:   algorithm.lr: was 0.1, is 0.2 now",
        "hpcfl:   run.rounds: was 4 (4 are done), is 3 now; it may only be raised",
        "hpcfl:   run.seed: was 1, is 7 now",
    ]
    assert (folder / "results.h5").read_bytes() == content
    assert [entry.name for entry in folder.parent.iterdir()] == ["local-001"]


def test_a_run_that_is_done_stays_as_it_is_until_it_gets_more_rounds(run, folder):
    content = (folder / "results.h5").read_bytes()
    code, errors, out = run("--resume", "run.checkpoint_every=1")
    assert (code, errors) == (0, [])
    assert out == f"done already: {folder}/results.h5; raise run.rounds to go on\n"
    assert (folder / "results.h5").read_bytes() == content
    code, errors, out = run("--resume", "run.rounds=7", 'run.state="disk"', "run.checkpoint_every=1")
    assert (code, errors) == (0, [])
    assert f"results: {folder}/results.h5, going on after round 4\n" in out
    with Run(folder) as found:
        assert (found.rounds_done, found.evaluations_done, found.status) == (7, 4, "done")
        assert found.attributes["restarts"] == 1
    assert sorted(entry.name for entry in (folder / "checkpoints").iterdir()) == ["round-6", "round-7"]


def test_resume_without_anything_to_go_on_with_is_a_new_run(run, tmp_path):
    code, errors, out = run("--resume")
    assert (code, errors) == (0, [])
    assert f"results: {tmp_path}/local-001/results.h5\n" in out
    (tmp_path / "local-002").mkdir()  # of a run that was killed before it had results
    code, errors, out = run("--resume")
    assert (code, errors) == (0, [])
    assert f"results: {tmp_path}/local-002/results.h5, going on after round 0\n" in out


def test_without_checkpoints_a_run_goes_on_from_the_start(run, tmp_path):
    assert run('run.checkpoint_every="off"')[0] == 0
    assert not (tmp_path / "local-001/checkpoints").exists()
    code, errors, out = run("--resume", "run.rounds=5")
    assert (code, errors) == (0, [])
    assert "going on after round 0\n" in out
    with Run(tmp_path / "local-001") as found:
        assert (found.rounds_done, found.status) == (5, "done")


def test_a_folder_in_use_is_left_alone(run, folder):
    content = (folder / "results.h5").read_bytes()
    with lock(folder):
        code, errors, _ = run("--resume", "run.rounds=7")
    assert code == 1
    (line,) = errors
    assert line.startswith(f"hpcfl: {folder} is in use by process {os.getpid()} on host ")
    assert line.endswith("; wait until that run ends, or end it")
    assert (folder / "results.h5").read_bytes() == content
    assert run("--resume", "run.rounds=7")[0] == 0  # the file of a lock blocks nobody


@pytest.mark.parametrize(
    ("size", "code", "said"),
    [(1000, 2, "cut off after 1000 of "), (20, 2, "cannot be read"), (0, 2, "not an HDF5 file")],
)
def test_a_damaged_results_file_is_one_line(run, folder, size, code, said):
    os.truncate(folder / "results.h5", size)
    found, errors, _ = run("--resume", "run.rounds=7")
    assert (found, len(errors)) == (code, 1), errors
    assert errors[0].startswith(f"hpcfl: {folder}/results.h5: ")
    assert said in errors[0]


def test_damaged_checkpoints_are_told(run, folder):
    for name in ("round-4", "round-2"):
        (folder / f"checkpoints/{name}/shared.h5").unlink()
    code, errors, out = run("--resume", "run.rounds=5")
    assert code == 0
    assert errors == [
        f"hpcfl: {folder}/checkpoints/{name}: damaged checkpoint, not used: shared.h5 is missing"
        for name in ("round-4", "round-2")
    ]
    assert "going on after round 0\n" in out


def test_the_data_may_lie_elsewhere_but_be_no_others(run, tmp_path):
    def save(name, bump=0.0):
        x = np.linspace(-1, 1, 60 * 3).reshape(60, 3)
        x[17, 1] += bump
        np.savez(tmp_path / name, x=x, y=np.arange(60) % 2, client=np.arange(60) % 4)
        return ['data={name="file", path="%s"}' % (tmp_path / f"{name}.npz"), 'partition={name="natural"}']

    here, moved, other = save("here"), save("moved"), save("other", 1e-9)
    assert run(*here)[0] == 0
    assert run(*here, "run.rounds=7", out="undisturbed")[0] == 0
    code, errors, _ = run(*other, "--resume", "run.rounds=7")
    assert (code, len(errors)) == (2, 1)
    assert "the data have changed since this run began: data_sha256 was " in errors[0]
    assert run(*moved, "--resume", "run.rounds=7")[0] == 0
    rows = []
    for folder in ("local-001", "undisturbed/local-001"):
        with Run(tmp_path / folder) as found:
            assert "path" in found.config["data"]
            rows.append(found.read("/per_client/personal/test_loss"))
    assert np.array_equal(*rows)


def test_data_beyond_float32(run, tmp_path):
    for name, x, y in (("x", 1e39, 0.5), ("y", 0.5, -1e39)):
        np.savez(tmp_path / "d", x=np.full((8, 2), x), y=np.full(8, y), client=np.arange(8) % 2)
        data = [f'data={{name="file", path="{tmp_path}/d.npz"}}', 'partition={name="natural"}', 'model={name="linear"}']
        code, errors, _ = run(*data)
        assert code == 2
        assert errors == [
            f'hpcfl: data: {name} has values beyond those of float32; scale them, or give run.dtype = "float64"'
        ]
        assert not (tmp_path / "local-001").exists()


def test_results_in_the_home_folder(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run("--out=~/mine")[0] == 0
    code, errors, out = run("--out=~/mine", "--resume", "run.rounds=5")
    assert (code, errors) == (0, [])
    assert f"results: {tmp_path}/mine/local-001/results.h5, going on after round 4" in out
    (error,) = run("--out=~nobody-of-this-name/x")[1]
    assert error.endswith("there is no such user, whose home folder it would be in")
    assert status(JOB, [], "~/mine") == (
        0,
        f"done in {tmp_path}/mine/local-001/results.h5, written {written(tmp_path)}",
    )


def written(folder: Path) -> str:
    with Run(folder / "mine/local-001") as found:
        return found.attributes["updated"]


def test_a_job_without_a_table_has_a_status(tmp_path):
    (tmp_path / "odd.toml").write_text("run = 5\n")
    assert status(tmp_path / "odd.toml", [], None)[0] == 1


def test_without_git(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run()[0] == 0
    with Run(tmp_path / "local-001") as found:
        assert found.attributes["git_commit"] == ""


def test_a_folder_whose_name_is_beyond_the_basic_plane(run, tmp_path):
    assert run(out="𝄞")[0] == 0
    assert (tmp_path / "𝄞/local-001/results.h5").exists()


def test_a_kill_while_a_run_that_was_done_is_made_longer(run, folder, monkeypatch):
    """The longer file is there, nothing else has happened: it is not done."""
    with monkeypatch.context() as patch:
        patch.setattr(results_resume.making, "open_to_write", lambda path: 1 / 0)
        assert run("--resume", "run.rounds=7")[0] == 1
    with Run(folder) as found:
        assert (found.status, found.rounds_done, len(found.file["/rounds/round"])) == ("running", 4, 7)
    code, errors, out = run("--resume", "run.rounds=7")
    assert (code, errors) == (0, [])
    assert "going on after round 4\n" in out
    with Run(folder) as found:
        assert (found.status, found.rounds_done) == ("done", 7)


def test_a_scratch_folder_that_is_not_there(run, tmp_path):
    code, errors, _ = run('run.state="disk"', f'run.scratch="{tmp_path}/nowhere"')
    assert (code, len(errors)) in ((1, 1), (2, 1))
    assert f"{tmp_path}/nowhere" in errors[0]


def test_an_out_that_is_a_file(run, tmp_path):
    (tmp_path / "file").write_text("")
    for options in ((), ("--resume",)):
        code, errors, _ = run(f'run.out="{tmp_path}/file"', f"--out={tmp_path}/file", *options)
        assert (code, len(errors)) == (2, 1), errors
        assert errors[0].startswith(f"hpcfl: out = {tmp_path}/file: cannot ")
        assert errors[0].endswith("choose another with --out")


def test_going_on_without_a_rank_needs_ranks(run, tmp_path):
    code, errors, _ = run('run.on_rank_loss="shrink"')
    assert code == 2
    (line,) = errors
    assert line.startswith('hpcfl: run.on_rank_loss = "shrink": ')
    assert "mpirun --with-ft ulfm" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--max-walltime=soon",), 'run.max_walltime = "soon": expected a length of time'),
        (('run.checkpoint_every="often"',), 'run.checkpoint_every = "often": expected a length of time'),
        (("run.checkpoint_every=0",), "run.checkpoint_every"),
        (("--stop-signal=KILL",), '--stop-signal "KILL": expected one of USR1, USR2, HUP'),
    ],
)
def test_wrong_options_are_one_line(run, tmp_path, given, said):
    code, errors, _ = run(*given)
    assert (code, len(errors)) == (2, 1), errors
    assert said in errors[0]
    assert list(tmp_path.iterdir()) == []
