"""`triage`: the first real error of a log, or of a folder of logs."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from runner.cli.output import out, out_json
from runner.cli.runs import find_run
from runner.errors import JobError
from runner.facts import Diagnosis, Ending
from runner.storage import journal
from runner.supervise.triage import first_error


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="FILE|DIR|RUN",
        nargs="?",
        help="a log, a folder of logs, or the folder, name or job.yaml of a run (default: the newest run)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    path = _find(args.path)
    if (number := _succeeded(path)) is not None:
        _tell_success(path, number, as_json=args.json)
        return 0
    found = first_error(path)
    if args.json:
        out_json(as_json(found))
        return 0
    for line in _told(found):
        out(line)
    return 0


def _find(which: str | None) -> Path:
    """Logs are taken as they are; what is none may be a run."""
    path = Path(which) if which else None
    if path and path.exists() and path.suffix not in {".yaml", ".yml"}:
        return path
    try:
        return find_run(which, os.environ)
    except JobError as error:
        if path is None or path.exists():
            raise
        expected = str(error).partition(": ")[2]
        raise JobError(
            f"{path}: expected a log or a folder of logs, found nothing", hint=f"of a run: {expected}"
        ) from None


def _succeeded(path: Path) -> int | None:
    """Number of the run's last attempt, where it succeeded."""
    attempts = journal.read(path / "journal.jsonl").attempts
    return attempts[-1].number if attempts and attempts[-1].ending is Ending.SUCCEEDED else None


def _tell_success(path: Path, number: int, *, as_json: bool) -> None:
    if not as_json:
        out(f"nothing failed: attempt {number}, the last of {path}, succeeded")
        return
    nothing: dict[str, Any] = {field.name: None for field in fields(Diagnosis) if field.name != "summary"}
    out_json({**nothing, "label": "none", "category": "none", "cause": "nothing failed", "env": {}})


def as_json(found: Diagnosis) -> dict[str, Any]:
    """The ten fields that scripts read."""
    values = {field.name: getattr(found, field.name) for field in fields(found) if field.name != "summary"}
    return {**values, "env": dict(found.env)}


def _told(found: Diagnosis) -> tuple[str, ...]:
    at = f" (line {found.primary_line_no})" if found.primary_line_no else ""
    change = "".join(f" {name}={value}" for name, value in found.env.items())
    return (
        f"{found.summary}{at}",
        f"label:    {found.label} ({found.category}), confidence {found.confidence}",
        f"cause:    {found.cause}",
        f"remedy:   {found.remedy}",
        f"decision: {found.decision}{change}",
    )
