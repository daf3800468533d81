"""What a store is to the rest of this room, and the two ways in which it can fail."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeVar

from runner.errors import StoreError, one_line
from runner.storage.checksums import CRC32, CRC64NVME, is_sum_of_parts
from vramfarm.checksum import crc32
from vramfarm.protocol import CHUNK_BYTES, Shard

Sent = Callable[[int], None]  # called with a number of bytes, from any thread
LeftOut = Callable[[str], None]  # called with what a list leaves out, in words
T = TypeVar("T")
R = TypeVar("R")

PROBE: Final = ".probe-"  # in the keys of what is only tried out: there a refusal is the answer
PREFLIGHT: Final = "preflight"  # folder of a run in which preflight tries the store
PROBED: Final = timedelta(minutes=15)  # longer than any look takes: what is older was left by a look that was killed
MAX_SMALL_BYTES: Final = 64 << 20  # of an object that is read into memory whole
Block = bytes | memoryview
Addressing = Literal["auto", "path", "virtual"]

BLOCK_BYTES: Final = 1 << 20  # of a file or an object that goes by; a chunk is a whole number of them


class Where(Protocol):
    """What `offload` of a job says of a store: where it is, and how it is spoken to."""

    @property
    def to(self) -> str | None: ...
    @property
    def endpoint(self) -> str | None: ...
    @property
    def region(self) -> str | None: ...
    @property
    def addressing(self) -> Addressing: ...
    @property
    def max_bandwidth(self) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The same without the models of a job, which a process that only moves bytes need not import."""

    to: str | None
    endpoint: str | None = None
    region: str | None = None
    addressing: Addressing = "auto"
    max_bandwidth: int | None = None


def dump_place(where: Where) -> dict[str, Any]:
    """`parse_place` reads it. Not as job.yaml is dumped, where a size is text."""
    return {name: getattr(where, name) for name in Place.__slots__}


def parse_place(fields: Mapping[str, Any]) -> Place:
    return Place(**{name: fields[name] for name in Place.__slots__ if name in fields})


