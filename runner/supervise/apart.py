"""
Work with a disk in a process of its own: one that does not answer keeps that process, and not us.

Not a thread: the kernel lets nobody end who has one in a call that hangs. Standard library only.
"""

from __future__ import annotations

import errno
import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from runner.supervise.process import end_with_parent

_LIMIT: Final = 1 << 16  # of an answer: what a pipe holds, so that who gives one never waits
_FAILED: Final = b"!"
_DONE: Final = b"."
_ALL: Final = 1 << 20


class Apart:
    """Work that goes on beside us, until `end` or our own end. Who started it collects its exit, as that of any child."""

    def __init__(self, work: Callable[[], bytes]) -> None:
        self._answer, theirs = os.pipe()
        try:
            self._pid = os.fork()
        except OSError:
            os.close(self._answer)
            os.close(theirs)
            raise
        if self._pid == 0:
            _be_apart(work, theirs)
        os.close(theirs)

    def wait(self, timeout_s: float) -> bytes | None:
        """What it came to; None while there is nothing. Its `OSError` is raised here."""
        if not select.select([self._answer], [], [], max(0.0, timeout_s))[0]:
            return None
        found = os.read(self._answer, _LIMIT)
        if found[:1] == _FAILED:
            number = int(found[1:])
            raise OSError(number, os.strerror(number))
        return found[1:] if found else None

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.close(self._answer)


def apart(work: Callable[[], bytes], timeout_s: float) -> bytes:
    """What `work` returns, or its `OSError`. `TimeoutError`: the disk does not answer; should it ever, nothing more is done."""
    one = Apart(work)
    try:
        found = one.wait(timeout_s)
    finally:
        one.end()
    if found is None:
        raise TimeoutError(errno.ETIMEDOUT, f"no answer for {timeout_s:g} s")
    return found


def _be_apart(work: Callable[[], bytes], answer: int) -> None:
    """In the child. It holds nothing of ours: who waits for the end of a pipe must not wait for a disk."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        end_with_parent(signal.SIGKILL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(nowhere, fd)
        os.closerange(3, answer)
        os.closerange(answer + 1, _ALL)
        os.write(answer, _run(work))
    finally:
        os._exit(0)


def _run(work: Callable[[], bytes]) -> bytes:
    try:
        return _DONE + work()
    except OSError as error:
        return _FAILED + str(error.errno or 0).encode()


class Scribe:
    """Writes lines to a file for us. What it cannot take is dropped."""

    def __init__(self, fd: int) -> None:
        ours, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self.pid = os.fork()
        if self.pid == 0:
            _copy(ours, fd)
        os.close(ours)

    def write(self, line: bytes) -> None:
        with suppress(BlockingIOError):
            os.write(self._pipe, line)

    def end(self, timeout_s: float) -> None:
        """Returns when all is written, or after that time."""
        os.close(self._pipe)
        with suppress(OSError):
            waiting = os.pidfd_open(self.pid)
            select.select([waiting], [], [], timeout_s)
            os.close(waiting)


def _copy(source: int, target: int) -> None:
    """In the child: until nobody can write any more."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for low, high in ((0, min(source, target)), (min(source, target) + 1, max(source, target))):
            os.closerange(low, high)
        os.closerange(max(source, target) + 1, _ALL)
        while line := os.read(source, _LIMIT):
            with suppress(OSError):
                os.write(target, line)
    finally:
        os._exit(0)


def wait_for_file(path: Path, pause: Callable[[], None]) -> bytes:
    """Until it is there. A disk that is broken has none."""
    while not os.path.exists(path):  # noqa: PTH110  # Path's raises when the disk is broken
        pause()
    return b""
