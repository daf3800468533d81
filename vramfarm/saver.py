"""
The saver: the one process that decides when to save, and the one that commits a checkpoint.

Run as `python -I /…/vramfarm/saver.py`, in a session of its own. Standard library and protocol
only. It holds the memory that the ranks stage into, so a save that all of them staged is
committed even if all of them are killed. It stays until training has ended, or they are gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

if __name__ == "__main__":  # last: nothing beside the package may shadow the standard library
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120  # a link stays a link

from vramfarm import agreement, folder, protocol
from vramfarm.agreement import Fate, Rank, Wishes
from vramfarm.arenas import Arenas
from vramfarm.committing import BUSY_S, ApartError, Committer, SaveError, frozen_in, late
from vramfarm.orders import Orders, say
from vramfarm.protocol import LATE_S, Arena, ControlPage, Decision, Ended, EndRecord, Phase, Reason, Slot, Told, Word

FIRST_SAVE_S: Final = 120.0  # disk, size and cost must be known while leaving is still cheap
RETRY_S: Final = 2.0
RETRY_INTERVAL_S: Final = 60.0
FINAL_TRIES: Final = 3
LAUNCHER_S: Final = 5.0  # to end the others when a rank is dead, before we do
LOCK_PATIENCE_S: Final = 60.0  # of ranks that are done and wait for their last save
_IDLE_S: Final = 0.02
_SOON_S: Final = 0.001
_T = TypeVar("_T")


@dataclass
class Save:
    """A save on its way, from the proposal on."""

    step: int
    reason: Reason
    serves: int  # the REQUEST_SAVE it answers
    started: float = field(default_factory=time.monotonic)
    staged_at: float | None = None  # by the first rank
    is_late: bool = False  # and that was said


@dataclass
class Wait:
    """Of ranks that are done, for one that is not, or that is dead."""

    rank: int
    is_dead: bool
    began: float = field(default_factory=time.monotonic)
    is_told: bool = False


class Saver:
    def __init__(self, orders: Orders, page: ControlPage) -> None:
        self._orders = orders
        self._page = page
        self._save: Save | None = None
        self._lock: int | None = None
        self._lost_step = 0  # the newest there was when the folder was removed
        self._due_at: float | None = None  # None: no step yet
        self._not_before = 0.0
        self._ahead = agreement.AHEAD
        self._warm_by = 0.0  # a rank that prepares its staging memory is waited for until then
        self._final_failures = 0
        self._wait: Wait | None = None
        pool = ThreadPoolExecutor(max_workers=page.num_ranks)
        self._disk = ThreadPoolExecutor(max_workers=1)
        self._arenas = Arenas(page, pool, orders.directory)
        self._committer = Committer(orders, page, self._arenas, pool)

    def run(self) -> None:
        """Serve until training has ended or the ranks are gone, and nothing is left to commit."""
        self._page[Word.SAVER_STARTED] = protocol.process_started(os.getpid())
        self._page[Word.SAVER_PID] = os.getpid()
        self._beat()
        if self._take_lock():
            self._recover()
        while not self._is_over():
            self._turn()
            self._pause(self._interval_s())

    def _interval_s(self) -> float:
        """Between two turns. As long as a rank copies, the disk could soon be busy."""
        if self._save is None:
            return _IDLE_S
        page, ranks = self._page, range(self._page.num_ranks)
        return _SOON_S if any(page.get(rank, Slot.ARENA_STATE) == Arena.FILLING for rank in ranks) else BUSY_S

    # ---------------------------------------------------------------- a turn

    def _turn(self) -> None:
        ranks = self._arenas.look()
        if self._save is None:
            self._arenas.release()
            self._consider(ranks)
            return
        final = self._save.reason is Reason.FINAL
        match agreement.decide_fate(self._save.step, ranks, final=final):
            case Fate.WRITE:
                self._finish(self._save)
            case Fate.VOID if not final and any(rank.phase is Phase.DONE for rank in ranks):
                self._settle(Decision.ABORTED)  # training ended before that step; the final save comes next
            case Fate.VOID:
                more = f" ({self._page.error()})" if self._page[Word.TOLD] == Told.HINDRANCE else ""
                self._fail_save(f"a rank ended, or could not take part, before its state was staged{more}")
            case Fate.WAIT:
                self._wait_for_ranks(self._save, ranks)

    def _consider(self, ranks: Sequence[Rank]) -> None:
        now = time.monotonic()
        if self._due_at is None and all(r.step > self._orders.resumed_step for r in ranks):
            self._due_at = now + min(self._orders.interval_s, FIRST_SAVE_S)
            self._warm_by = now + FIRST_SAVE_S
        if now < self._not_before or self._page[Word.ENDED] or self._is_hopeless(ranks):
            return
        requests = self._page[Word.REQUEST_SAVE]
        wishes = Wishes(
            leave=bool(self._page[Word.REQUEST_LEAVE]),
            asked=requests != self._page[Word.SERVED_SAVE],
            due=self._due_at is not None and now >= self._due_at,
            cold=(self._due_at is None or now < self._warm_by) and any(rank.warming for rank in ranks),
        )
        reason = agreement.decide_reason(ranks, wishes)
        if reason is None:
            return
        step = max(r.step for r in ranks)
        why = self._patiently(self._want_of_folder)
        if not why and reason is Reason.FINAL and self._is_saved(step):
            self._conclude(EndRecord("done", step))
        elif why := why or self._patiently(self._committer.want_of_room):
            self._save = Save(step, reason, requests)
            self._fail_save(why)
        else:
            self._begin(reason, self._arenas.look(), requests)  # steps were made meanwhile

    def _is_saved(self, step: int) -> bool:
        saved = {self._orders.resumed_step, self._page[Word.COMMITTED_STEP]}
        return step == 0 or (step in saved and step > self._lost_step)

    def _is_hopeless(self, ranks: Sequence[Rank]) -> bool:
        """Ranks that are done are not kept by one that is dead, nor for ever by one that is late. A long wait is told, once."""
        number = agreement.missing_at_the_end(ranks)
        if number is None:
            self._wait = None
            return False
        rank, wait = ranks[number], self._wait
        is_dead = rank.attached and not rank.alive
        if wait is None or (wait.rank, wait.is_dead) != (number, is_dead):
            wait = self._wait = Wait(number, is_dead)
        waited_s, who = time.monotonic() - wait.began, protocol.describe_rank(self._page, number)
        if is_dead and waited_s > LAUNCHER_S:
            self._give_up_the_end(f"{who}, ended before all were done")
        elif waited_s > protocol.LAST_RANK_S:
            self._give_up_the_end(f"{who}, has not come to its end for {waited_s:.0f} s; others have")
        elif waited_s > LATE_S and not wait.is_told:
            wait.is_told = True
            self._tell(f"waiting: {who}, has not come to its end; others have, {waited_s:.0f} s ago", Told.WAITING)
        return bool(self._page[Word.ENDED])

    def _give_up_the_end(self, why: str) -> None:
        self._fail(f"{why}: the final state cannot be saved; what was committed before stays")
        self._page[Word.ENDED] = Ended.FAILED

    def _tell(self, text: str, told: Told) -> None:
        self._page.set_error(text, told)
        say(text)

    def _begin(self, reason: Reason, ranks: Sequence[Rank], requests: int) -> None:
        """Propose, look again, agree. In a final save all ranks already wait, so there is nothing to propose."""
        page, final = self._page, reason is Reason.FINAL
        step = max(r.step for r in ranks) if final else agreement.propose_step(ranks, self._ahead)
        if reason is Reason.LEAVE and step == page.get(0, Slot.MAX_STEPS):
            reason = Reason.ASKED  # it is done by then, and done counts for more than left
        page[Word.DECISION] = Decision.PROPOSED  # before the step: no rank may see it with an old decision
        page[Word.REASON] = reason
        page[Word.PROPOSED_STEP] = step
        time.sleep(BUSY_S)  # every store of a rank that did not see the proposal is visible now
        agreed = final or agreement.is_agreed(step, self._arenas.look())
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
        if why := self._patiently(self._want_of_folder):
            self._fail_save(why)
            return
        started = time.monotonic_ns()
        try:
            manifest = self._patiently(self._committer.write, save.step, save.reason)
        except folder.UnsyncedError as error:
            why = folder.describe_error(self._orders.directory, error)
            self._fail(
                f"step {save.step} is written, and starts go on from it, but a power loss may take it: {why}", Told.NEWS
            )
            return
        except ApartError as error:
            self._make_up_for(save, str(error))
            return
        except Exception as error:  # noqa: BLE001  # a saver that dies of it would find the save pending, and die again
            self._fail_save(self._explain(error))
            return
        self._publish(save, manifest, time.monotonic_ns() - started)
        self._due_at = save.started + self._orders.interval_s
        if save.reason is Reason.LEAVE and not self._conclude(EndRecord("left", save.step)):
            return
        if save.reason is Reason.FINAL and not self._conclude(EndRecord("done", save.step)):
            return
        self._settle(Decision.NONE)
        self._rotate()

    def _explain(self, error: Exception) -> str:
        match error:
            case OSError():
                return folder.describe_error(self._orders.directory, error)
            case MemoryError() | RuntimeError():  # RuntimeError: a thread that could not be started
                return f"no memory, or no thread, to write it with ({error!r}): raise the memory limit; the next save tries again"
            case SaveError() | ValueError():
                return str(error)
        return f"a fault of the saver: {error!r}; the next save tries again"

    def _publish(self, save: Save, manifest: protocol.Manifest, took_ns: int) -> None:
        page = self._page
        page[Word.SAVE_NS] = took_ns
        page[Word.SAVE_BYTES] = manifest.size_bytes
        for rank, frozen in frozen_in(manifest).items():
            page.put(int(rank), Slot.FROZEN_HELD, frozen)
        page[Word.COMMITTED_STEP] = save.step
        page[Word.NUM_COMMITTED] += 1
        say(
            f"commit step={save.step} shards={len(manifest.shards)} bytes={manifest.size_bytes} {save.reason.name.lower()}, "
            f"{took_ns / 1e9:.3f}s, of it {self._committer.shards_s:.3f}s for the shards"
        )

    def _conclude(self, record: EndRecord) -> bool:
        """Record durably how training ended, then let the ranks go."""
        recorded = record.kind != "done" or not self._page[Word.UNRECORDED]
        try:
            if self._orders.end_file is not None and recorded:
                self._patiently(folder.write_durably, self._orders.end_file, record.dump())
        except folder.UnsyncedError as error:  # without it the next start looks at the checkpoints, which are durable
            say(f"the record of the end is there, but a power loss may take it: {error}")
        except OSError as error:
            self._fail(f"the record of the end could not be written, step {record.step} itself is saved: {error}")
            return False
        self._page[Word.ENDED] = Ended.DONE if record.kind == "done" else Ended.LEFT
        return True

    def _fail_save(self, why: str) -> None:
        assert self._save is not None
        self._fail(f"save of step {self._save.step} failed: {why}")

    def _make_up_for(self, save: Save, why: str) -> None:
        """Begin again at once: the request stays open, and the clock's time has come."""
        save.serves = self._page[Word.SERVED_SAVE]
        self._fail_save(why)
        self._not_before = 0.0
        if save.reason is Reason.INTERVAL:
            self._due_at = time.monotonic()

    def _fail(self, text: str, told: Told = Told.FAILURE) -> None:
        """Count and tell a save that is not what it should be, and try again soon."""
        now, save = time.monotonic(), self._save
        self._page.set_error(text, told)  # first: the page is memory, the log is on the disk that may be full
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
        if self._page[Word.TOLD] == Told.WAITING:
            self._page.set_error("")
        self._save = None
        self._arenas.release()
        self._page[Word.SAVING_STEP] = 0
        self._page[Word.DECISION] = decision

    def _wait_for_ranks(self, save: Save, ranks: Sequence[Rank]) -> None:
        """What others staged waits for as long as it takes: a rank that evaluates comes late. A long wait is told, once."""
        self._arenas.release(but=save.step)
        late_ones = [number for number, rank in enumerate(ranks) if not rank.is_ready(save.step)]
        if len(late_ones) == len(ranks):
            save.staged_at = None
            return
        save.staged_at = save.staged_at or time.monotonic()
        if save.is_late or time.monotonic() - save.staged_at < LATE_S:
            return
        save.is_late = True
        self._tell(late(self._page, save.step, late_ones[0]), Told.WAITING)

    def _rotate(self) -> None:
        """Without a supervisor nobody else does."""
        if self._orders.keep_last is None:
            return
        try:
            self._patiently(folder.prune, self._orders.directory, self._orders.keep_last)
            self._patiently(folder.discard_leftovers, self._orders.directory)  # what could not be removed then
        except OSError as error:
            self._page.set_error(f"old checkpoints could not be removed: {error}")

    # --------------------------------------------------------------- its life

    def _take_lock(self) -> bool:
        """Wait to be the one writer; an earlier attempt's saver may still be committing. False: it is over."""
        said, done_since = "", None
        while not self._is_over():
            why = self._try_lock()
            if not why:
                return True
            if why != said:
                said = why
                self._page.set_error(why)
                self._page[Word.NUM_FAILED] += 1
                say(why)
            now = time.monotonic()
            done = all(rank.phase is Phase.DONE for rank in self._arenas.look())
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
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(directory / protocol.SAVER_LOCK, flags, 0o600)
        except OSError as error:
            return f"{directory}: no checkpoint can be written: {error}"
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_ours = self._lock is not None and os.path.sameopenfile(fd, self._lock)
            os.close(fd)
            return "" if is_ours else f"{directory}: another saver writes here; waiting for it to end"
        except OSError as error:
            say(f"no lock on this filesystem, going on without: {error}")
        with contextlib.suppress(OSError):  # a full disk: whoever comes then takes us for a run that goes on
            os.ftruncate(fd, 0)
            os.pwrite(fd, os.fsencode(self._page.path), 0)
        before, self._lock = self._lock, fd
        if before is not None:
            os.close(before)
        return ""

    def _want_of_folder(self) -> str:
        """Make a folder that was removed or renamed again, and lock it: why that cannot be, or nothing."""
        if not self._is_folder_lost():
            return ""
        if why := self._try_lock():
            return why
        page, directory = self._page, self._orders.directory
        self._lost_step = max(self._orders.resumed_step, page[Word.COMMITTED_STEP])
        for rank in range(page.num_ranks):
            page.put(rank, Slot.FROZEN_HELD, 0)
        self._tell(
            f"{directory}: was removed or renamed while training ran: it is made again, and saves go on there; what was saved "
            "before is where it was moved to, or gone",
            Told.NEWS,
        )
        page[Word.NUM_FAILED] += 1  # after the text: whoever sees it reads that
        return ""

    def _is_folder_lost(self) -> bool:
        """Whether our lock is not in it any more. Of a filesystem whose numbers change, it is known by its path as well."""
        if self._lock is None:
            return False
        path = self._orders.directory / protocol.SAVER_LOCK
        try:
            there, ours = path.lstat(), os.fstat(self._lock)
        except OSError as error:
            return isinstance(error, FileNotFoundError | NotADirectoryError)  # writing will say what else is wrong
        if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
            return False
        return path.resolve() != Path(f"/proc/self/fd/{self._lock}").readlink()

    def _recover(self) -> None:
        """Take over what a saver that died left on the page."""
        page, step = self._page, self._page[Word.PROPOSED_STEP]
        if self._orders.keep_last is not None:
            self._patiently(folder.discard_leftovers, self._orders.directory)
        self._arenas.look()
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
        ranks = self._arenas.look()
        gone = any(r.attached for r in ranks) and not any(r.attached and r.alive for r in ranks)
        if not gone or (self._save is None):
            return gone
        return self._lock is None  # a save is pending: the next turn writes it, or finds it void

    def _patiently(self, call: Callable[..., _T], *arguments: Any) -> _T:  # noqa: ANN401  # whatever it takes
        """Have something done that waits for a disk. However long it takes, the ranks see that we live."""
        job = self._disk.submit(call, *arguments)
        while not wait([job], timeout=BUSY_S).done:
            self._beat()
        return job.result()

    def _pause(self, seconds: float) -> None:
        self._beat()
        time.sleep(seconds)

    def _beat(self) -> None:
        self._page[Word.SAVER_BEAT_NS] = time.monotonic_ns()


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
        page.set_error(f"the saver died of {error!r}; it is started again; see saver.log", Told.DEATH)
        page[Word.NUM_FAILED] += 1
        raise
    if orders.keep_last is not None:  # no supervisor: nobody else removes the page
        orders.control.unlink(missing_ok=True)


def leave(act: Callable[[], None]) -> NoReturn:
    """
    Do that and end at once, without a wait for threads that are giving memory its pages when nobody else wants the processor.

    Nobody wants those pages any more, and the next saver waits for our lock.
    """
    code = 1
    try:
        act()
        code = 0
    except Exception:  # noqa: BLE001  # as the interpreter would
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    leave(main)
