"""What dies takes nothing with it that is needed, and leaves nothing behind: launchers, memory, disks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from same import assert_same
from test_failures import FAILING, LONG, ranks_of, started

from hpcfl.analysis.reader import Run
from hpcfl.results_folder import lock

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "jobs/quickstart/local.toml"

OUT_OF_MEMORY = FAILING.replace(
    'ValueError("no luck today")', 'MemoryError("out of memory: 3 TB for a client\'s data")'
)

# The settings of a process that may write no file of more bytes than the first argument says.
LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), resource.RLIM_INFINITY))
sys.argv[0] = "hpcfl"
runpy.run_module("hpcfl", run_name="__main__")
"""


def alive(pid: int) -> bool:
    """Whether a process runs; one that is over, but not waited for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_killed_launcher_leaves_no_ranks_and_no_lock(start, hpcfl, tmp_path):
    process, file = started(start, 3, tmp_path)
    ranks = [*ranks_of(process)]
    assert len(ranks) >= 3
    with pytest.raises(Exception, match=r"is in use by process \d+ on host"):
        lock(file.parent)
    process.kill()
    end = time.monotonic() + 3
    while any(map(alive, ranks)) and time.monotonic() < end:
        time.sleep(0.02)
    assert [pid for pid in ranks if alive(pid)] == []
    with Run(file) as run:
        assert run.stale
        done = run.rounds_done
    lock(file.parent).close()
    more = hpcfl("run", JOB, "--out", tmp_path, *LONG, "--resume", "--max-walltime", "1s")
    assert more.returncode in (1, 75), more.stderr  # 1: it had no checkpoint yet
    assert "going on after round" in more.stdout
    with Run(file) as run:
        assert run.status == "stopped:walltime"
        assert run.rounds_done >= done


def test_a_rank_without_memory_ends_the_job_with_one_cause(start, tmp_path):
    (tmp_path / "plugin.py").write_text(OUT_OF_MEMORY)
    args = ["-m", "hpcfl", "run", JOB, "--out", tmp_path, "--plugin", tmp_path / "plugin.py", *LONG]
    process = start(3, *args, "--set", 'algorithm.name="failing"')
    report = None
    while report is None and process.poll() is None:
        time.sleep(0.05)
        report = next(tmp_path.glob("local-001/error-rank*.txt"), None)
    noticed = time.monotonic()
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - noticed < 10
    assert process.returncode == 1
    said = [line for line in errors.splitlines() if "hpcfl:" in line]
    assert len(said) == 1, errors
    assert "MemoryError: out of memory: 3 TB for a client's data (round 2, clients" in said[0]
    with Run(tmp_path / "local-001") as run:
        assert run.status.startswith("failed:")
        assert "MemoryError" in run.status


def test_a_full_disk_costs_a_checkpoint_not_the_run(launch, hpcfl, tmp_path):
    """A limit on the size of files stands in for it: more than the results have, less than a checkpoint."""
    changes = ["--set", "run.eval_every=4", "--set", "run.checkpoint_every=3", "--set", "run.rounds={}"]

    def given(rounds, out=tmp_path):
        return [JOB, "--out", out, *(word.format(rounds) for word in changes)]

    assert hpcfl("run", *given(6)).returncode == 0
    folder = tmp_path / "local-001"
    limit = (folder / "results.h5").stat().st_size + 100_000
    largest = max(file.stat().st_size for file in (folder / "checkpoints/round-6").iterdir())
    assert largest > limit
    done = launch(None, "-c", LIMITED, str(limit), "run", *given(12), "--resume")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("hpcfl:")]
    assert [line.partition(": ")[2].partition(",")[0] for line in said] == [
        "no checkpoint after round 9",
        "no checkpoint after round 12",
    ]
    for line in said:
        assert "the run goes on without: " in line
        assert line.endswith("cannot write the checkpoint: File too large")
    assert sorted(entry.name for entry in (folder / "checkpoints").iterdir()) == ["round-3", "round-6"]
    more = launch(2, "-m", "hpcfl", "run", *given(15), "--resume")
    assert more.returncode == 0, more.stderr
    assert "going on after round 6\n" in more.stdout
    assert sorted(entry.name for entry in (folder / "checkpoints").iterdir()) == ["round-12", "round-15"]
    undisturbed = hpcfl("run", *given(15, tmp_path / "undisturbed"))
    assert undisturbed.returncode == 0
    assert_same(tmp_path / "undisturbed/local-001/results.h5", folder / "results.h5")


def test_shrinking_without_fault_tolerance_is_refused(launch, tmp_path):
    done = launch(2, "-m", "hpcfl", "run", JOB, "--out", tmp_path, "--set", 'run.on_rank_loss="shrink"')
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("hpcfl:")]
    assert len(said) == 1, done.stderr
    assert said[0].startswith('hpcfl: run.on_rank_loss = "shrink": this launch of ')
    assert "has no fault tolerance; start it with mpirun --with-ft ulfm of Open MPI 5" in said[0]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
