"""How commands speak: data on standard output."""

from __future__ import annotations

import json
import sys
from typing import Any


def out(text: str) -> None:
    """One line of data."""
    sys.stdout.write(f"{text}\n")


def out_json(value: Any) -> None:  # noqa: ANN401  # JSON
    out(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns side by side; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)
