"""`offload.max_bandwidth`: the pace at which bytes leave, whatever the store."""

import threading
import time
from collections.abc import Iterator
from typing import Final

PACED_BYTES: Final = 512 << 10  # of a body that leaves, at most at once; few, as all threads share Python's lock
_LEAST_BYTES: Final = 16 << 10
_LATE_S: Final = 0.25
_BLOCKS_PER_S: Final = 50  # a paced body leaves in so many at least: no bursts


class Pace:
    """
    No more than so many bytes a second, all threads together. What a busy machine kept from leaving
    in time may follow, a quarter of a second's worth at most, so that the mean is kept as well.
    """

    def __init__(self, bytes_per_s: int | None) -> None:
        self._rate = bytes_per_s
        self.is_limited = bool(bytes_per_s)
        self._lock = threading.Lock()
        self._free_at: float | None = None
        at_rate = PACED_BYTES if bytes_per_s is None else bytes_per_s // _BLOCKS_PER_S
        self.block_bytes = min(PACED_BYTES, max(_LEAST_BYTES, at_rate))

    def take(self, num_bytes: int) -> None:
        """Returns when so many bytes may leave."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now - _LATE_S, now if self._free_at is None else self._free_at)
            self._free_at = start + num_bytes / self._rate
        time.sleep(max(0.0, start - now))

    def cut(self, content: bytes) -> Iterator[memoryview]:
        """All of it, block by block, each when it may leave; whole where there is no limit."""
        memory, step = memoryview(content), self.block_bytes if self._rate else max(1, len(content))
        for begin in range(0, len(memory), step):
            block = memory[begin : begin + step]
            self.take(len(block))
            yield block
