"""
A rehearsal of the night: which check of a run comes next, and what it came to.

The driver looks at a real run from outside, asks here, and does the one thing that it is told. Every
figure is measured; the sentences about them are in `cli/rehearsal_words.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from statistics import median
from typing import Any, Final

from runner.errors import GaveUpError, JobError, LeftError, LockedError, MachineError, RunnerError, StoreError
from runner.facts import Attempt, Checkpoint, Decision, Ending
from runner.policy.cadence import observed_interval
from vramfarm.protocol import Ref


class Check(StrEnum):
    """What is tried, in the order in which it is told."""

    STOP = "stop"  # would the provider stop this server?
    NOTIFY = "notify"
    PREFLIGHT = "preflight"
    FIRST_STEP = "first step"
    SAVE = "save"
    STORE = "store"
    CRASH = "crash"
    LEAVE = "leave"
    RESTORE = "restore"


class Mark(StrEnum):
    """How a check ended. Only FAILED keeps the night from being ready."""

    OK = "ok"
    WARN = "warning"
    FAILED = "failed"
    NOT_MADE = "not made"


CHAIN: Final = (Check.PREFLIGHT, Check.FIRST_STEP, Check.SAVE, Check.STORE, Check.CRASH, Check.LEAVE)
"""Those that a run goes through, one after the other."""

_AS_IT_IS: Final = frozenset(one.exit_code for one in (RunnerError, JobError, MachineError, StoreError, LockedError))
_GOES_ON: Final = frozenset({Check.STORE})  # what comes after it can be tried although it failed
_STEPS_BEFORE: Final = 5  # whose pace a save is compared with
_SETTLED_S: Final = 3.0
_PATIENCE_S: Final = 60.0  # for slow steps
_SAVES_SHARE: Final = 0.6  # of the time: so long a framework may take to its first save


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one check came to. `problem` and `cure` where it did not go well; `code` is that of a failure."""

    check: Check
    mark: Mark
    figures: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    cure: str = ""
    code: int = 0


Figures = Mapping[str, Any]


def ok(check: Check, figures: Figures, problem: str = "") -> Result:
    return Result(check=check, mark=Mark.OK, figures=figures, problem=problem)


def failed(check: Check, problem: str, cure: str, code: int, figures: Figures | None = None) -> Result:
    return Result(check=check, mark=Mark.FAILED, figures=figures or {}, problem=problem, cure=cure, code=code)


