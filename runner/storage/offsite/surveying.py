"""
What a store holds of a job.

    <job>/checkpoints/step-00000500-0123abcd/<shard> ...   each confirmed by the store
    <job>/checkpoints/step-00000500-0123abcd/MANIFEST.json last, and only if there is none
    <job>/outcome.json                                     the job is over
    <job>/looked.json                                      what the store can do, found out by the run's first look
    <job>/refusal.json                                     the last start came to nothing through the job or the store

Order, at any time, whoever sends, removes or reads:
  - a manifest in the store MUST name only shards that the store has confirmed;
  - a checkpoint's manifest MUST go before its first shard;
  - the newest whole checkpoint in the store is never removed.

Nothing in a store is trusted.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from runner.committed import Checkpoint
from runner.storage.checkpoints import describe
from runner.storage.offsite.contract import Abilities, Entry, OffsiteError, Store, parse_abilities
from runner.storage.offsite.meter import Progress
from vramfarm.protocol import MANIFEST, MAX_MANIFEST_BYTES, Manifest, ProtocolError, Ref, Shard, is_name, parse_manifest

OUTCOME: Final = "outcome.json"
LOOKED: Final = "looked.json"
_NUM_THREADS: Final = 8
_MAX_ENTRIES: Final = 1_000_000
_SMALL_BYTES: Final = 1 << 20  # of what a run says in a few words
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


def survey(  # noqa: PLR0913  # the last three by name
    store: Store,
    job: str,
    progress: Progress = lambda _fraction, _note: None,
    *,
    wanted: str = "",
    here: Collection[str] = (),
    spoilt: Mapping[str, Spoilt] = _NONE,
    given_up: bool = False,
) -> Survey:
    """
    Look at all of a job in a store; reads manifests, no shard. Those that an earlier look found `spoilt` are not
    read again while they are the same.

    An error if the store refuses the manifest of the one that is `wanted`, by default the newest, unless that is
    `here`: whoever took it for none would go on from an older one, or begin anew. Not `curable`: a run that is no
    further than an older one must not go on meanwhile. Manifests that the store alone fails at (500) are waited for in
    the same way until they are `given_up`: then they are spoilt, so that an older one is taken, and nothing begins
    anew where there is none.
    """
    found = survey_readable(store, job, progress, spoilt=spoilt)
    if given_up:
        lost = {name: ("", str(error)) for name, error in found.refused.items() if error.of_server}
        refused = {name: error for name, error in found.refused.items() if name not in lost}
        unusable = (*found.unusable, *(why for _, why in lost.values()))
        found = replace(found, refused=refused, spoilt={**found.spoilt, **lost}, unusable=unusable)
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
    whole, refused, latest = list[Checkpoint](), dict[str, OffsiteError](), list[tuple[datetime, str]]()
    spoilt_now: dict[str, Spoilt] = {}
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        told = pool.submit(_read_outcome, store, job)
        # of those without a manifest the upload has not ended, or the removal has begun
        listed = {name: entries for name, entries in list_checkpoints(store, job).items() if MANIFEST in entries}
        found = pool.map(partial(_describe_listed, store, job, spoilt), listed.items())
        for number, (name, one) in enumerate(zip(listed, found, strict=True)):
            progress(number / len(listed), name)
            if isinstance(one, tuple):
                spoilt_now[name] = one
                continue
            latest.append((listed[name][MANIFEST].modified_at, name))
            if isinstance(one, Checkpoint):
                whole.append(one)
            else:
                refused[name] = one
        outcome, problems = told.result()
    whole.sort(key=lambda checkpoint: checkpoint.ref)
    return Survey(
        checkpoints=tuple(whole),
        unusable=(*problems, *(why for _, why in spoilt_now.values())),
        spoilt=spoilt_now,
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
        expect_listed(manifest, entries)
        return describe(manifest)
    except ProtocolError as error:
        return "", f"{name}: {error}"
    except OffsiteError as error:
        if error.damaged:
            return which, f"{name}: {error}"
        if not (error.final or error.of_server):
            raise
        what, ill = f"{name}: its manifest cannot be read: {error}", error.of_server
        return OffsiteError(what, hint=error.hint or _REFUSED, final=error.final, of_server=ill, of_object=ill)


def _read_outcome(store: Store, job: str) -> tuple[Mapping[str, Any] | None, list[str]]:
    raw = _read_small(store, f"{job}/{OUTCOME}")
    if raw is None:
        return None, []
    try:
        outcome = json.loads(raw)
    except (ValueError, RecursionError):
        outcome = None
    if not isinstance(outcome, dict):
        return None, [f"{OUTCOME}: expected a JSON object"]
    return (outcome, []) if outcome.get("outcome") else (None, [])  # without one: it was opened again


def list_checkpoints(store: Store, job: str) -> dict[str, dict[str, Entry]]:
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
        raise damaged(store, key, problem)
    with _PARSING:  # what is parsed takes many times its bytes
        try:
            manifest = parse_manifest(raw)
        except ProtocolError as error:
            problem = str(error).removeprefix(f"{MANIFEST}: ")  # the address ends with it
    if problem:
        raise damaged(store, key, problem)
    if manifest.ref.name != name:
        raise damaged(store, key, f"expected the manifest of {name}, got that of {manifest.ref.name}")
    return manifest


def find_whole(store: Store, job: str, name: str) -> Manifest:
    """The manifest of the checkpoint with this name, all of which the store lists; `damaged` if there is none."""
    with ThreadPoolExecutor(1) as beside:
        listing = beside.submit(_list_checkpoint, store, job, name)
        manifest = read_manifest(store, job, name)
        try:
            expect_listed(manifest, listing.result())
        except ProtocolError as error:
            raise damaged(store, f"{job}/checkpoints/{name}", str(error)) from None
    return manifest


def _expect_small(raw: bytes) -> str:
    """Why a manifest is not even parsed: what JSON becomes in memory is told by its signs, and may be thirty times as much."""
    needed = len(raw) + sum(each * raw.count(sign) for sign, each in _SIGN_BYTES.items())
    if needed <= _MAX_PARSED_BYTES:
        return ""
    return f"expected a manifest that takes at most {_MAX_PARSED_BYTES >> 20} MiB of memory, got one of {needed >> 20}"


def expect_listed(manifest: Manifest, entries: Mapping[str, Entry]) -> None:
    for shard in manifest.shards:
        found = entries[shard.path].size_bytes if shard.path in entries else "none"
        if found != shard.size_bytes:
            raise ProtocolError(f"{shard.path}: expected {shard.size_bytes} bytes, found {found}")


def not_listed(store: Store, job: str, manifest: Manifest) -> OffsiteError | None:
    """Just before the manifest: what was confirmed long ago may have been removed since."""
    try:
        expect_listed(manifest, _list_checkpoint(store, job, manifest.ref.name))
    except ProtocolError as error:
        return OffsiteError(f"{store.address}/{job}/checkpoints/{manifest.ref.name}: {error}", final=False)
    return None


def _list_checkpoint(store: Store, job: str, name: str) -> dict[str, Entry]:
    """What is in its folder, by path."""
    prefix = f"{job}/checkpoints/{name}/"
    return {entry.key.removeprefix(prefix): entry for entry in store.list(prefix)}


def damaged(store: Store, key: str, what: str) -> OffsiteError:
    return OffsiteError(
        f"{store.address}/{key}: {what}", hint="use an older checkpoint; this one is damaged", final=True, damaged=True
    )


def key_of(job: str, ref: Ref, shard: Shard) -> str:
    return f"{job}/checkpoints/{ref.name}/{shard.path}"


def read_abilities(store: Store, job: str) -> Abilities | None:
    """What a run found out of its store; None: nothing can be read."""
    raw = _read_small(store, f"{job}/{LOOKED}")
    with suppress(ValueError, RecursionError):
        looked = json.loads(raw or b"{}")
        return parse_abilities(looked.get("abilities")) if isinstance(looked, dict) else None
    return None


def _read_small(store: Store, key: str) -> bytes | None:
    """What is too large to be ours is as good as any other nonsense: it must not hide the checkpoints beside it."""
    try:
        return store.get(key, limit_bytes=_SMALL_BYTES)
    except OffsiteError as error:
        if not error.damaged:
            raise
        return b""
