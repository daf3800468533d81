"""How the loop sleeps: for a while, until it is called, or until a process that it watches ends."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from typing import Final

from runner.supervise.process import Process, is_alive

_MS: Final = 1000


class Alarm:
    """One sleeper; `ring` may be called by any thread, and in a signal handler."""

    def __init__(self) -> None:
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)

    def sleep(self, seconds: float, until: Process | None = None) -> None:
        """Return after that time, when it rings or has rung, or when `until` ends; at once if that is gone."""
        poll, watched = select.poll(), self._watch(until)
        poll.register(self._bell, select.POLLIN)
        if watched is not None:
            poll.register(watched, select.POLLIN)
        try:
            if until is None or is_alive(until):  # only now: what ends from here on is seen through `watched`
                poll.poll(seconds * _MS)
        finally:
            if watched is not None:
                os.close(watched)
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    @staticmethod
    def _watch(process: Process | None) -> int | None:
        """None where the kernel, or who guards it, has no such thing: then the time is all."""
        with suppress(OSError):
            return None if process is None else os.pidfd_open(process.pid)
        return None

    def close(self) -> None:
        bell, self._bell = self._bell, -1  # first: a signal that comes now must not ring in somebody else's file
        os.close(bell)
