"""
What ranks and launcher print: finding their files, following them, reading their ends.

Output is whatever a script prints: binary, progress bars, lines without an end. Every read
is bounded, and what comes out is text that cannot move a terminal's cursor.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Final

_MAX_LINE_BYTES: Final = 16_384
_TAIL_BYTES: Final = 1 << 20
_TORCHRUN: Final = "*/attempt_*/*/std*.log"  # <id>/attempt_0/<local rank>/stdout.log
_DEEPSPEED: Final = re.compile(r"[^/]*_rank(\d+)\.log")
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\^_]|[\x00-\x08\x0b-\x1f\x7f]")
_WITHIN: Final = 64  # characters: further on a time is part of what is said
_CLOCK: Final = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<fraction>\d{1,9}))?"
_FORMS: Final = tuple(
    re.compile(form + _CLOCK + zone)
    for form, zone in (
        (r"(?<!\d)(?P<year>\d{4})([-/])(?P<month>\d\d)\2(?P<day>\d\d)[T _]", r"(?P<zone>Z|[+-]\d\d:?\d\d)?"),
        (r"(?<!\w)[DIWEF](?P<month>\d\d?)(?P<day>\d\d) ", ""),  # glog, without a year; torch's C++ writes March as 3
        (r"(?<!\d)(?P<month>\d\d)/(?P<day>\d\d)/(?P<year>\d{4}) ", ""),  # as the examples of transformers have it
    )
)
_AHEAD: Final = timedelta(days=1)  # a time beyond that is not when the line was written
_BEFORE: Final = datetime.min  # noqa: DTZ901  # local times are compared, without a zone


@dataclass(frozen=True, slots=True, order=True)
class Stream:
    """A file that somebody prints to. Rank -1 is the launcher."""

    rank: int
    name: str  # stdout, stderr, or output where both are one
    path: Path


@dataclass(frozen=True, slots=True)
class Line:
    """One line, without its end. Of a progress bar it is the last state."""

    rank: int
    stream: str
    text: str


def find_streams(folder: Path, *, rank: int | None = None) -> tuple[Stream, ...]:
    """Return the streams of an attempt, the launcher's first; with `rank`, those of one rank. No folder is one."""
    return tuple(sorted(s for s in _all_streams(folder) if (rank is None or s.rank == rank) and s.path.is_file()))


def stream_of(path: str) -> tuple[int, str] | None:
    """Rank and name of what is printed to a file, by its path below an attempt's folder; None: nothing is."""
    if path == "launcher.log":
        return -1, "output"
    if match := _DEEPSPEED.fullmatch(path):
        return int(match[1]), "output"
    rank = PurePosixPath(path).parent.name
    is_rank = fnmatchcase(path, _TORCHRUN) and path.count("/") == _TORCHRUN.count("/") and rank.isdecimal()
    return (int(rank), PurePosixPath(path).stem) if is_rank else None


def tail(folder: Path, num_lines: int, *, rank: int | None = None) -> tuple[Line, ...]:
    """Return the last lines of every stream, in the order of time where they tell it, else stream after stream."""
    pieces = []
    for stream in find_streams(folder, rank=rank):
        texts = read_tail(stream.path)[-num_lines:] if num_lines > 0 else []
        pieces.append((stream, [Line(stream.rank, stream.name, text) for text in texts]))
    return tuple(Merger().merge(pieces, _now()))


