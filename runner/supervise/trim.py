"""
Keeping logs small while somebody writes them.

A rank writes where it left off, whatever becomes of the file: cut short it would grow a hole and
be as long as before. So the hole is made at once, in the middle: the size stays, the bytes are
given back. The beginning (set-up, versions) and the end (what happens now) are kept.

And keeping them writable when the disk is full: a print that fails ends a rank. Each log has blocks
ahead of its end, and when there are none left to be had, older lines give theirs.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

HEAD_BYTES: Final = 1 << 20
_TAIL_BYTES: Final = 4 << 20  # never less than this of an end
_PAGE: Final = 1 << 16  # larger than any file system's block
_PUNCH_HOLE: Final = 0x02  # linux/falloc.h
_KEEP_SIZE: Final = 0x01
AHEAD_BYTES: Final = 2 << 20  # of each log; 20,000 lines
_STORED_UNIT: Final = 512  # of st_blocks, whatever the file system

_libc: Final = ctypes.CDLL(None, use_errno=True)


def stored_bytes(folder: Path) -> int:
    """What the logs below `folder` take on the disk."""
    return sum(_stored(path) for path in _logs(folder))


def trim(folder: Path, limit_bytes: int) -> int:
    """
    Give back what the logs below `folder` take beyond the limit, the largest first; returns how many bytes.

    OSError where the file system cannot make holes.
    """
    over = stored_bytes(folder) - limit_bytes
    given = 0
    for path in sorted(_logs(folder), key=_stored, reverse=True):
        if given >= over:
            break
        given += _punch(path, over - given)
    return given


class Ahead:
    """Blocks ahead of the end of every log of an attempt; what is not used is given back after it."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._folder: Path | None = None
        self._until: dict[Path, int] = {}

    def keep(self, folder: Path | None) -> None:
        """Of the attempt that writes into `folder`, again and again; None: nobody writes any more."""
        if folder != self._folder:
            self._give_back()
            self._folder = folder
        for path in _logs(folder) if folder else ():
            with suppress(OSError):
                self._reserve(path, path.stat().st_size)

    def _reserve(self, path: Path, size: int) -> None:
        if size + AHEAD_BYTES // 2 <= self._until.get(path, 0):
            return
        with path.open("r+b") as file:
            try:
                _fallocate(file.fileno(), size, AHEAD_BYTES, _KEEP_SIZE)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    self._until[path] = sys.maxsize  # no such thing here
                    return
                trim(self._logs, stored_bytes(self._logs) - 2 * AHEAD_BYTES)
                _fallocate(file.fileno(), size, AHEAD_BYTES, _KEEP_SIZE)
        self._until[path] = size + AHEAD_BYTES

    def _give_back(self) -> None:
        for path in self._until:
            with suppress(OSError):
                os.truncate(path, path.stat().st_size)
        self._until.clear()


def _logs(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*.log") if path.is_file() and not path.is_symlink())


def _stored(path: Path) -> int:
    try:
        return path.stat().st_blocks * _STORED_UNIT
    except OSError:
        return 0


def _punch(path: Path, wanted: int) -> int:
    """Make a hole of at least `wanted` bytes, or as large as may be, from where the last one ends."""
    before = _stored(path)
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        last = (size - _TAIL_BYTES) // _PAGE * _PAGE
        for start, end in _data(file.fileno(), HEAD_BYTES, last):
            stop = min(end, start + -(-wanted // _PAGE) * _PAGE)
            _fallocate(file.fileno(), start, stop - start, _PUNCH_HOLE | _KEEP_SIZE)
            wanted -= stop - start
            if wanted <= 0:
                break
    return max(before - _stored(path), 0)


def _data(fd: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Parts of the file between the two that are stored."""
    at = first
    while at < last:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # a hole to the end
            return
        if start >= last:
            return
        at = min(os.lseek(fd, start, os.SEEK_HOLE), last)
        yield start, at


def _fallocate(fd: int, offset: int, length: int, mode: int) -> None:
    if _libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
