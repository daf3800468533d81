"""
Checkpoints between a disk and a store.

    <job>/checkpoints/step-00000500-0123abcd/<shard> ...   each confirmed by the store
    <job>/checkpoints/step-00000500-0123abcd/MANIFEST.json last, and only if there is none
    <job>/outcome.json                                     the job is over
    <job>/looked.json                                      what the store can do, found out by the run's first look
    <job>/refusal.json                                     the last start came to nothing through the job or the store

Order, at any time:
  - a manifest in the store MUST name only shards that the store has confirmed;
  - a checkpoint's manifest MUST go before its first shard;
  - the newest whole checkpoint in the store is never removed.

Every function may be killed at any moment and called again. Nothing in a store is trusted.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import zip_longest
from operator import call
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

from runner.committed import Checkpoint
from runner.errors import one_line
from runner.storage.checkpoints import CheckpointDir, describe
from runner.storage.checksums import combine_chunks, describe_file
from runner.storage.disk import Disk, has_bytes
from runner.storage.offsite.contract import (
    Abilities,
    Block,
    Entry,
    Head,
    OffsiteError,
    Store,
    agrees,
    by_chunk,
    in_parallel,
    parse_abilities,
)
from runner.storage.offsite.disks import NO_PLACE, place_of, refused
from runner.storage.offsite.known import Known, signature
from vramfarm.checksum import crc32
from vramfarm.protocol import (
    CHUNK_BYTES,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    ProtocolError,
    Ref,
    Shard,
    is_name,
    parse_manifest,
)

Progress = Callable[[float, str], None]

OUTCOME: Final = "outcome.json"
LOOKED: Final = "looked.json"
_NUM_THREADS: Final = 8
_NUM_RUNS: Final = 12  # that are fetched at once: while some wait for the disk, others wait for the store
_NUM_SHARDS: Final = 4  # that are sent at once; their parts share the store's threads
_NUM_ORIGINS: Final = 2  # checkpoints in which content is looked for
_PAUSES_S: Final = (0.2, 0.8, 2.0)
_READ_ATTEMPTS: Final = 3
_TELL_EVERY_S: Final = 60.0
RUN_CHUNKS: Final = 8  # fetched with one request
_SPARE_BYTES: Final = 64 << 20  # left free on the disk after a restore
_MAX_ENTRIES: Final = 1_000_000
_LARGE_BYTES: Final = 1 << 20  # of a manifest: such are fetched one at a time
_LARGE: Final = threading.Lock()
_PARSING: Final = threading.Lock()
_SIGN_BYTES: Final[Mapping[bytes, int]] = {b"{": 250, b"[": 90, b",": 64}  # what parsed JSON takes for each
_MAX_PARSED_BYTES: Final = 120 << 20  # 1.4 million checksums: 11 TB
_NONE: Final[Mapping[str, tuple[str, str]]] = MappingProxyType({})
_REFUSED: Final = "let this key read it, or begin anew under another name of the job"


# Which manifest makes no sense, by size and time in the listing, empty if it does; and what is damaged.
Spoilt = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """
    What a store holds of a job. `checkpoints` are whole by the store's own listing, oldest first.

    `refused`, by name: the store keeps the manifest to itself, so that what it names may be whole, or damaged.
    """

    checkpoints: tuple[Checkpoint, ...]
    unusable: tuple[str, ...]  # what is damaged, and how
    spoilt: Mapping[str, Spoilt]  # by name, of checkpoints only
    refused: Mapping[str, OffsiteError]
    newest: str  # name of the last that was committed there, of those that are not damaged; empty: none
    outcome: Mapping[str, Any] | None  # what the job came to, as whoever ended it wrote it

    @property
    def problems(self) -> tuple[str, ...]:
        """For people: a line each, which begins with a name."""
        return (*self.unusable, *map(str, self.refused.values()))


# ----------------------------------------------------------------------------------- survey


def survey(  # noqa: PLR0913  # the last three by name
    store: Store,
    job: str,
    progress: Progress = lambda _fraction, _note: None,
    *,
    wanted: str = "",
    here: Collection[str] = (),
    spoilt: Mapping[str, Spoilt] = _NONE,
) -> Survey:
    """
    Look at all of a job in a store; reads manifests, no shard. Those that an earlier look found `spoilt` are not
    read again while they are the same.

    An error if the store refuses the manifest of the one that is `wanted`, by default the newest, unless that is
    `here`: whoever took it for none would go on from an older one, or begin anew. Not `curable`: a run that is no
    further than an older one must not go on meanwhile.
    """
    found = survey_readable(store, job, progress, spoilt=spoilt)
    name = wanted or found.newest
    if name in found.refused and name not in here:
        raise found.refused[name]
    return found


def survey_readable(
    store: Store,
    job: str,
    progress: Progress = lambda _fraction, _note: None,
    *,
    spoilt: Mapping[str, Spoilt] = _NONE,
) -> Survey:
    """The same for whoever only tells, or copies, what can be read."""
    outcome, problems = _read_outcome(store, job)
    whole, refused, latest = list[Checkpoint](), dict[str, OffsiteError](), list[tuple[datetime, str]]()
    damaged: dict[str, Spoilt] = {}
    listed = {name: entries for name, entries in _list_checkpoints(store, job).items() if MANIFEST in entries}
    with ThreadPoolExecutor(
        _NUM_THREADS
    ) as pool:  # of those without one the upload has not ended, or the removal has begun
        found = pool.map(partial(_describe_listed, store, job, spoilt), listed.items())
        for number, (name, one) in enumerate(zip(listed, found, strict=True)):
            progress(number / len(listed), name)
            if isinstance(one, tuple):
                damaged[name] = one
                continue
            latest.append((listed[name][MANIFEST].modified_at, name))
            if isinstance(one, Checkpoint):
                whole.append(one)
            else:
                refused[name] = one
    whole.sort(key=lambda checkpoint: checkpoint.ref)
    return Survey(
        checkpoints=tuple(whole),
        unusable=(*problems, *(why for _, why in damaged.values())),
        spoilt=damaged,
        refused=refused,
        newest=max(latest)[1] if latest else "",
        outcome=outcome,
    )


def _describe_listed(
    store: Store, job: str, spoilt: Mapping[str, Spoilt], listed: tuple[str, Mapping[str, Entry]]
) -> Checkpoint | OffsiteError | Spoilt:
    """A whole checkpoint, the store's refusal to show its manifest, or how it is damaged. What may pass is raised."""
    name, entries = listed
    there = entries[MANIFEST]
    which = f"{there.size_bytes} {there.modified_at.isoformat()}"
    known, why = spoilt.get(name, ("", ""))
    if known == which:
        return which, why
    try:
        with _LARGE if there.size_bytes > _LARGE_BYTES else nullcontext():
            manifest = read_manifest(store, job, name)
        _expect_listed(manifest, entries)
        return describe(manifest)
    except ProtocolError as error:
        return "", f"{name}: {error}"
    except OffsiteError as error:
        if error.damaged:
            return which, f"{name}: {error}"
        if not error.final:
            raise
        what = f"{name}: its manifest cannot be read: {error}"
        return OffsiteError(what, hint=error.hint or _REFUSED, final=True)


