"""
Lines of a log of any size, read within bounds: whatever is in it, memory and time are limited.

A small log is kept whole. Of a large one the beginning, the end, and windows around what looks
like an error are kept; between beginning and end only a few long words are looked for.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from runner.supervise.logs import clean

_BLOCK: Final = 1 << 20
_WHOLE: Final = 2 << 20  # a file up to this size is kept whole
_HEAD: Final = 8 << 20
_TAIL: Final = 24 << 20
_BEFORE: Final = 4 << 10
_AFTER: Final = 16 << 10
_END: Final = 256 << 10
_MAX_HITS: Final = 48  # from the beginning of a part, and as many from its end
MAX_LINE_BYTES: Final = 64 << 10
_MAX_TEXT: Final = 2_000  # of a line, for recognition
_MAX_RANK: Final = 1 << 16
_MAX_PARTS: Final = 400  # of a line of JSON
_TEXTS: Final = (
    "text",
    "message",
    "msg",
    "event",
    "error",
    "exc_info",
    "exception",
    "traceback",
    "stack_trace",
    "stack",
)
_MILD: Final = frozenset({"DEBUG", "INFO", "WARN", "WARNING"})

_WORDS: Final = (
    b"Traceback (most recent call last)",
    b"failed (exitcode: ",
    b"Watchdog caught",
    b"NVRM: Xid",
    b" NCCL WARN ",
    b"Killed process",
    b"xception: ",
)
_SUSPECT: Final = re.compile(
    rb"rror|RROR|xception|raceback|ailed|AILED|Xid|illed|bort|ssert|atchdog|atal|imed out|imeout|ignal|"
    rb"NaN|nan\b|No space|xceeded|\n[EW]: |wandb: |\[runner\]|xit code|oom"
)

_BAR: Final = re.compile(r"\d+%\|[^|]*\|[^\[]*\[[^\]]*\]|\d+%\|[█▏▎▍▌▋▊▉ #-]*\|?")
_PREFIX: Final = re.compile(
    r"^(?:"
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?(?: (?:stdout|stderr) [FP])?[ :]\s?|"
    r"\[(?:default(?P<default>\d+)|rank ?(?P<rank>\d+)|(?P<mpi_world>\d+),(?P<mpi>\d+))\](?:<std(?:out|err)>)?:? ?|"
    r"\((?:\w+ )?pid=\d+(?:, ip=[\d.]+)?\) |"
    r"[\w.-]+ +\| "
    r")"
)
_RANK: Final = re.compile(
    r"\[(?:PG [^\]]*?)?[Rr]ank (?P<bracket>\d+)\]|\[RANK:(?P<upper>\d+)\]|"
    r"^\S+:\d+:\d+ \[(?P<card>\d+)\] |\[(?P<setting>\d+)\] is setting up NCCL"
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of source number `source`: `raw` as it stands in the file, `text` to recognise it by."""

    source: int
    number: int
    raw: str
    text: str  # without escapes, progress bar and prefixes; what is indented stays so
    rank: int | None
    prefix: str  # whose lines belong together
    part: int = 0  # of a line of JSON, which holds a text of several

    @property
    def place(self) -> tuple[int, int, int]:
        return self.source, self.number, self.part


def read_lines(path: Path, source: int = 0, rank: int | None = None) -> list[LogLine]:
    """Return what is kept of a file, in order; a file that is gone or cannot be read has no lines."""
    try:
        with path.open("rb") as file:
            lines = (parse_line(raw, source, number, rank) for number, raw in _read(file))
            return [part for line in lines for part in unfold(line)]
    except OSError:
        return []


def _read(file: BufferedReader) -> Iterator[tuple[int, bytes]]:
    size = file.seek(0, 2)
    if size <= _WHOLE:
        yield from _lines(file, (0, size), 0)
        return
    survey = _survey(file, size)
    for window in _windows(survey, size):
        yield from _lines(file, window, _ends_before(file, survey, window[0]))


def parse_line(raw: bytes, source: int, number: int, rank: int | None) -> LogLine:
    shown = _most_telling(raw)
    text, prefix_rank, prefix = _strip(clean(shown)[:_MAX_TEXT])
    match = _RANK.search(text)
    said = next((int(g) for g in match.groups() if g is not None), None) if match else None
    who = next((r for r in (rank, prefix_rank, said) if r is not None), None)
    whole = raw.removesuffix(b"\r").decode(errors="replace")
    return LogLine(source, number, whole, text, who, prefix or ("" if rank is None else f"file of {rank}"))


def unfold(line: LogLine) -> Iterator[LogLine]:
    """A line of JSON as the lines of the texts in it: a logger's message, and the traceback that goes with it."""
    start = line.raw.find('{"')
    told = _object(line.raw[start:]) if line.text.startswith('{"') and _SUSPECT.search(line.raw.encode()) else None
    texts = [text for key in _TEXTS if told and (text := _text(told.get(key)))]
    if told is None or not texts:
        yield line
        return
    level = str(told.get("level") or told.get("levelname") or told.get("severity") or "").upper()
    lead = f"{level}: " if level in _MILD else ""
    rank = _rank(told.get("rank")) if line.rank is None else line.rank
    yield replace(line, text=json.dumps({key: value for key, value in told.items() if not isinstance(value, str)}))
    parts = [clean(part.encode())[:_MAX_TEXT] for text in texts for part in text.splitlines()]
    for number, part in enumerate(parts[:_MAX_PARTS], 1):
        yield replace(line, text=part if number > 1 else lead + part, rank=rank, part=number)


