"""
Data brought in before training: folders and files of stores, to places on this disk.

A file gets its name, and the time it was stored, only when it is whole and compared; so a file
with the size and the time of the listing is not fetched again, by whichever run. What is under
way lies beside it, under a name of the run's that no file of the data can have; the pieces it has are noted
in the run folder, and are believed as long as the machine has not been booted anew: what a crash
of the machine took is fetched again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Final

from runner.addresses import local_path
from runner.errors import one_line
from runner.storage.disk import Disk, is_own_name, own_path, write_durable
from runner.storage.offsite.comparing import STRETCH_CHUNKS
from runner.storage.offsite.contract import Block, Head, OffsiteError, Store, by_chunk, in_parallel, proves
from runner.storage.offsite.disks import expect_room, place_of, refused
from runner.storage.offsite.meter import Meter, Progress
from vramfarm.checksum import Summing, crc32, find_crc64nvme
from vramfarm.protocol import CHUNK_BYTES

_NOTES: Final = ".staging"  # folder in the run folder
_NUM_THREADS: Final = 12
_MAX_NAME_BYTES: Final = 255  # of any file system that people use
_PIECE: Final = re.compile(r"(\d{1,9}) (\d{1,10})\.", re.ASCII)  # index and checksum
_HASH_BYTES: Final = 1 << 20
_SOME_TIME: Final = datetime(2000, 1, 1, tzinfo=UTC)  # of a file that is always fetched: its tag tells it from others


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """`source`: s3:// or file://, a folder or a file; `to`: a place on this disk."""

    source: str
    to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """All items are here. `unsure`: files of which the store keeps no checksum that could be compared."""

    num_files: int
    size_bytes: int
    fetched_bytes: int
    unsure: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    store: Store = field(compare=False)
    key: str
    target: Path
    size_bytes: int
    modified_at: datetime
    tag: str = ""  # of the object that is read, where several requests read it
    mark: str = ""  # of the run: two that bring the same file in do not write into one another's
    wanted_by: str = "data"  # the key of job.yaml that names it

    @property
    def part(self) -> Path:
        return own_path(self.target, f"{self.mark}.part")

    @property
    def num_pieces(self) -> int:
        return -(-self.size_bytes // CHUNK_BYTES)

    def is_here(self) -> bool:
        with suppress(OSError):
            found = self.target.stat()
            return found.st_size == self.size_bytes and found.st_mtime_ns == _ns(self.modified_at)
        return False


def is_staged(targets: Sequence[str], run_dir: Path, digest: str) -> bool:
    """Whether data with this digest was brought in, and its places are still there."""
    return _marker(run_dir, digest).exists() and all(os.path.lexists(target) for target in targets)


def _marker(run_dir: Path, digest: str) -> Path:
    return run_dir / _NOTES / f"{digest}.json"


def stage(  # noqa: PLR0913  # called once, all by name
    items: Sequence[Item],
    open_at: Callable[[str], Store],
    *,
    run_dir: Path,
    digest: str,
    boot_id: str,
    progress: Progress,
) -> Staged:
    """
    Bring all items in; `digest` stands for them. May be killed at any moment and called again. Final
    errors: nothing at an address, no room, two files for one place.
    """
    notes = run_dir / _NOTES
    progress(0.0, "listing")
    mark = _mark_of(run_dir)
    try:
        files = [file for item in items for file in _find(item, open_at, mark)]
        _expect_own_places(files)
        missing = [file for file in files if not file.is_here()]
        notes.mkdir(parents=True, exist_ok=True)
        unsure = _Fetching(files, missing, notes, boot_id, progress).fetch()
        _expect_apart(missing)
        marker = {"listing": _digest(files), "files": len(files)}
        write_durable(Disk(), _marker(run_dir, digest), json.dumps(marker).encode())
    except OSError as error:
        raise refused(f"data: {place_of(error, run_dir)}", error, "data.to") from error
    return Staged(
        num_files=len(files),
        size_bytes=sum(file.size_bytes for file in files),
        fetched_bytes=sum(file.size_bytes for file in missing),
        unsure=unsure,
    )


def taste(items: Sequence[Item], open_at: Callable[[str], Store]) -> None:
    """One byte of each item, where it has any: a key may list what it may not read."""
    for item in items:
        file = next((file for file in _find(item, open_at, mark="") if file.size_bytes), None)
        if file is not None:
            file.store.read(file.key, 0, 1)


def stage_object(  # noqa: PLR0913  # called once, most by name
    store: Store, key: str, target: Path, *, run_dir: Path, boot_id: str, progress: Progress
) -> bool:
    """
    The archive of `source`, in the same way. False: there is none. Not listed: the key of a store may read the code
    and nothing else there.
    """
    head = store.head(key)
    if head is None:
        return False
    file = _File(
        store=store,
        key=key,
        target=target,
        size_bytes=head.size_bytes,
        modified_at=_SOME_TIME,
        mark=_mark_of(run_dir),
        wanted_by="source.archive",
    )
    notes = run_dir / _NOTES
    notes.mkdir(parents=True, exist_ok=True)
    _Fetching([file], [file], notes, boot_id, progress).fetch()
    return True


def _mark_of(run_dir: Path) -> str:
    return hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]