def _read_outcome(store: Store, job: str) -> tuple[Mapping[str, Any] | None, list[str]]:
    raw = store.get(f"{job}/{OUTCOME}", limit_bytes=1 << 20)
    if raw is None:
        return None, []
    try:
        outcome = json.loads(raw)
    except (ValueError, RecursionError):
        outcome = None
    if not isinstance(outcome, dict):
        return None, [f"{OUTCOME}: expected a JSON object"]
    return (outcome, []) if outcome.get("outcome") else (None, [])  # without one: it was opened again


def _list_checkpoints(store: Store, job: str) -> dict[str, dict[str, Entry]]:
    """By checkpoint's name, what is in its folder. Names that are none are left out."""
    prefix, found = f"{job}/checkpoints/", dict[str, dict[str, Entry]]()
    for number, entry in enumerate(store.list(prefix)):
        if number >= _MAX_ENTRIES:
            raise OffsiteError(f"{store.address}/{prefix}: expected at most {_MAX_ENTRIES} objects", final=True)
        name, _, path = entry.key.removeprefix(prefix).partition("/")
        if path and is_name(name):
            found.setdefault(name, {})[path] = entry
    return found


def read_manifest(store: Store, job: str, name: str) -> Manifest:
    """The manifest of the checkpoint with this name; `damaged` if it is none."""
    key = f"{job}/checkpoints/{name}/{MANIFEST}"
    raw = store.get(key, limit_bytes=MAX_MANIFEST_BYTES)
    if raw is None:
        raise OffsiteError(f"{store.address}/{key}: expected a manifest, found none", final=True, damaged=True)
    if problem := _expect_small(raw):
        raise _damaged(store, key, problem)
    with _PARSING:  # what is parsed takes many times its bytes
        try:
            manifest = parse_manifest(raw)
        except ProtocolError as error:
            problem = str(error)
    if problem:
        raise _damaged(store, key, problem)
    if manifest.ref.name != name:
        raise _damaged(store, key, f"expected the manifest of {name}, got that of {manifest.ref.name}")
    return manifest


