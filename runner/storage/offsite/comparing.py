"""
Whether the bytes in a store are those of a manifest: by the store's word, where it gives one, else by
reading them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from runner.storage.checksums import CRC32, CRC64NVME
from runner.storage.offsite.contract import Block, Head, OffsiteError, Store, agrees, by_chunk, in_parallel
from runner.storage.offsite.surveying import damaged, key_of, read_manifest
from vramfarm.checksum import crc32
from vramfarm.protocol import CHUNK_BYTES, Manifest, Ref, Shard

STRETCH_CHUNKS: Final = 8  # fetched with one request
_NUM_THREADS: Final = 8
_READ_ATTEMPTS: Final = 3


def verify(
    store: Store, job: str, ref: Ref, compared: Callable[[str, int], None] = lambda _path, _num_bytes: None
) -> Manifest:
    """
    The manifest of a checkpoint whose every shard has its size and checksum, as the store reports them.

    `compared` is called with the path and the size of each shard.
    """
    return compare(store, job, ref, compared, must_read=False)[0]


def compare(
    store: Store, job: str, ref: Ref, compared: Callable[[str, int], None], *, must_read: bool
) -> tuple[Manifest, int]:
    """The same, and how many bytes were read for it. `must_read`: all of them, whatever the store reports."""
    manifest, num_bytes_read = read_manifest(store, job, ref.name), 0
    for shard in manifest.shards:
        key = key_of(job, ref, shard)
        problem, was_read = _compare(store, key, shard, must_read=must_read)
        if problem:
            raise damaged(store, key, problem)
        num_bytes_read += shard.size_bytes if was_read else 0
        compared(shard.path, shard.size_bytes)
    return manifest, num_bytes_read


def differs(store: Store, key: str, shard: Shard) -> str:
    """How an object differs from a shard; empty if it is the same by size and checksum."""
    return _compare(store, key, shard, must_read=False)[0]


def differs_in_bytes(store: Store, key: str, shard: Shard) -> str:
    """The same, whatever the store says of its checksum."""
    return _compare(store, key, shard, must_read=True)[0]


def _compare(store: Store, key: str, shard: Shard, *, must_read: bool) -> tuple[str, bool]:
    """How it differs, and whether it was read."""
    found = store.head(key)
    if found is None:
        return "it is not there", False
    is_same = agrees(found, shard)
    if found.size_bytes != shard.size_bytes or (is_same is False and not must_read):
        return f"expected {_words(_expected_head(shard, found))}, got {_words(found)}", False
    if is_same and not must_read:
        return "", False
    return _read_back(store, key, shard), True


def _read_back(store: Store, key: str, shard: Shard) -> str:
    """For a store that confirms no checksums, or whose word is not enough."""

    def is_same(stretch: Stretch) -> bool:
        found: list[int] = []
        for _ in by_chunk(stream_chunks(store, key, shard, stretch.first, stretch.num_chunks), found.append):
            pass
        return all(_is_in_store(store, key, shard, index) for index in stretch.differing(found))

    stretches = [*stretches_of(shard)]
    wrong = [
        stretch
        for stretch, same in zip(stretches, in_parallel(is_same, stretches, _NUM_THREADS), strict=True)
        if not same
    ]
    return f"it has other bytes at {wrong[0].first * CHUNK_BYTES} or later" if wrong else ""


def _expected_head(shard: Shard, found: Head) -> Head:
    """By the checksum that the store tells."""
    crc64nvme = CRC64NVME.of_shard(shard) if shard.crc64nvme and found.crc64nvme is not None else None
    return Head(size_bytes=shard.size_bytes, crc32=CRC32.of_shard(shard), crc64nvme=crc64nvme)


def _words(head: Head) -> str:
    size = f"{head.size_bytes} bytes"
    if head.crc64nvme is not None:
        return f"{size} with crc64nvme {head.crc64nvme:016x}"
    return size if head.crc32 is None else f"{size} with crc32 {head.crc32:08x}"


def _is_in_store(store: Store, key: str, shard: Shard, index: int) -> bool:
    """Looked at once more: what was damaged on its way is nobody's damage."""
    try:
        fetch_chunk(store, key, shard, index)
    except OffsiteError as error:
        if error.damaged:
            return False
        raise
    return True


@dataclass(frozen=True, slots=True)
class Stretch:
    """Chunks of a shard, one after the other, that one request brings."""

    shard: Shard
    first: int
    num_chunks: int

    def differing(self, found: list[int]) -> Iterator[int]:
        """Which chunks have other checksums than the manifest's, or did not come at all."""
        expected = self.shard.checksums[self.first : self.first + self.num_chunks]
        pairs = enumerate(zip_longest(found, expected), self.first)
        return (index for index, (is_one, ought) in pairs if is_one != ought)


def stretches_of(shard: Shard, num_chunks: int = STRETCH_CHUNKS) -> Iterator[Stretch]:
    end = len(shard.checksums)
    return (Stretch(shard, first, min(num_chunks, end - first)) for first in range(0, end, num_chunks))


def stream_chunks(store: Store, key: str, shard: Shard, first: int, num_chunks: int) -> Iterator[Block]:
    begin = first * CHUNK_BYTES
    return store.stream(key, begin, min(num_chunks * CHUNK_BYTES, shard.size_bytes - begin))


def fetch_chunk(store: Store, key: str, shard: Shard, index: int) -> bytes:
    for _ in range(_READ_ATTEMPTS):  # bytes may be damaged on their way, too
        content = store.read(key, index * CHUNK_BYTES, chunk_size(shard, index))
        if is_chunk(content, shard, index):
            return content
    raise damaged(store, key, f"chunk {index}: expected crc32 {shard.checksums[index]:08x}, got {crc32(content):08x}")


def is_chunk(content: bytes, shard: Shard, index: int) -> bool:
    return len(content) == chunk_size(shard, index) and crc32(content) == shard.checksums[index]


def chunk_size(shard: Shard, index: int) -> int:
    return min(CHUNK_BYTES, shard.size_bytes - index * CHUNK_BYTES)
