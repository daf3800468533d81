"""
A rank's place on the control page: what it says there, and how it takes part in a save.

Standard library and protocol only. The rule: nothing here waits for another rank, and every
wait ends: with the saver's word, when there is no saver for `PATIENCE_S`, or when its disk has long had the time of a slow one.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import Final

from vramfarm import image, memory, protocol
from vramfarm.memory import WINDOW_BYTES, StagingMemory
from vramfarm.protocol import Arena, ControlPage, Decision, Ended, Env, Phase, Reason, Slot, Told, Word
from vramfarm.tending import SaverProcess

PATIENCE_S: Final = 60.0  # without a beat of the saver
DISK_S: Final = 600.0  # for a save that waits for its disk, and what a slow disk needs
SLOWEST: Final = 5e6  # bytes a second, of such a disk
AGREEMENT_S: Final = 5.0  # for the saver's word on a proposal; it takes 2 ms
_SLOW_SAVE_S: Final = 3600.0  # no longer than that, but where the last save took long, too
_END_EVENTS: Final = 100  # may happen before the end is there: a saver that dies whenever it is started is one, too
_LEFT_S: Final = 600.0  # without a beat of anybody: a page of processes that are not to be found is left
_PAGE: Final = re.compile(r"vramfarm-(\d{1,10})-[0-9a-f]{8}")  # as `create_page` calls it
_POLL_S: Final = 0.001
_SILENT_NS: Final = 1_000_000_000  # without a beat of the saver; then it is looked after
_PROPOSED_STEP: Final = int(Word.PROPOSED_STEP)  # plain numbers: an enum's are looked up
_SAVER_BEAT_NS: Final = int(Word.SAVER_BEAT_NS)
_NUM_COMMITTED: Final = int(Word.NUM_COMMITTED)
_NUM_FAILED: Final = int(Word.NUM_FAILED)
Fill = Callable[[memoryview, memoryview], Callable[[], str] | None]
Put = Callable[[memoryview, int, int], None]
"""Fills memory with the bytes of an image from a place on; the one behind the last has the frozen weights."""


@dataclass(frozen=True)
class Frozen:
    """A rank's frozen weights: `token` names their bytes, `size_bytes` is the size of their image. 0: there are none."""

    token: int = 0
    size_bytes: int = 0


NO_FROZEN: Final = Frozen()


