"""What a probe says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    OK = "ok"
    WARN = "warn"  # goes on, and says so
    REFUSE = "refuse"  # training here would fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at. `message` says what was found, `hint` what to do; `facts` are for decisions."""

    name: str
    severity: Severity
    message: str
    hint: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
