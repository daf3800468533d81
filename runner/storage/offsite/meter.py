"""How far bytes have come, told as they go by."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from runner.errors import one_line

Progress = Callable[[float, str], None]

_TELL_EVERY_S: Final = 60.0


class Meter:
    """Adds up bytes from several threads and tells each whole percent, and each minute that something has moved."""

    def __init__(self, total_bytes: int, progress: Progress) -> None:
        self._total = total_bytes
        self._progress = progress
        self._lock = threading.Lock()
        self._bytes = 0
        self._told = -1
        self._told_at = 0.0

    def add(self, note: str, num_bytes: int) -> None:
        with self._lock:
            self._bytes += num_bytes
            percent = 100 * self._bytes // max(1, self._total)
            if percent > self._told or time.monotonic() >= self._told_at + _TELL_EVERY_S:
                self._told, self._told_at = percent, time.monotonic()
                self._progress(min(1.0, percent / 100), one_line(note))
