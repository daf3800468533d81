"""
A model out of a checkpoint, as one safetensors file or several with an index: what other programs read.

    model.safetensors                      or, above the largest size,
    model-00001-of-00003.safetensors ...   and, last,
    model.safetensors.index.json           which file has which tensor

Every chunk is compared with the manifest before a byte of it is used, and only those with a part of
the model are read, once, beside the headers. Some chunks are in memory at a time, never a model. Nothing here
runs what it reads: a shard is a header of JSON and bytes, and what is not one is refused.
"""

import json
import math
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from runner.errors import StoreError
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk, alone_in
from runner.storage.offsite.contract import Block, OffsiteError, in_parallel
from runner.storage.offsite.meter import Meter, Progress
from runner.storage.offsite.restoring import Source
from vramfarm.checksum import crc32
from vramfarm.image import ITEM_BYTES, Box, ImageError, Placed, header_bytes, parse_header
from vramfarm.protocol import CHUNK_BYTES, Manifest, Ref, Shard

ONE_FILE: Final = "model.safetensors"
INDEX: Final = f"{ONE_FILE}.index.json"
TEMPORARY: Final = ".tmp-export"
OUR_FRAMEWORK: Final = "vramfarm"
_MAX_HEADER_BYTES: Final = 100_000_000  # what safetensors itself reads
_SPARE_BYTES: Final = 64 << 20
_NUM_THREADS: Final = 4  # and as many chunks in memory
_WRAPPERS: Final = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class HereSource:
    """A committed checkpoint on this machine."""

    def __init__(self, directory: CheckpointDir, ref: Ref) -> None:
        self.manifest = directory.manifest(ref)
        self._folder = directory.path(ref)

    def read(self, shard: Shard, chunk: int) -> bytes:
        path = self._folder / shard.path
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                found = os.pread(fd, min(CHUNK_BYTES, shard.size_bytes - chunk * CHUNK_BYTES), chunk * CHUNK_BYTES)
            finally:
                os.close(fd)
        except OSError as error:
            raise _damaged(f"{path}: {error.strerror}") from None  # an older one may be whole
        if crc32(found) != shard.checksums[chunk]:
            raise _damaged(
                f"{path}: chunk {chunk}: expected crc32 {shard.checksums[chunk]:08x}, got {crc32(found):08x}"
            )
        return found

    def stream(self, shard: Shard, first: int, num_chunks: int) -> Iterator[Block]:
        return (self.read(shard, chunk) for chunk in range(first, first + num_chunks))


