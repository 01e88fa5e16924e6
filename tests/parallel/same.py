"""Comparison of two results files, bit for bit, except what measures time and the machine."""

from __future__ import annotations

from pathlib import Path

import h5py


def differences(a: Path, b: Path) -> list[str]:
    """Names of the datasets that are not equal to the bit; seconds and /timing are left out."""
    different: list[str] = []
    with h5py.File(a) as left, h5py.File(b) as right:
        names: list[str] = []
        left.visit(names.append)
        others: list[str] = []
        right.visit(others.append)
        different += sorted(set(names) ^ set(others))
        for name in names:
            item = left[name]
            if not isinstance(item, h5py.Dataset) or name.startswith(("timing", "config")) or name.endswith("seconds"):
                continue
            x, y = item[()], right[name][()]
            if x.dtype != y.dtype or x.shape != y.shape or x.tobytes() != y.tobytes():
                different.append(name)
    return different


def assert_same(a: Path, b: Path) -> None:
    """Fails with the names of what differs, and when there is nothing to compare."""
    with h5py.File(a) as f:
        assert f.attrs["rounds_done"] > 0
        assert f.attrs["evaluations_done"] > 0
    assert differences(a, b) == []
