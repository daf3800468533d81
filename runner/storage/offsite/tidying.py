"""What leaves a store. A checkpoint's manifest goes first; the newest whole one never does."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Final

from runner.storage.offsite.contract import PREFLIGHT, Entry, Store, in_parallel
from runner.storage.offsite.surveying import OUTCOME, list_checkpoints, survey
from vramfarm.protocol import MANIFEST

_NUM_THREADS: Final = 8


def tidy(store: Store, job: str, *, keep_last: int, unusable: Collection[str] = ()) -> tuple[str, ...]:
    """
    Keep the newest whole checkpoints and remove older ones. Returns the names of what was removed.

    What is known as `unusable` takes no place of a good one. It goes with its age, and not before: the fault
    may be this machine's.
    """
    names = [checkpoint.ref.name for checkpoint in survey(store, job).checkpoints]
    kept = [name for name in names if name not in unusable][-max(1, keep_last) :]
    removed = names[: names.index(kept[0])] if kept else []
    listed = list_checkpoints(store, job) if removed else {}
    for name in removed:  # or somebody else has, meanwhile
        _remove(store, f"{job}/checkpoints/{name}/", listed.get(name, {}))
    return tuple(removed)


def sweep(store: Store, job: str) -> None:
    """
    Remove what uploads of a checkpoint left behind that had ended before the last one was complete: of a process,
    an attempt or a machine that is no more. Unfinished ones cost like objects, and no list shows them.
    """
    listed = list_checkpoints(store, job)
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
        for left in [e.key for e in store.list(f"{job}/{PREFLIGHT}/") if e.modified_at < entry.modified_at]:
            store.delete(left)  # of a look that was killed


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
