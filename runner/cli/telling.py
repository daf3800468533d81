"""What `run` says while it runs: a line an action, progress, checkpoints, the opening and the closing."""

from __future__ import annotations

import json
import os
import select
import sys
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import structlog

from runner.cli.bugreport import where
from runner.cli.output import plain
from runner.facts import History, Observed, Outcome
from runner.folder import RunFolder
from runner.job import Job
from runner.policy.actions import Accept, Action, End, GoOn, Launch, Refused, TrimLogs, Wait
from runner.policy.batch import tell_batch
from runner.policy.scaling import tell_scaling
from runner.policy.waiting import tell_waiting
from runner.report import gather_folder, page
from runner.supervise.logs import Follower
from runner.words import (
    Refusals,
    Surroundings,
    changes,
    closing,
    describe,
    describe_draining,
    grace,
    last_save_s,
    note_refusals,
    opening,
    progress_line,
    status,
    still_running,
    tell_end,
)

_EARLY: Final = timedelta(seconds=5)
_LATE: Final = timedelta(seconds=30)
_FIRST_MINUTE: Final = timedelta(minutes=1)
_ECHO_LINES: Final = 100  # of a stream a look: a script that prints thousands a second must not fill the disk twice
_STATUS_EVERY: Final = timedelta(seconds=2)
_MEASURE_EVERY: Final = timedelta(seconds=10)
_MAX_METRICS_BYTES: Final = 8 << 20


def _plain(logger: object, name: str, event: structlog.typing.EventDict) -> str:
    """`12:04:31 commit step=500`: no colour, nothing to parse."""
    del logger, name
    stamp, text = event.pop("timestamp"), event.pop("event")
    return plain(" ".join([stamp, text, *(f"{k}={v}" for k, v in event.items())]))


class _Stderr:
    """
    Where lines go; it never raises and never waits. A terminal that is closed, or stopped by
    Ctrl-S, must not end a run or hold it up; what it misses is in the logs.
    """

    def msg(self, text: str) -> None:
        with suppress(OSError, ValueError):
            if select.select([], [sys.stderr], [], 0)[1]:
                os.write(sys.stderr.fileno(), f"{text}\n".encode(errors="replace"))

    debug = info = warning = error = critical = msg


def _logger() -> structlog.typing.FilteringBoundLogger:
    logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        _Stderr(),
        processors=[structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False), _plain],
        wrapper_class=structlog.make_filtering_bound_logger(0),
    )
    return logger


def say(text: str) -> None:
    """One line of the log, before there is a run to tell of."""
    _logger().info(text)


