"""The folders of runs: OUT/<job>-<nnn>, numbered, and locked by the process that writes there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
from pathlib import Path
from typing import TextIO

from hpcfl.errors import InputError, RunError
from hpcfl.results_file import disk, now

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # what file systems without locks answer


def new_run_folder(out: Path, job: str) -> Path:
    """Create OUT/<job>-<nnn> with the number after the highest one there is. Safe against runs that start at once.

    Raises InputError where it cannot be created.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        number = max(_numbered(out, job), default=0) + 1
        while True:
            folder = out / f"{job}-{number:03d}"
            with contextlib.suppress(FileExistsError):  # another run took this number meanwhile
                folder.mkdir()
                return folder
            number += 1
    except OSError as error:
        raise InputError(
            f"out = {out}: cannot create a run folder there ({error.strerror}); choose another with --out"
        ) from None


def newest_run_folder(out: Path, job: str) -> Path | None:
    """OUT/<job>-<nnn> with the highest number, whatever is in it; None where there is none.

    Raises InputError where OUT cannot be read.
    """
    try:
        folders = {number: out / name for number, name in _numbered(out, job).items() if (out / name).is_dir()}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(
            f"out = {out}: cannot look for runs there ({error.strerror}); choose another with --out"
        ) from None
    return folders[max(folders)] if folders else None


def lock(folder: Path) -> TextIO:
    """Lock a run's folder against other processes, on any machine that shares it, until the result is closed.

    The lock ends with the process, however it ends; its file .lock stays and says who had it. On a file system without
    locks nothing is locked. Raises RunError where another process has the lock, or the file cannot be written.
    """
    path = folder / ".lock"
    with disk(path, "lock the run's folder"):
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                owner = file.read().strip() or "another process"
            raise RunError(f"{folder} is in use by {owner}; wait until that run ends, or end it") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                file.close()
                raise
        file.truncate(0)
        file.write(f"process {os.getpid()} on host {socket.gethostname()} since {now()}\n")
        file.flush()
    return file


def _numbered(out: Path, job: str) -> dict[int, str]:
    """The names <job>-<nnn> in a folder, by number."""
    if job in ("", ".", "..") or job != Path(job).name:
        raise InputError(f'job name "{job}": expected the name of a folder, without "/"')
    matches = (re.fullmatch(re.escape(job) + r"-(\d{3,})", name) for name in os.listdir(out))
    return {int(match[1]): match[0] for match in matches if match}
