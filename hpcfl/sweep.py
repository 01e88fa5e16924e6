"""Sweeps: one job with other settings and seeds, many times. Never imports torch but to make a sweep.

A sweep is a folder. ``sweep.toml`` lists its members; each has its own complete job file, <number>-<changes>.toml, and
so its own runs, <number>-<changes>-001/, beside it. All a batch script needs to know is the folder and a number.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcfl import slurm
from hpcfl.config import load, read, to_toml, toml_value
from hpcfl.errors import STOPPED, InputError
from hpcfl.names import short_names
from hpcfl.options import user_path
from hpcfl.results_folder import new_run_folder

LIST, SUBMISSIONS = "sweep.toml", "submissions.txt"
MOST = 10_000  # members


@dataclass(frozen=True)
class Member:
    """One run of a sweep: its name, which is that of its job file, and what differs from the sweep's job."""

    number: int
    name: str
    changes: Mapping[str, str]  # "algorithm.lr" -> "0.1"


@dataclass(frozen=True)
class Sweep:
    """A sweep as its folder tells it."""

    folder: Path
    job: str
    directory: Path  # where relative paths of the job start
    plugins: tuple[str, ...]
    sbatch: slurm.Options  # of the first submission
    members: tuple[Member, ...]

    @classmethod
    def open(cls, folder: Path) -> Sweep:
        """Raises InputError for a folder without a readable sweep.toml."""
        path = folder / LIST
        try:
            tables = tomllib.loads(path.read_text())
            members = tuple(Member(k, m["name"], m["changes"]) for k, m in enumerate(tables["member"]))
            sbatch = {name: value or None for name, value in tables["sbatch"].items()}
            directory, plugins = Path(tables["directory"]), tuple(tables["plugins"])
            return cls(folder.resolve(), tables["job"], directory, plugins, sbatch, members)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}; expected the folder of a sweep (hpcfl sweep)") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: not the list of a sweep ({type(error).__name__}: {error})") from None

    def job_file(self, member: Member) -> Path:
        return self.folder / f"{member.name}.toml"

    def command(self, member: Member) -> list[str]:
        """Arguments of hpcfl that start or resume the member."""
        plugins = [word for plugin in self.plugins for word in ("--plugin", plugin)]
        return ["run", str(self.job_file(member)), "--out", str(self.folder), *plugins, "--resume"]

    def submissions(self) -> dict[int, list[str]]:
        """Numbers of members -> their SLURM jobs, as "12_3", the oldest first."""
        found: dict[int, list[str]] = {}
        path = self.folder / SUBMISSIONS
        for line in path.read_text().splitlines() if path.exists() else ():
            if not re.fullmatch(r"\S+( \d+)+", line):
                raise InputError(f'{path}: "{line}": expected the number of a SLURM job, and those of its members')
            job, *numbers = line.split()
            for number in map(int, numbers):
                found.setdefault(number, []).append(f"{job}_{number}")
        return found


def make(
    job: Path,
    grid: Sequence[str],
    seeds: int | None,
    changes: Sequence[str],
    plugins: Sequence[Path],
    out: Path | None,
    sbatch: slurm.Options,
) -> Sweep:
    """Makes the folder of a sweep; every member's settings are checked first. Plug-ins must be loaded.

    grid: "key=value,value,..."; the members are all combinations, the last key's values in turn fastest. seeds: that
    many, from the job's run.seed on. out: the folder, new or empty; absent: <run.out>/<job>-sweep-<nnn>. Raises
    InputError.
    """
    first = load(job, changes)
    axes = [parse_axis(text) for text in grid]
    if seeds is not None:
        axes.append(("run.seed", [str(first.run.seed + k) for k in range(seeds)]))
    keys = [key for key, _ in axes]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise InputError(f"{twice[0]}: given twice, by --grid or by --seeds; give its values in one list")
    if "run.out" in keys:
        raise InputError("run.out: all members of a sweep write into its own folder; name that by --out")
    size = math.prod(len(values) for _, values in axes)
    if size > MOST:
        raise InputError(f"a sweep of {size:,} members; expected at most {MOST:,}")
    members = [
        Member(k, member_name(k, dict(zip(keys, values, strict=True))), dict(zip(keys, values, strict=True)))
        for k, values in enumerate(itertools.product(*(values for _, values in axes)))
    ]
    own = [[*changes, *(f"{key}={value}" for key, value in member.changes.items())] for member in members]
    jobs = [load(job, settings) for settings in own]
    known: dict[str, Member] = {}
    for member, checked in zip(members, jobs, strict=True):
        other = known.setdefault(checked.text, member)
        if other is not member:
            raise InputError(f"members {other.name} and {member.name} would be the same run; give different values")
    folder = new_folder(user_path(str(out))) if out else new_run_folder(user_path(first.run.out), f"{job.stem}-sweep")
    for member, settings, checked in zip(members, own, jobs, strict=True):
        tables = tomllib.loads(checked.text)
        tables["run"]["out"] = str(folder)
        about = f"# {job}, {', '.join(settings) or 'unchanged'}: member {member.number} of the sweep {folder}\n"
        (folder / f"{member.name}.toml").write_text(about + to_toml(tables))
    absolute = [str(plugin.absolute()) for plugin in plugins]
    (folder / LIST).write_text(_list(str(job), absolute, sbatch, members))
    return Sweep.open(folder)


