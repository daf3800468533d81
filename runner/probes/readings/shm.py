"""How large shared memory is: `df` in any language, `mount`, and what NCCL says when it is full."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from runner.facts import Broken, ReadingKind, SharedMemory
from runner.probes.readings.text import parse_size

_PLACE: Final = "/dev/shm"  # noqa: S108  # it is what we look at
_PERCENT: Final = re.compile(r"\d{1,3}%|-")
_UNIT: Final = re.compile(r"\s(\d{1,6})?([KMG])?B?-\S{3,10}\s", re.IGNORECASE)  # 1K-blocks, 1024-blocks, 1M-Blöcke
_INODES: Final = re.compile(r"\sI\S{4,8}\s+I\S+\s+I")
_MOUNTED: Final = re.compile(r"\s(?:on )?/dev/shm\s(?:type )?\s*\w+\s.*?\bsize=(\d{1,15}[kmgt]?%?)", re.IGNORECASE)
_NEED: Final = re.compile(r"shared memory segment\b.{0,200}?\(size (\d{1,15})\)")
_FULL: Final = re.compile(
    r"posix_fallocate failed|shared memory segment|insufficient shared memory|/dev/shm/.{1,280}No space left"
)
_HEAD: Final = re.compile(r"\bFilesystem\s.{0,200}Mounted")
_MISSING: Final = re.compile(rf"{_PLACE}\S{{0,4}}: No such file or directory")
_DEFAULT_UNIT: Final = 1024  # of a bare number, as `df` counts


def recognise(lines: Sequence[str]) -> bool:
    signs = (_MOUNTED, _FULL, _MISSING, _HEAD)
    return any(_is_entry(line) or any(sign.search(line) for sign in signs) for line in lines)


def parse(lines: Sequence[str]) -> SharedMemory | Broken:
    at = next((at for at, line in enumerate(lines) if _is_entry(line)), None)
    if at is not None:
        return _entry(lines, at)
    mounted = next((match[1] for line in lines if (match := _MOUNTED.search(line))), "")
    if mounted:
        size = parse_size(mounted)
        return (
            _broken(f"expected a size in bytes, got size={mounted}") if size is None else SharedMemory(size_bytes=size)
        )
    if any(_FULL.search(line) for line in lines):
        return _refused(lines)
    if any(_MISSING.search(line) for line in lines):
        return _broken("there is no /dev/shm on this machine")
    return _broken("expected a line that ends in /dev/shm, found none")


def _is_entry(line: str) -> bool:
    tokens = line.split()
    return len(tokens) > 1 and tokens[-1] == _PLACE and _PERCENT.fullmatch(tokens[-2]) is not None


def _entry(lines: Sequence[str], at: int) -> SharedMemory | Broken:
    """The three figures before the percentage, whatever stands before them (a name, a type, or a line of its own)."""
    head = next(
        (line for line in reversed(lines[:at]) if _PLACE not in line and "%" in line and not _is_figures(line)), ""
    )
    if _INODES.search(f" {head} "):
        return _broken("these are numbers of files (df -i), not bytes")
    figures = [parse_size(token, unit_bytes=_unit(head)) for token in lines[at].split()[:-2][-3:]]
    if len(figures) < 3 or figures[0] is None:  # noqa: PLR2004  # size, used, available
        return _broken(f"expected size, used and available before the percentage, got {lines[at].strip()[:120]!r}")
    return SharedMemory(size_bytes=figures[0], used_bytes=figures[1], free_bytes=figures[2])


def _is_figures(line: str) -> bool:
    return any(_PERCENT.fullmatch(token) and "%" in token for token in line.split())


def _unit(head: str) -> int:
    match = _UNIT.search(f" {head} ")
    if match is None or not (match[1] or match[2]):
        return _DEFAULT_UNIT
    return int(match[1] or 1) * (1024 ** ("KMG".index(match[2].upper()) + 1) if match[2] else 1)


def _refused(lines: Iterable[str]) -> SharedMemory:
    needs = [int(match[1]) for line in lines if (match := _NEED.search(line))]
    return SharedMemory(need_bytes=max(needs, default=None))


def _broken(message: str) -> Broken:
    return Broken(kind=ReadingKind.SHM, message=message, hint="save the output of `df -h /dev/shm`")
