"""`triage`: the first real error of a log, or of a folder of logs."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from runner.cli.output import out, out_json
from runner.errors import JobError
from runner.facts import Diagnosis
from runner.supervise.triage import first_error


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="FILE|DIR", help="a log, a folder of logs, or the folder of a run")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    path = Path(args.path)
    if not path.exists():
        raise JobError(f"{path}: expected a log or a folder of logs, found nothing")
    found = first_error(path)
    if args.json:
        out_json(as_json(found))
        return 0
    for line in _told(found):
        out(line)
    return 0


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
