"""
Large parts of a checkpoint straight to where they belong: read directly, verified on the way, several pieces at once.

The rule: no byte reaches a tensor before its chunk was verified, and each chunk is read once.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from vramfarm import protocol

MOST_READERS: Final = 8
_CHUNK: Final = protocol.CHUNK_BYTES


class DamagedError(Exception):
    """The bytes of a checkpoint are not those that were written; the text says where."""


@dataclass(frozen=True)
class Run:
    """Bytes of one file, from `begin` on, that fill `to`: the bytes of a tensor without holes."""

    path: Path
    shard: protocol.Shard
    begin: int
    to: Tensor


def check(name: str, shard: protocol.Shard, chunk: int, raw: memoryview) -> None:
    """`DamagedError` if a chunk is not what was written."""
    found = zlib.crc32(raw)
    if found != shard.checksums[chunk]:
        raise DamagedError(
            f"{name}: bytes from {chunk * _CHUNK}: expected checksum {shard.checksums[chunk]:08x}, got {found:08x}"
        )


def read_all(runs: Sequence[Run]) -> None:
    """Fill the tensors of all runs."""
    work: dict[tuple[Path, int], list[tuple[Run, int, int]]] = defaultdict(list)
    for run in runs:
        end = run.begin + len(run.to)
        for chunk in range(run.begin // _CHUNK, -(-end // _CHUNK)):
            work[run.path, chunk].append((run, max(run.begin, chunk * _CHUNK), min(end, (chunk + 1) * _CHUNK)))
    files = {run.path: _Source(run) for run in runs}
    streams = {one: torch.cuda.current_stream(one) for one in {run.to.device for run in runs} if one.type == "cuda"}
    buffers = _Buffers(streams)

    def bring(item: tuple[tuple[Path, int], list[tuple[Run, int, int]]]) -> None:
        (path, chunk), parts = item
        buffer = buffers.mine()
        files[path].read(chunk, buffer.raw)
        for run, begin, end in parts:
            piece = buffer.tensor[begin - chunk * _CHUNK : end - chunk * _CHUNK]
            with _on(streams.get(run.to.device)):
                run.to[begin - run.begin : end - run.begin].copy_(piece)

    pool = ThreadPoolExecutor(_num_readers())
    try:
        for _ in pool.map(bring, sorted(work.items(), key=lambda item: item[0])):
            pass
    finally:
        pool.shutdown(cancel_futures=True)
        for file in files.values():
            file.close()


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """A thread has a current stream of its own, and memory that was used before is free in the order of the caller's."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _num_readers() -> int:
    """This rank's share of the processors."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(MOST_READERS, max(2, len(os.sched_getaffinity(0)) // ranks))


class _Source:
    """A shard, read past the page cache where the filesystem has that."""

    def __init__(self, run: Run) -> None:
        self._shard = run.shard
        self._name = f"{run.path.parent.name}/{run.path.name}"
        self._fd = os.open(run.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            direct = os.open(run.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                raise
            return
        os.close(self._fd)
        self._fd = direct

    def read(self, chunk: int, raw: memoryview) -> None:
        """Read and verify one chunk."""
        at, size = 0, min(_CHUNK, self._shard.size_bytes - chunk * _CHUNK)
        while at < size:
            try:
                count = os.preadv(self._fd, [raw[at:]], chunk * _CHUNK + at)
            except OSError as error:  # once a file
                if error.errno != errno.EINVAL:
                    raise
                fcntl.fcntl(self._fd, fcntl.F_SETFL, 0)  # the filesystem took the flag and refuses the read
                continue
            if count == 0:
                raise DamagedError(f"{self._name}: expected {self._shard.size_bytes} bytes, it ends before")
            at += count
        check(self._name, self._shard, chunk, raw[:size])

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True)
class _Buffer:
    raw: memoryview
    tensor: Tensor


class _Buffers:
    """One buffer a thread; pinned where the bytes go on to a device."""

    def __init__(self, streams: Mapping[torch.device, torch.cuda.Stream]) -> None:
        self._stream = next(iter(streams.values()), None)
        self._local: Any = threading.local()

    def mine(self) -> _Buffer:
        if not hasattr(self._local, "buffer"):
            with _on(self._stream):  # pinned through this device: asked of another one it would take that one's memory
                self._local.buffer = _plain() if self._stream is None else _pinned()
        return self._local.buffer  # type: ignore[no-any-return]  # set above


def _pinned() -> _Buffer:
    tensor = torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=True)
    return _Buffer(memoryview((ctypes.c_char * _CHUNK).from_address(tensor.data_ptr())).cast("B"), tensor)


def _plain() -> _Buffer:
    memory = mmap.mmap(-1, _CHUNK)
    return _Buffer(memoryview(memory), torch.frombuffer(memory, dtype=torch.uint8))
