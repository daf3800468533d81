"""How commands speak: data on standard output, amounts a person can read."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any


def out(text: str) -> None:
    """One line of data."""
    sys.stdout.write(f"{text}\n")


def out_json(value: Any) -> None:  # noqa: ANN401  # JSON
    out(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def duration(value: timedelta | float) -> str:
    """`45s`, `30m`, `1h30m`, `2d4h`: at most two units, as job.yaml writes them."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if 0 < seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    left = round(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count}{unit}")
    return "".join(parts[:2])


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns side by side; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)