def find_whole(store: Store, job: str, name: str) -> Manifest:
    """The manifest of the checkpoint with this name, all of which the store lists; `damaged` if there is none."""
    manifest = read_manifest(store, job, name)
    if problem := _not_listed(store, job, manifest):
        raise _damaged(store, f"{job}/checkpoints/{name}", str(problem))
    return manifest


def _expect_small(raw: bytes) -> str:
    """Why a manifest is not even parsed: what JSON becomes in memory is told by its signs, and may be thirty times as much."""
    needed = len(raw) + sum(each * raw.count(sign) for sign, each in _SIGN_BYTES.items())
    if needed <= _MAX_PARSED_BYTES:
        return ""
    return f"expected a manifest that takes at most {_MAX_PARSED_BYTES >> 20} MiB of memory, got one of {needed >> 20}"


def _damaged(store: Store, key: str, what: str) -> OffsiteError:
    return OffsiteError(
        f"{store.address}/{key}: {what}", hint="use an older checkpoint; this one is damaged", final=True, damaged=True
    )


def _expect_listed(manifest: Manifest, entries: Mapping[str, Entry]) -> None:
    for shard in manifest.shards:
        found = entries[shard.path].size_bytes if shard.path in entries else None
        if found != shard.size_bytes:
            raise ProtocolError(f"{shard.path}: expected {shard.size_bytes} bytes, got {found}")


# ----------------------------------------------------------------------------------- upload


def upload(  # noqa: PLR0913, PLR0917  # called once
    store: Store,
    job: str,
    directory: CheckpointDir,
    ref: Ref,
    progress: Progress,
    unusable: Collection[str] = (),
    expect_ours: Callable[[], None] = lambda: None,
) -> int:
    """
    Bring a committed checkpoint into the store; when this returns the store has confirmed all of it.

    `expect_ours` raises if the run is another's by now; it is asked when only the manifest is left to be written.

    What is known as `unusable` there may be so in spite of what the store says of it: it is read back, before
    and after it is sent anew, and no other is copied from it.

    Returns how many bytes the store copied from a checkpoint that it had. `damaged` means that the
    bytes here are not those of the manifest: no such part was stored, and what to do about it is
    the caller's decision.
    """
    manifest = directory.manifest(ref)
    sender = _Sender(store, job, manifest, directory.path(ref), Meter(manifest.size_bytes, progress), unusable)
    sender.send()
    looks: list[Callable[[], None]] = [expect_ours, lambda: _eventually(lambda: _not_listed(store, job, manifest))]
    in_parallel(call, looks, len(looks))
    raw, key = (directory.path(ref) / MANIFEST).read_bytes(), f"{job}/checkpoints/{ref.name}/{MANIFEST}"
    store.put(key, raw) if ref.name in unusable else _put_manifest(store, key, manifest, raw)
    _eventually(lambda: _not_found(store, job, ref))
    return sender.copied_bytes


