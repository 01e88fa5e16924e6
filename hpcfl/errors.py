"""The errors a user can meet: each says what, got, expected, where, and what to do."""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

STOPPED = 75  # exit code of a run that stopped early and goes on with --resume: EX_TEMPFAIL


class HpcflError(Exception):
    """Base of the errors that end a run with one clear message instead of a traceback.

    Where every rank raises the same error at the same point the job ends in order, otherwise by abort.
    """

    exit_code = 1


class InputError(HpcflError):
    """Something the user gave cannot be used; exit code 2."""

    exit_code = 2


class RunError(HpcflError):
    """The run itself failed on one rank (an exception in a client's work, a lost file); exit code 1."""


class Diverged(HpcflError):
    """A loss, a model or an average is no longer finite; exit code 1."""


def place(error: BaseException) -> str:
    """Where an error comes from: the last line of a plug-in, else of hpcfl, else of a library."""
    frames, here = traceback.extract_tb(error.__traceback__), str(Path(__file__).parent)
    libraries = ("<", sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    own = [f for f in frames if f.filename.startswith(here) or not f.filename.startswith(libraries)]
    plugin = [f for f in own if not f.filename.startswith(here)]
    last = (plugin or own or list(frames))[-1]
    return f"{Path(last.filename).name} line {last.lineno}"


def keep_traceback(error: BaseException, file: Path, reason: str = "") -> str:
    """Writes it below a first line, the reason; the end of a sentence that says where it is."""
    try:
        file.write_text(f"{reason or error}\n\n{''.join(traceback.format_exception(error))}")
    except OSError:
        return ""
    return f"; traceback in {file}"


def nearest(name: str, valid: Iterable[str]) -> str:
    """Hint for a misspelt name: '; did you mean "x"?' or the list of what is valid."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; valid: {', '.join(valid)}" if valid else ""
