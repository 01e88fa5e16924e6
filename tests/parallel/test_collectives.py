"""checks.py on 1, 2, 3 and 5 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("checks.py")


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_collectives(launch, ranks):
    done = launch(None if ranks == 1 else ranks, "-m", "mpi4py", CHECKS, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("check_") == CHECKS.read_text().count("\ndef check_")
