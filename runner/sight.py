"""
What can be seen of the attempt that runs, or has just ended: its processes, its control page, what
a framework saved, what its logs take. Looked at anew each turn; nothing is decided here.
"""

from __future__ import annotations

import math
import signal
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from runner.adapters.frameworks import Save, get_framework
from runner.facts import (
    Attempt,
    Diagnosis,
    Exit,
    Hang,
    Live,
    Observed,
    Progress,
)
from runner.folder import RunFolder, free_bytes
from runner.job import GuardPolicy, HangPolicy, Job
from runner.policy import ledger
from runner.policy.divergence import LossWatch, divergence, watch_loss
from runner.policy.hang import Patience, Watch, cards_every_s, judge, keep, limit_s, look_every_s, watch
from runner.policy.straggler import Lags, straggler, watch_lags
from runner.supervise import attempt as attempts
from runner.supervise import page as pages
from runner.supervise import process
from runner.supervise.cards import Cards
from runner.supervise.clock import Clock
from runner.supervise.page import ProgressReader
from runner.supervise.process import Process, are_written
from runner.supervise.pulse import PulseReader
from runner.supervise.steps import StepReader
from runner.supervise.triage import first_error
from runner.supervise.trim import Ahead, stored_bytes, trim
from vramfarm.protocol import ControlPage, Word

_LOOK_AT_SAVES_EVERY: Final = timedelta(seconds=2)
_SIZE_LOGS_EVERY: Final = timedelta(seconds=0.5)  # of the attempt that runs: a script can print gigabytes in seconds
_SIZE_OTHERS_EVERY: Final = timedelta(seconds=20)
_KEEP_AHEAD_EVERY: Final = timedelta(seconds=5)
_FIND_EVERY: Final = timedelta(seconds=2)
_READ_LOG_EVERY: Final = timedelta(seconds=2)
_NS: Final = 1e-9


