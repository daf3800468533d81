"""
One checkpoint of what all ranks staged: onto the disk, compared, committed; or nothing.

Standard library and protocol only. It waits for the disk as long as that takes, so the saver calls it
on a thread.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, Final

from vramfarm import folder, image, metadata, protocol, writing
from vramfarm.arenas import Arenas
from vramfarm.orders import Orders, say
from vramfarm.protocol import ControlPage, Reason, Slot, Told, Word

FROZEN: Final = "frozen"  # in the manifest's state
BUSY_S: Final = 0.005  # between two looks at what comes soon


@dataclass(frozen=True)
class Staged:
    """
    A rank's part of a save: the images of its files at the beginning of `memory`, and its JSON.

    `places` says where each begins and ends: the shard, then what edges there are. `frozen` names its frozen weights, 0 if it has none; they are staged, or, with no bytes, in an older checkpoint.
    """

    memory: memoryview
    places: Sequence[tuple[int, int]]
    state: dict[str, Any]
    frozen: int
    frozen_memory: memoryview
    frozen_bytes: int
    window_bytes: int = 0  # not 0: `memory` holds so much at a time


@dataclass(frozen=True)
class Held:
    """A rank's frozen weights, in a committed checkpoint."""

    path: Path
    shard: protocol.Shard


class SaveError(Exception):
    """A save did not happen; the text is for a human. Training goes on."""


class ApartError(SaveError):
    """Nor did this one, which the next step makes up for: each rank has been told what to save by itself."""