def not_made(check: Check, problem: str, cure: str = "", figures: Figures | None = None) -> Result:
    return Result(check=check, mark=Mark.NOT_MADE, figures=figures or {}, problem=problem, cure=cure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is known before the run begins. `limit_s`: when what was not reached is given up."""

    limit_s: float
    uses_library: bool
    has_store: bool
    save_interval_s: float
    keep_last: int
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Rank 0 had made this many steps at this time."""

    at_s: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The run, looked at once from outside: its status, journal, folder and control page. `now_s` counts from its start."""

    now_s: float
    code: int | None = None  # its exit code, when it is over
    reason: str = ""  # its last word about that
    hint: str = ""
    message: str = ""  # the newest line of its log
    store_error: str = ""  # why the newest look into the store, or copy to it, failed
    store_gave_up: bool = False  # and is not tried again
    verdict: str = ""
    reasons: tuple[str, ...] = ()
    launched_s: float | None = None  # of the newest attempt
    attempts: tuple[Attempt, ...] = ()
    step: int = 0
    shows_progress: bool = False  # a script that does not use the library prints that it trains
    beats: tuple[Beat, ...] = ()  # of the newest attempt
    local: tuple[Checkpoint, ...] = ()
    offsite: tuple[Ref, ...] = ()  # verified there
    save_s: float = 0.0
    save_error: str = ""
    upload_s: float = 0.0
    free_bytes: int = 0


def remember(before: Seen, now: Seen) -> Seen:
    """The newest look, with what an earlier one saw and this one cannot any more."""
    return replace(
        now,
        local=now.local or before.local,
        save_s=now.save_s or before.save_s,
        upload_s=now.upload_s or before.upload_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A rank was killed."""

    attempt: int
    rank: int
    step: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What was done to the run so far, and found out."""

    results: tuple[Result, ...] = ()
    asked_s: float | None = None  # for a save
    killed: Kill | None = None
    left_s: float | None = None  # asked to leave
    left_step: int = 0


class Deed(StrEnum):
    """What the driver does next. END: of the run, whatever it is at."""

    WAIT = "wait"
    ASK_SAVE = "ask for a save"
    KILL_RANK = "kill a rank"
    ASK_LEAVE = "ask to leave"
    END = "end"


def decide(scene: Scene, notes: Notes, seen: Seen) -> Deed | Result:
    """The next deed, or what the check that is next came to."""
    done = {result.check: result for result in notes.results}
    check = next((check for check in CHAIN if check not in done), None)
    failures = {result.check for result in notes.results if result.mark is Mark.FAILED and result.check in CHAIN}
    if check is None:
        return Deed.END
    if failures - _GOES_ON:
        return not_made(check, "what comes before it failed")
    if check is not Check.LEAVE and (found := _crashed(check, notes, seen)):
        return found
    act = _next(check, scene, notes, seen)
    return _over(check, notes, seen) if seen.code is not None and isinstance(act, Deed) else act


def _next(check: Check, scene: Scene, notes: Notes, seen: Seen) -> Deed | Result:
    match check:
        case Check.PREFLIGHT:
            found = _preflight(seen)
        case Check.FIRST_STEP:
            found = _first_step(seen)
        case Check.SAVE:
            return _save(scene, notes, seen)
        case Check.STORE:
            found = _store(scene, seen)
        case Check.CRASH:
            return _crash(scene, notes, seen)
        case _:
            return _leave(scene, notes, seen)
    return found or _wait(check, scene.limit_s, seen)


# --------------------------------------------------------------------------- what goes wrong


def _over(check: Check, notes: Notes, seen: Seen) -> Result:
    """The run has ended before this check."""
    if seen.code == 0:
        return not_made(check, f"the job was over before, at step {seen.step}")
    if found := _crashed(check, notes, seen):
        return found
    code = seen.code if seen.code in _AS_IT_IS else GaveUpError.exit_code
    problem = seen.reason or f"the run ended with exit code {seen.code}"
    hint = seen.hint or "the log of the rehearsal says more"
    return failed(check, problem, hint, code)


def _crashed(check: Check, notes: Notes, seen: Seen) -> Result | None:
    """An attempt failed by itself. One that is repaired by a change of its environment is tried again, as at night."""
    mine = notes.killed.attempt if notes.killed else 0
    own = [a for a in seen.attempts if a.ending is Ending.FAILED and a.number != mine]
    last = own[-1] if own else None
    if last is None or (seen.code is None and last.diagnosis and last.diagnosis.decision is Decision.RETRY_ENV):
        return None
    found = last.diagnosis
    is_machine = found is not None and found.decision is Decision.GIVE_UP_MACHINE
    label = f" [{found.label}: {found.cause}]" if found else ""
    return failed(
        check,
        f"attempt {last.number} failed by itself at step {last.step}: {last.reason or 'no line of its log says why'}{label}",
        found.remedy if found else "",
        MachineError.exit_code if is_machine else GaveUpError.exit_code,
    )


def _wait(check: Check, limit_s: float, seen: Seen) -> Deed | Result:
    if seen.now_s < limit_s:
        return Deed.WAIT
    is_store = check is Check.STORE or (check is Check.PREFLIGHT and bool(seen.store_error))
    said = seen.store_error if is_store and seen.store_error else seen.message
    return failed(
        check,
        "it did not come in the time of this rehearsal" + (f"; last heard: {said}" if said else ""),
        "give the rehearsal more time: --minutes",
        StoreError.exit_code if is_store else GaveUpError.exit_code,
    )


# ------------------------------------------------------------------------------- the checks


def _preflight(seen: Seen) -> Result | None:
    if not seen.verdict or not seen.attempts:  # what is said of the code comes last, just before the launch
        return None
    return ok(Check.PREFLIGHT, {"verdict": seen.verdict, "reasons": list(seen.reasons), "seconds": seen.now_s})


def _first_step(seen: Seen) -> Result | None:
    if seen.launched_s is None or not (seen.step > _began_at(seen) or seen.shows_progress or seen.local):
        return None
    return ok(Check.FIRST_STEP, {"seconds": seen.now_s - seen.launched_s, "step": seen.step})


def _began_at(seen: Seen) -> int:
    """The step that the newest attempt went on from."""
    last = seen.attempts[-1] if seen.attempts else None
    return last.resume.step if last and last.resume else 0


def _save(scene: Scene, notes: Notes, seen: Seen) -> Deed | Result:
    if seen.local:
        return _judge_save(scene, notes, seen)
    if not scene.uses_library:
        if seen.now_s < _SAVES_SHARE * scene.limit_s:
            return Deed.WAIT
        problem = "the framework saves when it wants to, and did not in the time of this rehearsal"
        return not_made(Check.SAVE, problem, "--minutes, or save more often")
    if notes.asked_s is None:
        return Deed.ASK_SAVE if _has_pace(seen) else _wait(Check.SAVE, scene.limit_s, seen)
    if seen.save_error:
        return failed(Check.SAVE, seen.save_error, _DISK, MachineError.exit_code)
    return _wait(Check.SAVE, scene.limit_s, seen)


_DISK: Final = "free some space, or rent a machine with a larger disk"


def _has_pace(seen: Seen) -> bool:
    """Enough steps to tell whether a save slows them down."""
    if len(seen.beats) < 2:  # noqa: PLR2004  # a pace takes two
        return False
    took, steps = seen.beats[-1].at_s - seen.beats[0].at_s, seen.beats[-1].step - seen.beats[0].step
    return took >= _PATIENCE_S or (steps >= _STEPS_BEFORE and took >= _SETTLED_S)


def _judge_save(scene: Scene, notes: Notes, seen: Seen) -> Result:
    newest = max(seen.local, key=lambda checkpoint: checkpoint.ref)
    needed = newest.size_bytes * (scene.keep_last + 2)
    room = seen.free_bytes + sum(checkpoint.size_bytes for checkpoint in seen.local)
    figures = {
        "step": newest.ref.step,
        "size_bytes": newest.size_bytes,
        "seconds": seen.save_s or None,
        "stall_s": None if notes.asked_s is None else stall_s(seen.beats, notes.asked_s),
        "needed_bytes": needed,
        "room_bytes": room,
    }
    if room >= needed:
        return ok(Check.SAVE, figures)
    problem = f"the disk holds {room / newest.size_bytes:.1f} checkpoints, and {scene.keep_last + 2} are needed (checkpoint.keep_last + 2)"
    return failed(Check.SAVE, problem, _DISK, MachineError.exit_code, figures)


def stall_s(beats: Sequence[Beat], since_s: float) -> float | None:
    """How much longer than usual the slowest step since then took; None where nothing is there to compare with."""
    gaps = [(b.at_s, b.at_s - a.at_s, b.step - a.step) for a, b in pairwise(beats) if b.step > a.step]
    before = [took / steps for at, took, steps in gaps if at <= since_s]
    during = [(took, steps) for at, took, steps in gaps if at > since_s]
    if not before or not during:
        return None
    usual = median(before)
    return max(0.0, *(took - steps * usual for took, steps in during))


def _store(scene: Scene, seen: Seen) -> Result | None:
    if not scene.has_store:
        return not_made(Check.STORE, "no checkpoint leaves this disk", "set offload.to")
    if not seen.local and not scene.uses_library:
        return not_made(Check.STORE, "there was no save to copy")
    if seen.store_gave_up and seen.store_error:
        return failed(Check.STORE, seen.store_error, seen.hint, StoreError.exit_code)
    if not seen.offsite or not seen.upload_s:
        return None
    return _judge_upload(scene, seen, max(c.size_bytes for c in seen.local))


def saves_every_s(scene: Scene, seen: Seen) -> float:
    """Of a script that saves for itself, as it was seen: `checkpoint.save_interval` does not govern it."""
    observed = None if scene.uses_library else observed_interval(seen.local, seen.attempts)
    return observed.total_seconds() if observed else scene.save_interval_s


def _judge_upload(scene: Scene, seen: Seen, size_bytes: int) -> Result:
    step, upload_s, interval_s = max(seen.offsite).step, seen.upload_s, saves_every_s(scene, seen)
    figures = {
        "step": step,
        "size_bytes": size_bytes,
        "seconds": upload_s,
        "bytes_per_s": size_bytes / upload_s,
        "needed_bytes_per_s": size_bytes / interval_s,
        "save_interval_s": interval_s,
    }
    if upload_s <= interval_s:
        return ok(Check.STORE, figures)
    problem = "an upload takes longer than the time between saves: some never get into the store"
    minutes = -int(-upload_s // 60)
    cure = f"checkpoint.save_interval: {minutes}m" if scene.uses_library else f"let the script save every {minutes}m"
    return Result(check=Check.STORE, mark=Mark.WARN, figures=figures, problem=problem, cure=cure)


def _crash(scene: Scene, notes: Notes, seen: Seen) -> Deed | Result:
    killed = notes.killed
    if killed is None:
        is_late = seen.now_s >= scene.limit_s
        problem = "the time of this rehearsal was over"
        cure = "give it more: --minutes"
        return not_made(Check.CRASH, problem, cure) if is_late else Deed.KILL_RANK
    last = seen.attempts[-1]
    if last.number == killed.attempt:
        return _wait(Check.CRASH, scene.limit_s, seen)
    if seen.step <= _began_at(seen) and not seen.shows_progress:
        return _wait(Check.CRASH, scene.limit_s, seen)
    return _judge_crash(killed, last, seen)


def _judge_crash(killed: Kill, last: Attempt, seen: Seen) -> Result:
    first = next(attempt for attempt in seen.attempts if attempt.number == killed.attempt)
    newest = max((c.ref for c in seen.local if c.ref.attempt <= killed.attempt), default=None)
    figures = {
        "rank": killed.rank,
        "seconds": seen.now_s - killed.at_s,
        "first_error": first.reason.partition("; see ")[0],  # that log goes with the rehearsal
        "killed_at_step": killed.step,
        "resumed_step": last.resume.step if last.resume else 0,
    }
    problem = ""
    if newest is not None and (last.resume is None or last.resume < newest):
        problem = f"it went on from {last.resume.name if last.resume else 'step 0'}, although there is {newest.name}"
    elif not first.reason:
        problem = "nothing names what the attempt died of"
    if not problem:
        return ok(Check.CRASH, figures)
    cure = "the log of the rehearsal says what was chosen, and why"
    return failed(Check.CRASH, problem, cure, GaveUpError.exit_code, figures)


def _leave(scene: Scene, notes: Notes, seen: Seen) -> Deed | Result:
    if notes.left_s is None:
        is_settled = len(seen.beats) < 2 or seen.beats[-1].at_s - seen.beats[0].at_s >= _SETTLED_S  # noqa: PLR2004
        return Deed.ASK_LEAVE if is_settled else Deed.WAIT
    took = seen.now_s - notes.left_s
    if seen.code is None:
        if took < scene.grace_s + _PATIENCE_S:
            return Deed.WAIT
        problem = f"the run did not end within {took:.0f}s of SIGTERM"
        return failed(Check.LEAVE, problem, _GRACE, GaveUpError.exit_code)
    return _judge_leave(scene, notes, seen, took)


_GRACE: Final = "a longer restart.grace_period; and give the container as much: --stop-timeout"


def _judge_leave(scene: Scene, notes: Notes, seen: Seen, took: float) -> Result:
    saved = max((c.ref.step for c in seen.local), default=0)
    figures = {
        "seconds": took,
        "grace_s": scene.grace_s,
        "exit_code": seen.code,
        "asked_at_step": notes.left_step,
        "saved_step": saved,
    }
    if seen.code == 0:
        problem = f"the job was over first, at step {seen.step}"
        return not_made(Check.LEAVE, problem, figures=figures)
    problem = ""
    if seen.code != LeftError.exit_code:
        problem = f"expected exit code {LeftError.exit_code}, got {seen.code}: {seen.reason or seen.message}"
    elif scene.uses_library and saved < notes.left_step:
        problem = f"it left without a save: asked at step {notes.left_step}, the newest checkpoint is of step {saved}"
    if problem:
        return failed(Check.LEAVE, problem, _GRACE, GaveUpError.exit_code, figures)
    return ok(Check.LEAVE, figures)


# ------------------------------------------------------------------------------ the verdict


def exit_code(results: Sequence[Result]) -> int:
    """That of the first failure in the order of the checks; 0 without one."""
    return next((result.code for result in results if result.mark is Mark.FAILED), 0)


def verdict(results: Sequence[Result]) -> str:
    """One line: ready, or what is not."""
    failures = [result.check for result in results if result.mark is Mark.FAILED]
    if failures:
        return f"not ready: {', '.join(failures)}"
    left = [result.check for result in results if result.mark is Mark.NOT_MADE]
    return "ready for the night" + (f", as far as it was rehearsed; not made: {', '.join(left)}" if left else "")


def crash_costs_s(interval_s: float, results: Sequence[Result]) -> float | None:
    """The most that a crash costs: training since the newest durable checkpoint, and the way back to it."""
    took = {result.check: result.figures for result in results if result.mark in {Mark.OK, Mark.WARN}}
    if Check.CRASH not in took or Check.SAVE not in took:
        return None
    return interval_s + float(took[Check.SAVE]["seconds"] or 0) + float(took[Check.CRASH]["seconds"])


def missing(results: Sequence[Result]) -> Iterator[Check]:
    """Those of which nothing was told yet."""
    told = {result.check for result in results}
    yield from (check for check in Check if check not in told)
