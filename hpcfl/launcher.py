"""What a launcher says of this process by environment variables, before any MPI library is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping

# What launchers announce, the most specific first: daemons that mpirun starts through srun carry SLURM's count, too.
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
TASK_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def launched_tasks(environment: Mapping[str, str] = os.environ) -> int:
    """Number of tasks that the launcher's environment variables announce; 1 where there is no launcher."""
    names = [*TASK_COUNTS, *(["WORLD_SIZE"] if "TORCHELASTIC_RUN_ID" in environment else [])]
    for name in names:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return 1


def launched_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Rank that the launcher's environment variables announce, for messages before MPI is loaded; 0 without one."""
    return next((int(environment[name]) for name in RANKS if environment.get(name, "").isdigit()), 0)
