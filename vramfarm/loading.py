"""
Reading a checkpoint, verified: each 8 MiB chunk is checked against the manifest before its first byte is used.

Any world size: a rank asks for the box it holds and gets it from whichever shards have parts of it.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vramfarm import image, protocol, streaming
from vramfarm.folder import Stored
from vramfarm.image import ImageError, Placed
from vramfarm.staging import TORCH_DTYPES, as_tensor
from vramfarm.streaming import DamagedError, Run

_ALGORITHM = "crc32"
_LARGE_BYTES = 1 << 20  # from here on a part is worth a place in the queue

__all__ = ["DamagedError", "Reader"]


class _File:
    """One shard, mapped privately. No byte of it leaves before its chunk was verified."""

    def __init__(self, path: Path, shard: protocol.Shard) -> None:
        self.name = f"{path.parent.name}/{shard.path}"
        self.path = path
        self.shard = shard
        self._verified = [False] * len(shard.checksums)
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), shard.size_bytes, access=mmap.ACCESS_COPY)
        self._raw = as_tensor(self._memory)
        try:
            start = image.header_bytes(self._bytes(0, 8), shard.size_bytes)
            self.placed = image.parse_header(self._bytes(0, start), shard.size_bytes)
        except ImageError as error:
            raise DamagedError(f"{self.name}: {error}") from None

    def tensor(self, placed: Placed) -> Tensor:
        """Return a view of one tensor's bytes, as that tensor."""
        dtype = TORCH_DTYPES[placed.box.dtype]
        self._verify(placed.begin, placed.end)
        raw = self._raw[placed.begin : placed.end]
        if placed.begin % dtype.itemsize:
            raw = raw.clone()  # another writer's file: views must be aligned
        return raw.view(dtype).view(placed.box.shape)

    def _bytes(self, begin: int, end: int) -> bytes:
        self._verify(begin, end)
        return self._memory[begin:end]

    def _verify(self, begin: int, end: int) -> None:
        size = protocol.CHUNK_BYTES
        for chunk in range(begin // size, min(-(-end // size), len(self._verified))):
            if self._verified[chunk]:
                continue
            with memoryview(self._memory)[chunk * size : (chunk + 1) * size] as raw:
                streaming.check(self.name, self.shard, chunk, raw)
            self._verified[chunk] = True


@dataclass(frozen=True)
class _Part:
    file: _File
    placed: Placed


class Reader:
    """A committed checkpoint, opened. `keys` are the tensors in it."""

    def __init__(self, stored: Stored) -> None:
        self.manifest = stored.manifest
        if self.manifest.algorithm != _ALGORITHM:
            raise DamagedError(f"{stored.path.name}: expected {_ALGORITHM} checksums, got {self.manifest.algorithm!r}")
        self._parts: dict[str, list[_Part]] = {}
        self._queue: list[Run] = []
        for shard in self.manifest.shards:
            file = _File(stored.path / shard.path, shard)
            for placed in file.placed:
                self._parts.setdefault(placed.box.key, []).append(_Part(file, placed))
        for key, parts in self._parts.items():
            _check_parts(key, parts)

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self._parts)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        boxes = [part.placed.box for part in self._parts[key]]
        return tuple(max(b.offsets[d] + b.shape[d] for b in boxes) for d in range(len(boxes[0].shape)))

    def dtype(self, key: str) -> torch.dtype:
        return TORCH_DTYPES[self._parts[key][0].placed.box.dtype]

    def read_into(self, key: str, local: Tensor, offsets: Sequence[int]) -> None:
        """Fill `local`, the box at `offsets` of the whole tensor, by the next `flush`; all of it, or `DamagedError`."""
        missing = local.numel()
        with torch.no_grad():
            for part in self._parts[key]:
                missing -= self._bring(_Overlap(part, local, offsets))
        if missing:
            raise DamagedError(
                f"{self.manifest.ref.name}: {key}: {missing} of {local.numel()} elements are in no shard"
            )

    def read(self, key: str) -> Tensor:
        """Return the whole tensor."""
        whole = torch.empty(self.shape(key), dtype=self.dtype(key))
        waiting, self._queue = self._queue, []
        self.read_into(key, whole, (0,) * whole.dim())
        self.flush()
        self._queue = waiting  # many together are read faster than one by one
        return whole

    def flush(self) -> None:
        """Fill everything that waits for it."""
        queue, self._queue = self._queue, []
        if queue:
            with torch.no_grad():
                streaming.read_all(queue)

    def _bring(self, overlap: _Overlap) -> int:
        """Return the number of elements that are filled, or will be: what is large and in one piece waits its turn."""
        run = overlap.run()
        if run is None:
            overlap.copy()
        else:
            self._queue.append(run)
        return overlap.count


def _check_parts(key: str, parts: Sequence[_Part]) -> None:
    kinds = {(part.placed.box.dtype, len(part.placed.box.shape)) for part in parts}
    if len(kinds) != 1 or not {dtype for dtype, _ in kinds} <= TORCH_DTYPES.keys():
        raise DamagedError(f"{parts[0].file.name}: {key}: its parts are of kinds {sorted(kinds)}")


class _Overlap:
    """What one part has of the box of a tensor."""

    def __init__(self, part: _Part, local: Tensor, offsets: Sequence[int]) -> None:
        self._part, self._local, self._offsets = part, local, offsets
        box = part.placed.box
        self._begin = [max(a, b) for a, b in zip(box.offsets, offsets, strict=True)]
        end = [min(a + n, b + m) for a, n, b, m in zip(box.offsets, box.shape, offsets, local.shape, strict=True)]
        self._extent = [e - b for b, e in zip(self._begin, end, strict=True)]
        is_none = min(self._extent, default=1) <= 0 or local.numel() == 0
        self.count = 0 if is_none else math.prod(self._extent)

    def copy(self) -> None:
        if self.count:
            source = self._part.file.tensor(self._part.placed)
            box = self._part.placed.box
            self._local[_slices(self._begin, self._extent, self._offsets)].copy_(
                source[_slices(self._begin, self._extent, box.offsets)]
            )

    def run(self) -> Run | None:
        """The same as one row of bytes on both sides; None where it is none, or a short one."""
        box, local, item = self._part.placed.box, self._local, self._local.element_size()
        if self.count * item < _LARGE_BYTES or not local.is_contiguous():
            return None
        if not (self._extent[1:] == list(box.shape[1:]) == list(local.shape[1:])):
            return None
        row = math.prod(local.shape[1:]) * item
        begin = self._part.placed.begin + (self._begin[0] - box.offsets[0]) * row
        to = (self._begin[0] - self._offsets[0]) * row
        flat = local.view(-1).view(torch.uint8)[to : to + self.count * item]
        return Run(self._part.file.path, self._part.file.shard, begin, flat)


def _slices(begin: Sequence[int], extent: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(b - o, b - o + n) for b, n, o in zip(begin, extent, origin, strict=True))
