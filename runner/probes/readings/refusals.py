"""What `nvidia-smi` prints instead of any table. The reading is whole; it says that the machine is not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from runner.facts import Broken, ReadingKind

_RENT_ANOTHER: Final = (
    "the driver of this machine does not work, and nothing inside a container mends it: rent another one"
)
_SAYINGS: Final[tuple[tuple[re.Pattern[str], ReadingKind, str, str], ...]] = (
    (
        re.compile(r"Unable to determine the device handle for GPU", re.IGNORECASE),
        ReadingKind.QUERY,
        "a card has fallen off the bus",
        "only a restart of the host brings it back: rent another machine",
    ),
    (
        re.compile(r"No devices were found", re.IGNORECASE),
        ReadingKind.TOPO,
        "the driver runs and has no card to offer",
        "start the container with --gpus all; if it was, rent another machine",
    ),
    (
        re.compile(r"couldn'?t communicate with the NVIDIA driver", re.IGNORECASE),
        ReadingKind.TOPO,
        "the driver does not answer",
        _RENT_ANOTHER,
    ),
    (
        re.compile(r"Driver/library version mismatch", re.IGNORECASE),
        ReadingKind.TOPO,
        "the driver was changed while it ran: kernel and library differ",
        _RENT_ANOTHER,
    ),
    (
        re.compile(r"Failed to initialize NVML", re.IGNORECASE),
        ReadingKind.TOPO,
        "the driver's library cannot be used here",
        "a container that lost its cards needs a restart; if that does not help, rent another machine",
    ),
    (
        re.compile(r"nvidia-smi: (?:command )?not found|libnvidia-ml\.so.{0,80}(?:not found|couldn'?t)", re.IGNORECASE),
        ReadingKind.TOPO,
        "there is no NVIDIA driver here",
        "start the container with --gpus all, on a machine with cards",
    ),
    (
        re.compile(r"GPU is lost|has fallen off the bus", re.IGNORECASE),
        ReadingKind.QUERY,
        "a card is lost",
        "only a restart of the host brings it back: rent another machine",
    ),
)


def recognise(lines: Sequence[str]) -> bool:
    return _find(lines) is not None


def parse(lines: Sequence[str]) -> Broken:
    found = _find(lines)
    assert found is not None, "asked about a text that is no refusal"
    line, kind, meaning, hint = found
    return Broken(kind=kind, message=f"{meaning}: {line.strip()[:200]!r}", hint=hint, no_cards=True)


def _find(lines: Sequence[str]) -> tuple[str, ReadingKind, str, str] | None:
    return next(
        (
            (line, kind, meaning, hint)
            for line in lines
            for saying, kind, meaning, hint in _SAYINGS
            if saying.search(line)
        ),
        None,
    )