# ------------------------------------------------------------------------------------ listing


def _find(item: Item, open_at: Callable[[str], Store], mark: str) -> Iterator[_File]:
    address = item.source.rstrip("/")
    path = local_path(address)
    if path and path.is_file():
        yield _single(item, address, open_at, mark)
        return
    store, number, strays = open_at(address), 0, list[str]()
    entries = (entry for entry in store.list("", strays.append) if not is_own_name(entry.key))
    for number, entry in enumerate(entries, 1):  # noqa: B007  # used below
        if any(len(os.fsencode(part)) > _MAX_NAME_BYTES for part in entry.key.split("/")):
            strays.append(f"{entry.key} (too long)")
        yield _File(
            store=store,
            key=entry.key,
            target=Path(item.to) / entry.key,
            size_bytes=entry.size_bytes,
            modified_at=entry.modified_at,
            mark=mark,
        )
    _expect_none_left_out(store, strays)
    if number == 0:
        yield _single(item, address, open_at, mark)


def _expect_none_left_out(store: Store, strays: Sequence[str]) -> None:
    if strays:
        raise OffsiteError(
            f"data: {store.address}: expected files, found {len(strays)} that can be none here: {', '.join(strays[:3])}",
            hint="rename them there, put files where links are, or name a folder without them in data.from",
            final=True,
        )


def _single(item: Item, address: str, open_at: Callable[[str], Store], mark: str) -> _File:
    parent, _, name = address.rpartition("/")
    if is_own_name(name):
        raise OffsiteError(
            f"data: expected files at {item.source}, found a name of this tool's own, as an unfinished copy has it",
            hint="name what was to be copied in data.from, or rename it there",
            final=True,
        )
    store = open_at(parent) if not parent.endswith(("/", ":")) else None
    strays: list[str] = []
    found = [entry for entry in store.list(name, strays.append) if entry.key == name] if store else []
    if store is not None and not found:
        _expect_none_left_out(store, [stray for stray in strays if stray.rpartition(" (")[0] == name])
    if store is None or not found:
        raise OffsiteError(
            f"data: expected files at {item.source}, found none",
            hint="correct data.from in job.yaml, or put the data there first",
            final=True,
        )
    to = Path(item.to)
    target = to / name if item.to.endswith("/") or to.is_dir() else to
    entry = found[0]
    return _File(
        store=store, key=name, target=target, size_bytes=entry.size_bytes, modified_at=entry.modified_at, mark=mark
    )


def _expect_own_places(files: Sequence[_File]) -> None:
    seen: set[Path] = set()
    folders: set[Path] = set()
    real = cache(os.path.realpath)  # folders may be links to one another
    for file in files:
        place = Path(real(file.target.parent), file.target.name)
        if place in seen:
            raise _crowded(file.target, "one source", "two", "give the items of data folders of their own (to)")
        if is_own_name(file.target.name):
            raise _crowded(file.target, "a name of the data's own", "one of this tool's", "rename it, or leave it out")
        seen.add(place)
        for folder in place.parents:
            if folder in folders:
                break
            folders.add(folder)
    for both in sorted(seen & folders):
        raise _crowded(
            both, "a file or a folder", "both", "rename one of them, or bring them to folders of their own (to)"
        )


