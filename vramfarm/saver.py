"""
The saver: the one process that decides when to save, and the one that commits a checkpoint.

Run as `python -I /…/vramfarm/saver.py`, in a session of its own. Standard library and protocol
only. It holds the memory that the ranks stage into, so a save that all of them staged is
committed even if all of them are killed. It stays until training has ended, or they are gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, TypeVar

if __name__ == "__main__":  # last: nothing beside the package may shadow the standard library
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120  # a link stays a link

from vramfarm import agreement, folder, image, memory, protocol, writing
from vramfarm.agreement import Fate, Rank, Wishes
from vramfarm.protocol import Arena, ControlPage, Decision, Ended, EndRecord, Env, Phase, Reason, Slot, Word

ALGORITHM: Final = "crc32"
FROZEN: Final = "frozen"  # in the manifest's state
FIRST_SAVE_S: Final = 120.0  # disk, size and cost must be known while leaving is still cheap
RETRY_S: Final = 2.0
RETRY_INTERVAL_S: Final = 60.0
FINAL_TRIES: Final = 3
LATE_S: Final = 120.0  # from the first rank that staged a save to a word on the one that did not
LOCK_PATIENCE_S: Final = 60.0  # of ranks that are done and wait for their last save
_IDLE_S: Final = 0.02
_BUSY_S: Final = 0.005
_LOOK_S: Final = 0.1  # between two looks at whether the ranks live
_T = TypeVar("_T")


@dataclass(frozen=True)
class Orders:
    """What the saver is told, once, by its environment."""

    control: Path
    directory: Path
    interval_s: float
    job: str
    lineage: int
    attempt: int
    resumed_step: int
    end_file: Path | None
    keep_last: int | None

    @classmethod
    def parse(cls, env: Mapping[str, str]) -> Orders:
        resume = env.get(Env.RESUME, "none")
        end_file, keep_last = env.get(Env.END_FILE), env.get(Env.KEEP_LAST)
        return cls(
            control=Path(env[Env.CONTROL]),
            directory=Path(env[Env.CHECKPOINT_DIR]),
            interval_s=float(env.get(Env.SAVE_INTERVAL_S, "1800")),
            job=env.get(Env.JOB) or "job",
            lineage=int(env.get(Env.LINEAGE, "0")),
            attempt=int(env.get(Env.ATTEMPT, "1")),
            resumed_step=0 if resume == "none" else protocol.parse_name(Path(resume).name)[0],
            end_file=Path(end_file) if end_file else None,
            keep_last=int(keep_last) if keep_last else None,
        )


@dataclass
class Staging:
    """The saver's own hold on a rank's arena: it outlives the rank."""

    owner: tuple[int, int]
    memory: memoryview


@dataclass(frozen=True)
class Populating:
    """An announced arena that is given its pages: a second for each 2 GB, on a thread of its own."""

    arena: tuple[int, int, int]
    job: Future[memoryview]


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


@dataclass
class Save:
    """A save on its way, from the proposal on."""

    step: int
    reason: Reason
    serves: int  # the REQUEST_SAVE it answers
    started: float = field(default_factory=time.monotonic)
    staged_at: float | None = None  # by the first rank
    is_late: bool = False  # and that was said


class SaveError(Exception):
    """A save did not happen; the text is for a human. Training goes on."""


class Saver:
    def __init__(self, orders: Orders, page: ControlPage) -> None:
        self._orders = orders
        self._page = page
        self._stagings: dict[int, Staging] = {}
        self._save: Save | None = None
        self._lock: int | None = None
        self._due_at: float | None = None  # None: no step yet
        self._not_before = 0.0
        self._ahead = agreement.AHEAD
        self._warm_by = 0.0  # a rank that prepares its staging memory is waited for until then
        self._final_failures = 0
        self._covered: list[tuple[bytes, int]] = []
        self._alive: dict[int, bool] = {}
        self._looked_at = 0.0
        self._pool = ThreadPoolExecutor(max_workers=page.num_ranks)
        self._disk = ThreadPoolExecutor(max_workers=1)
        self._populating: dict[int, Populating] = {}
        self._free_bytes: int | None = None
        self._shards_s = 0.0  # of the save that was written last
        self._taking = threading.Lock()

    def run(self) -> None:
        """Serve until training has ended or the ranks are gone, and nothing is left to commit."""
        self._page[Word.SAVER_STARTED] = protocol.process_started(os.getpid())
        self._page[Word.SAVER_PID] = os.getpid()
        self._beat()
        if self._take_lock():
            self._recover()
        while not self._is_over():
            self._turn()
            self._pause(_BUSY_S if self._save else _IDLE_S)

    # ---------------------------------------------------------------- a turn

    def _turn(self) -> None:
        ranks = self._look()
        if self._save is None:
            self._release()
            self._consider(ranks)
            return
        final = self._save.reason is Reason.FINAL
        match agreement.decide_fate(self._save.step, ranks, final=final):
            case Fate.WRITE:
                self._finish(self._save)
            case Fate.VOID if not final and any(rank.phase is Phase.DONE for rank in ranks):
                self._settle(Decision.ABORTED)  # training ended before that step; the final save comes next
            case Fate.VOID:
                complaint = self._page.error()
                more = f" ({complaint})" if complaint.startswith("rank ") else ""
                self._fail(f"a rank ended, or could not take part, before its state was staged{more}")
            case Fate.WAIT:
                self._wait_for_ranks(self._save, ranks)

    def _consider(self, ranks: Sequence[Rank]) -> None:
        now = time.monotonic()
        if self._due_at is None and all(r.step > self._orders.resumed_step for r in ranks):
            self._due_at = now + min(self._orders.interval_s, FIRST_SAVE_S)
            self._warm_by = now + FIRST_SAVE_S
        if now < self._not_before or self._page[Word.ENDED]:
            return
        requests = self._page[Word.REQUEST_SAVE]
        wishes = Wishes(
            leave=bool(self._page[Word.REQUEST_LEAVE]),
            asked=requests != self._page[Word.SERVED_SAVE],
            due=self._due_at is not None and now >= self._due_at,
            cold=now < self._warm_by and any(rank.warming for rank in ranks),
        )
        reason = agreement.decide_reason(ranks, wishes)
        if reason is None:
            return
        step = max(r.step for r in ranks)
        if reason is Reason.FINAL and step in {0, self._orders.resumed_step, self._page[Word.COMMITTED_STEP]}:
            self._conclude(EndRecord("done", step))
        elif why := self._patiently(self._want_of_room):
            self._save = Save(step, reason, requests)
            self._fail(why)
        else:
            self._begin(reason, self._look(), requests)  # steps were made meanwhile

    def _begin(self, reason: Reason, ranks: Sequence[Rank], requests: int) -> None:
        """Propose, look again, agree. In a final save all ranks already wait, so there is nothing to propose."""
        page, final = self._page, reason is Reason.FINAL
        step = max(r.step for r in ranks) if final else agreement.propose_step(ranks, self._ahead)
        if reason is Reason.LEAVE and step == page.get(0, Slot.MAX_STEPS):
            reason = Reason.ASKED  # it is done by then, and done counts for more than left
        page[Word.DECISION] = Decision.PROPOSED  # before the step: no rank may see it with an old decision
        page[Word.REASON] = reason
        page[Word.PROPOSED_STEP] = step
        time.sleep(_BUSY_S)  # every store of a rank that did not see the proposal is visible now
        agreed = final or agreement.is_agreed(step, self._look())
        self._ahead = agreement.next_ahead(self._ahead, agreed=agreed)
        if not agreed:
            page[Word.DECISION] = Decision.ABORTED
            return
        page[Word.SAVING_STEP] = step
        page[Word.DECISION] = Decision.COMMITTED
        self._save = Save(step, reason, requests)

    # ------------------------------------------------------- outcome of a save

    def _finish(self, save: Save) -> None:
        """All ranks staged it. From here on only this process is needed."""
        started = time.monotonic_ns()
        try:
            manifest = self._patiently(self._write, save)
        except OSError as error:
            self._fail(folder.describe_error(self._orders.directory, error))
            return
        except (SaveError, ValueError) as error:
            self._fail(str(error))
            return
        except (MemoryError, RuntimeError) as error:  # RuntimeError: a thread that could not be started
            self._fail(f"no memory, or no thread, to write it with ({error!r}); the next save tries again")
            return
        page = self._page
        page[Word.SAVE_NS] = time.monotonic_ns() - started
        page[Word.SAVE_BYTES] = manifest.size_bytes
        for rank, frozen in _frozen_in(manifest).items():
            page.put(int(rank), Slot.FROZEN_HELD, frozen)
        page[Word.COMMITTED_STEP] = save.step
        page[Word.NUM_COMMITTED] += 1
        say(
            f"commit step={save.step} shards={len(manifest.shards)} bytes={manifest.size_bytes} {save.reason.name.lower()}, "
            f"{page[Word.SAVE_NS] / 1e9:.3f}s, of it {self._shards_s:.3f}s for the shards"
        )
        self._due_at = save.started + self._orders.interval_s
        if save.reason is Reason.LEAVE and not self._conclude(EndRecord("left", save.step)):
            return
        if save.reason is Reason.FINAL and not self._conclude(EndRecord("done", save.step)):
            return
        self._settle(Decision.NONE)
        self._rotate()

    def _conclude(self, record: EndRecord) -> bool:
        """Record durably how training ended, then let the ranks go."""
        recorded = record.kind != "done" or not self._page[Word.UNRECORDED]
        try:
            if self._orders.end_file is not None and recorded:
                self._patiently(folder.write_durably, self._orders.end_file, record.dump())
        except OSError as error:
            self._fail(f"end record: {error}")
            return False
        self._page[Word.ENDED] = Ended.DONE if record.kind == "done" else Ended.LEFT
        return True

    def _fail(self, why: str) -> None:
        now, save = time.monotonic(), self._save
        text = f"save of step {save.step} failed: {why}" if save else why
        self._page.set_error(text)  # first: the page is memory, the log is on the disk that may be full
        say(text)
        self._page[Word.NUM_FAILED] += 1
        self._not_before = now + RETRY_S
        self._due_at = now + min(self._orders.interval_s, RETRY_INTERVAL_S)
        if save is None or save.reason is Reason.FINAL:
            self._final_failures += 1
        if self._final_failures >= FINAL_TRIES:
            self._page[Word.ENDED] = Ended.FAILED
        self._settle(Decision.ABORTED)

    def _settle(self, decision: Decision) -> None:
        """The arenas may be filled again. The decision last: ranks go on when they see it."""
        if self._save is not None:
            self._page[Word.SERVED_SAVE] = self._save.serves
        self._save = None
        self._release()
        self._page[Word.SAVING_STEP] = 0
        self._page[Word.DECISION] = decision

    def _wait_for_ranks(self, save: Save, ranks: Sequence[Rank]) -> None:
        """What others staged waits for as long as it takes: a rank that evaluates comes late. A long wait is told, once."""
        self._release(but=save.step)
        late = [number for number, rank in enumerate(ranks) if not rank.is_ready(save.step)]
        if len(late) == len(ranks):
            save.staged_at = None
            return
        save.staged_at = save.staged_at or time.monotonic()
        if save.is_late or time.monotonic() - save.staged_at < LATE_S:
            return
        save.is_late = True
        pid = self._page.get(late[0], Slot.PID)
        doing = protocol.process_state(pid)
        text = (
            f"save of step {save.step} waits for rank {late[0]}, process {pid}{doing and f', {doing}'}, which is at step "
            f"{ranks[late[0]].step} and has not staged it for {LATE_S:.0f} s; what was committed before stays"
        )
        self._page.set_error(text)
        say(text)

    def _release(self, but: int | None = None) -> None:
        """What is staged, or was staged too late, is wanted by nobody, but for the save that is on its way."""
        get = self._page.get
        for rank in self._stagings:
            if get(rank, Slot.ARENA_STATE) == Arena.READY and get(rank, Slot.ARENA_STEP) != but:
                self._page.put(rank, Slot.ARENA_STATE, Arena.MAPPED)

    def _rotate(self) -> None:
        """Without a supervisor nobody else does."""
        if self._orders.keep_last is None:
            return
        try:
            self._patiently(folder.prune, self._orders.directory, self._orders.keep_last)
            self._patiently(
                folder.discard_leftovers, self._orders.directory
            )  # of a save that failed, and its removal too
        except OSError as error:
            self._page.set_error(f"old checkpoints could not be removed: {error}")

    # --------------------------------------------------------------- writing

    def _write(self, save: Save) -> protocol.Manifest:
        """Write one checkpoint and commit it, or leave nothing and raise."""
        again = self._committed_before(save.step)
        if again is not None:
            return again
        staged = [self._staged(rank) for rank in range(self._page.num_ranks)]
        identity = os.urandom(4).hex()
        temporary = self._orders.directory / f"{protocol.TEMPORARY}{save.step:08d}-{identity}"
        try:
            held = [self._held(rank, one, len(staged)) for rank, one in enumerate(staged)]
            size = sum(
                one.places[-1][1] + (0 if there else one.frozen_bytes) for one, there in zip(staged, held, strict=True)
            )
            if why := folder.want_of_room(self._orders.directory, size):
                raise SaveError(why)  # noqa: TRY301  # cleaned up below
            temporary.mkdir()
            started = time.monotonic()
            written = self._write_shards(save, temporary, staged, held)
            self._shards_s = time.monotonic() - started
            self._expect_cover([temporary / shard.path for shard in written])
            manifest = self._manifest(save, identity, written, staged)
            folder.commit(temporary, manifest)
        except BaseException:
            folder.discard(temporary)
            raise
        return manifest

    def _committed_before(self, step: int) -> protocol.Manifest | None:
        """A saver that was killed just after its commit has a successor that finds the save pending."""
        ours = (self._orders.lineage, step, self._orders.attempt)
        for stored in folder.committed(self._orders.directory):
            if (stored.manifest.lineage, stored.manifest.step, stored.manifest.attempt) == ours:
                return stored.manifest
        return None

    def _staged(self, rank: int) -> Staged:
        """Return what a rank staged."""
        size, length = self._page.get(rank, Slot.IMAGE_BYTES), self._page.get(rank, Slot.STATE_BYTES)
        arena = self._stagings[rank].memory
        frozen, apart = self._page.get(rank, Slot.FROZEN_AT), self._page.get(rank, Slot.FROZEN_BYTES)
        window, at = self._page.get(rank, Slot.WINDOW_BYTES), self._page.get(rank, Slot.STATE_AT)
        if window:
            return self._staged_by_window(rank, arena, window, at)
        if size + length > len(arena):
            raise SaveError(f"rank {rank}: staged {size + length} bytes in an arena of {len(arena)}")
        if apart and not size + length <= frozen <= len(arena) - apart:
            raise SaveError(f"rank {rank}: staged {apart} frozen bytes at {frozen} in an arena of {len(arena)}")
        state = json.loads(bytes(arena[size : size + length]))
        return Staged(
            arena, _places(rank, state, size), state, self._page.get(rank, Slot.FROZEN), arena[frozen:], apart
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
                same = _frozen_in(stored.manifest).get(str(rank)) == staged.frozen
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

    def _patiently(self, call: Callable[..., _T], *arguments: Any) -> _T:  # noqa: ANN401  # whatever it takes
        """Have something done that waits for a disk. However long it takes, the ranks see that we live."""
        job = self._disk.submit(call, *arguments)
        while not wait([job], timeout=_BUSY_S).done:
            self._beat()
        return job.result()

    def _write_shards(
        self, save: Save, temporary: Path, staged: Sequence[Staged], held: Sequence[Held | None]
    ) -> tuple[protocol.Shard, ...]:
        jobs = [
            self._pool.submit(self._write_rank, save, temporary, rank, staged, there) for rank, there in enumerate(held)
        ]
        wait(jobs)  # also where one failed: what has begun still writes
        return tuple(shard for job in jobs for shard in job.result())

    def _write_rank(
        self, save: Save, temporary: Path, rank: int, staged: Sequence[Staged], held: Held | None
    ) -> list[protocol.Shard]:
        """On a thread. Frozen weights that are there already get a link."""
        one = staged[rank]
        edges = [protocol.edges_name(rank, len(staged), number) for number in range(1, len(one.places))]
        paths = [temporary / name for name in (protocol.shard_name(rank, len(staged)), *edges)]
        files = list(zip(paths, one.places, strict=True))
        apart = temporary / protocol.frozen_name(rank, len(staged))
        if one.window_bytes:
            windows = self._windows(save, rank, one)
            written = [writing.write_windows(path, b - a, windows, one.window_bytes) for path, (a, b) in files]
            if one.frozen_bytes:
                written.append(writing.write_windows(apart, one.frozen_bytes, windows, one.window_bytes))
        else:
            written = [writing.write_shard(path, one.memory[a:], b - a) for path, (a, b) in files]
            if held is None and one.frozen_bytes:
                written.append(writing.write_shard(apart, one.frozen_memory, one.frozen_bytes))
        if held is not None:
            written.append(writing.link_shard(held.path, apart, held.shard))
        return written

    def _windows(self, save: Save, rank: int, staged: Staged) -> Iterator[memoryview]:
        """Yield the window each time that the rank has filled it, and let the rank go on when it is written."""
        get = self._page.get
        owner = (get(rank, Slot.PID), get(rank, Slot.STARTED))
        for number in itertools.count():
            while get(rank, Slot.WINDOWS) <= number:
                if get(rank, Slot.VOID_STEP) == save.step or protocol.process_started(owner[0]) != owner[1]:
                    raise SaveError(f"rank {rank} ended, or gave up, before its state was staged")
                time.sleep(_BUSY_S)
            yield staged.memory[: staged.window_bytes]
            self._page.put(rank, Slot.WINDOWS_TAKEN, number + 1)

    def _manifest(
        self, save: Save, identity: str, shards: tuple[protocol.Shard, ...], staged: Sequence[Staged]
    ) -> protocol.Manifest:
        frozen = {str(rank): one.frozen for rank, one in enumerate(staged) if one.frozen}
        return protocol.Manifest(
            job=self._orders.job,
            lineage=self._orders.lineage,
            step=save.step,
            id=identity,
            attempt=self._orders.attempt,
            world_size=len(staged),
            written_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            algorithm=ALGORITHM,
            shards=shards,
            contents=tuple(staged[0].state.get("contents", ())),
            reason=save.reason.name.lower(),
            state={"ranks": {str(rank): one.state for rank, one in enumerate(staged)}, FROZEN: frozen},
        )

    # ------------------------------------------------------------- the ranks

    def _look(self) -> list[Rank]:
        now = time.monotonic()
        if now - self._looked_at > _LOOK_S:
            self._alive, self._looked_at = {}, now
        ranks = [self._look_at(rank) for rank in range(self._page.num_ranks)]
        for number, rank in enumerate(ranks):
            if rank.arena is Arena.NONE:
                self._stagings.pop(number, None)
            elif rank.alive:
                self._map(number)
        return ranks

    def _look_at(self, rank: int) -> Rank:
        get = self._page.get
        pid, arena = get(rank, Slot.PID), Arena(get(rank, Slot.ARENA_STATE))
        if rank not in self._alive:
            self._alive[rank] = pid != 0 and protocol.process_started(pid) == get(rank, Slot.STARTED)
        return Rank(
            attached=pid != 0,
            alive=self._alive[rank],
            step=get(rank, Slot.STEP),
            phase=Phase(get(rank, Slot.PHASE)),
            arena=arena if arena is not Arena.READY or rank in self._stagings else Arena.FILLING,
            arena_step=get(rank, Slot.ARENA_STEP),
            void_step=get(rank, Slot.VOID_STEP),
            warming=bool(get(rank, Slot.WARMING)),
        )

    def _map(self, rank: int) -> None:
        """Get hold of a rank's arena. An announcement always means a new one."""
        get = self._page.get
        owner = (get(rank, Slot.PID), get(rank, Slot.STARTED))
        arena = (owner[0], get(rank, Slot.ARENA_FD), get(rank, Slot.ARENA_BYTES))
        if get(rank, Slot.ARENA_STATE) == Arena.ANNOUNCED:
            self._populate(rank, owner, arena)
            return
        known = self._stagings.get(rank)
        if known is not None and known.owner == owner:
            return
        try:
            self._stagings[rank] = Staging(owner, memory.map_arena(*arena))
        except (OSError, ValueError) as error:  # the rank went away, or waits until it gives this save up
            self._page.set_error(f"rank {rank}: its staging memory cannot be mapped: {error}")

    def _populate(self, rank: int, owner: tuple[int, int], arena: tuple[int, int, int]) -> None:
        """Start giving an announced arena its pages, or tell the rank that it has them, or that it never will."""
        running = self._populating.get(rank)
        if running is None or running.arena != arena:
            if not self._populating:
                self._free_bytes = memory.available_bytes()
            self._populating[rank] = Populating(arena, self._pool.submit(self._take_pages, arena))
            return
        if not running.job.done():
            return
        del self._populating[rank]
        try:
            self._stagings[rank] = Staging(owner, running.job.result())
            self._page.put(rank, Slot.ARENA_STATE, Arena.MAPPED)
        except (OSError, ValueError) as error:
            why = f"rank {rank}: no staging memory: {error}"
            self._page.set_error(why)
            say(why)
            self._page.put(rank, Slot.ARENA_STATE, Arena.NONE)

    def _take_pages(self, arena: tuple[int, int, int]) -> memoryview:
        """All ranks announce at about the same time: what one takes the next does not have."""
        size = arena[2]
        with self._taking:
            if self._free_bytes is not None:
                if size > self._free_bytes:
                    raise OSError(
                        errno.ENOMEM, f"it needs {size / 1e9:.2f} GB, {max(0, self._free_bytes) / 1e9:.2f} GB are left"
                    )
                self._free_bytes -= size
        return memory.populate_arena(*arena)

    def _want_of_room(self) -> str:
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

    # --------------------------------------------------------------- its life

    def _take_lock(self) -> bool:
        """Wait to be the one writer; an earlier attempt's saver may still be committing. False: it is over."""
        done_since = None
        while not self._is_over():
            why = self._try_lock()
            if not why:
                return True
            if why != self._page.error():
                self._page.set_error(why)
                self._page[Word.NUM_FAILED] += 1
                say(why)
            now = time.monotonic()
            done = all(rank.phase is Phase.DONE for rank in self._look())
            done_since = (done_since or now) if done else None
            if done_since is not None and now - done_since > LOCK_PATIENCE_S:
                self._page[Word.ENDED] = Ended.FAILED
            self._pause(_IDLE_S)
        return False

    def _try_lock(self) -> str:
        """Return why we may not write; nothing when we may."""
        directory = self._orders.directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            fd = os.open(directory / protocol.SAVER_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            return f"{directory}: no checkpoint can be written: {error}"
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return f"{directory}: another saver writes here; waiting for it to end"
        except OSError as error:
            say(f"no lock on this filesystem, going on without: {error}")
        self._lock = fd
        return ""

    def _recover(self) -> None:
        """Take over what a saver that died left on the page."""
        page, step = self._page, self._page[Word.PROPOSED_STEP]
        if self._orders.keep_last is not None:
            self._patiently(folder.discard_leftovers, self._orders.directory)
        self._look()
        if page[Word.DECISION] == Decision.COMMITTED:
            self._patiently(folder.discard_leftovers, self._orders.directory, f"{protocol.TEMPORARY}{step:08d}-")
            self._save = Save(step, Reason(page[Word.REASON]), page[Word.REQUEST_SAVE])
            return
        if page[Word.DECISION] == Decision.PROPOSED:
            page[Word.DECISION] = Decision.ABORTED
        self._settle(Decision(page[Word.DECISION]))

    def _is_over(self) -> bool:
        if self._page[Word.ENDED] and self._save is None:
            return True
        ranks = self._look()
        gone = any(r.attached for r in ranks) and not any(r.attached and r.alive for r in ranks)
        if not gone or (self._save is None):
            return gone
        return self._lock is None  # a save is pending: the next turn writes it, or finds it void

    def _pause(self, seconds: float) -> None:
        self._beat()
        time.sleep(seconds)

    def _beat(self) -> None:
        self._page[Word.SAVER_BEAT_NS] = time.monotonic_ns()


def _places(rank: int, state: dict[str, Any], size: int) -> list[tuple[int, int]]:
    """Return where a rank's images are: one, unless its JSON names the sizes of several."""
    found = image.places(state.pop(protocol.FILES, [size]))
    if found[-1][1] != size:
        raise SaveError(f"rank {rank}: staged {size} bytes, and files that end at {found[-1][1]}")
    return found


def _read_header(path: Path) -> tuple[bytes, int]:
    with path.open("rb") as file:
        first, size = file.read(8), os.fstat(file.fileno()).st_size
        return first + file.read(image.header_bytes(first, size) - 8), size


def _frozen_in(manifest: protocol.Manifest) -> dict[str, int]:
    """Return the names of each rank's frozen weights. The manifest may be anybody's."""
    found = manifest.state.get(FROZEN)
    return found if isinstance(found, dict) else {}


def say(text: str) -> None:
    """Into its log, if there is room for it: whoever keeps the checkpoints does not die of a word."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: closed
        os.write(sys.stderr.fileno(), f"{datetime.now(timezone.utc):%H:%M:%S} saver: {text}\n".encode())


def main(env: Mapping[str, str] = os.environ) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    orders = Orders.parse(env)
    page = ControlPage.open(orders.control)
    if protocol.process_started(page[Word.SAVER_PID]) == page[Word.SAVER_STARTED] != 0:
        say("another saver serves this attempt")
        return
    try:
        Saver(orders, page).run()
    except Exception as error:
        page.set_error(f"the saver died of {error!r}; it is started again; see saver.log")
        page[Word.NUM_FAILED] += 1
        raise
    if orders.keep_last is not None:  # no supervisor: nobody else removes the page
        orders.control.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