class _Sender:
    """Brings the shards of one checkpoint into the store, several at once; content that is there is not sent again."""

    def __init__(  # noqa: PLR0913, PLR0917  # made once
        self,
        store: Store,
        job: str,
        manifest: Manifest,
        source: Path,
        meter: Meter,
        unusable: Collection[str],
    ) -> None:
        self._store, self._job, self._manifest, self._source, self._meter = store, job, manifest, source, meter
        self._unusable = unusable
        self._differs = _differs_in_bytes if manifest.ref.name in unusable else differs
        self._there: dict[_Content, str] | None = None  # key of an object with this content
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self.copied_bytes = 0

    def send(self) -> None:
        first = {_content(shard): shard for shard in reversed(self._manifest.shards)}
        again = [shard for shard in self._manifest.shards if first[_content(shard)] is not shard]
        for shards in ([*first.values()], again):
            self._send_all(sorted(shards, key=lambda shard: -shard.size_bytes))

    def _send_all(self, shards: list[Shard]) -> None:
        with suppress(_StoppedError):
            in_parallel(self._send_one, shards, _NUM_SHARDS)
        if self._error:
            raise self._error

    def _send_one(self, shard: Shard) -> None:
        try:
            self._bring(_key(self._job, self._manifest.ref, shard), shard)
        except Exception as error:
            self._error = self._error or error
            raise _StoppedError from error

    def _bring(self, key: str, shard: Shard) -> None:
        if not self._differs(self._store, key, shard):
            self._sent(shard.path, shard.size_bytes)
            return
        if self._copy(key, shard):
            self._sent(shard.path, shard.size_bytes)
            return
        self._store.put_file(key, self._source / shard.path, shard, partial(self._sent, shard.path))
        _eventually(lambda: self._not_kept(key, shard))
        self._found()[_content(shard)] = key

    def _sent(self, note: str, num_bytes: int) -> None:
        if self._error:
            raise _StoppedError  # the others stop after the part that they were at
        self._meter.add(note, num_bytes)

    def _copy(self, key: str, shard: Shard) -> bool:
        """One chunk's checksum is too little to tell contents apart, and one chunk is soon sent."""
        origin = self._found().get(_content(shard)) if len(shard.checksums) > 1 else None
        if origin is None:
            return False
        try:
            done = self._store.copy(origin, key, shard) and not self._differs(self._store, key, shard)
        except OffsiteError:
            return False  # whatever it is: sending will say it, or do
        with self._lock:
            self.copied_bytes += shard.size_bytes if done else 0
        return done

    def _found(self) -> dict[_Content, str]:
        """Contents of the checkpoints in the store that came last, by their manifests."""
        with self._lock:
            if self._there is None:
                self._there = {}
                listed = _list_checkpoints(self._store, self._job)
                came = sorted(
                    (found[MANIFEST].modified_at, name)
                    for name, found in listed.items()
                    if MANIFEST in found and name not in self._unusable
                )
                for _, name in came[-_NUM_ORIGINS:]:
                    with suppress(OffsiteError):  # gone or spoilt: then less is copied, and more is sent
                        whole = read_manifest(self._store, self._job, name)
                        self._there |= {_content(s): _key(self._job, whole.ref, s) for s in whole.shards}
            return self._there

    def _not_kept(self, key: str, shard: Shard) -> OffsiteError | None:
        problem = self._differs(self._store, key, shard)
        return OffsiteError(f"{self._store.address}/{key}: stored, but {problem}", final=False) if problem else None


class _StoppedError(Exception):
    """One of several has failed, and has said why."""


_Content = tuple[int, tuple[int, ...]]


def _content(shard: Shard) -> _Content:
    return shard.size_bytes, shard.checksums


def _eventually(problem: Callable[[], OffsiteError | None]) -> None:
    """Raise what is wrong, if it still is after a while: some stores show what they have taken only later."""
    for pause_s in (*_PAUSES_S, None):
        found = problem()
        if found is None:
            return
        if pause_s is None:
            raise found
        time.sleep(pause_s)


def _not_found(store: Store, job: str, ref: Ref) -> OffsiteError | None:
    """Whoever lists the store from now on must find it."""
    key = f"{job}/checkpoints/{ref.name}/{MANIFEST}"
    if any(entry.key == key for entry in store.list(key)):
        return None
    return OffsiteError(f"{store.address}/{key}: stored, but the store does not list it", final=False)


def _put_manifest(store: Store, key: str, manifest: Manifest, raw: bytes) -> None:
    """
    The commit. A lost answer, or a copy that was restored and comes back, is no conflict.

    Nobody can use what is no manifest, so ours replaces it; another checkpoint's is another run's.
    """
    if store.put_new(key, raw):
        return
    head = store.head(key)
    is_sane = head is not None and head.size_bytes <= MAX_MANIFEST_BYTES
    there = store.get(key, limit_bytes=MAX_MANIFEST_BYTES) if is_sane else None
    try:
        found = parse_manifest(there or b"")
    except ProtocolError:
        store.put(key, raw)
        return
    if found != manifest:
        raise OffsiteError(
            f"{store.address}/{key}: expected no manifest or ours, got another one",
            hint="does another run use this name? give this job a name of its own",
            final=True,
        )


