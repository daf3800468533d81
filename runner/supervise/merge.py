"""
Lines of several streams in the order of time, where they tell it: torch and glog, Python's logging, ISO 8601.

No line ever overtakes another of its stream. One without a time goes with the one before it, so
that a traceback stays together.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Final, Protocol, TypeVar


class _Line(Protocol):
    @property
    def text(self) -> str: ...


L = TypeVar("L", bound=_Line)

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
    """Merges what streams have, piece after piece; it remembers the last time of each."""

    def __init__(self) -> None:
        self._last: dict[Hashable, datetime] = {}

    def merge(self, pieces: Iterable[tuple[Hashable, Sequence[L]]], now: datetime) -> Iterator[L]:
        """The lines of these streams. Those of one time, and those of streams that tell none, in the order given."""
        timed = [self._timed(stream, lines, now) for stream, lines in pieces]
        return (line for _, line in heapq.merge(*timed, key=lambda pair: pair[0]))

    def _timed(self, stream: Hashable, lines: Sequence[L], now: datetime) -> list[tuple[datetime, L]]:
        timed, last = [], self._last.get(stream, _BEFORE)
        for line in lines:
            last = max(last, stamp(line.text, now) or last)
            timed.append((last, line))
        self._last[stream] = last
        return timed
