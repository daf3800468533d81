"""What is said must never end a run, nor hold it up."""

import os
import subprocess
import sys

SAYS = """
import os, sys
from runner.cli.telling import _Stderr
for number in range(20_000):
    _Stderr().msg("a line of some length, to fill whatever buffer there is " * 2)
print("went on")
"""


def test_a_reader_that_never_reads_does_not_hold_up_the_run():
    """
    A terminal stopped by Ctrl-S, a pipe whose reader sleeps: lines are dropped.
    """
    ours, theirs = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", SAYS], stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60, check=False
        )
    finally:
        os.close(theirs)
        os.close(ours)

    assert "went on\n" == done.stdout


def test_a_closed_reader_does_not_end_the_run():
    """
    A closed terminal, `run | head`: no error.
    """
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        done = subprocess.run(
            [sys.executable, "-c", SAYS], stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60, check=False
        )
    finally:
        os.close(theirs)

    assert (0, "went on\n") == (done.returncode, done.stdout)