def _not_listed(store: Store, job: str, manifest: Manifest) -> OffsiteError | None:
    """Just before the manifest: what was confirmed long ago may have been removed since."""
    prefix = f"{job}/checkpoints/{manifest.ref.name}/"
    entries = {entry.key.removeprefix(prefix): entry for entry in store.list(prefix)}
    try:
        _expect_listed(manifest, entries)
    except ProtocolError as error:
        return OffsiteError(f"{store.address}/{prefix}: {error}", final=False)
    return None


def _key(job: str, ref: Ref, shard: Shard) -> str:
    return f"{job}/checkpoints/{ref.name}/{shard.path}"


def differs(store: Store, key: str, shard: Shard) -> str:
    """How an object differs from a shard; empty if it is the same by size and checksum."""
    found = store.head(key)
    if found is None:
        return "it is not there"
    match agrees(found, shard):
        case None:
            return _read_back(store, key, shard)
        case False:
            return f"expected {_words(_expected_head(shard))}, got {_words(found)}"
        case True:
            return ""


def _differs_in_bytes(store: Store, key: str, shard: Shard) -> str:
    """The same, whatever the store says of its checksum."""
    found = store.head(key)
    if found is None:
        return "it is not there"
    if found.size_bytes != shard.size_bytes:
        return f"expected {shard.size_bytes} bytes, got {found.size_bytes}"
    return _read_back(store, key, shard)


def _read_back(store: Store, key: str, shard: Shard) -> str:
    """For a store that confirms no checksums, or whose word is not enough."""

    def is_same(run: _Run) -> bool:
        found: list[int] = []
        for _ in by_chunk(_stream_chunks(store, key, shard, run.first, run.num_chunks), found.append):
            pass
        expected = shard.checksums[run.first : run.first + run.num_chunks]
        pairs = enumerate(zip_longest(found, expected), run.first)
        return all(is_one == ought or _is_in_store(store, key, shard, index) for index, (is_one, ought) in pairs)

    runs = [*_runs(shard, frozenset())]
    wrong = [run for run, same in zip(runs, in_parallel(is_same, runs, _NUM_THREADS), strict=True) if not same]
    return f"it has other bytes at {wrong[0].first * CHUNK_BYTES} or later" if wrong else ""


def _expected_head(shard: Shard) -> Head:
    return Head(size_bytes=shard.size_bytes, crc32=combine_chunks(shard.checksums, shard.size_bytes))


def _words(head: Head) -> str:
    return f"{head.size_bytes} bytes" + ("" if head.crc32 is None else f" with crc32 {head.crc32:08x}")


# ----------------------------------------------------------------------------------- verify


def read_abilities(store: Store, job: str) -> Abilities | None:
    """What a run found out of its store; None: nothing can be read."""
    raw = store.get(f"{job}/{LOOKED}", limit_bytes=1 << 20)
    with suppress(ValueError, RecursionError):
        looked = json.loads(raw or b"{}")
        return parse_abilities(looked.get("abilities")) if isinstance(looked, dict) else None
    return None


def verify(
    store: Store, job: str, ref: Ref, read: Callable[[str, int], None] = lambda _path, _num_bytes: None
) -> Manifest:
    """
    The manifest of a checkpoint whose every shard has its size and checksum, as the store reports them.

    `read` is called with the path and the size of each shard that was compared.
    """
    manifest = read_manifest(store, job, ref.name)
    for shard in manifest.shards:
        key = _key(job, ref, shard)
        if problem := differs(store, key, shard):
            raise _damaged(store, key, problem)
        read(shard.path, shard.size_bytes)
    return manifest


# ---------------------------------------------------------------------------------- restore


