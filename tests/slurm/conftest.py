"""A SLURM of our own: munged, slurmctld and two slurmd on this host, private to a test session, gone after it.

Jobs are real ones; of the two nodes, n1 and n2, with four cores each, all are this machine. As root no cgroups, no
systemd and no configuration of the system are needed.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
NODES, CORES = 2, 4

CONFIGURATION = """\
ClusterName=hpcfltest
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
TmpFS={folder}/tmp-%n
SlurmctldTimeout=30
SlurmdTimeout=60
KillWait=5
MinJobAge=600
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobRequeue=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
PartitionName=main Nodes=ALL Default=YES MaxTime=01:00:00 State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cores} RealMemory=4000 State=UNKNOWN\n"
# cred_expire: a requeued job starts again after so many seconds, not 120. TmpFS: PMIx needs a folder for each node.


class Slurm:
    """A running SLURM. env: what its clients need in their environment, beside the present one."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._pid_files = [folder / "munged.pid", folder / "slurmctld.pid"]
        self._pid_files += [folder / f"slurmd-n{k + 1}.pid" for k in range(NODES)]

    def start(self) -> None:
        host, ports = socket.gethostname().partition(".")[0], free_ports(1 + NODES)
        names = [f"n{k + 1}" for k in range(NODES)]
        for name in ("state", *(f"tmp-{name}" for name in names)):
            (self.folder / name).mkdir()
        text = CONFIGURATION.format(host=host, user=getpass.getuser(), ports=ports, folder=self.folder)
        for name, port in zip(names, ports[1:], strict=True):
            text += NODE.format(name=name, host=host, port=port, cores=CORES)
        (self.folder / "slurm.conf").write_text(text)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        munge = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        paths = {"socket": "munge.socket", "key": "munge.key", "pid": "munged.pid", "log": "munged.log", "seed": "seed"}
        self.call("munged", "--force", *(f"--{flag}={self.folder / paths[what]}" for flag, what in munge.items()))
        self.call("slurmctld")
        for name in names:
            self.call("slurmd", "-N", name)
        self.wait_for(lambda: self.call("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(NODES), 30, self.logs)

    def stop(self) -> None:
        """Ends all jobs, then the daemons that this started."""
        self.call("scancel", "--me", check=False)
        self.call("scancel", "--me", "--signal=KILL", check=False)
        deadline = time.monotonic() + 20
        while self.call("squeue", "-h", check=False).strip() and time.monotonic() < deadline:
            time.sleep(0.2)
        for path in reversed(self._pid_files):
            if path.exists() and path.read_text().strip():
                os.kill(int(path.read_text()), signal.SIGKILL)  # in order they would take seconds, to save their state

    def call(self, *command: str | Path, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """What a command of SLURM printed."""
        done = subprocess.run(
            list(map(str, command)),
            env=os.environ | self.env | (env or {}),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Facts of a job, e.g. JobState, ExitCode, Restarts; number "12", or "12_3" of an array."""
        shown = self.call("scontrol", "--oneliner", "show", "job", number)
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def wait(self, number: str, *states: str, timeout: float = 100) -> dict[str, str]:
        """The job's facts when it has one of these states; none given: when it is over."""
        wanted = states or ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_for(
            lambda: self.job(number)["JobState"] in wanted, timeout, lambda: f"{self.job(number)}\n{self.log(number)}"
        )
        return self.job(number)

    def log(self, number: str) -> str:
        """What the job has written so far."""
        path = Path(self.job(number)["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_log(self, number: str, text: str, timeout: float = 60) -> None:
        self.wait_for(lambda: text in self.log(number), timeout, lambda: f"no {text!r} in:\n{self.log(number)}")

    def wait_for(self, ready: Callable[[], bool], timeout: float, describe: Callable[[], str]) -> None:
        deadline = time.monotonic() + timeout
        while not ready():
            if time.monotonic() > deadline:
                pytest.fail(f"not after {timeout} s: {describe()}")
            time.sleep(0.2)

    def logs(self) -> str:
        """The daemons' last lines."""
        lines = [f"{p.name}: {line}" for p in self.folder.glob("*.log") for line in p.read_text().splitlines()[-8:]]
        return "\n".join(lines)


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in held]
    for server in held:
        server.close()
    return ports


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A running SLURM; where its packages are missing a skip with the reason, in CI a failure."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.getuid() != 0:
        message = (
            f"no {', '.join(missing)}; on Debian: apt-get install slurm-wlm munge" if missing else "these need root"
        )
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    cluster = Slurm(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