class Committer:
    """Writes and commits. `shards_s`: of the save that was written last, how long the shards took."""

    def __init__(
        self,
        orders: Orders,
        page: ControlPage,
        arenas: Arenas,
        pool: ThreadPoolExecutor,
        *,
        late_s: float = protocol.LATE_S,
    ) -> None:
        self._late_s = late_s
        self._orders = orders
        self._page = page
        self._arenas = arenas
        self._pool = pool
        self._covered: list[tuple[bytes, int]] = []
        self.shards_s = 0.0

    def write(self, step: int, reason: Reason) -> protocol.Manifest:
        """Write one checkpoint and commit it, or leave nothing and raise. `folder.UnsyncedError`: it is there, and a power loss may take it."""
        again = self._committed_before(step)
        if again is not None:
            return again
        began = time.monotonic_ns()
        staged = [self._staged(rank) for rank in range(self._page.num_ranks)]
        identity = os.urandom(4).hex()
        temporary = self._orders.directory / f"{protocol.TEMPORARY}{step:08d}-{identity}"
        try:
            held = [self._held(rank, one, len(staged)) for rank, one in enumerate(staged)]
            size = sum(
                one.places[-1][1] + (0 if there else one.frozen_bytes) for one, there in zip(staged, held, strict=True)
            )
            if why := folder.want_of_room(self._orders.directory, size):
                raise SaveError(why)  # noqa: TRY301  # cleaned up below
            temporary.mkdir()
            started = time.monotonic()
            written = self._write_shards(step, temporary, staged, held)
            self.shards_s = time.monotonic() - started
            self._expect_alike(
                temporary, staged
            )  # first: who writes what is decided by the sizes of all that is saved once
            self._expect_cover([temporary / shard.path for shard in written])
            manifest = self._manifest(step, reason, identity, written, staged)
            self._page[Word.SAVE_NS] = time.monotonic_ns() - began  # whoever sees the folder asks how long it took
            folder.commit(temporary, manifest)
        except BaseException:
            folder.discard(temporary)
            raise
        return manifest

    def want_of_room(self) -> str:
        """Known before the ranks are asked to stage, once the size is known. Without a supervisor, one less is kept then."""
        size = sum(self._page.get(rank, Slot.IMAGE_BYTES) for rank in range(self._page.num_ranks))
        directory = self._orders.directory
        try:
            why = folder.want_of_room(directory, size)
            if why and self._orders.keep_last is not None and not folder.want_of_room(directory, size, keep_last=1):
                folder.prune(directory, 1)
                why = folder.want_of_room(directory, size)
        except OSError:
            return ""  # writing will say what is wrong
        return why

    def _committed_before(self, step: int) -> protocol.Manifest | None:
        """A saver that was killed just after its commit, or could not sync it, finds the save pending. Only now it is surely durable."""
        ours = (self._orders.lineage, step, self._orders.attempt)
        for stored in folder.committed(self._orders.directory):
            if (stored.manifest.lineage, stored.manifest.step, stored.manifest.attempt) == ours:
                folder.sync_name(stored.path)
                return stored.manifest
        return None

    def _staged(self, rank: int) -> Staged:
        """Return what a rank staged."""
        size, length = self._page.get(rank, Slot.IMAGE_BYTES), self._page.get(rank, Slot.STATE_BYTES)
        arena = self._arenas.memory(rank)
        frozen_at, frozen_bytes = self._page.get(rank, Slot.FROZEN_AT), self._page.get(rank, Slot.FROZEN_BYTES)
        window, at = self._page.get(rank, Slot.WINDOW_BYTES), self._page.get(rank, Slot.STATE_AT)
        if window:
            return self._staged_by_window(rank, arena, window, at)
        if size + length > len(arena):
            raise SaveError(f"rank {rank}: staged {size + length} bytes in an arena of {len(arena)}")
        if frozen_bytes and not size + length <= frozen_at <= len(arena) - frozen_bytes:
            raise SaveError(
                f"rank {rank}: staged {frozen_bytes} frozen bytes at {frozen_at} in an arena of {len(arena)}"
            )
        state = json.loads(bytes(arena[size : size + length]))
        return Staged(
            arena, _places(rank, state, size), state, self._page.get(rank, Slot.FROZEN), arena[frozen_at:], frozen_bytes
        )

    def _staged_by_window(self, rank: int, arena: memoryview, window: int, at: int) -> Staged:
        get = self._page.get
        length = get(rank, Slot.STATE_BYTES)
        if window % protocol.CHUNK_BYTES or not window <= at <= len(arena) - length:
            raise SaveError(f"rank {rank}: staged through {window} bytes, JSON at {at}, in an arena of {len(arena)}")
        if (get(rank, Slot.WINDOWS), get(rank, Slot.WINDOWS_TAKEN)) != (1, 0):
            raise SaveError("the saver was started again while the ranks staged piece by piece")
        state = json.loads(bytes(arena[at : at + length]))
        return Staged(
            memory=arena,
            places=_places(rank, state, get(rank, Slot.IMAGE_BYTES)),
            state=state,
            frozen=get(rank, Slot.FROZEN),
            frozen_memory=arena[:0],
            frozen_bytes=get(rank, Slot.FROZEN_BYTES),
            window_bytes=window,
        )

    def _held(self, rank: int, staged: Staged, world_size: int) -> Held | None:
        """
        Return where a rank's frozen weights are on this disk already, told by their name or by their checksums.

        None: there are none, or they are to be written.
        """
        name = protocol.frozen_name(rank, world_size)
        if staged.window_bytes and staged.frozen_bytes:
            return None  # not here to be compared
        for stored in folder.committed(self._orders.directory) if staged.frozen else ():
            shard = next((one for one in stored.manifest.shards if one.path == name), None)
            if shard is None:
                continue
            if staged.frozen_bytes:
                same = writing.is_written(staged.frozen_memory[: staged.frozen_bytes], shard)
            else:
                same = frozen_in(stored.manifest).get(str(rank)) == staged.frozen
            if same:
                return Held(stored.path / name, shard)
            if staged.frozen_bytes:
                return None  # of several checkpoints the newest is compared
        if staged.frozen and not staged.frozen_bytes:
            self._page.put(rank, Slot.FROZEN_HELD, 0)
            raise SaveError("no checkpoint has the frozen weights any more; the next save writes them again")
        return None

    def _expect_cover(self, paths: Sequence[Path]) -> None:
        """What is committed can be loaded: all ranks together staged every element once. Equal headers are looked at once."""
        headers = [_read_header(path) for path in paths]
        if headers != self._covered:
            if why := image.want_of_cover(image.parse_header(header, size) for header, size in headers):
                raise SaveError(f"{why}; the ranks do not agree on who saves what")
            self._covered = headers

    def _expect_alike(self, temporary: Path, staged: Sequence[Staged]) -> None:
        """What is saved once is the same on all ranks; from the next save on each saves its own of what is not."""
        told = [metadata.take_alike(one.state) for one in staged]
        if not any(told):
            return
        sums = [
            _read_sums(temporary / protocol.shard_name(rank, len(staged)), told[rank]) for rank in range(len(staged))
        ]
        differing = sorted(
            {name for one in sums for name in sums[0].keys() | one.keys() if one.get(name) != sums[0].get(name)}
        )
        if not differing:
            return
        before, own = self._page[Word.APART], [metadata.own_objects(one.state) for one in staged]
        self._page[Word.APART] |= protocol.apart_bits(set().union(*sums, *own), differing)
        kind = SaveError if self._page[Word.APART] == before else ApartError
        raise kind(
            f"{', '.join(differing)}: differs from rank to rank; the next save has each rank's own, and a resume gives it back to that rank"
        )

    def _write_shards(
        self, step: int, temporary: Path, staged: Sequence[Staged], held: Sequence[Held | None]
    ) -> tuple[protocol.Shard, ...]:
        jobs = [
            self._pool.submit(self._write_rank, step, temporary, rank, staged, there) for rank, there in enumerate(held)
        ]
        wait(jobs)  # also where one failed: what has begun still writes
        return tuple(shard for job in jobs for shard in job.result())

    def _write_rank(
        self, step: int, temporary: Path, rank: int, staged: Sequence[Staged], held: Held | None
    ) -> list[protocol.Shard]:
        """On a thread. Frozen weights that are there already get a link."""
        one = staged[rank]
        edges = [protocol.edges_name(rank, len(staged), number) for number in range(1, len(one.places))]
        paths = [temporary / name for name in (protocol.shard_name(rank, len(staged)), *edges)]
        files = list(zip(paths, one.places, strict=True))
        frozen = temporary / protocol.frozen_name(rank, len(staged))
        if one.window_bytes:
            windows = self._windows(step, rank, one)
            written = [writing.write_windows(path, b - a, windows, one.window_bytes) for path, (a, b) in files]
            if one.frozen_bytes:
                written.append(writing.write_windows(frozen, one.frozen_bytes, windows, one.window_bytes))
        else:
            written = [writing.write_shard(path, one.memory[a:], b - a) for path, (a, b) in files]
            if held is None and one.frozen_bytes:
                written.append(writing.write_shard(frozen, one.frozen_memory, one.frozen_bytes))
        if held is not None:
            written.append(writing.link_shard(held.path, frozen, held.shard))
        return written

    def _windows(self, step: int, rank: int, staged: Staged) -> Iterator[memoryview]:
        """Yield the window each time that the rank has filled it, and let the rank go on when it is written."""
        get = self._page.get
        owner, is_told = (get(rank, Slot.PID), get(rank, Slot.STARTED)), False
        for number in itertools.count():
            began = time.monotonic()
            while get(rank, Slot.WINDOWS) <= number:
                if get(rank, Slot.VOID_STEP) == step or protocol.process_started(owner[0]) != owner[1]:
                    raise SaveError(f"rank {rank} ended, or gave up, before its state was staged")
                if not is_told and time.monotonic() - began > self._late_s:
                    is_told = True
                    self._page.set_error(why := late(self._page, step, rank), Told.WAITING)
                    say(why)
                time.sleep(BUSY_S)
            yield staged.memory[: staged.window_bytes]
            self._page.put(rank, Slot.WINDOWS_TAKEN, number + 1)

    def _manifest(
        self, step: int, reason: Reason, identity: str, shards: tuple[protocol.Shard, ...], staged: Sequence[Staged]
    ) -> protocol.Manifest:
        frozen = {str(rank): one.frozen for rank, one in enumerate(staged) if one.frozen}
        return protocol.Manifest(
            job=self._orders.job,
            lineage=self._orders.lineage,
            step=step,
            id=identity,
            attempt=self._orders.attempt,
            world_size=len(staged),
            written_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            algorithm=protocol.ALGORITHM,
            shards=shards,
            contents=metadata.contents(staged[0].state),
            reason=reason.name.lower(),
            state={"ranks": {str(rank): one.state for rank, one in enumerate(staged)}, FROZEN: frozen},
        )


