"""How the loop sleeps: for a while, until it is called, a file that it waits for appears, or a process that it waits for ends."""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from watchdog.events import DirCreatedEvent, DirMovedEvent, FileCreatedEvent, FileMovedEvent, FileSystemEvent
from watchdog.events import FileSystemEventHandler as Handler
from watchdog.observers import Observer

from runner.supervise.process import Process, is_alive

_MS: Final = 1000
_APPEARS: Final = [
    FileCreatedEvent,
    DirCreatedEvent,
    FileMovedEvent,
    DirMovedEvent,
]  # what is only written wakes nobody
_LAST_S: Final = 1.0


class Alarm:
    """
    One sleeper; `ring` may be called by any thread, and in a signal handler.

    It rings by itself when something appears in a folder of `appear` under a name that begins so. Where the system
    has no watches left, or the filesystem tells nothing, it does not; so nobody may sleep long.
    """

    def __init__(self, appear: Mapping[Path, str] | None = None) -> None:
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._observer = Observer()
        try:
            for folder, name in (appear or {}).items():
                self._observer.schedule(_Ringer(name, self), str(folder), event_filter=_APPEARS)
            if appear:
                self._observer.start()
        except OSError:
            self._observer = Observer()

    def ring(self) -> None:
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)

    def sleep(self, seconds: float, until: Process | None = None, children: Iterable[int] = ()) -> None:
        """
        Return after that time, when it rings or has rung, or when `until` or one of our `children` ends; at once
        if that is gone, or if a child waits to be collected.
        """
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        watched = [fd for pid in (*children, *([until.pid] if until else [])) if (fd := _watch(pid)) is not None]
        for fd in watched:
            poll.register(fd, select.POLLIN)
        try:
            if until is None or is_alive(until):  # only now: what ends from here on is seen through what is watched
                poll.poll(seconds * _MS)
        finally:
            for fd in watched:
                os.close(fd)
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def close(self) -> None:
        if self._observer.is_alive():
            logging.getLogger("watchdog").setLevel(logging.CRITICAL)  # it calls its own end an error
            self._observer.stop()
            self._observer.join(_LAST_S)
        bell, self._bell = self._bell, -1  # first: a signal that comes now must not ring in somebody else's file
        os.close(bell)


def _watch(pid: int) -> int | None:
    """None where the kernel, who guards it, or a Python built for older ones has no such thing: then the time is all."""
    with suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    return None


class _Ringer(Handler):
    def __init__(self, name: str, alarm: Alarm) -> None:
        self._name, self._alarm = name, alarm

    def on_any_event(self, event: FileSystemEvent) -> None:
        paths = (os.fsdecode(event.src_path), os.fsdecode(event.dest_path))
        if any(Path(path).name.startswith(self._name) for path in paths):
            self._alarm.ring()