class AttemptSight:
    """What can be seen of the attempt that runs, or has just ended."""

    def __init__(self, folder: RunFolder, hangs: HangWatch, guard: GuardPolicy, clock: Clock) -> None:
        self._folder, self._clock = folder, clock
        self._hangs = hangs
        self._guard, self._loss = guard, LossWatch()
        self.attempt: Attempt | None = None
        self._reader: ProgressReader | None = None
        self._steps: StepReader | None = None
        self._steps_at = datetime.min.replace(tzinfo=UTC)
        self._progress = Progress()
        self._save_s = 0.0
        self._leave_sent_at: datetime | None = None
        self._asked: frozenset[Process] = frozenset()  # by SIGTERM
        self._unasked: frozenset[Process] = frozenset()
        self._first_step_at: datetime | None = None
        self._gone_at: datetime | None = None
        self._exit_seen_at: datetime | None = None
        self._found: Live | None = None
        self._found_at = datetime.min.replace(tzinfo=UTC)
        self._told: tuple[Exit | None, Diagnosis] | None = None  # how it ended, its first error

    def look(self, seen: Observed, attempt: Attempt) -> Observed:
        if self.attempt is None or self.attempt.number != attempt.number:
            self.forget()
            self.attempt = attempt
        folder = self._folder.attempt(attempt.number)
        live = self._live(attempt.id, folder, seen.now)
        exit_ = attempts.read_exit(folder)  # after `live`: a shim writes it and then ends
        self._read_page()
        self._find_unasked(live)
        self._read_steps(folder, seen.now, ended=live is None or not live.trainers)
        self._remember_first_step(seen.now)
        is_known = exit_ is not None and (exit_.code is not None or attempts.is_unwatched(folder))
        seen_exit = exit_ if live is None or is_known else None
        self._exit_seen_at = (self._exit_seen_at or seen.now) if seen_exit else None
        self._gone_at = (self._gone_at or seen.now) if live and not live.trainers else None
        trains = live is not None and live.trainers and seen_exit is None and self._leave_sent_at is None
        page = self._reader.page if self._reader else None
        hang = self._hangs.look(attempt, live, page, self._save_s) if trains and live else None
        return replace(
            seen,
            live=live,
            exit=seen_exit,
            exit_seen_at=self._exit_seen_at,
            end=attempts.read_end(folder),
            diagnosis=self._diagnose(folder, exit_) if live is None else None,
            progress=self._progress,
            hang=hang,
            straggler=self._hangs.straggler,
            divergence=divergence(self._loss) if live and self._guard.nan_patience else None,
            leave_sent_at=self._leave_sent_at,
            terminated=bool(self._asked),
            asked_live=any(map(process.is_alive, self._asked)),
            unasked=bool(self._unasked),
            trainers_gone_at=self._gone_at,
            last_save_s=self._save_s,
            first_step_at=self._first_step_at,
        )

    def _live(self, attempt_id: str, folder: Path, now: datetime) -> Live | None:
        """
        Who lives. All of /proc is read for it, which is most of what supervision costs: in between
        it is enough that the shim lives, because then the attempt does.
        """
        if self._found is None or now - self._found_at >= _FIND_EVERY or attempts.find_shim(folder) is None:
            self._found, self._found_at = attempts.live(attempt_id, folder), now
        return self._found

    def _diagnose(self, folder: Path, exit_: Exit | None) -> Diagnosis | None:
        """Logs may be large: they are read once, when the last process of an attempt that failed is gone."""
        if exit_ is not None and exit_.code == 0:
            return None
        if self._told is None or self._told[0] != exit_:
            self._told = (
                exit_,
                first_error(folder, exit_ or Exit(code=None), free_bytes=free_bytes(self._folder.root)),
            )
        return self._told[1]

    def _read_page(self) -> None:
        assert self.attempt is not None
        if self._reader is None:
            page = pages.find(self._folder.root, self.attempt.id)
            self._reader = ProgressReader(page) if page else None
        if self._reader is None:
            return
        page = self._reader.page
        told = self._reader.read()
        self._loss = watch_loss(self._loss, told, self._guard)
        self._progress = self._steps.fill(told) if self._steps else told
        self._save_s = page[Word.SAVE_NS] * _NS
        if pages.leave_requested(page) and self._leave_sent_at is None:  # by an earlier life, which asked them, too
            self._leave_sent_at, self._asked = self._clock.now(), self._find_asked()

    def _find_unasked(self, live: Live | None) -> None:
        """A script may go on to its next program, and a shell that was asked may leave its own alone."""
        is_due = live is not None and live.trainers and self._leave_sent_at is not None and not self._progress.attached
        self._unasked = self._find_asked() - self._asked if is_due else frozenset()

    def _read_steps(self, folder: Path, now: datetime, *, ended: bool) -> None:
        """What the log says of a script without the library; once more when it has ended."""
        if self._progress.attached or (not ended and now - self._steps_at < _READ_LOG_EVERY):
            return
        self._steps, self._steps_at = self._steps or StepReader(folder), now
        self._steps.look(time.monotonic(), ended=ended)
        self._progress = self._steps.fill(self._progress)

    def _remember_first_step(self, now: datetime) -> None:
        assert self.attempt is not None
        began_at = self.attempt.resume.step if self.attempt.resume and not self._progress.from_log else 0
        if self._progress.step > began_at:
            self._first_step_at = self._first_step_at or now

    def shim(self) -> Process | None:
        """Who ends when the attempt has ended, while it lives."""
        return attempts.find_shim(self._folder.attempt(self.attempt.number)) if self.attempt else None

    def running(self) -> ledger.Running:
        return ledger.Running(
            step=self._progress.step, first_step_at=self._first_step_at, from_log=self._progress.from_log
        )

    def interrupt(self) -> None:
        """Ask through the page; who does not look there gets SIGTERM, once, on which some trainers save."""
        if self._reader is not None:
            pages.request_leave(self._reader.page)
        if not self._progress.attached:
            asked = self._find_asked() - self._asked
            process.kill(asked, signal.SIGTERM)
            self._asked |= asked
        self._unasked = frozenset()
        self._leave_sent_at = self._leave_sent_at or self._clock.now()

    def _find_asked(self) -> frozenset[Process]:
        return (
            attempts.find_asked(self.attempt.id, self._folder.attempt(self.attempt.number))
            if self.attempt
            else frozenset()
        )

    def identity(self) -> dict[str, int]:
        """What a checkpoint has to say of its attempt."""
        return {"number": self.attempt.number, "lineage": self.attempt.lineage} if self.attempt else {}

    def forget(self) -> None:
        self._hangs.forget()
        self.__init__(self._folder, self._hangs, self._guard, self._clock)  # type: ignore[misc]  # as new

    @property
    def hang(self) -> Hang | None:
        return self._hangs.hang

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._hangs.ranks


class HangWatch:
    """Looks for signs of life every few seconds, and has them judged."""

    def __init__(self, policy: HangPolicy, folder: RunFolder, cards: Cards) -> None:
        self._policy, self._patience, self._folder = policy, Patience(), folder
        self._cards = cards
        self.forget()

    def forget(self) -> None:
        self._reader: PulseReader | None = None
        self._watch = Watch()
        self._lags = Lags()
        self.straggler = ""
        self._next_s = 0.0
        self.hang: Hang | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank.pid for rank in self._watch.last.ranks) if self._watch.last else ()

    def look(self, attempt: Attempt, live: Live, page: ControlPage | None, last_save_s: float) -> Hang | None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return self.hang
        if self._reader is None:
            self._reader = PulseReader(self._folder.attempt(attempt.number), self._cards)
        limit = limit_s(self._watch, self._policy, self._patience, last_save_s=last_save_s)
        moved_s = self._watch.moved_s
        since = self._watch.clock_s - moved_s
        pulse = self._reader.read(live, page, cards_every_s=cards_every_s(since, limit))
        self._watch = watch(self._watch, pulse, self._patience)
        self._lags = watch_lags(self._lags, pulse)
        self.straggler = straggler(self._lags)
        found = judge(self._watch, self._policy, self._patience, last_save_s=last_save_s)
        self.hang = keep(self.hang, found, has_moved=self._watch.moved_s > moved_s)
        self._next_s = now_s + look_every_s(self._policy)
        return self.hang


