"""
A shard onto the disk, durably, at the disk's own speed.

Standard library only, and `checksum`. Direct writes from the arena: no copy, no page cache, and
the data set stays in memory. A call writes many pieces, so that the kernel keeps the disk busy: where training fills the
processors a thread that has to hand it the next piece comes late. Space is reserved before the first byte, so a full disk is known at
once. Checksums are of the bytes as they were handed to the disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final, TypeVar

from vramfarm import protocol
from vramfarm.checksum import crc32, find_crc64nvme
from vramfarm.protocol import Shard

CALL_BYTES: Final = 256 << 20  # written by one call
_SUMMERS: Final = 4  # threads of a shard
_WARM_BYTES: Final = 512 << 10  # summed twice while a core's cache has them
_TOGETHER_S: Final = 10.0
_BLOCK: Final = 4096
_PROBES: Final = 12  # pieces that show whether a disk is slow at memory that is new to it
_NOTICEABLE: Final = 1.1
_PAUSE: Final = 2  # times what a piece takes
_POLITE: Final = 10  # niceness
_SYNC_FILE_RANGE_WRITE: Final = 2
_REFUSED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_libc: Final = ctypes.CDLL(None, use_errno=True)
_T = TypeVar("_T")


def write_shard(path: Path, memory: memoryview, size: int) -> Shard:
    """Write the first `size` bytes of page-aligned memory as one durable file. What lies behind them may be read."""
    return write_windows(path, size, iter([memory]), max(size, 1))


def write_windows(path: Path, size: int, windows: Iterator[memoryview], window_bytes: int) -> Shard:
    """The same of memory that holds so many bytes at a time, whole chunks; the next window is asked for when one is written."""
    target = _Target(path, size)
    checksums: list[tuple[int, ...]] = []
    try:
        target.reserve()
        with _summers() as summers:
            for begin in range(0, size, window_bytes):
                memory, end = next(windows), min(begin + window_bytes, size)
                with _sums(summers, memory[: end - begin], _all_sums) as sums:
                    target.write(memory, begin, end)
                checksums += sums
        target.finish()
    finally:
        target.close()
    return Shard(path.name, size, *(zip(*checksums, strict=True) if checksums else [()]))


def _all_sums(chunk: memoryview) -> tuple[int, ...]:
    """CRC32 and, where there is one, CRC64NVME."""
    crc64nvme = find_crc64nvme()
    if crc64nvme is None:
        return (crc32(chunk),)
    first = second = 0
    for begin in range(0, len(chunk), _WARM_BYTES):
        block = chunk[begin : begin + _WARM_BYTES]
        first, second = crc32(block, first), crc64nvme(block, second)
    return first, second


@contextlib.contextmanager
def _sums(summers: ThreadPoolExecutor, memory: memoryview, of_chunk: Callable[[memoryview], _T]) -> Iterator[list[_T]]:
    """
    The sums of its chunks, at the end of the block. Whatever happens in it, nobody reads the memory afterwards.

    They have threads of their own, which are polite: the disk does not wait for them.
    """
    starts, sums = range(0, len(memory), protocol.CHUNK_BYTES), list[_T]()
    jobs = [summers.submit(of_chunk, memory[start : start + protocol.CHUNK_BYTES]) for start in starts]
    try:
        yield sums
        sums += [job.result() for job in jobs]
    finally:
        for job in jobs:
            job.cancel()
        wait(jobs)


_idle: Final[list[ThreadPoolExecutor]] = []


@contextlib.contextmanager
def _summers() -> Iterator[ThreadPoolExecutor]:
    """
    The threads of one shard, kept for the next save.

    Starting one may hang for good where memory has become short; those that are there go on.
    """
    summers = _idle.pop() if _idle else _new_summers()
    try:
        yield summers
    finally:
        _idle.append(summers)


def _new_summers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_SUMMERS, initializer=_be_polite)


def prepare(num_shards: int) -> None:
    """Find what sums, and start the threads of one shard more, of so many: beside a training on all cores that may take longer than a write."""
    find_crc64nvme()
    if len(_idle) >= num_shards:
        return
    together = threading.Barrier(_SUMMERS, timeout=_TOGETHER_S)  # a thread for each
    with contextlib.suppress(RuntimeError, MemoryError):  # a favour
        summers = _new_summers()
        wait([summers.submit(together.wait) for _ in range(_SUMMERS)])
        _idle.append(summers)


def introduce(memory: memoryview, folder: Path, is_wanted: Callable[[], bool]) -> bool:
    """
    Write all of it once, into a small file without a name, before it has anything to say. Return whether that was done.

    A virtual disk takes a fifth longer for memory that it has never seen, so a first save would. To other disks it
    makes no difference, which a few pieces show.
    """
    starts = range(0, len(memory) - protocol.CHUNK_BYTES, protocol.CHUNK_BYTES)
    if len(starts) < _PROBES:
        return False
    fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    unseen_s, seen_s = list[float](), list[float]()
    try:
        os.posix_fallocate(fd, 0, protocol.CHUNK_BYTES)
        for number, start in enumerate(starts):
            if not is_wanted() or (number == _PROBES and _middle(unseen_s) < _NOTICEABLE * _middle(seen_s)):
                return False
            piece = memory[start : start + protocol.CHUNK_BYTES]
            took_s = _time_to_write(fd, piece)
            if 0 < number < _PROBES:  # at first the file is new, too
                unseen_s.append(took_s)
                seen_s.append(_time_to_write(fd, piece))
            time.sleep(_PAUSE * took_s)  # whatever else is read and written there goes on
    finally:
        os.close(fd)
    return True


def _middle(numbers: list[float]) -> float:
    return sorted(numbers)[len(numbers) // 2]


def _time_to_write(fd: int, piece: memoryview) -> float:
    started = time.perf_counter()
    os.pwrite(fd, piece, 0)
    return time.perf_counter() - started


def is_written(memory: memoryview, shard: Shard) -> bool:
    """Whether these are the bytes of a shard that was written before: all its checksums are the same."""
    if len(memory) != shard.size_bytes:
        return False
    with _summers() as summers, _sums(summers, memory, crc32) as sums:
        pass
    return tuple(sums) == shard.checksums


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

    def write(self, memory: memoryview, begin: int, end: int) -> None:
        """Write the bytes from `begin` to `end`, which the memory begins with."""
        at = begin
        while at < end:
            put = self._put_directly if self._is_direct else self._put_buffered
            at += put(memory[at - begin :], at, end)

    def _put_directly(self, memory: memoryview, at: int, end: int) -> int:
        """Whole blocks, as long as the memory has them."""
        size = min(CALL_BYTES, -(-end // _BLOCK) * _BLOCK - at, len(memory))
        try:
            return os.pwrite(self._fd, memory[:size], at)
        except OSError as error:  # once a file
            if error.errno != errno.EINVAL:
                raise
            self._be_buffered()
            return 0

    def _put_buffered(self, memory: memoryview, at: int, end: int) -> int:
        """Copying into the page cache costs a processor as much as it costs the disk, which begins with each piece at once."""
        _be_polite()
        size = os.pwrite(self._fd, memory[: min(protocol.CHUNK_BYTES, end - at)], at)
        _libc.sync_file_range(self._fd, ctypes.c_longlong(at), ctypes.c_longlong(size), _SYNC_FILE_RANGE_WRITE)
        return size

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