class Seat:
    """One rank on the page. `saver` is given to local rank 0, which starts it."""

    def __init__(
        self, page: ControlPage, rank: int, saver: SaverProcess | None = None, *, disk_s: float = DISK_S
    ) -> None:
        self.page = page
        self.rank = rank
        self.saver = saver
        self._disk_s = disk_s
        self._until_ns: float = math.inf  # of any wait, once the process is on its way out
        self._arena: StagingMemory | None = None
        self._copying: threading.Thread | None = None
        self._words = page.words
        self._step_at, self._samples_at, self._beat_at = (
            page.index(rank, slot) for slot in (Slot.STEP, Slot.SAMPLES, Slot.BEAT_NS)
        )
        self._heard = 0
        self._take()
        self.tend()

    def _take(self) -> None:
        """The process id last: whoever sees it finds nothing of an earlier process in the slot."""
        self._put(Slot.PID, 0)
        for slot in Slot:
            self._put(slot, 0)
        self._put(Slot.STARTED, protocol.process_started(os.getpid()))
        self._put(Slot.BEAT_NS, monotonic_ns())
        self._put(Slot.PID, os.getpid())

    def _put(self, slot: Slot, value: int) -> None:
        self.page.put(self.rank, slot, value)

    def _get(self, slot: Slot) -> int:
        return self.page.get(self.rank, slot)

    def tend(self) -> None:
        if self.saver is not None:
            self.saver.tend()

    # -------------------------------------------------------------------- saying

    def enter(self, phase: Phase) -> None:
        self._put(Slot.BEAT_NS, monotonic_ns())
        self._put(Slot.PHASE, phase)

    def start(self, step: int, *, max_steps: int = 0, samples: int = 0) -> None:
        """Training starts with `step` steps behind it."""
        self._put(Slot.MAX_STEPS, max_steps)
        self._put(Slot.SAMPLES, samples)
        self._put(Slot.STEP, step)
        self.enter(Phase.TRAINING)

    def report(self, *, loss: float | None, lr: float | None) -> None:
        if loss is not None:
            self.page.put_float(self.rank, Slot.LOSS, loss)
        if lr is not None:
            self.page.put_float(self.rank, Slot.LR, lr)

    def finished(self, step: int, samples: int = 0) -> Reason | None:
        """Say that `step` is finished. Return why to save now, or None."""
        self.count(samples)
        return self.answer(step) if self.passes(step) else None

    def count(self, samples: int) -> None:
        """Say how many samples are behind us with the step that is finished next."""
        self._words[self._samples_at] = samples  # in each step of `steps()`

    def passes(self, step: int) -> bool:
        """
        Say that `step` is finished. Return whether there is something to `answer`, or to `hear`.

        Each training step comes by here with cold caches, so nothing is called but the clock.
        """
        words = self._words
        words[self._step_at] = step
        words[self._beat_at] = now = monotonic_ns()
        return (
            words[_PROPOSED_STEP] == step
            or now - words[_SAVER_BEAT_NS] > _SILENT_NS
            or words[_NUM_COMMITTED] + words[_NUM_FAILED] != self._heard
        )

    def answer(self, step: int) -> Reason | None:
        """Return why to save now, or None."""
        self.tend()
        return self._await_decision(step) if self.page[Word.PROPOSED_STEP] == step else None

    def hear(self) -> tuple[int, int]:
        """Return how many saves were committed, and how many failed."""
        found = self.page[Word.NUM_COMMITTED], self.page[Word.NUM_FAILED]
        self._heard = sum(found)
        return found

    def num_finished(self) -> int:
        """Return how many steps are finished."""
        return int(self._words[self._step_at])

    def skip(self, step: int) -> None:
        """This rank takes no part in a save at `step`; so there is none."""
        self._put(Slot.VOID_STEP, step)

    # -------------------------------------------------------------------- saving

    def prepare(self, size: int, frozen: Frozen = NO_FROZEN) -> memoryview | None:
        """Make the staging memory long before it is needed; the saver gives it its pages. Returns at once."""
        try:
            self._announce(size + memory.whole_pages(frozen.size_bytes))
        except OSError as error:
            self._complain(f"no staging memory: {error.strerror or error}")
            return None
        return self._arena.memory if self._arena else None

    def release(self) -> None:
        """Let go of the staging memory: nothing is staged any more."""
        self._put(Slot.ARENA_STATE, Arena.NONE)
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def is_mapped(self) -> bool | None:
        """Whether the memory from `prepare` has its pages; None: it never will."""
        state = self._get(Slot.ARENA_STATE)
        return None if state == Arena.NONE else state != Arena.ANNOUNCED

    def is_refused(self) -> bool:
        """Whether staging memory was asked for, and is not there."""
        return self._arena is not None and self._get(Slot.ARENA_STATE) == Arena.NONE

    def warm(self, *, done: bool) -> None:
        """Ask the saver not to propose a save until the staging memory is ready; it waits two minutes at most."""
        self._put(Slot.WARMING, int(not done))

    def stage(self, step: int, image_bytes: int, state: bytes, fill: Fill, frozen: Frozen = NO_FROZEN) -> bool:
        """
        Put the rank's state into memory that the saver holds. False: not this time, training goes on.

        `fill` writes the image of the shard, all of it, and that of the frozen weights if it is given memory for
        them; or it starts to, and returns a function that waits until all is there and says what is wrong with it.
        """
        phase = Phase(self._get(Slot.PHASE))
        self.enter(Phase.SAVING)
        started = False
        rest: Callable[[], str] | None = None
        try:
            arena, apart = self._memory(image_bytes + len(state), frozen)
            if arena is not None:
                self._put(Slot.ARENA_STEP, step)
                self._put(Slot.ARENA_STATE, Arena.FILLING)
                rest = fill(arena[:image_bytes], apart)
                arena[image_bytes : image_bytes + len(state)] = state
                self._put(Slot.IMAGE_BYTES, image_bytes)
                self._put(Slot.STATE_AT, image_bytes)
                self._put(Slot.STATE_BYTES, len(state))
                self._put(Slot.WINDOW_BYTES, 0)
                started = True
        except OSError as error:
            self._complain(f"no memory to stage step {step}: {error.strerror or error}")
        finally:
            if not started:
                self._give_up(step)
            self.enter(phase)
        if started and rest is None:
            self._publish(step)
        elif rest is not None:
            self._copying = threading.Thread(target=self._complete, args=(step, rest), daemon=True)
            try:
                self._copying.start()
            except RuntimeError:  # the interpreter is on its way out
                self._complete(step, rest)
        return started

    def stage_by_window(
        self, step: int, sizes: Sequence[int], state: bytes, put: Put, frozen: Frozen = NO_FROZEN
    ) -> bool:
        """The same of images of these sizes through a window of bounded memory: training waits until all but the last of it is written."""
        phase, done = Phase(self._get(Slot.PHASE)), False
        self.enter(Phase.SAVING)
        try:
            more = 0 if self.holds(frozen) else frozen.size_bytes
            arena, _ = self._memory(WINDOW_BYTES + len(state), Frozen(frozen.token, 0))
            if arena is not None:
                arena[WINDOW_BYTES : WINDOW_BYTES + len(state)] = state
                told = {
                    Slot.IMAGE_BYTES: image.places(sizes)[-1][1],
                    Slot.STATE_AT: WINDOW_BYTES,
                    Slot.STATE_BYTES: len(state),
                    Slot.FROZEN_BYTES: more,
                    Slot.WINDOW_BYTES: WINDOW_BYTES,
                    Slot.WINDOWS: 0,
                    Slot.WINDOWS_TAKEN: 0,
                }
                for slot, value in told.items():
                    self._put(slot, value)
                places = [
                    (number, at, size)
                    for number, size in enumerate([*sizes, more])
                    for at in range(0, size, WINDOW_BYTES)
                ]
                done = all(self._put_window(step, n, arena, put, place) for n, place in enumerate(places))
        except OSError as error:
            self._complain(f"no memory to stage step {step}: {error.strerror or error}")
        finally:
            if not done:
                self._give_up(step)
            self.enter(phase)
        return done

    def _put_window(self, step: int, number: int, arena: memoryview, put: Put, place: tuple[int, int, int]) -> bool:
        """Fill the window when its last bytes are written. False: the saver has given up this save, or is gone."""
        page = self.page

        def is_off() -> bool:
            return page[Word.DECISION] != Decision.COMMITTED or page[Word.PROPOSED_STEP] != step

        if not self._await(lambda: self._get(Slot.WINDOWS_TAKEN) >= number or is_off()) or is_off():
            return False
        which, at, size = place
        put(arena[: min(WINDOW_BYTES, size - at)], which, at)
        self._put(Slot.WINDOWS, number + 1)
        if number == 0:
            self._publish(step)
        return True

    def give_up(self, step: int, why: str) -> None:
        self._complain(f"step {step}: {why}")
        self.skip(step)

    def _complete(self, step: int, rest: Callable[[], str]) -> None:
        """On a thread: wait for copies that training did not wait for."""
        try:
            problem = rest()
            if not problem:
                self._publish(step)
                return
            self._complain(f"step {step}: {problem}")
        except Exception as error:  # noqa: BLE001  # a device that failed; the trainer will meet it too
            self._complain(f"step {step}: the copy to the host failed: {error!r}")
        self._give_up(step)

    def _publish(self, step: int) -> None:
        self._put(Slot.ARENA_STEP, step)
        self._put(Slot.ARENA_STATE, Arena.READY)

    def _give_up(self, step: int) -> None:
        if self._get(Slot.ARENA_STATE) == Arena.FILLING:
            self._put(Slot.ARENA_STATE, Arena.MAPPED)
        self.skip(step)

    def _complain(self, text: str) -> None:
        self.page.set_error(f"rank {self.rank}: {text}", Told.HINDRANCE)

    def leave(self, step: int) -> bool:
        """Wait until the staged `step` is committed and the end recorded. False: that failed, training goes on."""
        self.enter(Phase.SAVING)

        def answered() -> bool:
            decision = self.page[Word.DECISION]
            return (
                bool(self.page[Word.ENDED]) or self.page[Word.PROPOSED_STEP] != step or decision != Decision.COMMITTED
            )

        self._await(answered, self._end_patience_s())
        left = self.page[Word.ENDED] == Ended.LEFT
        self.enter(Phase.LEFT if left else Phase.TRAINING)
        return left

    def finish(self, stage: Callable[[int], object], *, timeout_s: float | None = None, recorded: bool = True) -> Ended:
        """
        Say that training is done and wait until that is recorded; `stage(step)` is called when the saver wants the final state.

        Ended.NO: not in time; `why_no_end` says why. Not `recorded`: the state is saved, and whether training
        was done is left to the exit code.
        """
        if self.rank == 0:
            self.page[Word.UNRECORDED] = 0 if recorded else 1
        self._put(Slot.VOID_STEP, 0)
        self.enter(Phase.DONE)
        if timeout_s is not None:
            self._until_ns = monotonic_ns() + int(timeout_s * 1e9)
        for _ in range(_END_EVENTS):
            moved = partial(self._has_moved, self._end_so_far(), stage)
            if not self._await(moved, self._end_patience_s()) or self.page[Word.ENDED]:
                break
        if self.page[Word.ENDED] and self.saver is not None:
            self.saver.see_off()
        return Ended(self.page[Word.ENDED])

    def _has_moved(self, before: tuple[int, ...], stage: Callable[[int], object]) -> bool:
        """Whether the end is here, or has come nearer; stages the final state when the saver wants it."""
        if self.page[Word.DECISION] != Decision.COMMITTED:
            self._put(Slot.VOID_STEP, 0)
        elif self.page[Word.REASON] == Reason.FINAL and not self.page[Word.ENDED]:
            self._stage_once(self.page[Word.PROPOSED_STEP], stage)
        return bool(self.page[Word.ENDED]) or self._end_so_far() != before

    def _end_so_far(self) -> tuple[int, ...]:
        """What changes while the end comes nearer: other ranks are done, a save is on its way, or has failed and is tried again."""
        page = self.page
        phases = (page.get(rank, Slot.PHASE) for rank in range(page.num_ranks))
        return (page[Word.SAVING_STEP], page[Word.DECISION], page[Word.NUM_COMMITTED], page[Word.NUM_FAILED], *phases)

    def _end_patience_s(self) -> float:
        """Without a save on its way it is the saver that waits for a rank, and gives up sooner."""
        waits_for_disk = self.page[Word.SAVING_STEP] != 0
        return self._disk_patience_s() + (0 if waits_for_disk else protocol.LAST_RANK_S)

    def _disk_patience_s(self) -> float:
        """For one save: so long that only a disk which does not answer takes longer."""
        ranks, get = range(self.page.num_ranks), self.page.get
        size = sum(get(rank, Slot.IMAGE_BYTES) + get(rank, Slot.FROZEN_BYTES) for rank in ranks)
        last_s = self.page[Word.SAVE_NS] / 1e9
        return self._disk_s + min(size / SLOWEST, max(_SLOW_SAVE_S, 10 * last_s))

    def why_no_end(self) -> str:
        """Why `finish` came back without an end."""
        page = self.page
        if monotonic_ns() - page[Word.SAVER_BEAT_NS] > PATIENCE_S * 1e9:
            return "the saver is gone; see saver.log"
        if step := page[Word.SAVING_STEP]:
            return (
                f"step {step} is not on the disk after {self._disk_patience_s():.0f} s: the disk, or the server behind it, does not answer; "
                "the saver goes on without us, and commits it if it does"
            )
        return "not all ranks came to their end"

    def _stage_once(self, step: int, stage: Callable[[int], object]) -> None:
        done = self.is_copying() or (self._get(Slot.ARENA_STATE) == Arena.READY and self._get(Slot.ARENA_STEP) == step)
        if not done and self._get(Slot.VOID_STEP) != step:
            stage(step)

    def is_pending(self) -> bool:
        """Whether this rank's staged state has yet to be committed."""
        return self.is_copying() or self._get(Slot.ARENA_STATE) == Arena.READY

    def is_copying(self) -> bool:
        return self._copying is not None and self._copying.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the state staged last is committed or given up; False after `timeout_s`, without a saver, or where the disk does not answer."""
        return self._await(lambda: not self.is_pending(), timeout_s)

    # ------------------------------------------------------------------- waiting

    def _await_decision(self, step: int) -> Reason | None:
        """The step is read before and after the decision, so the two belong together."""
        page = self.page

        def decided() -> bool:
            return page[Word.DECISION] != Decision.PROPOSED or page[Word.PROPOSED_STEP] != step

        if not self._await(decided, AGREEMENT_S):
            self.skip(step)
            return None
        decision, reason = page[Word.DECISION], Reason(page[Word.REASON])
        if page[Word.PROPOSED_STEP] != step or decision != Decision.COMMITTED:
            return None
        return reason

    def holds(self, frozen: Frozen) -> bool:
        """Whether the saver has these frozen weights in its newest checkpoint."""
        return self._get(Slot.FROZEN_HELD) == frozen.token

    def _memory(self, size: int, frozen: Frozen) -> tuple[memoryview | None, memoryview]:
        """Return memory of at least `size` that the saver has mapped and is not reading, and some for frozen weights that it lacks."""
        nothing = memoryview(b"")
        if not self._await(lambda: not self.is_pending()):
            return None, nothing
        more = 0 if self.holds(frozen) else frozen.size_bytes
        apart = memory.whole_pages(more)
        if self._arena is None or self._arena.size < size + apart or self._get(Slot.ARENA_STATE) == Arena.NONE:
            self._announce(size + apart)
        if not self._await(lambda: self._get(Slot.ARENA_STATE) != Arena.ANNOUNCED) or self._arena is None:
            return None, nothing
        if self._get(Slot.ARENA_STATE) == Arena.NONE:
            return None, nothing
        self._put(Slot.FROZEN, frozen.token)
        self._put(Slot.FROZEN_BYTES, more)
        return self._arena.memory, self._apart(more)

    def _apart(self, size: int) -> memoryview:
        """Return memory at the arena's end, where the state that grows does not move it."""
        assert self._arena is not None
        at = self._arena.size - memory.whole_pages(size)
        self._put(Slot.FROZEN_AT, at)
        return self._arena.memory[at : at + size]

    def _announce(self, size: int) -> None:
        """Replace the arena."""
        self.release()
        self._arena = StagingMemory(memory.arena_bytes(size))
        self._put(Slot.ARENA_FD, self._arena.fd)
        self._put(Slot.ARENA_BYTES, self._arena.size)
        self._put(Slot.ARENA_STATE, Arena.ANNOUNCED)

    def _await(self, is_true: Callable[[], bool], timeout_s: float | None = None) -> bool:
        started = monotonic_ns()
        timeout_s = self._disk_patience_s() if timeout_s is None else timeout_s
        until = min(self._until_ns, started + timeout_s * 1e9)
        while not is_true():
            now = monotonic_ns()
            beat = max(self.page[Word.SAVER_BEAT_NS], started)
            if now > until or now - beat > PATIENCE_S * 1e9:
                return False
            self._put(Slot.BEAT_NS, now)
            self.tend()
            time.sleep(_POLL_S)
        return True


