"""SLURM: the batch scripts of ``slurm/`` filled in and submitted, and what is in the queue.

The scripts work by themselves; ``fill`` only replaces their ``#SBATCH`` lines and puts the arguments in. Options of
sbatch come from three places, later ones win: the script, the site file's ``#SBATCH`` lines, the command line.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcfl.errors import InputError

Options = Mapping[str, str | None]  # long name of an sbatch option -> value; None: an option without one

KNOWN = {  # options of sbatch that hpcfl's commands have, too; any other one goes after "--"
    "nodes": "Nodes.",
    "ntasks": "MPI ranks in all.",
    "ntasks-per-node": "MPI ranks per node.",
    "cpus-per-task": "Cores per rank; absent: the job's run.threads.",
    "gpus-per-node": "GPUs per node, e.g. 4 or a100:4; ranks of a node share them evenly.",
    "mem": "Memory per node, e.g. 64G.",
    "time": "Time limit, e.g. 2:00:00; the run is stopped before it, requeued and resumed.",
    "partition": "Partition.",
    "account": "Account.",
    "qos": "Quality of service.",
    "constraint": "Features of the nodes.",
    "job-name": "Name of the job; absent: the job file's.",
    "output": "Log file, as a pattern of sbatch.",
    "signal": "When the run is asked to stop; absent: B:USR1@120, two minutes before the time limit.",
}
SHORT = {
    "A": "account",
    "C": "constraint",
    "D": "chdir",
    "G": "gpus",
    "J": "job-name",
    "L": "licenses",
    "M": "clusters",
    "N": "nodes",
    "S": "core-spec",
    "a": "array",
    "b": "begin",
    "c": "cpus-per-task",
    "d": "dependency",
    "e": "error",
    "m": "distribution",
    "n": "ntasks",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "t": "time",
    "w": "nodelist",
    "x": "exclude",
}
LAYOUT = {"nodes", "ntasks", "ntasks-per-node"}
SETTINGS = "# hpcfl submit: settings\n"  # the line of a script where they go


def parse(words: Sequence[str], where: str) -> dict[str, str | None]:
    """Options of sbatch from words like --name=value, --name value, --flag, -p value. where: for messages."""
    found: dict[str, str | None] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        match = re.fullmatch(r"--([a-z][a-z0-9-]*)(?:=(.*))?|-([A-Za-z])(.*)", word, re.DOTALL)
        if match is None or (match[3] and match[3] not in SHORT):
            raise InputError(f'{where}: "{word}" is not an option of sbatch as expected here, e.g. --qos=high')
        name, value = match[1] or SHORT[match[3]], match[2] if match[1] else match[4] or None
        if value is None and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        found[name] = value
    return found


def directives(text: str, where: str) -> dict[str, str | None]:
    """The options in a script's #SBATCH lines."""
    found: dict[str, str | None] = {}
    for line in re.findall(r"^#SBATCH[ \t](.*)$", text, re.MULTILINE):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise InputError(f"{where}: #SBATCH {line}: {error}") from None
        found |= parse(words, where)
    return found


def merge(*layers: Options) -> dict[str, str | None]:
    """All options, those of later layers win. Numbers of nodes and tasks belong together: one replaces all earlier."""
    merged: dict[str, str | None] = {}
    for layer in layers:
        replaced = {"requeue"} if "no-requeue" in layer else set()
        if layer.keys() & LAYOUT:
            replaced |= LAYOUT
        merged = {name: value for name, value in merged.items() if name not in replaced} | dict(layer)
    return merged


def site_file() -> Path | None:
    """The user's site file, if there is one. Raises InputError where HPCFL_SITE names one that is not there."""
    named = os.environ.get("HPCFL_SITE")
    path = Path(named).absolute() if named else Path.home() / ".config/hpcfl/slurm.sh"
    if named and not path.is_file():
        raise InputError(f"HPCFL_SITE={named}: no such file; see slurm/README.md")
    return path if path.is_file() else None


def repository() -> Path:
    """The folder with slurm/ and jobs/. Raises InputError for an hpcfl that was installed without them."""
    root = Path(__file__).resolve().parents[1]
    if not (root / "slurm/batch.sh").is_file():
        raise InputError(
            f"{root}: no slurm/ here; this command needs hpcfl installed from its repository: pip install -e"
        )
    return root


def fill(name: str, options: Sequence[Options], arguments: Sequence[str], launcher: str | None = None) -> str:
    """The script slurm/<name> with options of sbatch (layers as in ``merge``, beside the script's own) and arguments.

    options: the first layer gives way to the site file, the others win over it. The script runs this Python.
    """
    root, site = repository(), site_file()
    text = (root / "slurm" / name).read_text()
    weak, *strong = options
    local = directives(site.read_text(), str(site)) if site else {}
    merged = merge(directives(text, name), weak, local, *strong)
    lines = "".join(f"#SBATCH {_option(*option)}\n" for option in merged.items())
    settings = {"HPCFL_ROOT": str(root), "HPCFL_VENV": sys.prefix}
    settings |= {"HPCFL_SITE": str(site)} if site else {}
    settings |= {"HPCFL_GIVEN_LAUNCHER": launcher} if launcher else {}  # wins over the site file's
    given = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in settings.items())
    first, _, rest = text.partition("\n")
    rest = re.sub(r"^#SBATCH[ \t].*\n", "", rest, flags=re.MULTILINE)
    assert SETTINGS in rest, f"slurm/{name}: its line for the settings is gone"
    return f"{first}\n{lines}" + rest.replace(SETTINGS, f"{given}set -- {shlex.join(arguments)}\n")


def sbatch(script: str, directory: Path | None = None) -> str:
    """Submits a script from a folder; the job's number. Raises InputError with what sbatch says against it."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=script, cwd=directory, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise InputError(
            "sbatch not found: this machine has no SLURM, or its module is not loaded; --dry-run prints the script"
        ) from None
    if done.returncode != 0:
        raise InputError(f"sbatch refused the job: {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]


def log_file(script: str, job: str) -> str:
    """Where a submitted script writes, the parts of the pattern filled in that are known."""
    options = directives(script, "script")
    pattern = options.get("output") or "slurm-%j.out"
    known = {"%x": options.get("job-name") or "sbatch", "%j": job, "%A": job}
    return re.sub("|".join(known), lambda found: str(known[found[0]]), pattern)


def queue() -> dict[str, str] | None:
    """This user's jobs in the queue: number ("12", of an array "12_3") -> state. None where there is no squeue."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%F_%K %T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    jobs = (line.split() for line in done.stdout.splitlines())
    return {number.removesuffix("_N/A"): state for number, state in jobs}


def array(numbers: Sequence[int], at_once: int | None) -> str:
    """Numbers as sbatch's --array takes them, e.g. "0-2,5", at most 4 at once "0-2,5%4"."""
    return ranges(sorted(numbers)) + (f"%{at_once}" if at_once else "")


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers in short: [0, 1, 2, 5] is "0-2,5"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], n]
        else:
            parts.append([n])
    return ",".join("-".join(map(str, part)) for part in parts)


def _option(name: str, value: str | None) -> str:
    if value is None:
        return f"--{name}"
    return f"--{name}={shlex.quote(value) if set(value) & set(' #') else value}"