def _damaged(what: str) -> OffsiteError:
    return OffsiteError(what, hint="take an older checkpoint; this one is damaged", final=True, damaged=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is wanted. `as_bf16`: 32-bit floats become bfloat16, rounded to the nearest; all else stays as it is."""

    part: str = "model"
    max_file_bytes: int = 5_000_000_000
    as_bf16: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    files: tuple[str, ...]
    num_tensors: int
    size_bytes: int
    left_out: tuple[str, ...]  # what belongs to the model and is no tensor of it


@dataclass(frozen=True, slots=True)
class _Part:
    shard: Shard
    placed: Placed


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A whole tensor, which its parts fill without holes, and the type that it is written in."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[_Part, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    header: bytes
    begins: tuple[tuple[_Tensor, int], ...]  # where each tensor begins in the file
    size_bytes: int


def export(source: Source, folder: Path, wish: Wish, disk: Disk, progress: Progress) -> Exported:
    """
    Write the model into a folder, durably. Its names appear when all of it is there, the index last;
    after an error, or a death at any point, there is no model in the folder, and the next call cleans up.
    """
    parts, left_out = _find_parts(source, wish.part)
    tensors = _join(source.manifest, wish, parts)
    files = _lay_out(tensors, wish.max_file_bytes)
    total = sum(file.size_bytes for file in files)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with alone_in(folder, wait=False) as is_alone:
            if not is_alone:
                raise StoreError(f"{folder}: another export writes there", hint="wait for it, or name another folder")
            _export(source, folder, files, disk, progress)
    except OSError as error:
        raise StoreError(f"{error.filename or folder}: {error.strerror}; no model was written") from error
    names = tuple(file.name for file in files) + ((INDEX,) if len(files) > 1 else ())
    return Exported(files=names, num_tensors=len(tensors), size_bytes=total, left_out=left_out)


def _export(source: Source, folder: Path, files: Sequence[_File], disk: Disk, progress: Progress) -> None:
    temporary = _begin(folder, sum(file.size_bytes for file in files), disk)
    try:
        _write(source, files, temporary, disk, progress)
        _publish(files, temporary, folder, disk)
    except (Exception, KeyboardInterrupt):
        with suppress(OSError):  # the first error is the one to tell
            _clear(folder, disk)
        raise
    disk.remove(temporary)


# ------------------------------------------------------------------------- what there is


def _find_parts(source: Source, part: str) -> tuple[dict[str, list[_Part]], tuple[str, ...]]:
    """By the tensor's name in the checkpoint, without the prefix; and what is no tensor of the model."""
    manifest, prefix = source.manifest, f"{part}."
    if manifest.framework != OUR_FRAMEWORK:
        raise StoreError(
            f"{manifest.ref.name}: expected a checkpoint of {OUR_FRAMEWORK}, got one of {manifest.framework}",
            hint=f"{manifest.framework} has its own model files in it: vramfarm-runner checkpoints restore",
        )
    found, others, left_out = defaultdict[str, list[_Part]](list), set[str](), set[str]()
    for shard in manifest.shards:
        for placed in _read_header(source, shard):
            key = placed.box.key
            if not key.startswith(prefix):
                others.add(key.partition(".")[0])
            elif "_extra_state" in key:
                left_out.add(key)
            else:
                found[key.removeprefix(prefix)].append(_Part(shard, placed))
    if not found:
        raise StoreError(
            f"{manifest.ref.name}: expected tensors of {part!r}, got only those of {', '.join(sorted(others)) or 'nothing'}",
            hint="--part says which of them is the model",
        )
    return found, tuple(sorted(left_out))


def _read_header(source: Source, shard: Shard) -> tuple[Placed, ...]:
    where = f"{source.manifest.ref.name}/{shard.path}"
    if not shard.path.endswith(".safetensors"):
        raise _damaged(  # ours has no other: somebody wrote it, and an older one may be ours
            f"{where}: expected a .safetensors file; anything else could be a pickle, which can run code, and is not read"
        )
    try:
        first = source.read(shard, 0) if shard.checksums else b""
        start = header_bytes(first[:8], min(shard.size_bytes, _MAX_HEADER_BYTES))
        more = (source.read(shard, chunk) for chunk in range(1, -(-start // CHUNK_BYTES)))
        return parse_header(b"".join((first, *more))[:start], shard.size_bytes)
    except ImageError as error:
        raise _damaged(f"{where}: {error}") from None


def _join(manifest: Manifest, wish: Wish, found: Mapping[str, list[_Part]]) -> list[_Tensor]:
    """Whole tensors under the names that the model itself has for them, in the order of their layers."""
    named: dict[str, _Tensor] = {}
    is_wrapped = all(key.startswith("module.") for key in found)
    for key, parts in found.items():
        name = _clean(key.removeprefix("module.") if is_wrapped else key)
        if name in named:
            raise StoreError(f"{manifest.ref.name}: {name}: two tensors have this name without their wrappers'")
        box = _expect_whole(f"{manifest.ref.name}: {key}", [part.placed.box for part in parts])
        dtype = "BF16" if wish.as_bf16 and box.dtype == "F32" else box.dtype
        if dtype != box.dtype and any(part.placed.begin % ITEM_BYTES["F32"] for part in parts):
            raise StoreError(f"{manifest.ref.name}: {key}: is not aligned; export it as it is, without --dtype")
        named[name] = _Tensor(name, dtype, box.shape, tuple(parts))
    return sorted(named.values(), key=lambda tensor: _natural(tensor.name))


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _natural(name: str) -> list[tuple[int, str]]:
    """`layers.10` after `layers.9`."""
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", name)]


def _expect_whole(where: str, boxes: Sequence[Box]) -> Box:
    """The whole that the boxes fill, each place once."""
    first = boxes[0]
    if any((box.dtype, len(box.shape)) != (first.dtype, len(first.shape)) for box in boxes):
        raise _damaged(f"{where}: its parts are of different kinds")
    shape = tuple(max(box.offsets[d] + box.shape[d] for box in boxes) for d in range(len(first.shape)))
    there = sum(math.prod(box.shape) for box in boxes)
    if there != math.prod(shape) or any(_overlap(a, b) for a, b in combinations(boxes, 2)):
        raise _damaged(f"{where}: expected {math.prod(shape)} elements, each once, got {there}")
    return Box(first.key, first.dtype, shape, (0,) * len(shape))


def _overlap(a: Box, b: Box) -> bool:
    return all(max(p, q) < min(p + n, q + m) for p, n, q, m in zip(a.offsets, a.shape, b.offsets, b.shape, strict=True))


# ----------------------------------------------------------------------- where it goes


def _lay_out(tensors: Sequence[_Tensor], max_file_bytes: int) -> list[_File]:
    groups: list[list[_Tensor]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(one.size_bytes for one in groups[-1]) + tensor.size_bytes > max_file_bytes:
            groups.append([])
        groups[-1].append(tensor)
    if len(groups) == 1:
        return [_lay_out_file(ONE_FILE, groups[0])]
    return [
        _lay_out_file(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, start=1)
    ]


def _lay_out_file(name: str, tensors: Iterable[_Tensor]) -> _File:
    """Wide types first, so that all are aligned; else in the order given."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file that does not say so
    at, places = 0, []
    for tensor in sorted(tensors, key=lambda one: -ITEM_BYTES[one.dtype]):
        end = at + tensor.size_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        places.append((tensor, at))
        at = end
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw = raw.ljust(-(-len(raw) // 8) * 8)
    header = len(raw).to_bytes(8, "little") + raw
    return _File(name, header, tuple((tensor, len(header) + begin) for tensor, begin in places), len(header) + at)


# ----------------------------------------------------------------------------- writing


def _begin(folder: Path, total: int, disk: Disk) -> Path:
    """The folder to write into, where there is room for a model and none yet."""
    _clear(folder, disk)
    taken = sorted(path.name for path in folder.glob("model*.safetensors*"))
    if taken:
        raise StoreError(
            f"{folder}: expected no model there, found {taken[0]}", hint="name another folder, or remove that model"
        )
    free, needed = shutil.disk_usage(folder).free, total + _SPARE_BYTES
    if needed > free:
        raise StoreError(
            f"{folder}: expected {needed / 1e9:.1f} GB free, got {free / 1e9:.1f}",
            hint="free some space there, name a folder on a larger disk, or ask for --dtype bf16",
        )
    disk.make_folder(folder / TEMPORARY)
    disk.sync(folder)  # as long as it is there, files without an index are those of a call that was killed
    return folder / TEMPORARY


def _clear(folder: Path, disk: Disk) -> None:
    """Remove what a call left that did not come to its end."""
    if not os.path.lexists(folder / TEMPORARY):
        return
    if not os.path.lexists(folder / INDEX):
        for path in sorted(folder.glob("model-*-of-*.safetensors")):
            disk.remove(path)
        disk.sync(folder)
    disk.remove(folder / TEMPORARY)


@dataclass(frozen=True, slots=True)
class _Bring:
    """Bytes of a shard's chunk that belong to a tensor, and where that one begins."""

    part: _Part
    tensor: _Tensor
    path: Path
    begin: int


def _write(source: Source, files: Sequence[_File], temporary: Path, disk: Disk, progress: Progress) -> None:
    shards = {shard.path: shard for shard in source.manifest.shards}
    work = defaultdict[tuple[str, int], list[_Bring]](list)
    for file in files:
        disk.write(temporary / file.name, file.header)
        for tensor, begin in file.begins:
            for part in filter(_has_bytes, tensor.parts):
                bring = _Bring(part, tensor, temporary / file.name, begin)
                for chunk in range(part.placed.begin // CHUNK_BYTES, -(-part.placed.end // CHUNK_BYTES)):
                    work[part.shard.path, chunk].append(bring)
    meter = Meter(len(work) * CHUNK_BYTES, progress)

    def bring_chunk(item: tuple[str, int]) -> None:
        path, chunk = item
        content = memoryview(source.read(shards[path], chunk))
        for bring in work[item]:
            for at, piece in _pieces(bring, content, chunk * CHUNK_BYTES):
                disk.write_at(bring.path, at, piece)
        meter.add(path, CHUNK_BYTES)

    in_parallel(bring_chunk, list(work), _NUM_THREADS)
    for file in files:
        found = (temporary / file.name).stat().st_size
        assert found == file.size_bytes, f"{file.name}: {found} bytes instead of {file.size_bytes}"
        disk.sync(temporary / file.name)


def _has_bytes(part: _Part) -> bool:
    return part.placed.begin < part.placed.end


def _pieces(bring: _Bring, content: memoryview, at: int) -> Iterator[tuple[int, bytes]]:
    """What a chunk that begins at `at` has of a part: bytes, and where in the file they go."""
    placed, tensor = bring.part.placed, bring.tensor
    box, item = placed.box, ITEM_BYTES[placed.box.dtype]
    begin, end = max(placed.begin, at), min(placed.end, at + len(content))
    raw = bytes(content[begin - at : end - at])
    if box.dtype != tensor.dtype:
        raw = bf16_of_f32(raw)
    new = ITEM_BYTES[tensor.dtype]
    first, last = (begin - placed.begin) * new // item, (end - placed.begin) * new // item  # in the part, as written
    dim = _first_cut(box.shape, tensor.shape)
    row = math.prod(box.shape[dim:]) * new  # so many bytes lie together in the whole, too
    for number in range(first // row, -(-last // row)):
        a, b = max(first, number * row), min(last, (number + 1) * row)
        where = _offset_of(number, box, tensor.shape, dim) * new + (a - number * row)
        yield bring.begin + where, raw[a - first : b - first]


def _first_cut(shape: tuple[int, ...], whole: tuple[int, ...]) -> int:
    """The last dimension in which a box is smaller than the whole; behind it, it is as wide."""
    cut = [d for d in range(len(shape)) if shape[d] != whole[d]]
    return cut[-1] if cut else 0


def _offset_of(number: int, box: Box, whole: tuple[int, ...], dim: int) -> int:
    """Where in the whole, in elements, the box's row with this number begins; its rows are counted before `dim`."""
    places = list(box.offsets)
    for d in reversed(range(dim)):
        number, place = divmod(number, box.shape[d])
        places[d] += place
    offset = 0
    for place, size in zip(places, whole, strict=True):
        offset = offset * size + place
    return offset


def _publish(files: Sequence[_File], temporary: Path, folder: Path, disk: Disk) -> None:
    """Out of sight until all is durable; the index, or the one file, is the last name to appear."""
    weight_map = {tensor.name: file.name for file in files for tensor, _ in file.begins}
    total = sum(tensor.size_bytes for file in files for tensor, _ in file.begins)
    names = [file.name for file in files]
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        disk.write(temporary / INDEX, json.dumps(index, indent=2).encode())
        disk.sync(temporary / INDEX)
        names.append(INDEX)
    disk.sync(temporary)
    for name in names:
        if name == names[-1]:
            disk.sync(folder)
        disk.rename(temporary / name, folder / name)
    disk.sync(folder)


# ------------------------------------------------------------------------------ bfloat16


def bf16_of_f32(raw: bytes) -> bytes:
    """
    Little-endian 32-bit floats as bfloat16: to the nearest, ties to even, as torch rounds. NaN stays one.

    One large number holds them all, 32 bits each, so that the sums are C's and not Python's.
    """
    count = len(raw) // 4
    ones = int.from_bytes(b"\x01\x00\x00\x00" * count, "little")
    lanes = int.from_bytes(raw, "little")
    nan = (((lanes & ones * 0x7FFFFFFF) + ones * 0x007FFFFF) >> 31) & ones  # 1 where it is above infinity
    lanes &= ~((nan << 32) - nan)  # their carry would run into the next
    lanes += ones * 0x7FFF + ((lanes >> 16) & ones)
    high = (((lanes >> 16) & (ones * 0xFFFF)) | nan * 0x7FC0).to_bytes(4 * count, "little")
    narrow = bytearray(2 * count)
    narrow[0::2], narrow[1::2] = high[0::4], high[1::4]
    return bytes(narrow)
