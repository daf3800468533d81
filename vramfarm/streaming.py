"""
The bytes of a checkpoint straight to where they belong: read directly, verified on the way, several pieces at once.

The rule: no byte reaches a tensor before its chunk was verified, and each chunk is read once.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from vramfarm import memory, protocol
from vramfarm.checksum import crc32

MOST_READERS: Final = 8  # of all ranks together: a disk that is asked for more at a time gives less
LEAST_READERS: Final = 2  # of each: one sums while another waits
_CHUNK: Final = protocol.CHUNK_BYTES
_CLAIM_TRIES: Final = 20
_MISSING: Final = 16  # one page in so many may be missing of what counts as in memory
_libc: Final = ctypes.CDLL(None, use_errno=True)
_UNREADABLE: Final = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG})


class DamagedError(Exception):
    """The bytes of a checkpoint are not those that were written; the text says where."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `begin` to `end` of a shard, which go to byte `at` of `to`, a tensor without holes."""

    begin: int
    end: int
    to: Tensor
    at: int


def check(name: str, shard: protocol.Shard, chunk: int, raw: memoryview) -> None:
    """`DamagedError` if a chunk is not what was written."""
    found = crc32(raw)
    if found != shard.checksums[chunk]:
        raise DamagedError(
            f"{name}: bytes from {chunk * _CHUNK}: expected checksum {shard.checksums[chunk]:08x}, got {found:08x}"
        )


