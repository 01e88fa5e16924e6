"""The batch script, run by bash as SLURM would: with SLURM's variables, from a copy in another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from hpcfl.analysis.reader import Run

ROOT = Path(__file__).resolve().parents[2]


def test_batch_script(launch, tmp_path):
    script = shutil.copy(ROOT / "slurm/run.sbatch", tmp_path / "slurm_script")
    environment = os.environ | {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_NTASKS": "2"}
    command = ["bash", script, "jobs/quickstart/apfl.toml", "--out", str(tmp_path), "--set", "run.rounds=1"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    with Run(tmp_path / "apfl-001/results.h5") as run:
        assert run.status == "done"
        assert run.attributes["ranks"] == 2
