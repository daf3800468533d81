"""The control group's limit on memory: version 1 and 2, with or without file names, and `free` beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from runner.facts import Broken, MemoryLimit, ReadingKind
from runner.probes.readings.text import parse_size

_LIMITS: Final = ("memory.max", "memory.limit_in_bytes")
_CURRENTS: Final = ("memory.current", "memory.usage_in_bytes")
_FILE: Final = re.compile(r"\bmemory\.(?:max|current|limit_in_bytes|usage_in_bytes)(?![\w.])")
_VALUE: Final = re.compile(r"(?:^|[\s:=])(max|-1|\d{1,20})\s*$")
_FREE: Final = re.compile(r"\s*Mem:\s+(\S{1,20})\s")
_WORD: Final = re.compile(r"\s*(?:max|-1|\d{4,20})\s*")
_NO_LIMIT: Final = 1 << 62  # version 1 writes 2^63 less a page


def recognise(lines: Sequence[str]) -> bool:
    filled = [line for line in lines if line.strip()]
    return any(_FILE.search(line) for line in filled) or (0 < len(filled) < 3 and all(map(_WORD.fullmatch, filled)))  # noqa: PLR2004  # limit and usage


def parse(lines: Sequence[str]) -> MemoryLimit | Broken:
    told = dict(reversed(list(_values(lines))))  # the first of each
    limit = next((told[name] for name in _LIMITS if name in told), None)
    if limit is None:
        return Broken(
            kind=ReadingKind.SHM,
            message="expected `max` or a number of bytes for the memory limit, found neither",
            hint="save the output of `cat /sys/fs/cgroup/memory.max`",
        )
    free = next((match[1] for line in lines if (match := _FREE.match(line))), "")
    return MemoryLimit(
        limit_bytes=_bytes(limit),
        current_bytes=next((_bytes(told[name]) for name in _CURRENTS if name in told), None),
        host_bytes=parse_size(free, unit_bytes=1024) if free else None,
        host_text=free,
    )


def _values(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each value under the file's name that stands before it; the first without one is the limit, the second the usage."""
    unnamed = iter((_LIMITS[0], _CURRENTS[0]))
    names: list[str] = []
    for line in lines:
        found = _FILE.findall(line)
        value = _VALUE.search(line)
        names += found
        if value is None:
            continue
        if names:
            yield names.pop(0), value[1]
        elif _WORD.fullmatch(line) and (name := next(unnamed, "")):
            yield name, value[1]


def _bytes(value: str) -> int | None:
    return int(value) if value.isdecimal() and int(value) < _NO_LIMIT else None