def _expect_apart(files: Sequence[_File]) -> None:
    """On some disks two names are one (`A` and `a`): then the later file has taken the place of the earlier one."""
    seen: dict[tuple[int, int], Path] = {}
    for file in files:
        found = file.target.stat()
        other = seen.setdefault((found.st_dev, found.st_ino), file.target)
        if other != file.target:
            what = f"one place with {other}: this disk takes both names for one"
            raise _crowded(file.target, "a place of its own", what, "rename one of them, or bring them to another disk")


def _crowded(target: Path, expected: str, found: str, hint: str) -> OffsiteError:
    return OffsiteError(f"data: expected {expected} for {target}, found {found}", hint=hint, final=True)


def _digest(files: Sequence[_File]) -> str:
    lines = sorted(f"{file.target}\0{file.size_bytes}\0{_ns(file.modified_at)}\n" for file in files)
    return hashlib.sha256(os.fsencode("".join(lines))).hexdigest()[:16]


def _ns(moment: datetime) -> int:
    return round(moment.timestamp() * 1_000_000) * 1000


# ----------------------------------------------------------------------------------- fetching


class _Fetching:
    def __init__(
        self, files: Sequence[_File], missing: Sequence[_File], notes: Path, boot_id: str, progress: Progress
    ) -> None:
        self._missing, self._notes, self._boot_id = missing, notes, boot_id
        self._meter = Meter(sum(file.size_bytes for file in files), progress)
        self._meter.add("here already", sum(file.size_bytes for file in files) - sum(f.size_bytes for f in missing))
        self._lock = threading.Lock()
        self._unsure: list[str] = []

    def fetch(self) -> tuple[str, ...]:
        """Several files at once, and several pieces of a large one."""
        for file in self._missing:
            file.target.parent.mkdir(parents=True, exist_ok=True)
        self._make_room()
        large = [file for file in self._missing if file.num_pieces > 1]
        in_parallel(self._fetch_small, [file for file in self._missing if file.num_pieces <= 1], _NUM_THREADS)
        for file in large:
            self._fetch_large(file)
        return tuple(self._unsure)

    def _make_room(self) -> None:
        needed: dict[int, int] = {}
        places: dict[int, Path] = {}
        for file in self._missing:
            device = file.target.parent.stat().st_dev
            there = file.part.stat().st_blocks * 512 if file.part.exists() else 0
            needed[device] = needed.get(device, 0) + file.size_bytes - there
            places[device] = file.target.parent
        for device, num_bytes in needed.items():
            expect_room("for data", num_bytes, places[device], "bring less, or rent a machine with a larger disk")

    def _fetch_small(self, file: _File) -> None:
        content = file.store.read(file.key, 0, file.size_bytes)
        if len(content) != file.size_bytes:
            raise _changed(file)
        Disk().remove(file.part)
        Disk().write_at(file.part, 0, content)
        self._finish(file, [crc32(content)] if content else [])
        self._meter.add(file.key, file.size_bytes)

    def _fetch_large(self, file: _File) -> None:
        head = file.store.head(file.key)
        if head is None or head.size_bytes != file.size_bytes:
            raise _changed(file)
        file = replace(file, tag=head.tag)  # all pieces are of one object, also those of an earlier call
        pieces = _Pieces(file, self._notes, self._boot_id)
        self._meter.add(file.key, sum(_piece_bytes(file, index) for index in pieces.known))
        in_parallel(partial(self._fetch_stretch, file, pieces), _stretches(file, pieces), _NUM_THREADS)
        try:
            self._finish(file, [pieces.known[index] for index in range(file.num_pieces)])
        except _WrongError as error:
            pieces.forget()
            raise error.what from None
        pieces.forget()

    def _fetch_stretch(self, file: _File, pieces: _Pieces, stretch: list[int]) -> None:
        begin, expected = stretch[0] * CHUNK_BYTES, iter(stretch)

        def note(checksum: int) -> None:
            index = next(expected)
            pieces.note(index, checksum)
            self._meter.add(file.key, _piece_bytes(file, index))

        Disk().write_blocks(file.part, begin, by_chunk(_stream(file, begin, len(stretch) * CHUNK_BYTES), note))

    def _finish(self, file: _File, checksums: list[int]) -> None:
        """Compared, durable, and only then under its name."""
        is_right = _compare(file, file.store.head(file.key), checksums)
        if is_right is False:
            Disk().remove(file.part)
            raise _WrongError(_changed(file))
        if is_right is None:
            with self._lock:
                self._unsure.append(one_line(str(file.target)))
        os.utime(file.part, ns=(_ns(file.modified_at), _ns(file.modified_at)))
        Disk().sync(file.part)
        Disk().rename(file.part, file.target)
        Disk().sync(file.target.parent)


