"""What the machine can do: the numbers that an engine is measured against, taken in the same run."""

import mmap
import os
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from raw import PIECE, direct, get, put


class Limits:
    """
    A pinned copy of the same bytes, and the same bytes written and read directly, as fast as this disk does it.

    Of a state that is larger than `at_most` that much is taken, and the seconds are counted up to all of it.
    """

    def __init__(self, tensors, folder, rank, barrier, at_most=1 << 62):
        self._barrier = barrier
        self._path = Path(folder) / f"limit-{rank}"
        self.whole_bytes = sum(t.numel() * t.element_size() for t in tensors)
        self._tensors, self.size_bytes = [], 0
        for tensor in tensors:
            if self.size_bytes < at_most:
                self._tensors.append(tensor)
                self.size_bytes += tensor.numel() * tensor.element_size()
        self._padded = -(-self.size_bytes // 4096) * 4096
        self._memory = mmap.mmap(-1, self._padded)
        self._view = memoryview(self._memory)
        self._fill()  # pages that nobody wrote to are zeros, and some disks are quick at those
        self._direct = direct(self._path.parent)
        self._depths = [1, 4]
        self._write_s = {}
        self._read_s = {}
        self._host = None

    def _fill(self):
        raw, at = torch.frombuffer(self._memory, dtype=torch.uint8), 0
        for tensor in self._tensors:
            flat = tensor.reshape(-1).view(torch.uint8)
            raw[at : at + len(flat)].copy_(flat)
            at += len(flat)

    def copy(self):
        """Seconds of one copy of all tensors into memory that is pinned, or at least there."""
        device = self._tensors[0].device
        if self._host is None:
            self._host = [torch.empty_like(t, device="cpu", pin_memory=device.type == "cuda") for t in self._tensors]
            for host in self._host:
                host.zero_()
        return self._timed(lambda: torch._foreach_copy_(self._host, self._tensors, non_blocking=True))

    def write(self):
        """Seconds of a direct, fsynced write into a new file, with the number of pieces in flight that is best here."""
        return self._best(self._write_s, self._write_all)

    def start_writing(self):
        """The same on a thread, for a training that goes on beside it. Return what says how long it took, None until then."""
        self._tidy(self._write_all)
        found = []

        def work():
            started = time.perf_counter()
            self._write_all(min(self._write_s, key=self._write_s.get))
            found.append((time.perf_counter() - started) * self.whole_bytes / self.size_bytes)

        threading.Thread(target=work, daemon=True).start()
        return lambda: found[0] if found else None

    def read(self):
        return self._best(self._read_s, self._read_all)

    def sums(self):
        """Bytes a second that one thread sums."""
        started = time.perf_counter()
        part = self._view[: 256 << 20]
        zlib.crc32(part)
        return len(part) / (time.perf_counter() - started)

    def tidy(self):
        """Others need the room."""
        self._path.unlink(missing_ok=True)

    def close(self):
        self.tidy()
        self._host = self._tensors = None

    def _best(self, found, act):
        if found:
            self._tidy(act)
            return self._timed(lambda: act(min(found, key=found.get)))
        for depth in self._depths:
            self._tidy(act)
            found[depth] = self._timed(lambda depth=depth: act(depth))
        return min(found.values())

    def _tidy(self, act):
        """Freeing the last file's blocks is no part of a write."""
        if act == self._write_all:
            self._path.unlink(missing_ok=True)
            os.sync()

    def _timed(self, act):
        """From when all ranks begin until the last one is done."""
        self._barrier()
        started = time.perf_counter()
        act()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._barrier()
        return (time.perf_counter() - started) * self.whole_bytes / self.size_bytes

    def _write_all(self, depth):
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | self._direct, 0o600)
        os.posix_fallocate(fd, 0, self._padded)
        self._each(depth, lambda at: put(fd, self._view[at : at + PIECE], at))
        os.fsync(fd)
        os.close(fd)

    def _read_all(self, depth):
        fd = os.open(self._path, os.O_RDONLY | self._direct)
        self._each(depth, lambda at: get(fd, self._view[at : at + PIECE], at))
        os.close(fd)

    def _each(self, depth, act):
        with ThreadPoolExecutor(depth) as pool:
            list(pool.map(act, range(0, self._padded, PIECE)))


def read_directly(paths):
    """Seconds of a direct read of all these files together into memory that is there: of 4 and 8 pieces in flight the better."""
    sizes = {path: -(-path.stat().st_size // PIECE) * PIECE for path in paths}
    memory = mmap.mmap(-1, max(sum(sizes.values()), PIECE))
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = 1
    pieces = [(path, at) for path, size in sizes.items() for at in range(0, size, PIECE)]
    view = memoryview(memory)
    work = [(path, at, view[i * PIECE : (i + 1) * PIECE]) for i, (path, at) in enumerate(pieces)]
    files = {path: os.open(path, os.O_RDONLY | direct(path.parent)) for path in paths}
    seconds = []
    for depth in (4, 8):
        started = time.perf_counter()
        with ThreadPoolExecutor(depth) as pool:
            list(pool.map(lambda one: os.preadv(files[one[0]], [one[2]], one[1]), sorted(work, key=lambda one: one[1])))
        seconds.append(time.perf_counter() - started)
    for fd in files.values():
        os.close(fd)
    return min(seconds)
