"""What is said must never end a run, nor hold it up."""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from runner.cli.telling import Teller, _replace
from runner.facts import Attempt, History, Observed
from runner.folder import RunFolder
from runner.job import Job
from runner.policy.actions import End
from runner.words import Surroundings
from tests.simworld import START

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


def test_a_flood_is_repeated_in_part_and_says_so(tmp_path, capfd):
    """
    A script that prints thousands of lines a second must not fill the disk twice: the last lines, and how many there were.
    """
    folder = RunFolder(root=tmp_path)
    folder.attempt(1).mkdir(parents=True)
    printed = folder.attempt(1) / "torchrun" / "attempt_0" / "0" / "stdout.log"
    printed.parent.mkdir(parents=True)
    printed.write_text("long ago\n")
    around = Surroundings(run_dir=str(tmp_path), server=None, first_boot_at=None, runner_pid=1)
    attempt = Attempt(number=1, id="a", resume=None, lineage=1, boot_id="b", launched_at=START)

    teller = Teller(Job(name="job", command="train.py"), folder, around, machine="")
    teller._before = Observed(now=START, boot_id="b", life="l")
    teller._echo(History(attempts=(attempt,)))
    written_before = capfd.readouterr().err
    with printed.open("a") as file:
        file.writelines(f"step {number}\n" for number in range(1000))
    teller._echo(History(attempts=(attempt,)))
    told = capfd.readouterr().err.splitlines()

    assert "  | long ago\n" == written_before
    assert "  | (900 lines more; vramfarm-runner logs has them)" == told[0]
    assert [f"  | step {number}" for number in range(900, 1000)] == told[1:]


def test_what_cannot_be_told_ends_no_run(tmp_path, capfd):
    """
    A fault in the words, each turn and at the end: each place that has one is named once, and what is done is done all the same.
    """
    folder = RunFolder(root=tmp_path)
    around = Surroundings(run_dir=str(tmp_path), server=None, first_boot_at=None, runner_pid=1)
    teller = Teller(Job(name="job", command="train.py"), folder, around, machine="")
    seen = Observed(now=START, boot_id="b", life="l")
    broken = replace(seen, local=("no checkpoint",))
    for each in (seen, broken, seen, broken):
        teller(None, each, History())
    teller._before = broken
    teller.close(History(), End(code=0, stop=False, keep=False, reason="training is done"))
    told = capfd.readouterr().err

    assert 2 == told.count("this turn cannot be told, which is a fault of the runner: AttributeError")
    assert 1 == told.count("the end cannot be told, which is a fault of the runner: AttributeError")
