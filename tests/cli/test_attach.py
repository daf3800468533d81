"""`attach`: what the screen says, and that nothing typed into it reaches the run."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from runner.cli.screen import View, clip, screen
from runner.facts import CardPulse
from runner.supervise.logs import Line

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
RUNNER = (sys.executable, "-I", "-m", "runner")


def _ago(**span: int) -> str:
    return (NOW - timedelta(**span)).isoformat()


STATUS = {
    "job": "llama-8b-sft",
    "phase": "RUNNING",
    "attempt": 2,
    "step": 1240,
    "max_steps": 10_000,
    "loss": 1.23456,
    "steps_per_s": 0.95,
    "eta_s": 9200.0,
    "deadline_at": (NOW + timedelta(hours=9)).isoformat(),
    "cost": "12.40 EUR",
    "server": "srv_1",
    "store": "s3://bucket/runs/llama-8b-sft",
    "checkpoints": [
        {"step": 900, "written_at": _ago(minutes=18), "local": True, "offsite": True},
        {"step": 1200, "written_at": _ago(minutes=3), "local": True, "offsite": False},
    ],
    "tasks": [{"kind": "upload", "subject": "step-00001200-0123abcd", "progress": 0.43, "note": "31 MB/s"}],
    "message": "checkpoint step-00001200-0123abcd committed: 92.1 GB in 61.0s",
    "updated_at": _ago(seconds=1),
}
CARDS = tuple(
    CardPulse(index=i, use_percent=98, used_bytes=61 * 10**9, total_bytes=80 * 10**9, power_w=640, temperature=61)
    for i in range(8)
)
LINES = tuple(Line(rank, "stdout", f"loss of rank {rank}") for rank in (0, 1, -1))


def _view(**change: object) -> View:
    return View(**{"status": STATUS, "alive": True, "now": NOW, "cards": CARDS, "lines": LINES, **change})  # type: ignore[arg-type]


def test_a_glance_answers_what_a_person_at_night_asks():
    """
    Does it run, how far, until when, at what price, what is safe, what do the cards do.
    """
    text = "\n".join(screen(_view(), width=80, height=24))

    for expected in (
        "llama-8b-sft  RUNNING  attempt 2",
        "12.4%  step 1,240/10,000  loss 1.2346  0.95 steps/s",
        "about 2h 33m left  deadline in 9h 00m  cost 12.40 EUR",
        "step 1,200, 3m 00s ago, here, not in the store yet",
        "step 900, 18m 00s ago, here and in the store",
        "upload  step-00001200-0123abcd  43% (31 MB/s)",
        "card 7   98%  61.0 GB of 80.0 GB  640 W  61 °C",
        "1 | loss of rank 1",
        "launcher | loss of rank -1",
        "q detach",
    ):
        assert expected in text


@pytest.mark.parametrize("width", [20, 80, 300])
@pytest.mark.parametrize("height", [6, 24, 100])
def test_a_screen_never_has_more_than_fits(width: int, height: int):
    """
    A longer line would wrap, and push the others away.
    """
    wide = (*LINES, Line(0, "stdout", "漢字" * 200), Line(0, "stdout", "x" * 10_000))

    lines = screen(_view(lines=wide), width=width, height=height)

    assert len(lines) <= height
    assert all(line == clip(line, width) for line in lines)


@pytest.mark.parametrize("store", ["s3://bucket/runs/llama-8b-sft", ""])
def test_forty_columns_have_all_that_matters(store: str):
    """
    A telephone's terminal: how far, the loss, the rate, and where the newest checkpoint is.
    """
    status = STATUS | {"step": 1_234_567, "max_steps": 10_000_000, "store": store, "loss": 12.34567}

    lines = screen(_view(status=status), width=40, height=30)

    where = "here, not in the store yet" if store else "only on this disk"
    for expected in ("1,234,567/10,000,000", "loss 12.3457", "0.95 steps/s", "step 1,200", "3m", where):
        assert any(expected in line for line in lines), (expected, lines)
    assert all(len(line) <= 40 for line in lines)


def test_a_rank_can_be_looked_at_alone():
    """
    And the rule says which.
    """
    lines = screen(_view(rank=1), width=80, height=24)

    assert [line for line in lines if " | " in line] == ["1 | loss of rank 1"]
    assert any(line.startswith("-- rank 1 --") for line in lines)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"alive": False}, "NOT RUNNING (start it again"),
        ({"alive": False, "status": {**STATUS, "outcome": "succeeded", "exit_code": 0}}, "SUCCEEDED (exit code 0)"),
        ({"status": {**STATUS, "updated_at": _ago(minutes=5)}}, "as of 5m 00s ago"),
        ({"status": {}}, "checkpoint  none yet"),
        ({"status": {**STATUS, "store": None, "checkpoints": STATUS["checkpoints"][1:]}}, "only on this disk"),  # type: ignore[index]
    ],
)
def test_what_is_wrong_is_said(change: dict[str, object], expected: str):
    """
    A run that is dead, over, stale or unsafe does not look like one that is well.
    """
    assert expected in "\n".join(screen(_view(**change), width=100, height=24))


# ------------------------------------------------------------------------- in a terminal


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "job" / "logs" / "attempt-0001"
    folder.mkdir(parents=True)
    (folder / "launcher.log").write_text("torchrun says hello\n")
    (tmp_path / "job" / "status.json").write_text(json.dumps(STATUS))
    return tmp_path / "job"


def _read_until(master: int, expected: bytes, seconds: float = 30.0) -> bytes:
    ends, got = time.monotonic() + seconds, b""
    while expected not in got and time.monotonic() < ends:
        if select.select([master], [], [], 0.5)[0]:
            try:
                got += os.read(master, 1 << 16)
            except OSError:  # the other end is closed
                break
    assert expected in got, got
    return got


def test_attach_shows_the_run_follows_its_log_and_leaves_on_q(run_dir: Path):
    """
    In a real terminal of 80 columns.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [*RUNNER, "attach", str(run_dir)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "vt100", "LC_ALL": "C.UTF-8"},
    )
    os.close(slave)
    try:
        seen = _read_until(master, b"torchrun says hello")
        assert b"llama-8b-sft" in seen
        with (run_dir / "logs" / "attempt-0001" / "launcher.log").open("a") as log:
            log.write("a line that comes later\n")
        _read_until(master, b"a line that comes later")
        with (run_dir / "logs" / "attempt-0001" / "launcher.log").open("a") as log:
            log.write("its last words\n")
        (run_dir / "logs" / "attempt-0002").mkdir()
        (run_dir / "logs" / "attempt-0002" / "launcher.log").write_text("torchrun again\n")
        seen = _read_until(master, b"torchrun again")
        assert seen.index(b"its last words") < seen.index(b"== attempt 2 ==") < seen.index(b"torchrun again")

        os.write(master, b"q")

        assert 0 == process.wait(30)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_attach_without_a_terminal_says_what_works_there(run_dir: Path):
    """
    `docker exec` without -it, cron.
    """
    done = subprocess.run(
        [*RUNNER, "attach", str(run_dir)], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )

    assert 2 == done.returncode
    assert "expected a terminal, found none (docker exec needs -it)" in done.stderr
    assert "logs -f" in done.stderr


def test_events_tell_the_journal_one_line_each(run_dir: Path):
    """
    For eyes; with --json as it is.
    """
    event = {"event": "exited", "ending": "failed", "code": 1, "reason": "CUDA error", "step": 0, "at": NOW.isoformat()}
    (run_dir / "journal.jsonl").write_text(json.dumps(event) + '\n{"torn')

    plain = subprocess.run([*RUNNER, "events", str(run_dir)], capture_output=True, text=True, check=True)
    as_json = subprocess.run([*RUNNER, "events", str(run_dir), "--json"], capture_output=True, text=True, check=True)

    assert plain.stdout.rstrip().endswith('exited       ending=failed code=1 reason="CUDA error" step=0')
    assert [event] == [json.loads(line) for line in as_json.stdout.splitlines()]
