"""
A shard onto the disk, durably, at the disk's own speed.

Standard library only, and `checksum`. Direct writes from the arena, several in flight: no copy, no page cache, and
the data set stays in memory. Space is reserved before the first byte, so a full disk is known at
once. Checksums are of the bytes as they were handed to the disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

from vramfarm import protocol
from vramfarm.checksum import crc32
from vramfarm.protocol import Shard

IN_FLIGHT: Final = 8  # pieces of a shard
_SUMMERS: Final = 4  # threads of a shard
_TOGETHER_S: Final = 10.0
_BLOCK: Final = 4096
_POLITE: Final = 10  # niceness
_SYNC_FILE_RANGE_WRITE: Final = 2
_REFUSED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_libc: Final = ctypes.CDLL(None, use_errno=True)


def write_shard(path: Path, memory: memoryview, size: int) -> Shard:
    """Write the first `size` bytes of page-aligned memory as one durable file. What lies behind them may be read."""
    return write_windows(path, size, iter([memory]), max(size, 1))


def write_windows(path: Path, size: int, windows: Iterator[memoryview], window_bytes: int) -> Shard:
    """The same of memory that holds so many bytes at a time, whole chunks; the next window is asked for when one is written."""
    target = _Target(path, size)
    checksums: list[int] = []
    try:
        target.reserve()
        with _threads() as threads:
            for begin in range(0, size, window_bytes):
                memory, end = next(windows), min(begin + window_bytes, size)
                checksums += _write_window(threads, target, memory, begin, end)
        target.finish()
    finally:
        target.close()
    return Shard(path.name, size, tuple(checksums))


def _write_window(threads: _Threads, target: _Target, memory: memoryview, begin: int, end: int) -> Sequence[int]:
    """
    Sums have threads of their own: where processors are busy the disk does not wait for them.

    They are polite. Direct writes are not: they take a hundredth of a second for each GB, and the disk stands still while they wait for it.
    """
    jobs: list[Future[int]] = []
    for start in range(begin, end, protocol.CHUNK_BYTES):
        jobs.append(threads.writers.submit(target.write, memory, begin, start))
        jobs.append(threads.summers.submit(crc32, memory[start - begin : end - begin][: protocol.CHUNK_BYTES]))
    return _results(jobs)[1::2]


class _Threads:
    """Of one shard."""

    def __init__(self) -> None:
        self.writers = ThreadPoolExecutor(IN_FLIGHT)
        self.summers = ThreadPoolExecutor(_SUMMERS, initializer=_be_polite)

    def start(self) -> None:
        together = threading.Barrier(IN_FLIGHT + _SUMMERS, timeout=_TOGETHER_S)  # a thread for each
        with contextlib.suppress(threading.BrokenBarrierError):
            _results(
                [self.writers.submit(together.wait) for _ in range(IN_FLIGHT)]
                + [self.summers.submit(together.wait) for _ in range(_SUMMERS)]
            )


_idle: Final[list[_Threads]] = []


@contextlib.contextmanager
def _threads() -> Iterator[_Threads]:
    """
    Kept for the next save.

    Starting one may hang for good where memory has become short; those that are there go on.
    """
    threads = _idle.pop() if _idle else _Threads()
    try:
        yield threads
    finally:
        _idle.append(threads)


def prepare(num_shards: int) -> None:
    """Start the threads of one shard more, of so many: beside a training on all cores that may take longer than a write."""
    with contextlib.suppress(RuntimeError, MemoryError):  # a favour
        if len(_idle) < num_shards:
            threads = _Threads()
            threads.start()
            _idle.append(threads)


def _results(jobs: Sequence[Future[int]]) -> tuple[int, ...]:
    """After an error, what has begun is waited for: it still writes."""
    try:
        return tuple(job.result() for job in jobs)
    finally:
        for job in jobs:
            job.cancel()
        wait(jobs)


def is_written(memory: memoryview, shard: Shard) -> bool:
    """Whether these are the bytes of a shard that was written before: all its checksums are the same."""
    if len(memory) != shard.size_bytes:
        return False
    starts = range(0, len(memory), protocol.CHUNK_BYTES)
    with _threads() as threads:
        found = _results(
            [threads.summers.submit(crc32, memory[start : start + protocol.CHUNK_BYTES]) for start in starts]
        )
    return found == shard.checksums


def link_shard(source: Path, target: Path, shard: Shard) -> Shard:
    """Give a shard that is never written again a second name, durably; where there are no links, a verified copy."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return copy_shard(source, target, shard)
    fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    return shard


def copy_shard(source: Path, target: Path, shard: Shard) -> Shard:
    """Copy a shard chunk by chunk, each verified."""
    with source.open("rb") as old, target.open("xb") as new:
        for number, checksum in enumerate(shard.checksums):
            raw = old.read(protocol.CHUNK_BYTES)
            if crc32(raw) != checksum:
                raise OSError(errno.EIO, f"chunk {number} is not what was written", str(source))
            new.write(raw)
        new.flush()
        os.fsync(new.fileno())
    return shard


class _Target:
    """One file being written, directly where the filesystem has that."""

    def __init__(self, path: Path, size: int) -> None:
        self._size = size
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o644)
            self._is_direct = True
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            path.unlink(missing_ok=True)  # some filesystems make the file before they refuse
            self._fd = os.open(path, flags, 0o644)
            self._is_direct = False

    def reserve(self) -> None:
        """Take the space; where the filesystem cannot, the writes will say what is wrong."""
        if self._size and _libc.fallocate(self._fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(self._size)) != 0:
            code = ctypes.get_errno()
            if code not in {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}:
                raise OSError(code, os.strerror(code))

    def write(self, memory: memoryview, begin: int, start: int) -> int:
        """Write the chunk from `start` on and return its size; the memory holds the bytes from `begin` on."""
        end = min(start + protocol.CHUNK_BYTES, self._size)
        if self._is_direct:
            self._put(memory, begin, start, min(-(-end // _BLOCK) * _BLOCK, begin + len(memory)))
        else:
            _be_polite()  # copying into the page cache costs a processor as much as it costs the disk
            self._put(memory, begin, start, end)
            _libc.sync_file_range(
                self._fd, ctypes.c_longlong(start), ctypes.c_longlong(end - start), _SYNC_FILE_RANGE_WRITE
            )
        return end - start

    def _put(self, memory: memoryview, begin: int, at: int, end: int) -> None:
        while at < end:
            was_direct = self._is_direct
            try:
                at += os.pwrite(self._fd, memory[at - begin : end - begin], at)
            except OSError as error:  # once a file
                if error.errno != errno.EINVAL or not was_direct:
                    raise
                self._be_buffered()

    def _be_buffered(self) -> None:
        """The filesystem took the flag and refuses the write; or a short write left us between two blocks."""
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self._is_direct = False

    def finish(self) -> None:
        os.ftruncate(self._fd, self._size)
        os.fsync(self._fd)
        if not self._is_direct:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._fd)


def _be_polite() -> None:
    """Of this thread only: the saver's word on a proposal must come at once."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _POLITE)