class OffsiteError(StoreError):
    """
    The store, or what is in it, cannot be used now. `final`: trying again cannot help.

    `curable`: unless somebody does something that no part of the job is changed by: renews the credentials,
    makes room. `damaged`: the bytes of one checkpoint are not those of its manifest, or its manifest is none;
    take another one. No refusal is ever that. `of_object`: it is about one object, others may go. `of_server`: it
    answered, with a fault of its own (500). `of_address`: nothing at all can be asked there.
    """

    def __init__(  # noqa: PLR0913  # all by name
        self,
        message: str,
        *,
        hint: str = "",
        final: bool,
        curable: bool = False,
        damaged: bool = False,
        of_object: bool = False,
        of_server: bool = False,
        of_address: bool = False,
    ) -> None:
        super().__init__(one_line(message), hint=one_line(hint))
        self.final = final
        self.curable = curable
        self.damaged = damaged
        self.of_object = of_object
        self.of_server = of_server
        self.of_address = of_address


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    key: str
    size_bytes: int
    modified_at: datetime  # by the store's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """
    What the store says of an object.

    `crc64nvme` and `crc32` of all its bytes; `parts_crc32`: the CRC32 of its parts' CRC32s, and their number. None:
    this store keeps none. `md5` where the store tells it, else empty; `tag` changes with the object.
    """

    size_bytes: int
    crc32: int | None
    parts_crc32: tuple[int, int] | None = None
    crc64nvme: int | None = None
    md5: str = field(default="", compare=False)
    tag: str = field(default="", compare=False)


class Checksums(StrEnum):
    """By what a store itself confirms a large file: it refuses other bytes, and tells their checksum later."""

    WHOLE = "whole"  # CRC32 of all its bytes
    PARTS = "parts"  # CRC32 of the CRC32s of its parts
    NONE = "none"  # size only: whoever wants to be sure reads the bytes back


_CONFIRMED: Final = {
    Checksums.WHOLE: "it confirms the CRC32 of whole files",
    Checksums.PARTS: "it confirms checksums (CRC32) of parts only, which are compared with the manifest's",
    Checksums.NONE: "it confirms no checksums (CRC64NVME, CRC32): what is sent is read back and compared",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """
    What a store can do. `conditional`: of several who write one object, new or as they all saw it, one succeeds.

    `crc64nvme`: it confirms that of all bytes of a file whose manifest has it, and `checksums` of all others.
    """

    checksums: Checksums
    conditional: bool
    crc64nvme: bool = False

    @property
    def confirmed(self) -> str:
        """By what bytes are compared there, for a person."""
        return "it confirms the CRC64NVME of whole files" if self.crc64nvme else _CONFIRMED[self.checksums]


def parse_abilities(found: object) -> Abilities | None:
    """None: nothing that we understand."""
    if not isinstance(found, Mapping) or found.get("checksums") not in {*Checksums}:
        return None
    return Abilities(
        checksums=Checksums(found["checksums"]),
        conditional=found.get("conditional") is True,
        crc64nvme=found.get("crc64nvme") is True,
    )


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

    def probe(self) -> Abilities:
        """Found out by trying, once. An error if the store cannot be written, read and tidied."""
        ...

    def put_file(self, key: str, path: Path, shard: Shard, sent: Sent) -> None:
        """
        Store a file whose size and checksums are those of `shard`, in bounded memory.

        A file that differs is refused with `damaged`. Where the store keeps
        parts, those of an earlier, killed call are not sent again.
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

    def copy(self, source: str, key: str, shard: Shard, /) -> bool:
        """Store the bytes of another object, whose shard equals this one, without sending them. False: it cannot."""
        ...

    def get(self, key: str, limit_bytes: int = MAX_SMALL_BYTES) -> bytes | None:
        """All bytes, or None if there is no such object. More than `limit_bytes` is `damaged`."""
        ...

    def read(self, key: str, offset: int, num_bytes: int, tag: str = "") -> bytes:
        """
        Some bytes of an object; fewer only at its end. Not checked: compare checksums.

        `tag`, of its `Head`: an error, which may pass, if it is another object by now. Without one, only what
        one call brings is of one object.
        """
        ...

    def stream(self, key: str, offset: int, num_bytes: int, tag: str = "") -> Iterator[Block]:
        """
        The same in blocks of `BLOCK_BYTES`, the last one perhaps shorter, so that memory does not grow with them.

        A block is there until the next one is asked for: its memory is used again.
        """
        ...

    def list(self, prefix: str, left_out: LeftOut = lambda _: None) -> Iterator[Entry]:
        """
        Everything below a prefix, in no order, but for what can be no file below a folder (`is_key`), and what
        is none: a link, a pipe. That is handed to `left_out`.
        """
        ...

    def head(self, key: str) -> Head | None:
        """None if there is no such object."""
        ...

    def delete(self, key: str) -> None:
        """No error if there is no such object."""
        ...

    def abort(self, prefix: str, before: datetime) -> None:
        """Forget uploads below a prefix that were begun earlier and never finished."""
        ...

    def find_missing_rights(self, folder: str) -> tuple[str, ...]:
        """Tried out in a folder: what this key may not do, and an upload does without at a price."""
        ...


def is_key(key: str) -> bool:
    """
    Whether a key can be a file's path below a folder, and has one spelling only. Any sign may be in it that a path
    may have: whoever shows it to people shows `one_line` of it.
    """
    try:
        os.fsencode(key)
    except UnicodeEncodeError:
        return False
    return "\0" not in key and not {"", ".", ".."}.intersection(key.split("/"))


def agrees(head: Head, shard: Shard) -> bool | None:
    """Whether an object is a shard by size and checksum; None: the store's word is not enough to tell."""
    crc64nvme = partial(CRC64NVME.of_shard, shard) if shard.crc64nvme else None
    return proves(head, shard.size_bytes, shard.checksums, crc64nvme=crc64nvme)


