"""
Reading a checkpoint, verified: each 8 MiB chunk is checked against the manifest before its first byte is used.

Any world size: a rank asks for the box it holds and gets it from whichever shards have parts of it.
"""

from __future__ import annotations

import math
import mmap
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vramfarm import image, protocol, streaming
from vramfarm.folder import Stored
from vramfarm.image import ImageError, Placed
from vramfarm.staging import TORCH_DTYPES, as_tensor
from vramfarm.streaming import DamagedError, Source, Span

_CHUNK = protocol.CHUNK_BYTES

__all__ = ["DamagedError", "Reader"]


class _File:
    """One shard. No byte of it leaves before its chunk was verified."""

    def __init__(self, path: Path, shard: protocol.Shard) -> None:
        self.source = Source(path, shard)
        self.name = self.source.name
        self._path, self._shard = path, shard
        self._mapped: _Mapped | None = None
        try:
            start = image.header_bytes(self._head(8), shard.size_bytes)
            self.placed = image.parse_header(self._head(start), shard.size_bytes)
        except ImageError as error:
            raise DamagedError(f"{self.name}: {error}") from None

    def tensor(self, placed: Placed) -> Tensor:
        """Return a view of one tensor's bytes, as that tensor."""
        self._mapped = self._mapped or _Mapped(self.name, self._path, self._shard)
        return self._mapped.tensor(placed)

    def _head(self, size: int) -> bytes:
        chunks = range(-(-min(size, self._shard.size_bytes) // _CHUNK))
        return b"".join(self.source.keep(chunk)[: size - chunk * _CHUNK] for chunk in chunks)


class _Mapped:
    """The same in memory, for what is wanted with holes between its parts."""

    def __init__(self, name: str, path: Path, shard: protocol.Shard) -> None:
        self._name, self._shard = name, shard
        self._verified = [False] * len(shard.checksums)
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), shard.size_bytes, access=mmap.ACCESS_COPY)
        self._raw = as_tensor(self._memory)

    def tensor(self, placed: Placed) -> Tensor:
        dtype = TORCH_DTYPES[placed.box.dtype]
        self._verify(placed.begin, placed.end)
        raw = self._raw[placed.begin : placed.end]
        if placed.begin % dtype.itemsize:
            raw = raw.clone()  # another writer's file: views must be aligned
        return raw.view(dtype).view(placed.box.shape)

    def _verify(self, begin: int, end: int) -> None:
        for chunk in range(begin // _CHUNK, min(-(-end // _CHUNK), len(self._verified))):
            if self._verified[chunk]:
                continue
            with memoryview(self._memory)[chunk * _CHUNK : (chunk + 1) * _CHUNK] as raw:
                streaming.check(self._name, self._shard, chunk, raw)
            self._verified[chunk] = True


@dataclass(frozen=True)
class _Part:
    file: _File
    placed: Placed


class Reader:
    """A committed checkpoint, opened. `keys` are the tensors in it."""

    def __init__(self, stored: Stored) -> None:
        self.manifest = stored.manifest
        if self.manifest.algorithm != protocol.ALGORITHM:
            raise DamagedError(
                f"{stored.path.name}: expected {protocol.ALGORITHM} checksums, got {self.manifest.algorithm!r}"
            )
        self._parts: dict[str, list[_Part]] = {}
        self._queue: dict[Source, list[Span]] = defaultdict(list)
        with ThreadPoolExecutor(streaming.num_readers()) as pool:
            files = list(pool.map(lambda shard: _File(stored.path / shard.path, shard), self.manifest.shards))
        for file in files:
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

    def whole(self, key: str) -> Tensor:
        """Return the whole tensor, which is filled by the next `flush`."""
        whole = torch.empty(
            self.shape(key), dtype=self.dtype(key), device="cpu"
        )  # whatever the script has as its default
        self.read_into(key, whole, (0,) * whole.dim())
        return whole

    def read(self, key: str) -> Tensor:
        """Return the whole tensor, filled, with all that waits for a `flush`."""
        whole = self.whole(key)
        self.flush()
        return whole

    def flush(self) -> None:
        """Fill everything that waits for it."""
        queue, self._queue = self._queue, defaultdict(list)
        if queue:
            streaming.read_all(queue)

    def _bring(self, overlap: _Overlap) -> int:
        """Return the number of elements that are filled, or will be: what is in one piece waits for the others."""
        if overlap.count:
            span = overlap.span()
            if span is None:
                overlap.copy()
            else:
                self._queue[overlap.source].append(span)
        return overlap.count


def _check_parts(key: str, parts: Sequence[_Part]) -> None:
    kinds = {(part.placed.box.dtype, len(part.placed.box.shape)) for part in parts}
    if len(kinds) != 1 or not {dtype for dtype, _ in kinds} <= TORCH_DTYPES.keys():
        raise DamagedError(f"{parts[0].file.name}: {key}: its parts are of kinds {sorted(kinds)}")
    if len(parts) > 1 and image.overlap([part.placed.box for part in parts]):
        raise DamagedError(f"{parts[0].file.name}: {key}: parts of it overlap, so others may be missing")


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

    @property
    def source(self) -> Source:
        return self._part.file.source

    def copy(self) -> None:
        source = self._part.file.tensor(self._part.placed)
        box = self._part.placed.box
        self._local[_slices(self._begin, self._extent, self._offsets)].copy_(
            source[_slices(self._begin, self._extent, box.offsets)]
        )

    def span(self) -> Span | None:
        """The same as one row of bytes on both sides; None where it is none."""
        box, local = self._part.placed.box, self._local
        if not local.is_contiguous() or not (self._extent[1:] == list(box.shape[1:]) == list(local.shape[1:])):
            return None
        item = local.element_size()
        row = math.prod(local.shape[1:]) * item
        first = 0 if not self._extent else self._begin[0]
        begin = self._part.placed.begin + (first - sum(box.offsets[:1])) * row
        return Span(begin, begin + self.count * item, local, (first - sum(self._offsets[:1])) * row)


def _slices(begin: Sequence[int], extent: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(b - o, b - o + n) for b, n, o in zip(begin, extent, origin, strict=True))
