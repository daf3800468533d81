"""The fabric blocks of `nvidia-smi -q`: whether cards on an NVSwitch board have joined it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from runner.facts import Broken, Fabric, FabricState, ReadingKind

_CARD: Final = re.compile(r"\s*GPU [0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d\s*")
_BLOCK: Final = re.compile(r"\s*Fabric\s*")
_HEAD: Final = re.compile(r"=+NVSMI LOG=+|\s*Attached GPUs\s*:|\s*Product (?:Name|Architecture)\s*:")
_UNWELL: Final = frozenset({"true", "yes", "degraded"})
_WELL: Final = frozenset({"", "none", "n/a", "no", "false"})


def recognise(lines: Sequence[str]) -> bool:
    return any(_BLOCK.fullmatch(line) or _CARD.fullmatch(line) or _HEAD.match(line) for line in lines)


def parse(lines: Sequence[str]) -> Fabric | Broken:
    cards = tuple(_state(block) for block in _blocks(lines))
    if any(not card.state for card in cards):
        return Broken(
            kind=ReadingKind.FABRIC,
            message="the fabric block is cut: expected a line with its state, found none",
            hint="save the whole output of `nvidia-smi -q`",
        )
    return Fabric(cards=cards)


def _blocks(lines: Sequence[str]) -> Iterator[dict[str, str]]:
    """The fields below each `Fabric` line: what is indented deeper than it, or all of it where indents were lost."""
    at = 0
    while at < len(lines):
        head = lines[at]
        at += 1
        if not _BLOCK.fullmatch(head):
            continue
        fields: dict[str, str] = {}
        while at < len(lines) and _belongs(lines[at], head):
            name, colon, value = lines[at].partition(":")
            if colon:
                fields.setdefault(name.strip().lower(), value.strip()[:200])
            at += 1
        yield fields


def _belongs(line: str, head: str) -> bool:
    if not line.strip() or _BLOCK.fullmatch(line) or _CARD.fullmatch(line):
        return False
    return _indent(line) > _indent(head) or _indent(head) == 0


def _indent(line: str) -> int:
    expanded = line.expandtabs(4)
    return len(expanded) - len(expanded.lstrip())


def _state(fields: dict[str, str]) -> FabricState:
    return FabricState(
        state=fields.get("state", ""),
        status=fields.get("status", ""),
        health=fields.get("summary", ""),
        troubles=tuple(f"{name}: {value}" for name, value in fields.items() if _is_unwell(name, value.lower())),
        recovering=fields.get("route recovery in progress", "").lower() == "true",
    )


def _is_unwell(name: str, value: str) -> bool:
    return value not in _WELL if name.startswith("incorrect") else value in _UNWELL
