"""A file goes up in parts: which they are, whether one is there, and how many are on their way at once."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from runner.storage.checksums import Crc
from runner.storage.offsite.bodies import open_part
from runner.storage.offsite.digests import Kind, encode
from vramfarm.protocol import CHUNK_BYTES, Shard

NUM_THREADS: Final = 16  # that send parts
_NUM_AT_FIRST: Final = 2  # parts on their way
_SOON_S: Final = 2.0  # where a part is there so soon, one more may be on its way
_FAST_BYTES_PER_S: Final = 64 << 20  # a part leaves: no socket's memory takes so much
_SAME: Final = 1.2  # times the first one's: more beside it have cost a part nothing, so it is not the line that is slow
PART_CHUNKS: Final = 2  # chunks in a part, at least
_MOST_CHUNKS: Final = 4  # progress is told by part, on a slow line, too
_PARTS: Final = 32  # of a large shard: a kill loses no more of it, and each part costs a server its turn
_MAX_PARTS: Final = 10_000
_HASH_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    number: int  # from 1
    first: int  # chunk
    num_chunks: int
    size_bytes: int
    checksum: int

    @property
    def offset(self) -> int:
        return self.first * CHUNK_BYTES


def plan_parts(shard: Shard, crc: Crc, part_chunks: int) -> list[Part]:
    """Parts of whole chunks, the same for a shard at each try: those of an upload that was begun are found again."""
    num_chunks = len(shard.checksums)
    step = max(part_chunks, min(_MOST_CHUNKS, num_chunks // _PARTS), -(-num_chunks // _MAX_PARTS))
    firsts = range(0, max(1, num_chunks), step)
    return [_part(shard, crc, number, first, step) for number, first in enumerate(firsts, 1)]


def _part(shard: Shard, crc: Crc, number: int, first: int, num_chunks: int) -> Part:
    checksums = crc.of_chunks(shard)[first : first + num_chunks]
    size = min(len(checksums) * CHUNK_BYTES, shard.size_bytes - first * CHUNK_BYTES)
    return Part(
        number=number,
        first=first,
        num_chunks=len(checksums),
        size_bytes=size,
        checksum=crc.combine_chunks(checksums, size),
    )


def digest_of(kind: Kind, part: Part, path: Path, shard: Shard) -> Mapping[str, Any]:
    """By what the server compares a body: always by something."""
    return kind.fields(part.checksum) or {"ContentMD5": base64.b64encode(_md5(path, shard, part)).decode()}


def is_same(there: Mapping[str, Any], kind: Kind, path: Path, shard: Shard, part: Part) -> bool:
    """Whether a part in the store is ours. Not every server tells the checksum of a part (SeaweedFS); all tell the MD5."""
    if told := there.get(f"Checksum{kind.crc.name}"):
        return bool(told == encode(kind.crc, part.checksum))
    return bool(there["ETag"].strip('"') == _md5(path, shard, part).hex())


def _md5(path: Path, shard: Shard, part: Part) -> bytes:
    digest = hashlib.md5(usedforsecurity=False)
    with open_part(path, shard, part.first, part.num_chunks) as body:
        while block := body.read(_HASH_BYTES):
            digest.update(block)
    return digest.digest()


class Window:
    """
    How many parts are on their way at once. Each keeps a server busy for a moment after its last byte, in which others
    should be sent, and a long way wants many. On a slow line that is nothing, and what is half there is lost with a
    kill: there they stay few, so that one after another is whole.
    """

    def __init__(self) -> None:
        self._slots = threading.Semaphore(_NUM_AT_FIRST)
        self._lock = threading.Lock()
        self._left = NUM_THREADS - _NUM_AT_FIRST
        self._first_s = 0.0

    @contextmanager
    def one(self) -> Iterator[Callable[[int], None]]:
        """Yields what is to be called when all bytes of the part have left, so many."""
        with self._slots:
            began = time.monotonic()
            yield lambda num_bytes: self.note_left(num_bytes, time.monotonic() - began)
            self._note(time.monotonic() - began)

    def note_left(self, num_bytes: int, took_s: float) -> None:
        """A fast line is known as such before the server has answered once, and all are wanted from then on."""
        if num_bytes < max(PART_CHUNKS * CHUNK_BYTES, took_s * _FAST_BYTES_PER_S):
            return
        with self._lock:
            left, self._left = self._left, 0
        if left:
            self._slots.release(left)

    def _note(self, took_s: float) -> None:
        with self._lock:
            if self._left and took_s < max(_SOON_S, _SAME * self._first_s):
                self._left -= 1
                self._slots.release()
            self._first_s = self._first_s or took_s
