"""
Which day a job with `{date}` in its name belongs to.

A container that starts again after midnight must find the run that it began in the evening:
another date would be another run, and that one would begin at step 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from runner.errors import JobError
from runner.job import Job

DATE_VARIABLE: Final = "RUNNER_DATE"


def date_of(job: Job, env: Mapping[str, str], workspace: Path, now: datetime) -> str:
    """$RUNNER_DATE; else yesterday if yesterday's run is here and not over; else today, by UTC."""
    if given := env.get(DATE_VARIABLE):
        return _checked(given)
    today, yesterday = (day.astimezone(UTC).date().isoformat() for day in (now, now - timedelta(days=1)))
    if "{date}" in job.name and not _run_dir(job, workspace, today).exists():
        return yesterday if _is_unfinished(_run_dir(job, workspace, yesterday)) else today
    return today


def _checked(given: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}", given):
        raise JobError(f"${DATE_VARIABLE}: expected a date such as 2026-01-31, got {given!r}")
    return given


def _run_dir(job: Job, workspace: Path, date: str) -> Path:
    return Path(job.fill(workspace=str(workspace), date=date).run_dir)


def _is_unfinished(run_dir: Path) -> bool:
    """It was begun, and nothing says that it ended."""
    if not (run_dir / "journal.jsonl").exists():
        return False
    try:
        return not json.loads((run_dir / "status.json").read_bytes()).get("outcome")
    except (OSError, ValueError, AttributeError):
        return True