def num_readers() -> int:
    """This rank's share of what keeps a disk busy, whatever the number of processors: they wait for the disk."""
    return max(LEAST_READERS, MOST_READERS // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class Buffer:
    """Room for a chunk, for one thread at a time; pinned where the bytes go on to a device."""

    def __init__(self, *, pinned: bool = False) -> None:
        if pinned:
            self.tensor = torch.empty(_CHUNK, dtype=torch.uint8, device="cpu", pin_memory=True)
            self.raw = memoryview((ctypes.c_char * _CHUNK).from_address(self.tensor.data_ptr())).cast("B")
        else:
            self.raw = memory.huge(_CHUNK)
            self.tensor = torch.frombuffer(self.raw, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()


class Source:
    """
    A shard, read chunk by chunk: from the page cache what lies there, the rest past it where the filesystem has that.

    Whoever reads ahead into the cache ends when it is opened here.
    """

    def __init__(self, path: Path, shard: protocol.Shard) -> None:
        self.name = f"{path.parent.name}/{path.name}"
        self.shard = shard
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        self._cached: _Cached | None = None
        self._is_direct = False
        self._kept: dict[int, Buffer] = {}
        self._claim()

    def _claim(self) -> None:
        """A lock says that a rank is there. A reader ahead asks for it for a moment at a time, to learn that."""
        for _ in range(_CLAIM_TRIES):
            if _lock(self._fd):
                return
            time.sleep(0.001)

    def be_direct(self) -> None:
        """From here on. Until then what is read is there for the other ranks, too."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_DIRECT)
            self._is_direct = True
            with contextlib.suppress(OSError, ValueError):  # no room in the address space, or nothing in the file
                self._cached = _Cached(self._fd)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                raise

    def keep(self, chunk: int) -> memoryview:
        """Read a chunk ahead and return its bytes."""
        if chunk not in self._kept:
            with contextlib.suppress(OSError):  # in one piece: reading bit by bit is slow
                os.posix_fadvise(self._fd, chunk * _CHUNK, _CHUNK, os.POSIX_FADV_WILLNEED)
            buffer = Buffer()
            self.read(chunk, buffer)
            self._kept[chunk] = buffer
        return self._kept[chunk].raw[: self._size_of(chunk)]

    def take_kept(self, chunk: int) -> Buffer | None:
        """Return the buffer of a chunk that was read ahead; whoever takes it has it for himself."""
        return self._kept.pop(chunk, None)

    def read(self, chunk: int, buffer: Buffer) -> None:
        """Read and verify one chunk."""
        at, size = 0, self._size_of(chunk)
        fd = self._cached.fd if self._cached and self._cached.has(chunk * _CHUNK, size) else self._fd
        while at < size:
            was_direct = self._is_direct
            try:
                count = os.preadv(fd, [buffer.raw[at:]], chunk * _CHUNK + at)
            except OSError as error:
                self._be_buffered(chunk, error, was_direct=was_direct)
                continue
            if count == 0:
                raise DamagedError(f"{self.name}: expected {self.shard.size_bytes} bytes, it ends before")
            at += count
        check(self.name, self.shard, chunk, buffer.raw[:size])

    def _size_of(self, chunk: int) -> int:
        return min(_CHUNK, self.shard.size_bytes - chunk * _CHUNK)

    def _be_buffered(self, chunk: int, error: OSError, *, was_direct: bool) -> None:
        """Once a file: the filesystem took the flag and refuses the read."""
        if error.errno in _UNREADABLE:
            raise DamagedError(f"{self.name}: bytes from {chunk * _CHUNK}: {error.strerror}") from None
        if error.errno != errno.EINVAL or not was_direct:
            raise error
        fcntl.fcntl(self._fd, fcntl.F_SETFL, 0)
        self._is_direct = False


def _lock(fd: int) -> bool:
    """Whether there is nothing more to wait for: it is locked, or there are no locks here."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # at worst some bytes are read twice
    return True


class _Cached:
    """The same file through the page cache, and what lies there, which asking does not change."""

    def __init__(self, fd: int) -> None:
        self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        self._memory = mmap.mmap(self.fd, 0, access=mmap.ACCESS_COPY)  # nobody touches it: it has no pages of its own
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def has(self, begin: int, size: int) -> bool:
        """Whether nearly all of it is in memory; `begin` is that of a page. Where the system does not tell, it says yes."""
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        told = _libc.mincore(ctypes.c_void_p(self._address + begin), ctypes.c_size_t(size), pages)
        return (
            told == 0 and bytes(pages).count(0) <= len(pages) // _MISSING
        )  # the kernel takes a page back now and then


def read_all(spans: Mapping[Source, Sequence[Span]]) -> None:
    """Fill the tensors of all spans."""
    work = [(source, chunk, parts) for source, several in spans.items() for chunk, parts in _by_chunk(several)]
    devices = {span.to.device for several in spans.values() for span in several}
    streams = {one: torch.cuda.current_stream(one) for one in devices if one.type == "cuda"}
    threads = min(num_readers(), len(work))
    with _on(next(iter(streams.values()), None)):  # pinned through this device: another one would pay with its memory
        free = [Buffer(pinned=bool(streams)) for _ in range(threads)]

    def bring(item: tuple[Source, int, list[Span]]) -> None:
        source, chunk, parts = item
        kept = source.take_kept(chunk)
        if kept is not None:
            _spread(kept, chunk * _CHUNK, parts, streams)
            return
        buffer = free.pop()
        try:
            source.read(chunk, buffer)
            _spread(buffer, chunk * _CHUNK, parts, streams)
        finally:
            free.append(buffer)

    for source in spans:
        source.be_direct()
    pool = ThreadPoolExecutor(threads)
    try:
        for _ in pool.map(bring, work):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


def _by_chunk(spans: Sequence[Span]) -> Iterable[tuple[int, list[Span]]]:
    found: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        for chunk in range(span.begin // _CHUNK, -(-span.end // _CHUNK)):
            found[chunk].append(span)
    return sorted(found.items())


def _spread(
    buffer: Buffer, start: int, spans: Sequence[Span], streams: Mapping[torch.device, torch.cuda.Stream]
) -> None:
    """
    Copy what spans want of a chunk, which begins at byte `start` of the shard.

    To a device on the caller's stream: a thread has one of its own, and memory that was used before is free in the order of the caller's.
    """
    for span in spans:
        begin, end = max(span.begin, start), min(span.end, start + _CHUNK)
        at, to = span.at + begin - span.begin, span.to
        if type(to) is Tensor and to.device.type == "cpu":
            ctypes.memmove(to.data_ptr() + at, buffer.address + begin - start, end - begin)
            continue
        with _on(streams.get(to.device)):
            flat = to.view(-1).view(torch.uint8)[at : at + end - begin]
            flat.copy_(buffer.tensor[begin - start : end - start], non_blocking=True)
    for stream in streams.values():
        stream.synchronize()  # the buffer is filled anew


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
