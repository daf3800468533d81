"""
The bytes of a .safetensors file: header and where each tensor lies. No torch.

A shard also carries DCP's sharding information, so torch's own reader can reshard it.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

ITEM_BYTES: Final[Mapping[str, int]] = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
SMALL_BYTES: Final = 64 << 10
_ALIGN: Final = 4096  # where the tensors begin: a page, for direct writes
_MAX_HEADER: Final = 100_000_000  # as safetensors' own readers have it


class ImageError(ValueError):
    """The bytes are no shard of ours."""


@dataclass(frozen=True)
class Box:
    """A box of a tensor: its local shape, and where it begins in the whole tensor."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Placed:
    """A box and the bytes of the file that hold it."""

    box: Box
    begin: int
    end: int


@dataclass(frozen=True)
class Image:
    """
    A shard: `header`, then the tensors back to back, wide types first so that all are aligned.

    Of a type the small ones first: a device gathers them for one copy. In memory it begins at
    `begin`, and `placed` counts from there as the memory does.
    """

    header: bytes
    placed: tuple[Placed, ...]
    size_bytes: int
    begin: int = 0


def lay_out_all(boxes: Iterable[Box]) -> tuple[Image, ...]:
    """Return the files of a rank, one behind the other in memory. A file has a name once: further boxes of a tensor go to further files."""
    files: list[list[Box]] = [[]]
    count: Counter[str] = Counter()
    for box in boxes:
        if count[box.key] == len(files):
            files.append([])
        files[count[box.key]].append(box)
        count[box.key] += 1
    images: list[Image] = []
    for several in files:
        images.append(lay_out(several, begin=_next_page(images[-1].begin + images[-1].size_bytes) if images else 0))
    return tuple(images)


def places(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Return where in memory files of these sizes are: begin and end of each, as `lay_out_all` puts them."""
    found: list[tuple[int, int]] = []
    for size in sizes:
        begin = _next_page(found[-1][1]) if found else 0
        found.append((begin, begin + size))
    return found


def _next_page(at: int) -> int:
    return -(-at // _ALIGN) * _ALIGN


def lay_out(boxes: Iterable[Box], *, begin: int = 0) -> Image:
    """Return where everything goes. Equal boxes give equal bytes, in any order."""
    ordered = sorted(boxes, key=lambda b: (-ITEM_BYTES[b.dtype], b.size_bytes > SMALL_BYTES, b.key))
    entries: dict[str, Any] = {}
    at = 0
    spans = []
    for box in ordered:
        spans.append((at, at + box.size_bytes))
        entries[box.key] = {"dtype": box.dtype, "shape": list(box.shape), "data_offsets": list(spans[-1])}
        at = spans[-1][1]
    sharding = {box.key: {"saved_offsets": list(box.offsets)} for box in ordered}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(sharding)}
    raw = json.dumps({"__metadata__": metadata, **entries}).encode()
    start = _next_page(8 + len(raw))
    header = (start - 8).to_bytes(8, "little") + raw.ljust(start - 8)
    first = begin + start
    placed = tuple(Placed(box, first + a, first + b) for box, (a, b) in zip(ordered, spans, strict=True))
    return Image(header, placed, start + at, begin)


def want_of_cover(shards: Iterable[Iterable[Placed]]) -> str:
    """Say which tensor is not in the shards exactly once, from its first element to the last that anybody has; empty if all are."""
    boxes: dict[str, list[Box]] = {}
    for placed in shards:
        for one in placed:
            boxes.setdefault(one.box.key, []).append(one.box)
    for key, several in boxes.items():
        if len(several) == 1 and not any(several[0].offsets):
            continue
        if len(ranks := {len(box.shape) for box in several}) > 1:
            return f"{key}: staged with {' and with '.join(map(str, sorted(ranks)))} dimensions"
        whole = [max(b.offsets[d] + b.shape[d] for b in several) for d in range(len(several[0].shape))]
        held = sum(math.prod(box.shape) for box in several)
        if held != math.prod(whole):
            return f"{key}: {math.prod(whole)} elements, and the ranks staged {held} of it"
        if overlap(several):
            return f"{key}: some of its elements were staged twice, and others not at all"
    return ""


def overlap(boxes: Sequence[Box]) -> bool:
    """
    Whether any two boxes of one tensor have an element in common.

    Where a cut along one dimension goes through no box, both sides are looked at apart: of n slices that takes n log n.
    """
    groups = [[box for box in boxes if math.prod(box.shape)]]
    while groups:
        group = groups.pop()
        if len(group) <= 1:
            continue
        parts = next((found for d in range(len(group[0].shape)) if len(found := _cut(group, d)) > 1), None)
        if parts is not None:
            groups += parts
        elif any(_meet(one, other) for one, other in itertools.combinations(group, 2)):
            return True
    return False


def _cut(boxes: Iterable[Box], dim: int) -> list[list[Box]]:
    """Cut along a dimension wherever no box is cut through."""
    parts: list[list[Box]] = []
    end = 0
    for box in sorted(boxes, key=lambda b: b.offsets[dim]):
        if not parts or box.offsets[dim] >= end:
            parts.append([])
        parts[-1].append(box)
        end = max(end, box.offsets[dim] + box.shape[dim])
    return parts


def _meet(one: Box, other: Box) -> bool:
    sides = zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in sides)


def header_bytes(first: bytes, size: int) -> int:
    """Return where the tensors begin in a file of `size` bytes, told from its first eight."""
    start = 8 + int.from_bytes(first, "little")
    if len(first) != 8 or start > min(size, _MAX_HEADER):  # noqa: PLR2004  # the length of the length
        raise ImageError(f"expected a header within {size} bytes, got one of {start}")
    return start


def parse_header(header: bytes, size: int) -> tuple[Placed, ...]:
    """Return what a shard holds. Nothing here trusts its input."""
    try:
        entries = json.loads(header[8:])
        sharding = json.loads(entries.pop("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
        placed = tuple(_parse(key, entry, sharding, len(header)) for key, entry in entries.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ImageError(f"not a safetensors header: {error!r}") from None
    at = len(header)
    for one in sorted(placed, key=lambda p: (p.begin, p.end)):
        if one.begin != at or one.end - one.begin != one.box.size_bytes:
            raise ImageError(
                f"{one.box.key}: expected {one.box.size_bytes} bytes from {at}, got {one.begin} to {one.end}"
            )
        at = one.end
    if at != size:
        raise ImageError(f"expected {at} bytes, got {size}")
    return placed


def _parse(key: str, entry: Mapping[str, Any], sharding: Mapping[str, Any], start: int) -> Placed:
    shape = _whole(entry["shape"])
    offsets = _whole(sharding.get(key, {}).get("saved_offsets", [0] * len(shape)))
    begin, end = _whole(entry["data_offsets"])
    dtype = entry["dtype"]
    if dtype not in ITEM_BYTES or len(offsets) != len(shape):
        raise ImageError(f"{key}: {dtype} {shape} at {offsets} is no box")
    return Placed(Box(key, dtype, shape, offsets), start + begin, start + end)


def _whole(numbers: Sequence[Any]) -> tuple[int, ...]:
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ImageError(f"expected whole numbers, got {str(numbers)[:80]}")
    return tuple(numbers)
