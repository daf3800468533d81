"""What a store is to the rest of this room, and the two ways in which it can fail."""

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol, TypeVar

from runner.errors import StoreError
from runner.storage.checksums import crc32
from vramfarm.protocol import CHUNK_BYTES, Shard, is_inside

Sent = Callable[[int], None]  # called with a number of bytes, from any thread
T = TypeVar("T")
R = TypeVar("R")

MAX_SMALL_BYTES: Final = 64 << 20  # of an object that is read into memory whole


class OffsiteError(StoreError):
    """
    The store, or what is in it, cannot be used now. `final`: trying again cannot help.

    `damaged`: the bytes of one checkpoint are not those of its manifest; take another one.
    """

    def __init__(self, message: str, *, hint: str = "", final: bool, damaged: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.final = final
        self.damaged = damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    key: str
    size_bytes: int
    modified_at: datetime  # by the store's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What the store says of an object. `crc32` of all its bytes; None: this store keeps none."""

    size_bytes: int
    crc32: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A small object as it was at one moment; `tag` changes with its content."""

    content: bytes
    tag: str


class Store(Protocol):
    """
    A place off this machine. Keys are relative, `a/b/c`.

    Every call has a time limit, is safe to repeat, and raises `OffsiteError` or nothing. What
    was stored is durable, as far as the store can tell, and is there whole or not at all.
    """

    address: str  # for messages

    def put_file(self, key: str, path: Path, shard: Shard, sent: Sent) -> None:
        """
        Store a file whose size and checksums are those of `shard`, in bounded memory.

        A file that differs is refused with `damaged`. Parts that are there from an earlier,
        killed call are not sent again.
        """
        ...

    def put(self, key: str, content: bytes) -> None:
        """Store a few bytes, in place of what was there."""
        ...

    def put_new(self, key: str, content: bytes) -> bool:
        """Store a few bytes unless something is there; False: something is. At most one of two writers gets True."""
        ...

    def put_if(self, key: str, content: bytes, tag: str | None) -> str | None:
        """
        Store a few bytes if the object still has this tag (None: if there is no object); returns the new tag.

        None: it is another object by now. That may be our own, of a try whose answer was lost: look.
        """
        ...

    def get_version(self, key: str, limit_bytes: int = MAX_SMALL_BYTES) -> Version | None:
        """Bytes and tag of one moment, for `put_if`; None if there is no such object."""
        ...

    def get(self, key: str, limit_bytes: int = MAX_SMALL_BYTES) -> bytes | None:
        """All bytes, or None if there is no such object. More than `limit_bytes` is an error."""
        ...

    def read(self, key: str, offset: int, num_bytes: int) -> bytes:
        """Some bytes of an object; fewer only at its end. Not checked: compare checksums."""
        ...

    def list(self, prefix: str) -> Iterator[Entry]:
        """Everything below a prefix, in no order; keys that are not plain relative paths are left out."""
        ...

    def head(self, key: str) -> Head | None:
        """None if there is no such object."""
        ...

    def delete(self, key: str) -> None:
        """No error if there is no such object."""
        ...

    def abort(self, prefix: str, before: datetime, keep: Callable[[str], bool]) -> None:
        """Forget uploads below a prefix that were begun earlier and never finished, except of keys to keep."""
        ...


def is_key(key: str) -> bool:
    """Whether a key can be a file's path below a folder, and has one spelling only."""
    return is_inside(f"x/{key}")  # below a folder any name will do, MANIFEST.json too


def read_chunks(path: Path, shard: Shard, first: int, num_chunks: int) -> bytes:
    """Chunks of a local file, compared with what they must be."""
    try:
        with path.open("rb") as file:
            file.seek(first * CHUNK_BYTES)
            found = file.read(min(num_chunks * CHUNK_BYTES, shard.size_bytes - first * CHUNK_BYTES))
    except OSError as error:
        raise OffsiteError(f"{path}: {error.strerror}", final=False) from None
    view = memoryview(found)
    checksums = tuple(crc32(view[at : at + CHUNK_BYTES]) for at in range(0, len(view), CHUNK_BYTES))
    if checksums != shard.checksums[first : first + num_chunks]:
        raise OffsiteError(
            f"{path}: expected the bytes of its manifest, got others at {first * CHUNK_BYTES} or later; it was not sent",
            hint="set this checkpoint aside: it is damaged here",
            final=True,
            damaged=True,
        )
    return found


def in_parallel(function: Callable[[T], R], items: list[T], num_threads: int) -> list[R]:
    """Results in the order of the items. The first exception stops what has not begun."""
    with ThreadPoolExecutor(num_threads) as pool:
        futures = [pool.submit(function, item) for item in items]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        pool.shutdown(wait=True, cancel_futures=True)
        for future in done:
            future.result()
        return [future.result() for future in futures]