def restore(  # noqa: PLR0913, PLR0917  # as `upload`
    store: Store, job: str, ref: Ref, directory: CheckpointDir, progress: Progress, manifest: Manifest | None = None
) -> Checkpoint:
    """
    Bring a checkpoint back and commit it. Every chunk is compared on its way; those that are
    here from an earlier, killed call are not fetched again. `damaged`: take the next older.
    """
    for checkpoint in directory.committed():
        if checkpoint.ref == ref:
            return checkpoint
    manifest = manifest or read_manifest(store, job, ref.name)
    if manifest.ref != ref:
        raise _damaged(store, ref.name, f"expected {ref}, got {manifest.ref}")
    return bring(manifest, StoreSource(store, job, ref, manifest), directory, progress)


class Source(Protocol):
    """A checkpoint, wherever it is."""

    manifest: Manifest

    def read(self, shard: Shard, chunk: int) -> bytes:
        """One chunk, compared with the manifest; `StoreError` if it is another or cannot be had."""
        ...

    def stream(self, shard: Shard, first: int, num_chunks: int) -> Iterator[Block]:
        """Chunks in blocks, none of which has bytes of two, each there until the next is asked for. Not compared."""
        ...


class StoreSource:
    """A checkpoint in a store; only what is asked for is fetched."""

    def __init__(self, store: Store, job: str, ref: Ref, manifest: Manifest | None = None) -> None:
        self.manifest = manifest or read_manifest(store, job, ref.name)
        self._store = store
        self._key = partial(_key, job, ref)

    def read(self, shard: Shard, chunk: int) -> bytes:
        return _fetch_chunk(self._store, self._key(shard), shard, chunk)

    def stream(self, shard: Shard, first: int, num_chunks: int) -> Iterator[Block]:
        return _stream_chunks(self._store, self._key(shard), shard, first, num_chunks)


def _stream_chunks(store: Store, key: str, shard: Shard, first: int, num_chunks: int) -> Iterator[Block]:
    begin = first * CHUNK_BYTES
    return store.stream(key, begin, min(num_chunks * CHUNK_BYTES, shard.size_bytes - begin))


def bring(manifest: Manifest, source: Source, directory: CheckpointDir, progress: Progress) -> Checkpoint:
    """Commit a checkpoint with the chunks of `source`, each compared; safe to be killed and called again."""
    try:
        directory.root.mkdir(parents=True, exist_ok=True)
        folder = directory.begin_restore(manifest.ref)
        begun = _make_room(directory.disk, folder, manifest)
        _bring_all(manifest, source, _Target(directory.disk, folder, begun), progress)
        return directory.adopt(folder, manifest)
    except OSError as error:
        raise refused(place_of(error, directory.root), error, "checkpoint.dir") from error


def _make_room(disk: Disk, folder: Path, manifest: Manifest) -> frozenset[str]:
    """
    Files for the shards, with their space taken, or from an earlier call: these are returned. An error if the disk
    cannot hold the rest.
    """
    there = sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))  # files may have holes
    needed, free = manifest.size_bytes - there + _SPARE_BYTES, shutil.disk_usage(folder.parent).free
    if needed > free:
        raise OffsiteError(
            f"{folder.parent}: expected {needed / 1e9:.1f} GB free to restore {manifest.ref.name}, got {free / 1e9:.1f}",
            hint="free some space, or rent a machine with a larger disk",
            final=True,
            curable=True,
        )
    return frozenset(shard.path for shard in manifest.shards if _make_file(disk, folder, shard))


def _make_file(disk: Disk, folder: Path, shard: Shard) -> bool:
    """Whether an earlier call has written to it."""
    path = folder / shard.path
    try:
        is_begun = has_bytes(path)
        for between in reversed(path.relative_to(folder.parent).parents[:-1]):
            disk.make_folder(folder.parent / between)
        if path.is_file() and path.stat().st_size > shard.size_bytes:
            disk.remove(path)
            is_begun = False
        disk.reserve(path, shard.size_bytes)
    except OSError as error:
        if error.errno not in NO_PLACE:
            raise
        what = f"{folder.name}: {shard.path[:80]}: expected what can be a file here: {error.strerror}"
        hint = "use an older checkpoint; the manifest of this one makes no sense"
        raise OffsiteError(what, hint=hint, final=True, damaged=True) from error
    return is_begun


@dataclass(frozen=True, slots=True)
class _Target:
    disk: Disk
    folder: Path
    begun: frozenset[str]  # shards that an earlier call left some chunks of


