"""Logs that grow too large while somebody writes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from runner.sight import Logs
from runner.supervise.logs import Follower, read_tail
from runner.supervise.triage.lines import read_lines
from runner.supervise.trim import AHEAD_BYTES, HEAD_BYTES, Ahead, stored_bytes, trim

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank, size in enumerate((30, 12)):
        log = tmp_path / f"attempt-0001/x/attempt_0/{rank}/stdout.log"
        log.parent.mkdir(parents=True)
        with log.open("w") as file:
            for number in range(size * MIB // 64):
                file.write(f"rank {rank} line {number}".ljust(63, ".") + "\n")
    return tmp_path


def _log(folder: Path, rank: int) -> Path:
    return folder / f"attempt-0001/x/attempt_0/{rank}/stdout.log"


def test_logs_take_no_more_than_they_may(folder: Path):
    """
    The largest gives first; beginnings and ends stay, and so do the sizes.
    """
    before = stored_bytes(folder)

    given = trim(folder, 20 * MIB)

    assert stored_bytes(folder) <= 20 * MIB
    assert before - stored_bytes(folder) == given
    assert 30 * MIB == _log(folder, 0).stat().st_size
    assert 12 * MIB <= _log(folder, 1).stat().st_blocks * 512
    assert b"rank 0 line 0." == _log(folder, 0).read_bytes()[:14]
    assert f"rank 0 line {30 * MIB // 64 - 1}" == read_tail(_log(folder, 0))[-1].rstrip(".")


def test_trimming_goes_on_as_a_log_grows(folder: Path):
    """
    Each time from where the last hole ends.
    """
    for _ in range(3):
        with _log(folder, 0).open("ab") as file:
            file.write(b"more\n" * (2 * MIB))
        trim(folder, 20 * MIB)

        assert stored_bytes(folder) <= 20 * MIB + MIB


def test_small_logs_stay_whole(folder: Path):
    """
    What is left can be more than the limit: beginnings and ends are never given up.
    """
    trim(folder, 0)

    assert stored_bytes(folder) <= 2 * (HEAD_BYTES + 5 * MIB)
    assert 0 == trim(folder, 0)


def test_a_writer_that_never_opened_it_for_appending_goes_on_behind_the_hole(tmp_path: Path):
    """
    As torchrun's ranks do: an offset of its own, which a truncated file would not change.
    """
    path = tmp_path / "stdout.log"
    program = "import sys; [print('x' * 1023) for _ in range(16384)]; sys.stdout.flush(); input(); print('the end')"
    with path.open("wb") as file:
        writer = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=file)
    while path.stat().st_size < 16 * MIB:
        assert writer.poll() is None
    trim(tmp_path, 8 * MIB)
    writer.communicate(b"\n", timeout=30)

    assert stored_bytes(tmp_path) <= 8 * MIB + MIB
    assert "the end" == read_tail(path)[-1]


def test_the_first_error_is_found_beside_a_hole_and_quickly(tmp_path: Path):
    """
    A hole of 64 GB is passed over, and line numbers do not matter there.
    """
    path = tmp_path / "stderr.log"
    with path.open("wb") as file:
        file.write(b"begin\n" * 100)
        file.seek(1 << 36)
        file.write(b"\nTraceback (most recent call last):\n  File x\nRuntimeError: CUDA error: out of memory\n")

    texts = [line.text for line in read_lines(path)]

    assert "begin" == texts[0]
    assert "RuntimeError: CUDA error: out of memory" == texts[-1]


def test_a_log_is_followed_across_a_hole(folder: Path):
    """
    Who reads behind the writer sees whole lines again after it.
    """
    follower = Follower(folder / "attempt-0001", rank=0)
    follower.skip()
    trim(folder, 10 * MIB)
    with _log(folder, 0).open("a") as file:
        file.write("after\n")

    assert ["after"] == [line.text for line in follower.read()]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 24 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting takes root, and a system that allows it")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def _fill(disk: Path) -> None:
    with (disk / "data").open("ab", buffering=0) as file:
        try:
            while file.write(b"x" * 4096) == 4096:
                pass
        except OSError:
            pass
    with pytest.raises(OSError, match="No space left"):
        (disk / "more").write_bytes(b"x" * 4096)


def test_a_rank_goes_on_printing_when_the_disk_is_full(small_disk: Path) -> None:
    """
    A print that fails ends it. What was kept ahead is used first, then older lines give their place.
    """
    attempt = small_disk / "logs" / "attempt-0001"
    attempt.mkdir(parents=True)
    line = b"step 1 loss 0.5\n" * 4096
    ahead = Ahead(small_disk / "logs")
    with (attempt / "rank.log").open("ab", buffering=0) as log:
        for _ in range(8 * MIB // len(line)):
            log.write(line)
        ahead.keep(attempt)
        _fill(small_disk)

        for _ in range(6 * MIB // len(line)):
            assert len(line) == log.write(line)
            ahead.keep(attempt)

    assert 14 * MIB == (attempt / "rank.log").stat().st_size


def test_what_was_kept_ahead_is_given_back(tmp_path: Path) -> None:
    """
    When the attempt is over, and for each attempt that follows.
    """
    first, second = tmp_path / "attempt-0001", tmp_path / "attempt-0002"
    for folder in (first, second):
        folder.mkdir()
        (folder / "rank.log").write_bytes(b"a line\n")
    ahead = Ahead(tmp_path)

    ahead.keep(first)
    kept = stored_bytes(first)
    ahead.keep(second)
    ahead.keep(None)

    assert True is (kept >= AHEAD_BYTES)
    assert True is (stored_bytes(tmp_path) < MIB)
    assert b"a line\n" == (first / "rank.log").read_bytes()


def test_a_flood_is_seen_at_the_next_tick(folder: Path) -> None:
    """
    Gigabytes are printed in seconds: a look each few of them would be too late for a disk.
    """
    logs, attempt, now = Logs(folder), folder / "attempt-0001", datetime(2026, 1, 1, tzinfo=UTC)
    logs.size(now, attempt)
    with _log(folder, 0).open("ab") as file:
        file.write(b"more\n" * (4 * MIB))

    seen = logs.size(now + timedelta(seconds=1), attempt)
    logs.trim(20 * MIB)
    after = logs.size(now + timedelta(seconds=2), attempt)

    assert stored_bytes(folder) == after
    assert 60 * MIB < seen
    assert after <= 20 * MIB


def test_a_limit_below_what_is_never_given_up_is_no_reason_to_try_at_each_tick(folder: Path) -> None:
    """
    Beginnings and ends stay, so the logs are still larger after it.
    """
    logs, attempt, now = Logs(folder), folder / "attempt-0001", datetime(2026, 1, 1, tzinfo=UTC)
    logs.size(now, attempt)
    logs.trim(MIB)

    assert 0 == logs.size(now + timedelta(seconds=2), attempt)
    assert MIB < logs.size(now + timedelta(seconds=30), attempt)


def test_nothing_of_a_flood_is_left_after_the_end(tmp_path: Path) -> None:
    """
    A script that prints more than logs.max_size in its last second leaves no more than that behind; it is told in one line.
    """
    job = {
        "name": "flood",
        "command": "sh -c 'yes a line that comes again and again | head -c 90000000'",
        "launcher": "command",
        "cpu_processes": 1,
        "preflight": {"comm_test": False},
        "provider": {"kind": "none"},
        "logs": {"max_size": "10MiB"},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    done = subprocess.run(
        (sys.executable, "-I", "-m", "runner", "run", "--config", "job.yaml"),
        env={**os.environ, "VRAMFARM_WORKSPACE": str(tmp_path)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert 0 == done.returncode, done.stderr[-2000:]
    assert stored_bytes(tmp_path / "flood" / "logs") <= 10 * MIB
    assert 1 == done.stderr.count("trim logs to")
