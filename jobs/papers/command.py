"""What the studies' commands share: options, where a table is written, and how mistakes end."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hpcfl.comm import Comm, world
from hpcfl.errors import HpcflError, InputError
from hpcfl.launcher import launched_rank
from hpcfl.signals import StopRequest

Asked = Callable[[], str | None]  # why to stop; None: nobody asked


class Parser(argparse.ArgumentParser):
    """Without abbreviations, whose mistakes are InputErrors."""

    def __init__(self, **options: Any):
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see: study.py --help)")


def count(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number >= 1')
    return int(text)


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def write(file: Path, text: str) -> None:
    print(text, flush=True)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    except OSError as error:
        raise InputError(f"{file}: cannot be written: {error.strerror or error}") from None


def start(
    given: Sequence[str],
    arguments: Callable[[Sequence[str]], argparse.Namespace],
    study: Callable[[argparse.Namespace, Comm, Asked], None],
) -> int:
    """Runs ``study(arguments(given), world, asked)``, collective over the world.

    SIGUSR1 stops it with a checkpoint. The exit code, as that of ``hpcfl run``.
    """
    comm = Comm()
    request = StopRequest()
    request.listen()
    try:
        options = arguments(given)
        comm = world()
        study(options, comm, lambda: request.reason)
        return 0
    except HpcflError as error:
        return leave(comm, error.exit_code, f"study.py: {error}")
    except KeyboardInterrupt:
        return leave(comm, 130, "study.py: interrupted; start it again to go on with this run")
    except Exception:
        return leave(comm, 1, traceback.format_exc())


def leave(comm: Comm, code: int, text: str) -> int:
    """Says what happened, and ends: in order when all ranks are here, else by abort. The exit code."""
    together = comm.arrive()
    if launched_rank() == 0 or not together:
        print(text, file=sys.stderr, flush=True)
    if not together:
        comm.abort(code)
    return code