def open_page(env: Mapping[str, str]) -> ControlPage | None:
    """Map the supervisor's page; None where there is no supervisor."""
    path = env.get(Env.CONTROL)
    return ControlPage.open(path) if path else None


def create_page(num_ranks: int) -> ControlPage:
    """Make a page where there is no supervisor; the saver removes it in the end."""
    name = f"vramfarm-{os.getpid()}-{os.urandom(4).hex()}"
    shm = Path("/dev/shm")  # noqa: S108  # memory; where it cannot be written a file does
    remove_left_pages(shm)
    try:
        return ControlPage.create(shm / name, num_ranks=num_ranks)
    except OSError:
        import tempfile  # noqa: PLC0415  # rarely needed

        return ControlPage.create(Path(tempfile.gettempdir()) / name, num_ranks=num_ranks)


def remove_left_pages(place: Path, silent_s: float = _LEFT_S) -> None:
    """Remove what this user's runs have left whose savers, which remove a page in the end, were killed with all ranks."""
    for path in place.glob("vramfarm-*"):
        with contextlib.suppress(OSError, protocol.ProtocolError):  # somebody else's, or just removed
            if _is_left(path, silent_s):
                path.unlink()


def _is_left(path: Path, silent_s: float) -> bool:
    """Whether nobody is there who knows it. What lives in another container is not seen here, but its beats are."""
    name, entry = _PAGE.fullmatch(path.name), path.lstat()
    is_ours = stat.S_ISREG(entry.st_mode) and entry.st_uid == os.getuid()
    age_s = time.time() - entry.st_mtime  # noqa: TID251  # since it was made: a file has no other clock
    if name is None or not is_ours or age_s < silent_s or protocol.process_started(int(name[1])):
        return False
    page = ControlPage.open(path)
    get, ranks = page.get, range(min(page.num_ranks, protocol.MAX_RANKS))
    owners = [(get(rank, Slot.PID), get(rank, Slot.STARTED)) for rank in ranks]
    owners.append((page[Word.SAVER_PID], page[Word.SAVER_STARTED]))
    heard = max([page[Word.SAVER_BEAT_NS], *(get(rank, Slot.BEAT_NS) for rank in ranks)])
    page.close()
    is_used = any(pid and protocol.process_started(pid) == started for pid, started in owners)
    return not is_used and monotonic_ns() - heard > silent_s * 1e9