def _bring_all(manifest: Manifest, source: Source, target: _Target, progress: Progress) -> None:
    meter = Meter(manifest.size_bytes, progress)

    def fetch(run: _Run) -> None:
        path, first = target.folder / run.shard.path, run.first
        if not run.may_be_here or not _is_here(path, run.shard, first):
            _fetch_run(source, run, target.disk, path)
        meter.add(run.shard.path, sum(_chunk_size(run.shard, first + i) for i in range(run.num_chunks)))

    runs = [run for shard in manifest.shards for run in _runs(shard, target.begun)]
    runs.sort(key=lambda run: run.first)  # of all shards in turn: some file systems take one write to a file at a time
    in_parallel(fetch, runs, _NUM_RUNS)


@dataclass(frozen=True, slots=True)
class _Run:
    """Chunks of a shard, one after the other, that one request brings."""

    shard: Shard
    first: int
    num_chunks: int
    may_be_here: bool


def _runs(shard: Shard, begun: frozenset[str]) -> Iterator[_Run]:
    """Single chunks, where some are here and some are not."""
    may_be_here = shard.path in begun
    step, end = (1 if may_be_here else RUN_CHUNKS), len(shard.checksums)
    return (_Run(shard, first, min(step, end - first), may_be_here) for first in range(0, end, step))


def _fetch_run(source: Source, run: _Run, disk: Disk, path: Path) -> None:
    """What was damaged on its way is fetched again."""
    found: list[int] = []
    blocks = source.stream(run.shard, run.first, run.num_chunks)
    disk.write_blocks(path, run.first * CHUNK_BYTES, by_chunk(blocks, found.append))
    expected = run.shard.checksums[run.first : run.first + run.num_chunks]
    for index, (is_one, ought) in enumerate(zip_longest(found, expected), run.first):
        if is_one != ought:
            disk.write_at(path, index * CHUNK_BYTES, source.read(run.shard, index))


def _is_here(path: Path, shard: Shard, index: int) -> bool:
    with path.open("rb") as file:
        file.seek(index * CHUNK_BYTES)
        return _is_chunk(file.read(_chunk_size(shard, index)), shard, index)


def _fetch_chunk(store: Store, key: str, shard: Shard, index: int) -> bytes:
    for _ in range(_READ_ATTEMPTS):  # bytes may be damaged on their way, too
        content = store.read(key, index * CHUNK_BYTES, _chunk_size(shard, index))
        if _is_chunk(content, shard, index):
            return content
    raise _damaged(store, key, f"chunk {index}: expected crc32 {shard.checksums[index]:08x}, got {crc32(content):08x}")


def _is_in_store(store: Store, key: str, shard: Shard, index: int) -> bool:
    """Looked at once more: what was damaged on its way is nobody's damage."""
    try:
        _fetch_chunk(store, key, shard, index)
    except OffsiteError as error:
        if error.damaged:
            return False
        raise
    return True


def _is_chunk(content: bytes, shard: Shard, index: int) -> bool:
    return len(content) == _chunk_size(shard, index) and crc32(content) == shard.checksums[index]


def _chunk_size(shard: Shard, index: int) -> int:
    return min(CHUNK_BYTES, shard.size_bytes - index * CHUNK_BYTES)


# ------------------------------------------------------------------------------------- tidy


def tidy(store: Store, job: str, *, keep_last: int, unusable: Collection[str] = ()) -> tuple[str, ...]:
    """
    Keep the newest whole checkpoints and remove older ones. Returns the names of what was removed.

    What is known as `unusable` takes no place of a good one. It goes with its age, and not before: the fault
    may be this machine's.
    """
    names = [checkpoint.ref.name for checkpoint in survey(store, job).checkpoints]
    kept = [name for name in names if name not in unusable][-max(1, keep_last) :]
    removed = names[: names.index(kept[0])] if kept else []
    listed = _list_checkpoints(store, job) if removed else {}
    for name in removed:  # or somebody else has, meanwhile
        _remove(store, f"{job}/checkpoints/{name}/", listed.get(name, {}))
    return tuple(removed)


