"""``hpcfl doctor``: what works on this machine, one line each, and what to do about what does not.

Started on several ranks it shows the ranks instead of trying a launch.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from hpcfl.comm import Comm, world
from hpcfl.data import omniglot, vision
from hpcfl.launcher import launched_tasks
from hpcfl.probe import OK, PROBLEM, WARNING, Line, attempt, hdf5, mpi, reason
from hpcfl.slurm import ranges

COLOURS = {OK: "green", WARNING: "yellow", PROBLEM: "red"}
PACKAGES = ("torch", "torchvision", "numpy", "h5py", "mpi4py", "pydantic", "typer", "rich", "scikit-learn")
SEGMENT = 16 << 20  # bytes of shared memory that a rank of Open MPI takes
SOURCES = (vision.MNIST, vision.FASHION, vision.EMNIST, vision.CIFAR10, omniglot.SOURCE)


@dataclass(frozen=True)
class Rank:
    """What one rank sees of itself. cores: the binding, "0-3,8"; its number of cores is ``n_cores``."""

    rank: int
    host: str
    local: int
    device: str
    threads: str
    cores: str
    n_cores: int


def doctor(console: Console) -> None:
    """Print the report. Collective over the world where a launcher started several ranks; rank 0 prints."""
    lines, ranks = examine()
    width = max((len(what) for _, what, _ in lines), default=0)
    for level, what, text in lines:
        console.print(f"[{COLOURS[level]}]{level:<8}[/]", end="")
        console.print(f"{what:<{width}}  {text}", markup=False, highlight=False, soft_wrap=True)
    if len(ranks) > 1:
        table = Table("rank", "host", "local rank", "device", "threads", "bound to cores", box=box.SIMPLE)
        for r in ranks:
            table.add_row(*map(str, astuple(r)[:-1]))
        console.print(table)


def report() -> list[Line]:
    """All lines (level, what, text), level one of ok, warning, problem; none on other ranks. Collective like doctor."""
    return examine()[0]


def examine() -> tuple[list[Line], list[Rank]]:
    """The report's lines and the ranks, in rank order; both empty on other ranks than 0."""
    launched, comm = started_by_launcher() if launched_tasks() > 1 else ([], Comm())
    ranks = comm.gather(this_rank(comm))
    if ranks is None or (comm.size == 1 and announced_rank() != "0"):
        return [], []
    checks: list[Callable[[], Iterable[Line]]] = [
        python,
        packages,
        (lambda: launched) if launched else mpi,
        slurm,
        partial(threads, ranks),
        devices,
        hdf5,
        data_sets,
        partial(space, comm.size),
    ]
    return [line for check in checks for line in guarded(check)], ranks


def guarded(check: Callable[[], Iterable[Line]]) -> list[Line]:
    """The check's lines; an error of any kind is a finding, not a traceback."""
    try:
        return list(check())
    except Exception as error:
        what = getattr(check, "func", check).__name__
        return [(PROBLEM, what, f"{type(error).__name__}: {error}")]


def started_by_launcher() -> tuple[list[Line], Comm]:
    """The world of this launch, or this process alone with the reason. Collective over the world."""
    try:
        comm = world()
    except Exception as error:
        return [(PROBLEM, "MPI", str(error))], Comm()
    return [(OK, "MPI", f"{comm.mpi()}, {comm.size} ranks")], comm


def announced_rank() -> str:
    """The rank that the launcher's variables tell, for launches where MPI itself does not."""
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    return next((os.environ[name] for name in names if name in os.environ), "0")


def this_rank(comm: Comm) -> Rank:
    """Collective over the world: the local rank is the rank among those that share this node's memory."""
    local = comm.node().rank
    try:
        from hpcfl.device import choose_device

        device = str(choose_device("auto", local))
    except Exception as error:  # a torch that does not load must not keep this rank from the gather
        device = f"none: {type(error).__name__}"
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    set_threads = os.environ.get("OMP_NUM_THREADS", "not set")
    return Rank(comm.rank, socket.gethostname(), local, device, set_threads, ranges(cores), len(cores))


