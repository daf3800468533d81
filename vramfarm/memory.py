"""
Staging memory: one memory file per rank, which outlives it because the saver has it mapped.

Standard library only. The rule: the trainer never pays for a page. The rank makes an empty file and
maps it; the saver fills in the pages. Memory that is not there is refused before it is taken, since
the kernel's own answer is to kill the training.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PIECE_BYTES: Final = 32 << 20  # what is populated, or registered with a device, at a time
WINDOW_BYTES: Final = PIECE_BYTES  # of an image that is staged by and by
_SHARE: Final = 0.8  # of the memory that is left, for staging
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, Linux 5.14; not in Python's mmap
_CGROUPS: Final = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
        "total_cache",
    ),
)
_libc: Final = ctypes.CDLL(None, use_errno=True)


class StagingMemory:
    """The rank's end: room for the image of its shard, then its JSON. Empty until the saver has populated it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create("vramfarm-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size)
            self.memory = memoryview(mmap.mmap(self.fd, size))
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        os.close(self.fd)  # the mapping goes with the last view of it


def is_bounded(wish: str, needed: int, available: int | None) -> bool:
    """Whether to stage through a window, told from what all ranks here need together and what is left to them."""
    if wish == "auto":
        return available is not None and needed > _SHARE * available
    return wish == "chunked"


def arena_bytes(size: int) -> int:
    """Return a size for `size` bytes: whole pages and a little to spare, since the JSON grows by a digit now and then."""
    return whole_pages(size + min(size // 64, 4 << 20) + mmap.PAGESIZE)


def whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def map_arena(pid: int, fd: int, size: int) -> memoryview:
    """Map a rank's staging memory; it stays when the rank is gone."""
    mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(mine, size))
    finally:
        os.close(mine)


def populate_arena(pid: int, fd: int, size: int) -> memoryview:
    """Map a rank's empty staging memory and give it all its pages."""
    memory = map_arena(pid, fd, size)
    with contextlib.suppress(OSError):
        memory.obj.madvise(mmap.MADV_HUGEPAGE)  # type: ignore[attr-defined]  # where the kernel allows it for memory files
    if not all(populate(memory)):
        mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(mine, 0, size)
        finally:
            os.close(mine)
    return memory


def populate(memory: memoryview) -> Iterator[bool]:
    """Fault a mapping in, piece by piece, without the interpreter's lock. Yields False where the kernel cannot."""
    address = address_of(memory)
    for start in range(0, len(memory), PIECE_BYTES):
        length = min(PIECE_BYTES, len(memory) - start)
        if _libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(length), _POPULATE_WRITE) == 0:
            yield True
            continue
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise OSError(code, os.strerror(code))
        yield False
        return


def populate_slowly(memory: memoryview) -> None:
    """The same beside a training that goes on: for the rank's own mapping, whose pages exist already."""
    for _ in populate(memory):
        time.sleep(0.002)


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def available_bytes() -> int | None:
    """Return what may be taken before the kernel kills: the control group's rest, else the machine's; None if unknown."""
    for limit, used, stat, cache in _CGROUPS:
        with contextlib.suppress(OSError, ValueError, KeyError):
            most = int(Path(limit).read_text())
            if most < 1 << 60:
                counted = dict(line.split() for line in Path(stat).read_text().splitlines())
                held = int(counted.get("shmem", counted.get("total_shmem", "0")))
                return most - int(Path(used).read_text()) + max(0, int(counted[cache]) - held)
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return None