def read_tail(path: Path, *, limit_bytes: int = _TAIL_BYTES) -> list[str]:
    """Return the lines at the end of a file; the first may be cut, a file that is gone has none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - limit_bytes))
            raw = file.read(limit_bytes)
    except FileNotFoundError:
        return []
    return [clean(part[:_MAX_LINE_BYTES]) for part in raw.split(b"\n")[: None if raw[-1:] not in {b"\n", b""} else -1]]


def clean(raw: bytes) -> str:
    """Return one line as text: the last state of a progress bar, no control characters."""
    states = [state for state in raw.split(b"\r") if state.strip()]
    return _ESCAPES.sub("", states[-1].decode(errors="replace")) if states else ""


class Follower:
    """Reads what is added to the streams of an attempt; new streams are found as they appear."""

    def __init__(self, folder: Path, *, rank: int | None = None) -> None:
        self._folder = folder
        self._rank = rank
        self._readers: dict[Stream, _Reader] = {}
        self._merger = Merger()
        self.num_dropped = 0  # lines of the last read that were over its limit

    def read(self, *, limit_bytes: int = 1 << 20, limit_lines: int | None = None) -> tuple[Line, ...]:
        """
        Return the whole lines that were added, merged as `tail` does; what is beyond the limit comes next time.

        With `limit_lines` only so many of a stream, the last ones: for a reader who would be buried.
        """
        self.num_dropped = 0
        streams = find_streams(self._folder, rank=self._rank)
        share = limit_bytes // max(1, len(streams))
        pieces = [(stream, self._lines(stream, share, limit_lines)) for stream in streams]
        return tuple(self._merger.merge([piece for piece in pieces if piece[1]], _now()))

    def skip(self) -> None:
        """Pass over what is there already."""
        for stream in find_streams(self._folder, rank=self._rank):
            self._readers.setdefault(stream, _Reader(stream.path)).skip()

    def finish(self) -> tuple[Line, ...]:
        """Return last lines that have no end; for when nobody writes any more."""
        rest = ((stream, reader.rest()) for stream, reader in self._readers.items())
        return tuple(Line(stream.rank, stream.name, clean(raw)) for stream, raw in rest if raw)

    def _lines(self, stream: Stream, share: int, limit_lines: int | None) -> list[Line]:
        raws = self._readers.setdefault(stream, _Reader(stream.path)).read(share)
        kept = raws if limit_lines is None else raws[-limit_lines:]
        self.num_dropped += len(raws) - len(kept)
        return [Line(stream.rank, stream.name, clean(raw)) for raw in kept]


class _Reader:
    """Whole lines of one growing file. Of a line that is too long only the beginning is kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._begun = b""

    def read(self, limit_bytes: int) -> list[bytes]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                raw = file.read(limit_bytes)
        except FileNotFoundError:
            return []
        self._offset += len(raw)
        *whole, begun = (self._begun + raw).split(b"\n")
        # of a bar only its last states can matter, of a long line its beginning
        self._begun = begun[-_MAX_LINE_BYTES:] if b"\r" in begun else begun[:_MAX_LINE_BYTES]
        return [line[-_MAX_LINE_BYTES:] if b"\r" in line else line[:_MAX_LINE_BYTES] for line in whole]

    def skip(self) -> None:
        with suppress(FileNotFoundError):
            self._offset, self._begun = self._path.stat().st_size, b""

    def rest(self) -> bytes:
        rest, self._begun = self._begun, b""
        return rest


def _now() -> datetime:
    return datetime.now()  # noqa: DTZ005  # local, as the lines are


def _all_streams(folder: Path) -> Iterator[Stream]:
    for path in (folder / "launcher.log", *folder.glob(_TORCHRUN), *folder.glob("*_rank*.log")):
        if found := stream_of(path.relative_to(folder).as_posix()):
            yield Stream(*found, path)


def stamp(text: str, now: datetime) -> datetime | None:
    """When a line says that it was written, in local time without a zone; `now` likewise. None: it does not say."""
    for form in _FORMS:
        if match := form.search(text, 0, _WITHIN):
            with suppress(ValueError, OverflowError):  # the 31st of a month that has 30
                found = _read(match.groupdict(), now)
                return found if found <= now + _AHEAD else None
    return None


def _read(fields: Mapping[str, str | None], now: datetime) -> datetime:
    month, day, hour, minute, second = (int(fields[n] or 0) for n in ("month", "day", "hour", "minute", "second"))
    micros = int((fields["fraction"] or "").ljust(6, "0")[:6])
    year = fields.get("year")
    found = datetime(int(year or now.year), month, day, hour, minute, second, micros)  # noqa: DTZ001  # local
    if year is None and found > now + _AHEAD:  # of December, read in January
        found = found.replace(year=now.year - 1)
    if zone := fields.get("zone"):
        return datetime.fromisoformat(f"{found.isoformat()}{zone}").astimezone().replace(tzinfo=None)
    return found


class Merger:
    """
    Merges what streams have, piece after piece, in the order of time; it remembers the last time of each.

    No line ever overtakes another of its stream. One without a time goes with the one before it, so
    that a traceback stays together.
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, datetime] = {}

    def merge(self, pieces: Iterable[tuple[Hashable, Sequence[Line]]], now: datetime) -> Iterator[Line]:
        """The lines of these streams. Those of one time, and those of streams that tell none, in the order given."""
        timed = [self._timed(stream, lines, now) for stream, lines in pieces]
        return (line for _, line in heapq.merge(*timed, key=lambda pair: pair[0]))

    def _timed(self, stream: Hashable, lines: Sequence[Line], now: datetime) -> list[tuple[datetime, Line]]:
        timed, last = [], self._last.get(stream, _BEFORE)
        for line in lines:
            last = max(last, stamp(line.text, now) or last)
            timed.append((last, line))
        self._last[stream] = last
        return timed
