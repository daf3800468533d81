"""Where the files of a run are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Where the files of a run are. Its layout is in ARCHITECTURE.md."""

    root: Path

    @property
    def journal(self) -> Path:
        return self.root / "journal.jsonl"

    @property
    def job(self) -> Path:
        return self.root / "job.json"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def stop(self) -> Path:
        return self.root / "stop"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def holder(self) -> Path:
        return self.root / "holder"

    @property
    def tasks(self) -> Path:
        return self.root / "logs" / "tasks"

    def attempt(self, number: int) -> Path:
        return self.root / "logs" / f"attempt-{number:04d}"

    def evidence(self, number: int) -> Path:
        return self.root / "evidence" / f"attempt-{number:04d}"


def free_bytes(folder: Path) -> int | None:
    """What its disk has left; nothing, if it may have no more files. None: nobody can say."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return None
    no_more_files = space.f_files > 0 and space.f_favail == 0
    return 0 if no_more_files else space.f_bavail * space.f_frsize
