"""
A checkpoint back on a disk. Every chunk is compared on its way; its manifest is written last, when all else is durable.

Every function may be killed at any moment and called again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from runner.committed import Checkpoint
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk, has_bytes
from runner.storage.offsite.comparing import (
    STRETCH_CHUNKS,
    Stretch,
    chunk_size,
    fetch_chunk,
    is_chunk,
    stream_chunks,
    stretches_of,
)
from runner.storage.offsite.contract import Block, OffsiteError, Store, by_chunk, in_parallel
from runner.storage.offsite.disks import NO_PLACE, expect_room, place_of, refused
from runner.storage.offsite.meter import Meter, Progress
from runner.storage.offsite.surveying import damaged, key_of, read_manifest
from vramfarm.protocol import CHUNK_BYTES, Manifest, Ref, Shard

_NUM_STRETCHES: Final = 12  # that are fetched at once: while some wait for the disk, others wait for the store


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
        raise damaged(store, ref.name, f"expected {ref}, got {manifest.ref}")
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
        self._key = partial(key_of, job, ref)
        self._look = partial(read_manifest, store, job, ref.name)

    def read(self, shard: Shard, chunk: int) -> bytes:
        with self._telling_apart():
            return fetch_chunk(self._store, self._key(shard), shard, chunk)

    def stream(self, shard: Shard, first: int, num_chunks: int) -> Iterator[Block]:
        with self._telling_apart():
            yield from stream_chunks(self._store, self._key(shard), shard, first, num_chunks)

    @contextmanager
    def _telling_apart(self) -> Iterator[None]:
        """Of a server that fails: whether at this object alone, as where a disk of its own has rotten, or at all of them."""
        try:
            yield
        except OffsiteError as error:
            if error.of_server:
                self._look()  # what this raises is said in its place: the store is down
                error.of_object = True
            raise


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
    what, hint = f"to restore {manifest.ref.name}", "or rent a machine with a larger disk"
    expect_room(what, manifest.size_bytes - there, folder.parent, hint)
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

    def num_chunks(shard: Shard) -> int:
        """Single ones of what is begun: some are here, and some are not."""
        return 1 if shard.path in target.begun else STRETCH_CHUNKS

    stretches = [stretch for shard in manifest.shards for stretch in stretches_of(shard, num_chunks(shard))]
    unfinished = _Unfinished(stretches)

    def fetch(stretch: Stretch) -> None:
        path, first = target.folder / stretch.shard.path, stretch.first
        if stretch.shard.path not in target.begun or not _is_here(path, stretch.shard, first):
            _fetch_stretch(source, stretch, target.disk, path)
        if unfinished.is_last(stretch):
            target.disk.sync(path)  # beside what others fetch: a disk that writes late would do it all at the end
        meter.add(stretch.shard.path, sum(chunk_size(stretch.shard, first + i) for i in range(stretch.num_chunks)))

    in_parallel(fetch, _in_turn(manifest, stretches), _NUM_STRETCHES)


def _in_turn(manifest: Manifest, stretches: list[Stretch]) -> list[Stretch]:
    """Of several shards in turn, since some file systems take one write to a file at a time; and then of the next ones."""
    groups = {shard.path: number // _NUM_STRETCHES for number, shard in enumerate(manifest.shards)}
    return sorted(stretches, key=lambda stretch: (groups[stretch.shard.path], stretch.first))


class _Unfinished:
    def __init__(self, stretches: list[Stretch]) -> None:
        self._lock = threading.Lock()
        self._num_left = Counter(stretch.shard.path for stretch in stretches)

    def is_last(self, stretch: Stretch) -> bool:
        """Called once for each that is done: whether its shard is whole by now."""
        with self._lock:
            self._num_left[stretch.shard.path] -= 1
            return not self._num_left[stretch.shard.path]


def _fetch_stretch(source: Source, stretch: Stretch, disk: Disk, path: Path) -> None:
    """What was damaged on its way is fetched again."""
    found: list[int] = []
    blocks = source.stream(stretch.shard, stretch.first, stretch.num_chunks)
    disk.write_blocks(path, stretch.first * CHUNK_BYTES, by_chunk(blocks, found.append))
    for index in stretch.differing(found):
        disk.write_at(path, index * CHUNK_BYTES, source.read(stretch.shard, index))


def _is_here(path: Path, shard: Shard, index: int) -> bool:
    with path.open("rb") as file:
        file.seek(index * CHUNK_BYTES)
        return is_chunk(file.read(chunk_size(shard, index)), shard, index)