def proves(
    head: Head,
    size_bytes: int,
    checksums: Sequence[int],
    *,
    crc64nvme: Callable[[], int] | None = None,
    md5: Callable[[], str] | None = None,
) -> bool | None:
    """
    The same of bytes whose chunks have these CRC32s. The strongest checksum of the whole that both have counts; what
    is called is called only where the store tells the same. An MD5 finds accidents at least as well, but takes a reading.
    """
    if head.size_bytes != size_bytes:
        return False
    if head.crc64nvme is not None and crc64nvme:
        return head.crc64nvme == crc64nvme()
    if head.crc32 is not None:
        return head.crc32 == CRC32.combine_chunks(checksums, size_bytes)
    if head.md5 and md5:
        return head.md5 == md5()
    parts = head.parts_crc32
    return (
        True if parts and is_sum_of_parts(*parts, checksums, size_bytes) else None
    )  # may have been cut in another way


def too_large(where: str, limit_bytes: int, found_bytes: int) -> OffsiteError:
    return OffsiteError(
        f"{where}: expected at most {limit_bytes} bytes, got {found_bytes}",
        hint="no runner writes such a one: see who else writes there, and remove it",
        final=True,
        damaged=True,
    )


def replaced(where: str) -> OffsiteError:
    return OffsiteError(
        f"{where}: expected the object that was found, got another one",
        hint="it was replaced while it was read; it is read again",
        final=False,
    )


def other_bytes(path: Path, index: int) -> OffsiteError:
    """What is wrong with a local file whose chunk is not what it must be."""
    return OffsiteError(
        f"{path}: expected the bytes of its manifest, got others at {index * CHUNK_BYTES} or later; they are not stored",
        hint="set this checkpoint aside: it is damaged here",
        final=True,
        damaged=True,
    )


def by_chunk(blocks: Iterable[Block], done: Callable[[int], None]) -> Iterator[Block]:
    """
    Pass on the blocks of whole chunks. `done` is called with a chunk's CRC32 when whoever takes the blocks asks
    for the next one, and so has written the chunk.
    """
    checksum, size = 0, 0
    for block in blocks:
        checksum, size = crc32(block, checksum), size + len(block)
        yield block
        if size == CHUNK_BYTES:
            done(checksum)
            checksum, size = 0, 0
    if size:
        done(checksum)


def read_chunk(path: Path, shard: Shard, index: int) -> bytes:
    """A chunk of a local file, compared with what it must be."""
    try:
        with path.open("rb") as file:
            file.seek(index * CHUNK_BYTES)
            found = file.read(min(CHUNK_BYTES, shard.size_bytes - index * CHUNK_BYTES))
    except OSError as error:
        raise OffsiteError(f"{path}: {error.strerror}", final=False) from None
    if crc32(found) != shard.checksums[index]:
        raise other_bytes(path, index)
    return found


def in_parallel(function: Callable[[T], R], items: list[T], num_threads: int) -> list[R]:
    """Results in the order of the items. The first exception stops what has not begun."""
    results = dict[int, R]()

    def work(taken: tuple[int, T]) -> None:
        results[taken[0]] = function(taken[1])

    for_each(work, enumerate(items), min(num_threads, len(items)))
    return [results[index] for index in range(len(items))]


def for_each(function: Callable[[T], object], items: Iterable[T], num_threads: int) -> None:
    """The same for as many as there are: no more of them are asked for than are worked at, and nothing is kept."""
    left, lock, is_over = iter(items), threading.Lock(), threading.Event()

    def take() -> tuple[T, ...]:
        with lock:
            return () if is_over.is_set() else tuple(islice(left, 1))

    def work(_: int) -> None:
        try:
            while taken := take():
                function(taken[0])
        except BaseException:
            is_over.set()
            raise

    if num_threads:
        with ThreadPoolExecutor(num_threads) as pool:
            run_all(pool, work, list(range(num_threads)))


def run_all(pool: Executor, function: Callable[[T], R], items: list[T]) -> list[R]:
    """The same, in threads that others use as well. Returns when none of these is running."""
    futures = [pool.submit(function, item) for item in items]
    done, left = wait(futures, return_when=FIRST_EXCEPTION)
    for future in left:
        future.cancel()
    wait(left)
    for future in done:
        future.result()
    return [future.result() for future in futures]
