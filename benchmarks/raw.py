"""Bytes to a disk and back with nothing between: what engines are measured against. No torch."""

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

PIECE, HUGE = 8 << 20, 2 << 20


def direct(folder):
    """O_DIRECT where the filesystem has it, else 0."""
    probe = Path(folder) / f"probe-{os.getpid()}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return 0
    finally:
        probe.unlink(missing_ok=True)
    return os.O_DIRECT


def huge(size):
    """Memory that is there, of huge pages where the system has them: disks are quicker with those."""
    memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE
    view = memoryview(memory)[begin : begin + size]
    for at in range(0, size, mmap.PAGESIZE):
        view[at] = 1
    return view


def put(fd, view, at):
    while view:
        count = os.pwrite(fd, view, at)
        view, at = view[count:], at + count


def get(fd, view, at):
    while view:
        count = os.preadv(fd, [view], at)
        view, at = view[count:], at + count


def _read(paths, depth):
    """When a direct read of all of these files began and ended, `depth` pieces in flight, into memory that is used again."""
    files = {path: os.open(path, os.O_RDONLY | direct(path.parent)) for path in paths}
    starts = range(0, max(path.stat().st_size for path in paths), PIECE)
    pieces = deque((fd, at) for at in starts for path, fd in files.items() if at < path.stat().st_size)
    buffers = [huge(PIECE) for _ in range(depth)]

    def work(buffer):
        with contextlib.suppress(IndexError):  # no more pieces
            while True:
                fd, at = pieces.popleft()
                os.preadv(fd, [buffer], at)

    threads = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended = time.perf_counter()
    for fd in files.values():
        os.close(fd)
    return started, ended


def seconds_to_read(paths, depth, readers=1):
    """Of a direct read of all of these files, by so many processes at once, `depth` pieces in flight in each."""
    shares = [share for share in (paths[number::readers] for number in range(readers)) if share]
    with ProcessPoolExecutor(len(shares), multiprocessing.get_context("fork")) as pool:
        moments = list(pool.map(_read, shares, [depth] * len(shares)))
    return max(ended for _, ended in moments) - min(started for started, _ in moments)


def forget(folder):
    """Take the files of a folder out of the page cache. Only those: the libraries that a start needs stay."""
    for path in filter(Path.is_file, Path(folder).rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