def parse_axis(text: str) -> tuple[str, list[str]]:
    """The key and the values of "algorithm.lr=0.01,0.1"; commas in brackets, braces and quotes belong to a value."""
    key, equals, given = text.partition("=")
    values, depth, quote = [""], 0, ""
    for c in given:
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        else:
            depth += (c in "[{") - (c in "]}")
        if c == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += c
    values = [value.strip() for value in values]
    if not (key.strip() and equals and all(values)):
        raise InputError(f'--grid "{text}": expected part.key=value,value,..., e.g. algorithm.lr=0.01,0.1')
    return key.strip(), values


def member_name(number: int, changes: Mapping[str, str]) -> str:
    """Name of a member's files: its number, and for people what it changes: 003-lr=0.1-seed=2."""
    short = short_names(changes)
    clean = {key: re.sub(r"[^\w.+-]+", "_", value).strip("_") for key, value in changes.items()}
    return "-".join([f"{number:03d}", *(f"{short[key]}={value}" for key, value in clean.items())])[:100].rstrip("-_.")


def new_folder(path: Path) -> Path:
    """Makes this folder. Raises InputError where it exists with anything in it, or cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise InputError(f"--out {path}: is not empty; a sweep needs a folder of its own")
    except OSError as error:
        raise InputError(f"--out {path}: cannot be made ({error.strerror})") from None
    return path


def submit(
    sweep: Sweep,
    numbers: Sequence[int],
    sbatch: slurm.Options,
    at_once: int | None,
    launcher: str | None,
    dry_run: bool,
) -> None:
    """Submits the members of these numbers as one array, or prints its script."""
    job = read(sweep.job_file(sweep.members[numbers[0]]))
    weak = {"job-name": sweep.folder.name, "cpus-per-task": str(job["run"]["threads"])}
    weak |= {"output": str(sweep.folder / "log-%A_%a.out")}
    given = slurm.merge(sweep.sbatch, sbatch, {"array": slurm.array(numbers, at_once)})
    plugins = [word for plugin in sweep.plugins for word in ("--plugin", plugin)]
    script = slurm.fill("sweep.sbatch", [weak, given], [str(sweep.folder), *plugins], launcher)
    if dry_run:
        print(script, end="")
        return
    if not sweep.directory.is_dir():
        raise InputError(f"{sweep.folder / LIST}: directory {sweep.directory} is not there; correct that line")
    number = slurm.sbatch(script, sweep.directory)
    with (sweep.folder / SUBMISSIONS).open("a") as file:
        file.write(f"{number} {' '.join(map(str, numbers))}\n")
    print(f"submitted job {number}, members {slurm.ranges(sorted(numbers))}; log: {slurm.log_file(script, number)}")


def run_here(sweep: Sweep, numbers: Sequence[int], ranks: int | None) -> int:
    """Runs the members of these numbers one after the other, each on so many MPI ranks (absent: as one process).

    A member that fails is said so, and the next one starts; one that is stopped stops the sweep. Returns the exit code:
    0 all done, 1 some failed, 75 stopped.
    """
    failed = []
    for count, member in enumerate((sweep.members[number] for number in numbers), 1):
        print(f"member {member.name} ({count} of {len(numbers)})", flush=True)
        code = run_member(sweep, member, ranks)
        if code == STOPPED:
            print(f"stopped; hpcfl sweep missing {sweep.folder} --local goes on")
            return STOPPED
        if code:
            failed.append(member.name)
            print(f"member {member.name} failed: exit code {code}", flush=True)
    print(f"{len(numbers) - len(failed)} of {len(numbers)} members done: hpcfl show {sweep.folder}")
    return 1 if failed else 0


def run_member(sweep: Sweep, member: Member, ranks: int | None) -> int:
    """The exit code of one member's run, in processes of its own; a SIGUSR1 that comes meanwhile is passed on."""
    program = [sys.executable, "-m", "hpcfl", *sweep.command(member)]
    if ranks is not None:
        program = ["bash", str(slurm.repository() / "jobs/mpirun.sh"), "-n", str(ranks), *program]
    started, asked = list[subprocess.Popen[bytes]](), list[int]()

    def ask(number: int, frame: object) -> None:
        asked.append(number)
        for process in started:
            process.send_signal(number)

    before = signal.signal(signal.SIGUSR1, ask)
    try:
        started.append(subprocess.Popen(program, cwd=sweep.directory))
        if asked:
            started[0].send_signal(signal.SIGUSR1)
        try:
            code = started[0].wait()
        except KeyboardInterrupt:  # a terminal sends it to the member, too, which stops with a checkpoint
            asked.append(signal.SIGINT)
            code = started[0].wait()
    finally:  # a sweep that is interrupted again ends its member
        signal.signal(signal.SIGUSR1, before)
        for process in started:
            if process.poll() is None:
                process.terminate()
                process.wait()
    return STOPPED if asked else code


def commands(sweep: Sweep) -> Iterator[str]:
    """What the members would run, one line each."""
    for member in sweep.members:
        yield shlex.join(["hpcfl", *sweep.command(member)])


def _list(job: str, plugins: Sequence[str], sbatch: slurm.Options, members: Sequence[Member]) -> str:
    head = {"job": job, "directory": os.getcwd(), "plugins": plugins}
    lines = [f"{key} = {toml_value(value)}" for key, value in head.items()]
    lines += ["", to_toml({"sbatch": {name: value or "" for name, value in sbatch.items()}})]
    for member in members:
        changes = ", ".join(f"{toml_value(key)} = {toml_value(value)}" for key, value in member.changes.items())
        lines += ["[[member]]", f"name = {toml_value(member.name)}", f"changes = {{{changes}}}", ""]
    return "\n".join(lines)