def _rank(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < _MAX_RANK else None


def _object(raw: str) -> dict[str, Any] | None:
    try:
        told = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


def _text(value: object) -> str:
    """Structured tracebacks (a list of exceptions, the outermost last) as Python would end them."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and "exc_type" in value[0]:
        return f"Traceback (most recent call last):\n{value[0]['exc_type']}: {value[0].get('exc_value', '')}"
    return value if isinstance(value, str) else ""


def _most_telling(raw: bytes) -> bytes:
    """Of the states of a progress bar the last that looks like an error, else the last."""
    if b"\r" not in raw:
        return raw[:MAX_LINE_BYTES]
    states = [state for state in raw[-MAX_LINE_BYTES:].split(b"\r") if state.strip()]
    return next((state for state in reversed(states) if _SUSPECT.search(state)), states[-1] if states else b"")


def _strip(text: str) -> tuple[str, int | None, str]:
    """Return (what is said, rank, prefixes); a bar in front of an error is no part of it."""
    if "%|" in text and _SUSPECT.search(text.encode()):
        text = _BAR.sub("", text, count=1).lstrip()
    rank, prefix = None, ""
    while match := _PREFIX.match(text):
        said = match["rank"] or match["default"] or match["mpi"]
        if said is not None:
            rank, prefix = int(said), f"rank {said}"
        text = text[match.end() :]
    return text, rank, prefix


# --------------------------------------------------------------------------------- windows


@dataclass(slots=True)
class _Hits:
    """The first and the last offsets of a part of a file; what lies between is dropped."""

    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)

    def add(self, offset: int) -> None:
        if len(self.first) < _MAX_HITS:
            self.first.append(offset)
            return
        self.last.append(offset)
        del self.last[:-_MAX_HITS]


@dataclass(slots=True)
class _Survey:
    """One pass over a file: where its suspects are, and how many lines end before each block."""

    head: _Hits = field(default_factory=_Hits)
    middle: _Hits = field(default_factory=_Hits)
    tail: _Hits = field(default_factory=_Hits)
    ends_before: list[int] = field(default_factory=list)

    def offsets(self) -> Iterator[int]:
        return (at for part in (self.head, self.middle, self.tail) for at in (*part.first, *part.last))


def _survey(file: BufferedReader, size: int) -> _Survey:
    survey = _Survey()
    before, ends, free_from, data_from = b"", 0, 0, 0
    for start in range(0, size, _BLOCK):
        survey.ends_before.append(ends)
        if start >= data_from:
            data_from = _next_data(file, start, size)
        if data_from >= start + _BLOCK:  # nothing but a hole, where a log that grew too large was cut
            before = b""
            continue
        file.seek(start)
        read = file.read(_BLOCK)
        block, base = before + read, start - len(before)
        part = survey.head if start < _HEAD else survey.tail if start >= size - _TAIL else survey.middle
        found = _first_words(block) if part is survey.middle else _suspects(block, max(0, free_from - base))
        for at in found:
            part.add(base + at)
            free_from = base + at + _AFTER // 2
        ends += read.count(b"\n")
        before = block[-64:]  # a word may lie across two blocks
    return survey


def _next_data(file: BufferedReader, start: int, size: int) -> int:
    """Where the next bytes are that are stored; `start` on a disk that knows no holes."""
    fd = file.fileno()
    at = os.lseek(fd, 0, os.SEEK_CUR)  # `file` keeps its own idea of it
    try:
        return os.lseek(fd, start, os.SEEK_DATA)
    except OSError as error:
        return size if error.errno == errno.ENXIO else start
    finally:
        os.lseek(fd, at, os.SEEK_SET)


def _suspects(block: bytes, at: int) -> Iterator[int]:
    """At least half a window apart."""
    while match := _SUSPECT.search(block, at):
        yield match.start()
        at = match.start() + _AFTER // 2


def _first_words(block: bytes) -> list[int]:
    return sorted(at for at in map(block.find, _WORDS) if at >= 0)


def _windows(survey: _Survey, size: int) -> list[tuple[int, int]]:
    """Parts of the file, in order and apart from each other, that are worth reading line by line."""
    around = [(max(0, at - _BEFORE), min(size, at + _AFTER)) for at in survey.offsets()]
    return _merge([(0, _AFTER), *around, (size - _END, size)])


def _merge(windows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(windows):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _ends_before(file: BufferedReader, survey: _Survey, offset: int) -> int:
    start = offset - offset % _BLOCK
    file.seek(start)
    return survey.ends_before[start // _BLOCK] + file.read(offset - start).count(b"\n")


def _lines(file: BufferedReader, window: tuple[int, int], number: int) -> Iterator[tuple[int, bytes]]:
    """Whole lines that begin in the window; the one that was begun before it is completed, up to a limit."""
    start, end = window
    file.seek(max(0, start - MAX_LINE_BYTES))
    before = file.read(start - file.tell())
    begun = before[before.rfind(b"\n") + 1 :]
    file.seek(start)
    left = end - start
    while left > 0:
        rest = file.readline(MAX_LINE_BYTES)
        if not rest:
            break
        number += 1
        yield number, (begun + rest).removesuffix(b"\n")
        left -= len(rest) + (0 if rest.endswith(b"\n") else _skip_line(file, left))
        begun = b""


def _skip_line(file: BufferedReader, limit: int) -> int:
    """Pass over what is left of a line that is too long; nothing of it can matter."""
    skipped = 0
    while skipped < limit:
        rest = file.readline(min(_BLOCK, limit - skipped))
        skipped += len(rest)
        if not rest or rest.endswith(b"\n"):
            break
    return skipped
