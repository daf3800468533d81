"""A disk that is full keeps its own cause out of the logs: what it has left is measured instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from runner.facts import FULL_BYTES, Decision
from runner.supervise.triage.refine import Chosen

DISK_FULL: Final = Chosen(label="disk_full", line=None, confidence="high", decision=Decision.RESUME)


def weigh_disk(chosen: Chosen, free_bytes: int | None) -> Chosen:
    """What only follows from a full disk is certain where the disk is full."""
    if chosen.label != DISK_FULL.label or chosen.confidence != "medium" or free_bytes is None:
        return chosen
    return replace(chosen, confidence="high" if is_full(free_bytes) else "low")


def is_full(free_bytes: int) -> bool:
    return free_bytes < FULL_BYTES


def tell_full(folder: Path, free_bytes: int) -> str:
    """Return the line for a human. No log is named: it has no word of this."""
    return f"the disk of {folder} is full: {free_bytes // 1000} kB are free, and no log could be written"