def _places(rank: int, state: dict[str, Any], size: int) -> list[tuple[int, int]]:
    """Return where a rank's images are: one, unless its JSON names the sizes of several."""
    found = image.places(metadata.take_sizes(state, size))
    if found[-1][1] != size:
        raise SaveError(f"rank {rank}: staged {size} bytes, and files that end at {found[-1][1]}")
    return found


def _read_sums(path: Path, told: dict[str, Any]) -> dict[str, Any]:
    """Return what a rank says of its objects, with the sums in its shard."""
    if not any(keys for _, keys in told.values()):
        return told
    placed = {one.box.key: one for one in image.parse_header(*_read_header(path))}
    with path.open("rb") as file:
        return {name: [crc, [_read(file, placed[key]) for key in keys]] for name, (crc, keys) in told.items()}


def _read(file: IO[bytes], placed: image.Placed) -> bytes:
    file.seek(placed.begin)
    return file.read(placed.end - placed.begin)


def _read_header(path: Path) -> tuple[bytes, int]:
    with path.open("rb") as file:
        first, size = file.read(8), os.fstat(file.fileno()).st_size
        return first + file.read(image.header_bytes(first, size) - 8), size


def late(page: ControlPage, step: int, rank: int) -> str:
    """Say, once a save, which rank it waits for."""
    who = protocol.describe_rank(page, rank)
    what = f"has not staged the save of step {step} for {protocol.LATE_S:.0f} s; what was committed before stays"
    return f"waiting: {who}, {what}"


def frozen_in(manifest: protocol.Manifest) -> dict[str, int]:
    """Return the names of each rank's frozen weights. The manifest may be anybody's."""
    found = manifest.state.get(FROZEN)
    return found if isinstance(found, dict) else {}
