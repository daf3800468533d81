"""What is said must never end a run, nor hold it up."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from runner.cli.telling import _replace

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


def test_on_a_full_disk_the_picture_is_drawn_over_the_last_one(tmp_path):
    """
    A longer one in the blocks that it has, a shorter one whole; one that does not fit leaves the last one as it is.
    """
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("this user may not mount a filesystem")
    try:
        path = tmp_path / "status.json"
        _replace(path, b'{"step": 1}')
        with (tmp_path / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        seen = []
        for picture in ({"step": 2, "more": "x" * 2000}, {"step": 3}, {"step": 4, "more": "x" * 9000}):
            _replace(path, json.dumps(picture).encode())
            seen.append(json.loads(path.read_bytes())["step"])
        left = sorted(each.name for each in tmp_path.iterdir())
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)

    assert [2, 3, 3] == seen
    assert ["filler", "status.json"] == left
