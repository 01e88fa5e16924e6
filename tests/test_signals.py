"""Requests to stop, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from hpcfl.errors import InputError
from hpcfl.signals import StopRequest

BEGIN = """
import ctypes, hashlib, os, signal, sys, time
from hpcfl.signals import StopNow, StopRequest
def say(*words):
    print(*words, flush=True)
def work():  # a call that no signal interrupts
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 3_000_000)
"""


@pytest.fixture
def python():
    """``python(code)``: a process that runs the code after BEGIN; ended with the test."""
    started = []

    def start(code: str, *before: str) -> subprocess.Popen[str]:
        command = [*before, sys.executable, "-c", BEGIN + code]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_which_signals_stop():
    def names(name, environment):
        return {number.name for number in StopRequest(name, environment).signals}

    assert names("USR1", {}) == {"SIGUSR1", "SIGTERM", "SIGINT"}
    assert names("USR2", {"OMPI_COMM_WORLD_RANK": "0"}) == {"SIGUSR2"}  # its mpirun kills too soon
    assert names("HUP", {"PMI_RANK": "1", "HYDI_CONTROL_FD": "7"}) == {"SIGHUP", "SIGTERM", "SIGINT"}
    assert names("USR1", {"SLURM_STEP_ID": "0"}) == {"SIGUSR1"}
    for name in ("KILL", "usr1", "SIGUSR1", ""):
        with pytest.raises(InputError, match=f'^--stop-signal "{name}": expected one of USR1, USR2, HUP$'):
            StopRequest(name)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_told_while_the_main_thread_is_in_a_call(python, number):
    process = python(
        """
request = StopRequest()
request.listen()
request.follow(0, lambda number: say("told", number.name))
say("up", request.reason)
work()
say("reason", request.reason)
"""
    )
    assert process.stdout.readline() == "up None\n"
    process.send_signal(number)
    assert process.communicate(timeout=60)[0] == f"told {number.name}\nreason signal {number.name}\n"
    assert process.returncode == 0


def test_a_signal_before_anything_is_loaded_is_not_lost(python):
    process = python('request = StopRequest("USR2")\nrequest.listen()\nsay("up")\nwork()\nsay(request.reason)')
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGUSR2)
    assert process.communicate(timeout=60)[0] == "signal SIGUSR2\n"


def test_the_second_signal_is_raised_when_the_current_call_returns(python):
    process = python(
        """
request = StopRequest()
request.listen()
request.follow(0, lambda number: None)
say("up")
try:
    while True:
        work()
        say("on", request.reason)
except StopNow as error:
    say("now", error)
"""
    )
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "on signal SIGUSR1\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "now SIGUSR1\n"


def test_the_other_ranks_ignore_it(python):
    process = python(
        """
request = StopRequest("USR1", {"OMPI_COMM_WORLD_RANK": "1"})
request.listen()
request.follow(1, lambda number: say("told"))
say("up")
sys.stdin.readline()
say(request.reason)
"""
    )
    assert process.stdout.readline() == "up\n"
    for _ in range(3):
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
    assert process.communicate("\n", timeout=60)[0] == "None\n"


def test_sigterm_from_a_launcher_is_only_told(python):
    process = python(
        """
request = StopRequest("USR1", {"OMPI_COMM_WORLD_RANK": "0"})
request.listen()
request.follow(0, lambda number: say("told", number.name))
say("up")
sys.stdin.readline()
say(request.reason)
"""
    )
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "told SIGTERM\n"
    assert process.communicate("\n", timeout=60)[0] == "None\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize("before", [True, False], ids=["before it follows", "later"])
def test_a_rank_dies_with_its_launcher(python, before):
    """Also where the launcher died before the rank could ask for it."""
    process = python(
        f"""
request = StopRequest("USR1", {{"OMPI_COMM_WORLD_RANK": "1"}})
if {before}:
    say("up")
    sys.stdin.readline()
request.follow(1, lambda number: None)
if not {before}:
    say("up")
    sys.stdin.readline()
say("alive")
""",
        *("sh", "-c", 'exec 3<&0; "$@" <&3 & wait', "sh"),
    )
    assert process.stdout.readline() == "up\n"
    process.kill()
    process.wait()
    time.sleep(0.2)
    try:
        out = process.communicate("\n", timeout=60)[0]
    except BrokenPipeError:  # nobody reads any more
        out = process.stdout.read()
    assert out == ""
