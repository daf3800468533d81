"""The date in a job's name, around midnight."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from runner.cli.dates import date_of
from runner.errors import JobError
from runner.job import Job

JOB = Job(name="night-{date}", command="train.py")
MORNING = datetime.fromisoformat("2026-02-01T02:00+00:00")


def begin(workspace: Path, date: str, **status) -> None:
    """A run folder as a runner leaves it."""
    folder = workspace / f"night-{date}"
    folder.mkdir()
    (folder / "journal.jsonl").touch()
    if status:
        (folder / "status.json").write_text(json.dumps(status))


def test_a_new_run_is_of_today(tmp_path):
    """
    Today by UTC, wherever the machine is.
    """
    there = datetime.fromisoformat("2026-02-01T08:00+09:00")

    assert "2026-01-31" == date_of(JOB, {}, tmp_path, there)


@pytest.mark.parametrize("status", [{}, {"outcome": None}])
def test_a_start_after_midnight_goes_on_with_yesterday(tmp_path, status):
    """
    `docker restart` at two in the morning does not begin at step 0 under a new name.
    """
    begin(tmp_path, "2026-01-31", **status)

    assert "2026-01-31" == date_of(JOB, {}, tmp_path, MORNING)


def test_a_run_that_is_over_makes_room_for_today(tmp_path):
    """
    The next night is a run of its own.
    """
    begin(tmp_path, "2026-01-31", outcome="succeeded")

    assert "2026-02-01" == date_of(JOB, {}, tmp_path, MORNING)


def test_a_run_of_today_goes_first(tmp_path):
    """
    An unfinished yesterday does not take over once today has begun.
    """
    begin(tmp_path, "2026-01-31")
    begin(tmp_path, "2026-02-01")

    assert "2026-02-01" == date_of(JOB, {}, tmp_path, MORNING)


def test_the_environment_decides(tmp_path):
    """
    Who starts the job knows its date best.
    """
    begin(tmp_path, "2026-01-31")

    assert "2025-12-31" == date_of(JOB, {"RUNNER_DATE": "2025-12-31"}, tmp_path, MORNING)


@pytest.mark.parametrize("date", ["../x", "a/b", ".", "x" * 41])
def test_a_date_cannot_leave_the_folder(tmp_path, date):
    """
    It becomes part of a path.
    """
    with pytest.raises(JobError, match=r"^\$RUNNER_DATE: expected a date"):
        date_of(JOB, {"RUNNER_DATE": date}, tmp_path, MORNING)
