"""
The ranks as the saver sees them, and its hold on their staging memory, which outlives them.

Standard library and protocol only. What a rank announces gets its pages here, on a thread; memory
that is not there is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vramfarm import memory, protocol, writing
from vramfarm.agreement import Rank
from vramfarm.orders import say
from vramfarm.protocol import Arena, ControlPage, Phase, Slot, Told

_LOOK_S: Final = 0.1  # between two looks at whether the ranks live
_LOWEST: Final = 19
_LARGE_BYTES: Final = 64 << 20  # the pages of less are there in a moment
_UNHURRIED_S: Final = (
    60.0  # of the two minutes that saves wait for them; with all processors busy they take a share then
)


@dataclass
class Staging:
    """The saver's own hold on a rank's arena: it outlives the rank."""

    owner: tuple[int, int]
    memory: memoryview


@dataclass(frozen=True)
class Populating:
    """An announced arena that is given its pages, on a thread that takes what processor time nobody else wants."""

    arena: tuple[int, int, int]
    job: Future[memoryview]


class Arenas:
    """
    What the ranks of one page are and have staged. `pool` has a thread for each, which gets ready what is to write it to `directory`.
    """

    def __init__(self, page: ControlPage, pool: ThreadPoolExecutor, directory: Path) -> None:
        self._page = page
        self._directory = directory
        self._pool = pool
        self._pages = ThreadPoolExecutor(max_workers=page.num_ranks, initializer=_be_idle)
        self._stagings: dict[int, Staging] = {}
        self._populating: dict[int, Populating] = {}
        self._alive: dict[int, bool] = {}
        self._looked_at = 0.0
        self._free_bytes: int | None = None
        self._announced_at = 0.0
        self._taking = threading.Lock()
        self._priority = Priority()

    def memory(self, rank: int) -> memoryview:
        """Return what a rank stages into; it was seen to be READY."""
        return self._stagings[rank].memory

    def release(self, but: int | None = None) -> None:
        """What is staged, or was staged too late, is wanted by nobody, but for the save that is on its way."""
        get = self._page.get
        for rank in self._stagings:
            if get(rank, Slot.ARENA_STATE) == Arena.READY and get(rank, Slot.ARENA_STEP) != but:
                self._page.put(rank, Slot.ARENA_STATE, Arena.MAPPED)

    def look(self) -> list[Rank]:
        """Look at every rank, and get hold of what memory it has."""
        now = time.monotonic()
        if now - self._looked_at > _LOOK_S:
            self._alive, self._looked_at = {}, now
        ranks = [self._look_at(rank) for rank in range(self._page.num_ranks)]
        for number, rank in enumerate(ranks):
            if rank.arena is Arena.NONE:
                self._stagings.pop(number, None)
            elif rank.alive:
                self._map(number)
        self._priority.be(_LOWEST if self._is_unhurried(ranks, now) else 0)
        return ranks

    def _is_unhurried(self, ranks: Sequence[Rank], now: float) -> bool:
        """Whether much memory is given its pages, and nobody waits for it."""
        size = sum(one.arena[2] for one in self._populating.values())
        is_free = all(ranks[number].alive and ranks[number].phase is not Phase.SAVING for number in self._populating)
        return size >= _LARGE_BYTES and is_free and now - self._announced_at < _UNHURRIED_S

    def _look_at(self, rank: int) -> Rank:
        get = self._page.get
        pid, arena = get(rank, Slot.PID), Arena(get(rank, Slot.ARENA_STATE))
        if rank not in self._alive:
            self._alive[rank] = protocol.is_rank_alive(self._page, rank)
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
            self._page.set_error(f"rank {rank}: its staging memory cannot be mapped: {error}", Told.HINDRANCE)

    def _populate(self, rank: int, owner: tuple[int, int], arena: tuple[int, int, int]) -> None:
        """Start giving an announced arena its pages, or tell the rank that it has them, or that it never will."""
        running = self._populating.get(rank)
        if running is None or running.arena != arena:
            if not self._populating:
                self._free_bytes = memory.available_bytes()
                self._announced_at = time.monotonic()
            self._populating[rank] = Populating(arena, self._pages.submit(self._take_pages, arena))
            self._pool.submit(writing.prepare, self._page.num_ranks)
            return
        if not running.job.done():
            return
        del self._populating[rank]
        try:
            self._stagings[rank] = Staging(owner, running.job.result())
            self._page.put(rank, Slot.ARENA_STATE, Arena.MAPPED)
            self._pool.submit(self._introduce, rank)
        except (OSError, ValueError) as error:
            why = f"rank {rank}: no staging memory: {error}"
            self._page.set_error(why, Told.HINDRANCE)
            say(why)
            self._page.put(rank, Slot.ARENA_STATE, Arena.NONE)

    def _introduce(self, rank: int) -> None:
        """As long as nobody has a use for the memory."""
        get, staging = self._page.get, self._stagings[rank]
        with contextlib.suppress(OSError):  # a favour
            writing.introduce(staging.memory, self._directory, lambda: get(rank, Slot.ARENA_STATE) == Arena.MAPPED)

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


class Priority:
    """
    Niceness of this process's session, where the kernel shares out processors among sessions ("autogroup").

    Each rank has a session, and so have we: what a thread's own policy says counts among ours only, and a thread
    that should take what nobody else wants has as much as a rank.
    """

    def __init__(self, path: Path = Path("/proc/self/autogroup")) -> None:
        self._path = path if os.getsid(0) == os.getpid() else None  # else it is somebody else's, too
        self._niceness = 0

    def be(self, niceness: int) -> None:
        """Be that, at one of the next calls at the latest: the kernel takes few a second."""
        if self._path is None or niceness == self._niceness:
            return
        try:
            self._path.write_text(str(niceness))
        except BlockingIOError:
            return
        except OSError:  # there is no such thing here
            self._path = None
        self._niceness = niceness


def _be_idle() -> None:
    """
    Of this thread, for good: where memory is in pieces, the kernel takes a second and more to put together 1 GB of huge pages.

    A training that waits for them leaves its processors to us.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