def sweep(store: Store, job: str) -> None:
    """
    Remove what uploads of a checkpoint left behind that had ended before the last one was complete: of a process,
    an attempt or a machine that is no more. Unfinished ones cost like objects, and no list shows them.
    """
    listed = _list_checkpoints(store, job)
    since = max((entries[MANIFEST].modified_at for entries in listed.values() if MANIFEST in entries), default=None)
    if since is None:
        return  # whatever there is may be all there is
    for name, entries in listed.items():
        if _is_abandoned(entries, since):
            _remove(store, f"{job}/checkpoints/{name}/", entries)
    store.abort(f"{job}/checkpoints/", since)


def close(store: Store, job: str) -> None:
    """The run is over, and says so in the store: nobody goes on with an upload that was begun before."""
    sweep(store, job)
    for entry in store.list(f"{job}/{OUTCOME}"):
        store.abort(f"{job}/", entry.modified_at)


def _is_abandoned(entries: Mapping[str, Entry], since: datetime) -> bool:
    """One uploader, one checkpoint at a time: shards without a manifest that are older than a later commit are nobody's."""
    return MANIFEST not in entries and all(entry.modified_at < since for entry in entries.values())


def _remove(store: Store, prefix: str, entries: Mapping[str, Entry]) -> None:
    store.delete(prefix + MANIFEST)
    in_parallel(lambda path: store.delete(prefix + path), [p for p in entries if p != MANIFEST], _NUM_THREADS)


def remove_run(store: Store, job: str) -> None:
    """All that is stored under a run's name, and uploads that never ended. Manifests first: what is half there is none."""
    prefix = f"{job}/"
    store.abort(prefix, datetime.now(UTC))
    keys = [entry.key for entry in store.list(prefix)]
    manifests = [key for key in keys if key.endswith(f"/{MANIFEST}")]
    in_parallel(store.delete, manifests, _NUM_THREADS)
    in_parallel(store.delete, [key for key in keys if key not in {*manifests}], _NUM_THREADS)


# ---------------------------------------------------------------------------------- publish


def publish(store: Store, job: str, files: Mapping[str, bytes]) -> None:
    """Store small files of the run under the job's name, in the order given."""
    for name, content in files.items():
        store.put(f"{job}/{name}", content)


def publish_file(store: Store, key: str, path: Path, limit_bytes: int, known: Known) -> None:
    """
    Store a file as it is now, or its end where it is larger; it may grow meanwhile, or be gone. What
    is there unchanged is not sent, and what `known` says of it is believed.
    """
    now = signature(path)
    if not now:
        return
    wanted, stored = min(now[0], limit_bytes), known.of(key)
    if stored[:-1] == now and stored[-1] >= wanted:
        return
    try:
        _publish_whole(store, key, path) if wanted == now[0] else store.put(key, _end_of(path, limit_bytes))
    except OSError:
        return  # one file that cannot be read must not keep all others from being told
    except OffsiteError as error:
        if not error.damaged:
            raise
        return  # it was trimmed just now: next time
    known.note(key, (*now, wanted))


def _publish_whole(store: Store, key: str, path: Path) -> None:
    shard = describe_file(path, path.name)
    found = store.head(key)
    if found is not None and agrees(found, shard):
        return
    if shard.size_bytes <= CHUNK_BYTES:
        store.put(key, path.read_bytes())
    else:
        store.put_file(key, path, shard, lambda _: None)


def _end_of(path: Path, limit_bytes: int) -> bytes:
    with path.open("rb") as file:
        left_out = max(file.seek(0, os.SEEK_END) - limit_bytes, 0)
        file.seek(left_out)
        return f"[the first {left_out} bytes are not in the store]\n".encode() + file.read(limit_bytes)


# --------------------------------------------------------------------------------- progress


class Meter:
    """Adds up bytes from several threads and tells each whole percent, and each minute that something has moved."""

    def __init__(self, total_bytes: int, progress: Progress) -> None:
        self._total = total_bytes
        self._progress = progress
        self._lock = threading.Lock()
        self._bytes = 0
        self._told = -1
        self._told_at = 0.0

    def add(self, note: str, num_bytes: int) -> None:
        with self._lock:
            self._bytes += num_bytes
            percent = 100 * self._bytes // max(1, self._total)
            if percent > self._told or time.monotonic() >= self._told_at + _TELL_EVERY_S:
                self._told, self._told_at = percent, time.monotonic()
                self._progress(min(1.0, percent / 100), one_line(note))
