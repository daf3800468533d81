"""
Staging memory: one memory file per rank, which outlives it because the saver has it mapped.

Standard library only. The rule: the trainer never pays for a page. The rank makes an empty file and
maps it; the saver fills in the pages, huge ones where the kernel has them: a disk is then told of few long
pieces of memory, and neither page tables nor a direct write cost anything to speak of. Memory that is not there
is refused before it is taken, since the kernel's own answer is to kill the training.
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
_HUGE_BYTES: Final = 2 << 20
_SHARE: Final = 0.8  # of the memory that is left, for staging
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, Linux 5.14; not in Python's mmap
_COLLAPSE: Final = 25  # MADV_COLLAPSE, Linux 6.1: huge pages for memory files, too, whatever is set for those
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000  # address space alone; what lies in it is accounted for by itself
_CGROUPS: Final = (  # version 2 and 1: the line of /proc/self/cgroup, where the groups are, limit, usage, and caches in memory.stat
    ("", "/sys/fs/cgroup", "memory.max", "memory.current", ("file", "shmem")),
    (
        "memory",
        "/sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_cache", "total_shmem"),
    ),
)
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)


_LIMITED: Final = (
    "there is memory, and the limit on the size of a file, which counts for it, too, is less: ulimit -f unlimited"
)


class StagingMemory:
    """The rank's end: room for the image of its shard, then its JSON. Empty until the saver has populated it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create("vramfarm-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size)
            self.memory = _map(self.fd, size)
        except BaseException as error:
            os.close(self.fd)
            if isinstance(error, OSError) and error.errno == errno.EFBIG:
                raise OSError(errno.EFBIG, _LIMITED) from error
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


def huge(size: int) -> memoryview:
    """
    Private memory, of huge pages where the system has them, and aligned so that they fit.

    A disk that is told of few long pieces of memory has been up to three times as fast.
    """
    view = _room(size)
    _advise(address_of(view), size, mmap.MADV_HUGEPAGE)
    return view


def _room(size: int) -> memoryview:
    """Address space that begins where a huge page may."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    view = memoryview(mmap.mmap(-1, size + _HUGE_BYTES, flags=flags))
    begin = -address_of(view) % _HUGE_BYTES
    return view[begin : begin + size]


def _map(fd: int, size: int) -> memoryview:
    """Map a file over address space where its huge pages fit; both go with the last view."""
    if os.fstat(fd).st_size < size:
        raise ValueError("the file is shorter than what is to be mapped")  # it would be a SIGBUS later
    view = _room(size)
    found = _libc.mmap(address_of(view), size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if found != address_of(view):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return view


def map_arena(pid: int, fd: int, size: int) -> memoryview:
    """Map a rank's staging memory; it stays when the rank is gone."""
    mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _map(mine, size)
    finally:
        os.close(mine)


def populate_arena(pid: int, fd: int, size: int) -> memoryview:
    """Map a rank's empty staging memory and give it all its pages."""
    memory = map_arena(pid, fd, size)
    _take_huge_pages(memory)
    if not populate(memory):
        mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(mine, 0, size)
        finally:
            os.close(mine)
    return memory


def _take_huge_pages(memory: memoryview) -> None:
    """
    As many as the kernel has: it makes one of what is there, so each begins with a small one.

    While it does, its processor does nothing else, for 30 ms where a virtual machine's host has to find the memory first.
    So the host has found it before, for memory that is given back at once, and taken again.
    """
    begin = address_of(memory)
    end = begin + len(memory) // _HUGE_BYTES * _HUGE_BYTES
    for piece in range(begin, end, PIECE_BYTES):
        length = min(PIECE_BYTES, end - piece)
        with contextlib.suppress(OSError):
            populate(huge(length))
        for page in range(piece, piece + length, _HUGE_BYTES):
            if _advise(page, mmap.PAGESIZE, _POPULATE_WRITE):
                return
        if _advise(piece, length, _COLLAPSE) not in {0, errno.EAGAIN}:
            return


def populate(memory: memoryview, pause_s: float = 0.0) -> bool:
    """Fault a mapping in, piece by piece, without the interpreter's lock. False: this kernel cannot."""
    address = address_of(memory)
    for start in range(0, len(memory), PIECE_BYTES):
        code = _advise(address + start, min(PIECE_BYTES, len(memory) - start), _POPULATE_WRITE)
        if code == errno.EINVAL:
            return False
        if code:
            raise OSError(code, os.strerror(code))
        time.sleep(pause_s)
    return True


def populate_slowly(memory: memoryview) -> None:
    """The same beside a training that goes on: for the rank's own mapping, whose pages exist already."""
    populate(memory, pause_s=0.002)


def _advise(address: int, size: int, advice: int) -> int:
    """Return what is wrong with it, 0 if nothing is."""
    done = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)
    return ctypes.get_errno() if done else 0


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def available_bytes() -> int | None:
    """Return what may be taken before the kernel kills: what is left of the machine and of each control group that we are in; None if unknown."""
    return min((left for left in (*_left_in_groups(), _left_on_machine()) if left is not None), default=None)


def _left_in_groups() -> Iterator[int]:
    """A group's limit holds for those in it; in a container the first group may be all that is seen, under another name."""
    mine = _own_groups()
    for kind, root, limit, used, (cache, held) in _CGROUPS:
        own = Path(root, mine.get(kind, "").lstrip("/"))
        for group in (one for one in (own, *own.parents) if one.is_relative_to(root)):
            with contextlib.suppress(OSError, ValueError, KeyError):  # no such group here, or no limit
                most = int((group / limit).read_text())
                counted = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                yield most - int((group / used).read_text()) + max(0, int(counted[cache]) - int(counted[held]))


def _own_groups() -> dict[str, str]:
    """Return the control groups of this process, by what they control; that of version 2 under an empty name."""
    with contextlib.suppress(OSError):
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        return {kind: path for _, kinds, path in lines for kind in kinds.split(",")}
    return {}


def _left_on_machine() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return None
