"""What the machine can do: the numbers that an engine is measured against, taken in the same run."""

import os
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from raw import PIECE, direct, huge, put

WAYS = ((1, PIECE), (4, PIECE), (1, 256 << 20))  # pieces in flight, and their size


class Limits:
    """
    A pinned copy of the same bytes, and the same bytes written directly, as fast as this disk does it.

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
        self._view = huge(self._padded)
        self._fill()  # pages that nobody wrote to are zeros, and some disks are quick at those
        self._direct = direct(self._path.parent)
        self._write_s = {}
        self._host = None

    def _fill(self):
        raw, at = torch.frombuffer(self._view, dtype=torch.uint8), 0
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
        """Seconds of a direct, fsynced write into a new file, in the way that is best here."""
        return min(self._write_once(way) for way in ([self._best()] if self._write_s else WAYS))

    def start_writing(self):
        """The same on a thread, for a training that goes on beside it. Return what says how long it took, None until then."""
        self._make_room()
        found = []

        def work():
            started = time.perf_counter()
            self._write_all(*self._best())
            found.append((time.perf_counter() - started) * self.whole_bytes / self.size_bytes)

        threading.Thread(target=work, daemon=True).start()
        return lambda: found[0] if found else None

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

    def _best(self):
        return min(self._write_s, key=self._write_s.get)

    def _write_once(self, way):
        self._make_room()
        took = self._timed(lambda: self._write_all(*way))
        self._write_s.setdefault(way, took)
        return took

    def _make_room(self):
        """Freeing the last file's blocks is no part of a write."""
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

    def _write_all(self, depth, piece):
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | self._direct, 0o600)
        os.posix_fallocate(fd, 0, self._padded)
        with ThreadPoolExecutor(depth) as pool:
            list(pool.map(lambda at: put(fd, self._view[at : at + piece], at), range(0, self._padded, piece)))
        os.fsync(fd)
        os.close(fd)
