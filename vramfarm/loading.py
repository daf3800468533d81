"""
Reading a checkpoint, verified: each 8 MiB chunk is checked against the manifest before its first byte is used.

Any world size: a rank asks for the box it holds and gets it from whichever shards have parts of it.
"""

from __future__ import annotations

import math
import mmap
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vramfarm import image, protocol
from vramfarm.folder import Stored
from vramfarm.image import ImageError, Placed
from vramfarm.staging import TORCH_DTYPES, as_tensor

_ALGORITHM = "crc32"


class DamagedError(Exception):
    """The bytes of a checkpoint are not those that were written; the text says where."""


class _File:
    """One shard, mapped privately. No byte of it leaves before its chunk was verified."""

    def __init__(self, path: Path, shard: protocol.Shard) -> None:
        self.name = f"{path.parent.name}/{shard.path}"
        self._checksums = shard.checksums
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
                found = zlib.crc32(raw)
            if found != self._checksums[chunk]:
                raise DamagedError(
                    f"{self.name}: bytes from {chunk * size}: expected checksum {self._checksums[chunk]:08x}, got {found:08x}"
                )
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
        """Fill `local`, the box at `offsets` of the whole tensor; all of it, or `DamagedError`."""
        missing = local.numel()
        with torch.no_grad():
            for part in self._parts[key]:
                missing -= _copy_overlap(part, local, offsets)
        if missing:
            raise DamagedError(
                f"{self.manifest.ref.name}: {key}: {missing} of {local.numel()} elements are in no shard"
            )

    def read(self, key: str) -> Tensor:
        """Return the whole tensor."""
        whole = torch.empty(self.shape(key), dtype=self.dtype(key))
        self.read_into(key, whole, (0,) * whole.dim())
        return whole


def _check_parts(key: str, parts: Sequence[_Part]) -> None:
    kinds = {(part.placed.box.dtype, len(part.placed.box.shape)) for part in parts}
    if len(kinds) != 1 or not {dtype for dtype, _ in kinds} <= TORCH_DTYPES.keys():
        raise DamagedError(f"{parts[0].file.name}: {key}: its parts are of kinds {sorted(kinds)}")


def _copy_overlap(part: _Part, local: Tensor, offsets: Sequence[int]) -> int:
    """Copy what one part has of the box; return the number of elements."""
    box = part.placed.box
    begin = [max(a, b) for a, b in zip(box.offsets, offsets, strict=True)]
    end = [min(a + n, b + m) for a, n, b, m in zip(box.offsets, box.shape, offsets, local.shape, strict=True)]
    extent = [e - b for b, e in zip(begin, end, strict=True)]
    if min(extent, default=1) <= 0 or local.numel() == 0:
        return 0
    source = part.file.tensor(part.placed)
    local[_slices(begin, extent, offsets)].copy_(source[_slices(begin, extent, box.offsets)])
    return math.prod(extent)


def _slices(begin: Sequence[int], extent: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(b - o, b - o + n) for b, n, o in zip(begin, extent, origin, strict=True))
