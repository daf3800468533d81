"""
Into a store: a checkpoint, of which the manifest is stored last, and small files of a run.

Every function may be killed at any moment and called again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from operator import call
from pathlib import Path
from typing import Final

from runner.storage.checkpoints import CheckpointDir
from runner.storage.checksums import describe_file
from runner.storage.offsite.comparing import differs, differs_in_bytes
from runner.storage.offsite.contract import Entry, OffsiteError, Store, agrees, in_parallel
from runner.storage.offsite.known import Known, signature
from runner.storage.offsite.meter import Meter, Progress
from runner.storage.offsite.surveying import key_of, list_checkpoints, not_listed, read_manifest
from vramfarm.protocol import (
    CHUNK_BYTES,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    ProtocolError,
    Ref,
    Shard,
    parse_manifest,
)

_NUM_SHARDS: Final = 4  # that are sent at once; their parts share the store's threads
_NUM_ORIGINS: Final = 2  # checkpoints in which content is looked for
_PAUSES_S: Final = (0.2, 0.8, 2.0)


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
    looks: list[Callable[[], None]] = [expect_ours, lambda: _eventually(lambda: not_listed(store, job, manifest))]
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
        self._differs = differs_in_bytes if manifest.ref.name in unusable else differs
        self._listed: dict[str, dict[str, Entry]] | None = None  # what was there at the beginning
        self._there: dict[_Content, str] | None = None  # key of an object with this content
        self._own: dict[_Content, str] = {}  # the same, of this checkpoint
        self._lock, self._asking = threading.Lock(), threading.RLock()
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
            self._bring(key_of(self._job, self._manifest.ref, shard), shard)
        except Exception as error:
            self._error = self._error or error
            raise _StoppedError from error

    def _bring(self, key: str, shard: Shard) -> None:
        if self._is_there(key, shard) or self._copy(key, shard):
            self._sent(shard.path, shard.size_bytes)
            return
        self._store.put_file(key, self._source / shard.path, shard, partial(self._sent, shard.path))
        _eventually(lambda: self._not_kept(key, shard))
        self._own[_content(shard)] = key

    def _is_there(self, key: str, shard: Shard) -> bool:
        """What the store does not list is sent without a question: the first time that is every shard."""
        is_listed = shard.path in self._list().get(self._manifest.ref.name, ())
        return is_listed and not self._differs(self._store, key, shard)

    def _sent(self, note: str, num_bytes: int) -> None:
        if self._error:
            raise _StoppedError  # the others stop after the part that they were at
        self._meter.add(note, num_bytes)

    def _copy(self, key: str, shard: Shard) -> bool:
        """One chunk's checksum is too little to tell contents apart, and one chunk is soon sent."""
        content = _content(shard)
        origin = self._own.get(content) or self._found().get(content) if len(shard.checksums) > 1 else None
        if origin is None:
            return False
        try:
            done = self._store.copy(origin, key, shard) and not self._differs(self._store, key, shard)
        except OffsiteError:
            return False  # whatever it is: sending will say it, or do
        with self._lock:
            self.copied_bytes += shard.size_bytes if done else 0
        return done

    def _list(self) -> Mapping[str, Mapping[str, Entry]]:
        with self._asking:
            if self._listed is None:
                self._listed = list_checkpoints(self._store, self._job)
            return self._listed

    def _found(self) -> Mapping[_Content, str]:
        """Contents of the checkpoints in the store that came last, by their manifests."""
        with self._asking:
            if self._there is None:
                came = sorted(
                    (found[MANIFEST].modified_at, name)
                    for name, found in self._list().items()
                    if MANIFEST in found and name not in self._unusable
                )
                names = [name for _, name in came[-_NUM_ORIGINS:]]
                contents = in_parallel(self._contents, names, _NUM_ORIGINS)
                self._there = {content: key for one in contents for content, key in one.items()}
            return self._there

    def _contents(self, name: str) -> dict[_Content, str]:
        with suppress(OffsiteError):  # gone or spoilt: then less is copied, and more is sent
            whole = read_manifest(self._store, self._job, name)
            return {_content(shard): key_of(self._job, whole.ref, shard) for shard in whole.shards}
        return {}

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
