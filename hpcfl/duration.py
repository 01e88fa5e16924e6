"""Lengths of time as people and batch systems write them."""

from __future__ import annotations

import re

from hpcfl.errors import InputError

UNITS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def seconds(name: str, text: str) -> float:
    """Seconds of "90s", "10min", "2h", "1d", "1h30min", or SLURM's "MM:SS", "HH:MM:SS", "D-HH:MM:SS".

    name: of the option, for the message. Raises InputError for anything else, and for no time at all.
    """
    found = _of_units(text) if not re.search(r"[:-]", text) else _of_clock(text)
    if found is None or found <= 0:
        raise InputError(f'{name} = "{text}": expected a length of time, e.g. "90s", "10min", "2h", "1-12:00:00"')
    return found


def _of_units(text: str) -> float | None:
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
    whole = "".join(re.split(r"\s+", text)) == "".join(number + unit for number, unit in parts)
    if not parts or not whole or any(unit not in UNITS for _, unit in parts):
        return None
    return sum(float(number) * UNITS[unit] for number, unit in parts)


def _of_clock(text: str) -> float | None:
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d\d))?(?::(\d\d))?", text)
    if not match:
        return None
    days, *clock = match.groups()
    numbers = [int(number) for number in clock if number is not None]
    if days is None:  # MM:SS, HH:MM:SS
        numbers = [0] * (3 - len(numbers)) + numbers
    else:  # D-HH, D-HH:MM, D-HH:MM:SS
        numbers += [0] * (3 - len(numbers))
    hours, minutes, rest = numbers
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + rest