def python() -> Iterable[Line]:
    yield OK, "Python", f"{platform.python_version()} ({sys.executable}), {platform.platform()}"


def packages() -> Iterable[Line]:
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    yield OK, "packages", ", ".join(found)
    if missing:
        yield PROBLEM, "packages", f"not installed: {', '.join(missing)}; pip install {' '.join(missing)}"


def slurm() -> Iterable[Line]:
    env = os.environ
    if "SLURM_JOB_ID" in env:
        tasks, cores = env.get("SLURM_NTASKS", "1"), env.get("SLURM_CPUS_PER_TASK", "1")
        nodes = env.get("SLURM_JOB_NUM_NODES", "1")
        yield OK, "SLURM", f"inside job {env['SLURM_JOB_ID']}: nodes {nodes}, tasks {tasks}, cores per task {cores}"
    elif not shutil.which("sbatch"):
        yield OK, "SLURM", "not seen"
        return
    else:
        yield OK, "SLURM", "sbatch is there; this is not inside a job"
    launcher = env.get("HPCFL_LAUNCHER", "mpirun")
    output = attempt(["srun", "--mpi=list"])
    if types := re.findall(r"^(?:srun: |\s+)(\w+)$", output, re.MULTILINE):
        text = f"srun --mpi= {', '.join(types)}; launcher of the batch scripts: {launcher} (HPCFL_LAUNCHER)"
        yield OK, "SLURM", text
    else:
        yield WARNING, "SLURM", f"srun --mpi=list fails: {reason(output)}"


def threads(ranks: Sequence[Rank]) -> Iterable[Line]:
    """Threads against cores on the host of rank 0."""
    here = [r for r in ranks if r.host == ranks[0].host]
    cores = max(r.n_cores for r in here)
    if not all(r.threads.isdigit() for r in here):
        text = f"OMP_NUM_THREADS is not set: some libraries start a thread on each of {cores} cores, in every rank"
        yield WARNING, "threads", f"{text}; export OMP_NUM_THREADS=1"
        return
    wanted = sum(int(r.threads) for r in here)
    text = f"ranks on {here[0].host}: {len(here)}, their threads: {wanted}, cores: {cores}"
    if wanted > cores:
        yield WARNING, "threads", f"{text}; they take turns, so more ranks bring no speed"
    else:
        yield OK, "threads", text


def devices() -> Iterable[Line]:
    import torch

    if not torch.cuda.device_count():
        text = f"torch {torch.__version__} sees no GPU; ranks compute on the CPU"
        if shutil.which("nvidia-smi"):
            yield WARNING, "devices", f"{text}. There is a driver: ask SLURM for a GPU, or install a torch that fits it"
        else:
            yield OK, "devices", text
    for i in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(i).total_memory
        yield OK, "devices", f"cuda:{i} {torch.cuda.get_device_name(i)}, {memory / 2**30:.0f} GiB"


def data_sets() -> Iterable[Line]:
    """The data sets that are files in data/; all others are made when needed or come with a package."""
    root = Path("data")
    for source in SOURCES:
        if source.missing(root):
            yield WARNING, source.name, f"not in {root / source.folder}; {source.fetch_into(root)}"
        else:
            yield OK, source.name, f"in {root / source.folder}"


def space(ranks: int) -> Iterable[Line]:
    free = shutil.disk_usage(".").free
    yield OK if free > 1e9 else WARNING, "free disk", f"{free / 1e9:.1f} GB in {Path.cwd()}"
    if Path("/dev/shm").is_dir():
        free, wanted = shutil.disk_usage("/dev/shm").free, max(ranks, 8) * SEGMENT
        text = f"{free / 1e6:.0f} MB in /dev/shm, {wanted / 1e6:.0f} MB wanted for {max(ranks, 8)} ranks"
        if free > wanted:
            yield OK, "shared memory", text
        else:
            yield WARNING, "shared memory", f"{text}; in a container: --shm-size=1g"
