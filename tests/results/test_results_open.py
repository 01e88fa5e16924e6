"""Readers and writers that come and go at the same time: neither keeps the other from its work."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from results_example import EVERYTHING, clients

from hpcfl.analysis.reader import Run
from hpcfl.results import ResultsWriter, Schema

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)])}


@pytest.fixture
def path(tmp_path):
    """A results file that nobody writes."""
    schema = Schema(**EVERYTHING)
    file = tmp_path / "results.h5"
    ResultsWriter.create(file, schema, clients=clients(schema), config="[run]\n", attributes={}).close()
    return file


@pytest.fixture
def python():
    """``python(code, path)``: a process, once it has said that it is ready; ended with the test."""
    started = []

    def start(code, *args):
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", code, *map(str, args)], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
            )
        )
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_who_reads_a_file_does_not_keep_its_run_from_going_on(path, python):
    python('import sys, h5py, time\nfile = h5py.File(sys.argv[1])\nprint("ready", flush=True)\ntime.sleep(60)', path)
    schema = Schema(**EVERYTHING)
    writer = ResultsWriter.resume(path, schema, config="[run]\n", attributes={})
    writer.status("stopped:test")
    writer.close()
    with Run(path) as run:
        assert (run.status, run.attributes["restarts"]) == ("stopped:test", 1)


def test_a_reader_opens_the_file_whenever_writers_come_and_go(path, python):
    code = """
import sys
from pathlib import Path
from hpcfl.results_file import open_to_write
open_to_write(Path(sys.argv[1])).close()
print("ready", flush=True)
while True:
    open_to_write(Path(sys.argv[1])).close()
"""
    process = python(code, path)
    seen, end = set(), time.monotonic() + 3
    while time.monotonic() < end:
        seen.add(path.read_bytes()[11])
        with Run(path) as run:
            assert run.rounds_done == 0
    assert seen == {0, 5}  # a file that says 1 or 4 is one that nobody can open
    assert process.poll() is None
