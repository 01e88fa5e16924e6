"""Lengths of time as people and batch systems write them."""

from __future__ import annotations

import pytest

from hpcfl.duration import seconds
from hpcfl.errors import InputError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", 90),
        ("90 sec", 90),
        ("10min", 600),
        ("10m", 600),
        ("2h", 7200),
        ("1.5h", 5400),
        ("1d", 86400),
        ("1h30min", 5400),
        ("1 h 30 min", 5400),
        ("0.2s", 0.2),
        ("00:30", 30),
        ("90:00", 5400),
        ("01:30:00", 5400),
        ("1-12:00:00", 129600),
        ("1-12", 129600),
        ("1-12:30", 131400),
    ],
)
def test_lengths(text, expected):
    assert seconds("run.max_walltime", text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text", ["", "5", "h", "5x", "-5s", "5s!", "1 0s", "1:2", "1:2:3:4", "1-", "0s", "0:00", "2h soon", "inf", "nan"]
)
def test_anything_else_is_one_clear_line(text):
    with pytest.raises(InputError) as error:
        seconds("run.max_walltime", text)
    assert str(error.value) == (
        f'run.max_walltime = "{text}": expected a length of time, e.g. "90s", "10min", "2h", "1-12:00:00"'
    )