class Saves:
    """What a framework saves by itself, in a folder of its own."""

    def __init__(self, job: Job, num_procs: int) -> None:
        self._framework, self._folder = get_framework(job), Path(job.checkpoint.watch)
        self._num_procs = num_procs
        self._looked_at = datetime.min.replace(tzinfo=UTC)
        self._candidate, self._ready = "", ""
        self._writing: Save | None = None  # the newest save, whole or not, and when it began to be written
        self._began_s = 0.0
        self.write_s = 0.0  # that the last whole one took, to the next look

    def ready(self, now: datetime, attempt: Attempt, live: Live | None) -> str:
        """The newest complete save of the attempt: the same in two looks, and no process that could write to it."""
        if self._framework.uses_library or (live and now - self._looked_at < _LOOK_AT_SAVES_EVERY):
            return self._ready
        self._looked_at = now
        newest = self._newest(attempt)
        before, self._candidate = self._candidate, newest.id if newest else ""
        if newest and (live is None or (before == newest.id and not _is_written(live, newest))):
            if self._ready != newest.id and self._writing and self._writing.name == newest.name:
                self.write_s = max(newest.stamp * _NS - self._began_s, 0.0) + _LOOK_AT_SAVES_EVERY.total_seconds()
                self._writing = None
            self._ready = newest.id
        return self._ready

    def _newest(self, attempt: Attempt) -> Save | None:
        launched_ns = attempt.launched_at.timestamp() / _NS
        saves = self._framework.saves(self._folder, self._num_procs)
        own = [save for save in saves if save.stamp >= launched_ns]
        self._watch(max(own, key=lambda save: save.stamp, default=None))
        return max((save for save in own if save.complete), key=lambda save: save.stamp, default=None)

    def _watch(self, newest: Save | None) -> None:
        """When the one that is being written was first seen; in a folder of its own, when its first file was whole."""
        if newest is None or newest.id == self._ready or (self._writing and self._writing.name == newest.name):
            return
        first = self._looked_at.timestamp()
        if newest.root != self._folder:
            first = min(first, min((_modified_s(newest.root / name) for name in newest.files), default=first))
        self._writing, self._began_s = newest, first

    def put_aside(self, attempt: Attempt) -> None:
        """
        What lies beyond the checkpoint that this attempt resumes from, and what never became whole:
        a framework that looks for the highest number would take it, or keep it and delete newer ones.
        """
        self._candidate = self._ready = ""
        self._writing = None
        if self._framework.uses_library:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        step = attempt.resume.step if attempt.resume else 0
        saves = self._framework.saves(self._folder, self._num_procs)
        for save in saves:
            if not save.complete or (save.step is not None and save.step > step):
                self._move(save, self._folder / f".aside-before-attempt-{attempt.number:04d}")

    def _move(self, save: Save, aside: Path) -> None:
        aside.mkdir(exist_ok=True)
        inside = {self._folder / Path(name).parts[0] for name in save.files}
        for path in inside if save.root == self._folder else {save.root}:
            with suppress(OSError):
                path.rename(aside / path.name)


def _modified_s(path: Path) -> float:
    """Later than anything where it is gone."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return math.inf


def _is_written(live: Live, save: Save) -> bool:
    return are_written(live.trainers, (save.root / name for name in save.files))


class Logs:
    """What logs take on the disk, looked at now and then, and room for what is still to be printed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ahead = Ahead(folder)
        self._kept_at = datetime.min.replace(tzinfo=UTC)
        self._attempt: Path | None = None
        self._size = self._of_others = 0
        self._sized_at = self._others_at = datetime.min.replace(tzinfo=UTC)
        self._trimmed_in_vain = False
        self.error = ""

    def size(self, now: datetime, attempt: Path | None) -> int:
        """What they take, all together: those of the attempt that runs looked at each tick, others now and then and when it ends."""
        if self.error:
            return self._size
        if attempt != self._attempt or now - self._others_at >= _SIZE_OTHERS_EVERY:
            self._size = stored_bytes(self._folder)
            self._of_others = self._size - (stored_bytes(attempt) if attempt else 0)
            self._attempt, self._sized_at, self._others_at = attempt, now, now
            self._trimmed_in_vain = False
        elif attempt and now - self._sized_at >= _SIZE_LOGS_EVERY and not self._trimmed_in_vain:
            self._size, self._sized_at = self._of_others + stored_bytes(attempt), now
        return self._size

    def keep_ahead(self, now: datetime, attempt: Path | None) -> None:
        """Room on the disk for the logs of the attempt that runs; None: none does."""
        if attempt is None or now - self._kept_at >= _KEEP_AHEAD_EVERY:
            self._ahead.keep(attempt)
            self._kept_at = now

    def trim(self, max_bytes: int) -> None:
        self._size = 0  # until it is looked at again
        try:
            trim(self._folder, max_bytes)
            self._of_others = stored_bytes(self._folder) - (stored_bytes(self._attempt) if self._attempt else 0)
            self._trimmed_in_vain = stored_bytes(self._folder) > max_bytes  # beginnings and ends alone are more
        except OSError as error:
            self.error = error.strerror or str(error)
