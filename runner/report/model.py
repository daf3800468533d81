"""The report as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from runner.policy.goodput import Spending, goodput, useful_cost
from runner.policy.ledger import dump_machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the ranks said at one moment. `machine` counts from 1."""

    at: datetime
    machine: int
    attempt: int
    step: int
    loss: float | None
    steps_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that is there. `where`: `store`, `disk`, or both; of a store's report also a disk that had it last."""

    name: str
    step: int
    where: str
    written_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`status` is the last one that the run wrote; `spendings` are of its machines, in the order of their coming."""

    address: str
    status: Mapping[str, Any]
    command: str
    spendings: tuple[Spending, ...]
    checkpoints: tuple[Saved, ...]
    samples: tuple[Sample, ...]


def as_json(report: Report) -> dict[str, Any]:
    """For `--json`: seconds and decimal texts."""
    return {
        "job": report.status.get("job"),
        "address": report.address,
        "command": report.command,
        "outcome": report.status.get("outcome"),
        "exit_code": report.status.get("exit_code"),
        "reason": report.status.get("reason"),
        "phase": report.status.get("phase"),
        "step": report.status.get("step"),
        "max_steps": report.status.get("max_steps"),
        "loss": report.status.get("loss"),
        "updated_at": report.status.get("updated_at"),
        "goodput": round(goodput(report.spendings), 4),
        "machines": [_spending(spending) for spending in report.spendings],
        "checkpoints": [asdict(saved) for saved in report.checkpoints],
    }


def _spending(spending: Spending) -> dict[str, Any]:
    parts = ("total_s", "setup_s", "startup_s", "useful_s", "lost_s", "idle_s")
    seconds = {name: round(getattr(spending, name), 1) for name in parts}
    shares = [asdict(share) for share in spending.shares]
    return {**dump_machine(spending.machine), **seconds, "useful_cost": str(useful_cost(spending)), "shares": shares}