def _stream(file: _File, begin: int, num_bytes: int) -> Iterator[Block]:
    """All of it, or an error: else what an early end leaves of a piece would count as one."""
    left = min(num_bytes, file.size_bytes - begin)
    for block in file.store.stream(file.key, begin, left, file.tag):
        left -= len(block)
        yield block
    if left:
        raise _changed(file)


class _WrongError(OffsiteError):
    """What came is not what the store has."""

    def __init__(self, what: OffsiteError) -> None:
        super().__init__(str(what), hint=what.hint, final=what.final)
        self.what = what


def _changed(file: _File) -> OffsiteError:
    return OffsiteError(
        f"{file.wanted_by}: {file.store.address}/{file.key}: expected the {file.size_bytes} bytes that were listed, got others",
        hint="it was damaged on its way, or changes while it is read; it is fetched again",
        final=False,
    )


def _compare(file: _File, head: Head | None, checksums: list[int]) -> bool | None:
    """Whether the store confirms what came; None: by size only."""
    if head is None or file.tag not in {"", head.tag}:
        return False
    summing = find_crc64nvme() if head.crc64nvme is not None else None  # `awscrt` is not loaded for nothing
    crc64nvme = partial(_sum, file.part, summing) if summing else None
    return proves(head, file.size_bytes, checksums, crc64nvme=crc64nvme, md5=partial(_md5, file.part))


def _sum(path: Path, crc: Summing) -> int:
    whole = 0
    with path.open("rb") as content:
        while block := content.read(_HASH_BYTES):
            whole = crc(block, whole)
    return whole


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as content:
        while block := content.read(_HASH_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _piece_bytes(file: _File, index: int) -> int:
    return min(CHUNK_BYTES, file.size_bytes - index * CHUNK_BYTES)


def _stretches(file: _File, pieces: _Pieces) -> list[list[int]]:
    """Missing pieces, one after the other, that one request brings."""
    stretches: list[list[int]] = []
    for index in (index for index in range(file.num_pieces) if index not in pieces.known):
        if stretches and stretches[-1][-1] == index - 1 and len(stretches[-1]) < STRETCH_CHUNKS:
            stretches[-1].append(index)
        else:
            stretches.append([index])
    return stretches


class _Pieces:
    """Which pieces of a file are in its `part`, with their CRC32. A line that was torn, by a full disk or a kill, is none."""

    def __init__(self, file: _File, notes: Path, boot_id: str) -> None:
        self._path = notes / f"{hashlib.sha256(os.fsencode(file.target)).hexdigest()[:16]}.pieces"
        self._lock = threading.Lock()
        head = json.dumps([str(file.target), file.size_bytes, _ns(file.modified_at), file.tag, boot_id])
        self.known = self._read(head, file.num_pieces) if file.part.exists() else {}
        if not self.known:
            Disk().remove(file.part)
            Disk().write(self._path, head.encode())

    def _read(self, head: str, num_pieces: int) -> dict[int, int]:
        try:
            first, *lines = self._path.read_text().split("\n")
        except (FileNotFoundError, UnicodeDecodeError):
            return {}
        found = filter(None, map(_PIECE.fullmatch, lines)) if first == head else ()
        pieces = {int(piece[1]): int(piece[2]) for piece in found}
        return {index: checksum for index, checksum in pieces.items() if index < num_pieces}

    def note(self, index: int, checksum: int) -> None:
        with self._lock:
            self.known[index] = checksum
            Disk().append(self._path, f"\n{index} {checksum}.".encode())

    def forget(self) -> None:
        Disk().remove(self._path)
