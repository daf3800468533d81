"""The time of a runner's life, which a wall clock that is set back cannot slow down."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta


def _wall() -> datetime:
    return datetime.now(UTC)


class Clock:
    """
    The wall clock, but never less than its first word and the time that has passed since: a limit
    comes when it is due, with time for a last save, and not only when the guardian ends all.
    """

    def __init__(self, wall: Callable[[], datetime] = _wall, passed_s: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._passed_s = wall, passed_s
        self._began, self._began_s = wall(), passed_s()

    def now(self) -> datetime:
        return max(self._wall(), self._began + timedelta(seconds=self._passed_s() - self._began_s))