class Teller:
    """`loop.Tell`: called once a turn, before the action is done."""

    def __init__(
        self, job: Job, folder: RunFolder, around: Surroundings, *, machine: str, stop_timeout: str | None = None
    ) -> None:
        """`stop_timeout`: what the container was told that `docker stop` waits; None outside containers."""
        self._job, self._folder, self._around, self._machine = job, folder, around, machine
        self._log = _logger()
        self._before: Observed | None = None
        self._progress_at: datetime | None = None
        self._status_at: datetime | None = None
        self._follower: Follower | None = None
        self._followed: Path | None = None
        self._begun_at = datetime.now(UTC)
        self._message = ""
        self._measured_at: datetime | None = None
        self._measured_step = 0
        self._stop_timeout = stop_timeout
        self._save_s = _remembered_save_s(folder.status)
        self._enough: bool | None = None
        self._scaling_told = 0
        self._end_told = 0
        self._trimmed_at: datetime | None = None
        self._draining = False  # said in this boot that the end is held up
        self._faults: set[str] = set()
        self._refusals: Refusals = {}
        self._saved_s = 0.0  # the page that says it goes with its attempt

    def __call__(self, action: Action | Refused | None, seen: Observed, history: History) -> None:
        try:
            self._tell(action, seen, history)
        except Exception as error:  # noqa: BLE001  # whatever it is: who cannot tell goes on doing
            self._tell_fault("this turn", error)
        self._before = seen

    def _tell_fault(self, what: str, error: Exception) -> None:
        """Once each: it may come each turn."""
        if (found := where(error)) not in self._faults:
            self._faults.add(found)
            fault = f"{type(error).__name__}: {str(error)[:200]} ({found})"
            self._log.warning(
                f"{what} cannot be told, which is a fault of the runner: {fault}; the run is not touched by it"
            )

    def _tell(self, action: Action | Refused | None, seen: Observed, history: History) -> None:
        if self._before is None:
            self._begun_at = seen.now
            for line in opening(self._job, self._around, self._machine):
                self._log.info(line)
            if history.conclusion and not isinstance(action, GoOn):
                self._log.info(_tell_over(history.conclusion.outcome))
            else:
                self._tell_grace(first=True)
        self._echo(history)
        for line in changes(self._before, seen, self._refusals, tell_waiting(self._job, history, seen)):
            self._say(line)
        self._refusals = note_refusals(self._refusals, self._before, seen)
        self._tell_progress(seen)
        self._tell_scaling(seen, history)
        knows_saves, self._save_s = self._save_s is not None, last_save_s(seen) or self._save_s
        self._saved_s = seen.last_save_s or self._saved_s
        self._tell_end(seen, history)
        if action is not None and not self._is_told(action, seen.now) and (line := describe(action)):
            self._say(line)
        if isinstance(action, Launch):
            for line in tell_batch(self._job, action, history, seen):
                self._log.info(line)
        self._tell_draining(seen, history)
        has_news = not isinstance(action, Wait | Accept) or knows_saves != (self._save_s is not None)
        self._write_status(seen, history, has_news=has_news)
        self._tell_grace(first=False)  # only now: the next life knows what was told
        self._measure(seen, history)

    def _is_told(self, action: Action | Refused, now: datetime) -> bool:
        """A script that floods its logs has them trimmed each second; that is one line a flood."""
        if not isinstance(action, TrimLogs):
            return False
        told, self._trimmed_at = self._trimmed_at, now
        return told is not None and now - told < _LATE

    def _say(self, line: str) -> None:
        self._message = line
        self._log.info(line)

    def _echo(self, history: History) -> None:
        """What rank 0 prints is what `docker logs` is looked at for; the other ranks have their files."""
        if not history.attempts:
            return
        folder = self._folder.attempt(history.attempts[-1].number)
        if self._follower is None or self._followed != folder:
            self._follower, self._followed = Follower(folder, rank=0), folder
            if self._before is None:  # of an attempt that an earlier life has told of
                self._follower.skip()
        lines = [f"  | {line.text}" for line in self._follower.read(limit_lines=_ECHO_LINES)]
        if dropped := self._follower.num_dropped:
            lines.insert(0, f"  | ({dropped} lines more; vramfarm-runner logs has them)")
        if lines:
            _Stderr().msg("\n".join(lines))  # one write

    def _tell_progress(self, seen: Observed) -> None:
        progress, before = seen.progress, self._before.progress if self._before else None
        if self._progress_at is not None and seen.now < self._progress_at:
            return
        moved = bool(progress.step) and (before is None or progress.step != before.step)
        lines = [progress_line(seen)] if moved else []
        lines += still_running(seen, longer_than=_EARLY)
        for line in lines:
            self._log.info(line)
        if lines:
            early = seen.now - self._begun_at < _FIRST_MINUTE
            self._progress_at = seen.now + (_EARLY if early else _LATE)

    def _tell_scaling(self, seen: Observed, history: History) -> None:
        """Once an attempt, when it is sure."""
        attempt = history.last.number if history.last else 0
        if self._scaling_told == attempt or not (line := tell_scaling(self._job, history, seen)):
            return
        self._scaling_told = attempt
        self._log.info(line)

    def _tell_grace(self, *, first: bool) -> None:
        """At the start, and again when the answer becomes another."""
        if self._stop_timeout is None:
            return
        now = grace(self._save_s, self._stop_timeout)
        if first or now.enough is not self._enough:
            self._enough = now.enough
            self._log.info(now.line)

    def _tell_end(self, seen: Observed, history: History) -> None:
        """At the start, and once more when the first upload has shown how long it takes."""
        parts = 1 + bool(seen.last_upload_s and seen.local)
        if history.conclusion is None and history.opened_at and self._end_told < parts:
            self._end_told = parts
            self._log.info(tell_end(self._job, history, seen, self._around.server))

    def _tell_draining(self, seen: Observed, history: History) -> None:
        """Once: whoever asked for the end sees that it is not forgotten, and how long it may take."""
        if not self._draining and (line := describe_draining(self._job, history, seen)):
            self._draining = True
            self._say(line)

    def _write_status(self, seen: Observed, history: History, *, has_news: bool, end: End | None = None) -> None:
        if not has_news and self._status_at and seen.now < self._status_at:
            return
        self._status_at = seen.now + _STATUS_EVERY
        picture = status(self._job, history, seen, self._around, self._message, end) | {
            "last_save_s": self._save_s,
            "last_upload_s": seen.last_upload_s or None,
        }
        _replace(self._folder.status, json.dumps(picture, indent=1).encode())

    def _measure(self, seen: Observed, history: History) -> None:
        """For the curves of the report: a line every ten seconds in which a step was made, some megabytes at most."""
        progress = seen.progress
        moved = progress.step and (self._before is None or progress.step != self._measured_step)
        if not moved or not history.attempts or (self._measured_at and seen.now < self._measured_at):
            return
        self._measured_at, self._measured_step = seen.now + _MEASURE_EVERY, progress.step
        line = {
            "at": seen.now.isoformat(timespec="seconds"),
            "attempt": history.attempts[-1].number,
            "step": progress.step,
            "loss": progress.loss,
            "steps_per_s": progress.steps_per_s,
        }
        with suppress(OSError), self._folder.metrics.open("a") as file:
            if file.tell() < _MAX_METRICS_BYTES:
                file.write(json.dumps(line) + "\n")

    def close(self, history: History, end: End) -> None:
        """The end is what it is, and the server is stopped for it, whatever can be told of it."""
        if self._before is None:
            return
        try:
            self._sum_up(self._before, history, end)
        except Exception as error:  # noqa: BLE001  # as in each turn
            self._tell_fault("the end", error)

    def _sum_up(self, seen: Observed, history: History, end: End) -> None:
        self._log.info("summary")
        for line in closing(self._job, history, replace(seen, last_save_s=self._saved_s), self._around, end):
            self._log.info(f"  {line}")
        self._write_status(seen, history, has_news=True, end=end)
        with suppress(OSError):
            self._folder.report.write_text(page(gather_folder(self._folder.root)))


def _tell_over(outcome: Outcome) -> str:
    more = ", for more steps than it had" if outcome is Outcome.SUCCEEDED else ""
    return f"this job is over already ({outcome}): nothing is trained; --go-on goes on{more}, --start-over trains anew"


def _remembered_save_s(path: Path) -> float | None:
    """What an earlier life found out."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        return float(json.loads(path.read_bytes()).get("last_save_s"))
    return None


def _replace(path: Path, raw: bytes) -> None:
    """A full disk must not end a run for want of a picture of it; the blocks of the last picture hold this one then."""
    fresh = path.with_name(f".{path.name}")
    try:
        fresh.write_bytes(raw)
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
            old = path.stat()
            if len(raw) <= max(old.st_size, old.st_blocks * 512):
                with path.open("r+b", buffering=0) as file:
                    file.write(raw.ljust(old.st_size))
