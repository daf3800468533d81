"""
Whether to try again, when, and with which one change; and who is to blame if not.

Triage says what an attempt died of. What it advises is followed where that is certain; where
it is not, the budget of attempts without progress decides, as it does for what nobody knows.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice
from typing import Final

from runner.facts import Attempt, Decision, Diagnosis, Ending, Outcome
from runner.job import RestartPolicy
from vramfarm.protocol import Ref

START_UP: Final = timedelta(minutes=10)  # a script that tells no steps is still starting for so long

# Before the first step these end every attempt in the same way.
_CERTAIN: Final = frozenset({
    "dataset_missing",
    "duplicate_gpu",
    "file_is_lfs_pointer_or_html",
    "hf_gated_403",
    "hf_token_401",
    "missing_module",
    "s3_bad_key",
    "s3_no_bucket",
    "segfault_startup",
    "state_dict_mismatch",
    "wrong_arch",
    "wrong_nproc",
})  # fmt: skip
_CERTAIN_LINE: Final = re.compile(
    r"\b(?:SyntaxError|IndentationError|TabError|ImportError|NameError)\b|"
    r": error: (?:unrecognized arguments|the following arguments are required|argument )|can't open file '|No such option|"
    r"got an unexpected keyword argument|not used by the HfArgumentParser|Could not override '|trust_remote_code|BdbQuit|"
    r"EOF when reading a line|ValidationError: \d+ validation"
)
DISK_FULL: Final = "disk_full"
_OF_THE_MACHINE: Final = frozenset({"container", "disk", "machine", "nccl", "setup", "shm"})  # categories
_OF_THE_USER: Final = frozenset({"user_code", "user_config"})  # categories
_CHANCE: Final = frozenset({"network_storage", "signal", "unknown"})  # categories: they happen to a job
_KILLED: Final = "sigkill_unknown"
_UNSAFE: Final = frozenset({"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"})  # runs what a file holds: only a person may say so
_DIGITS: Final = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Succeeded:
    """Nothing left to train."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Launch again, no earlier than `at`, with `env`: the changes that helped, and one new one at most."""

    at: datetime
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not launch again; `reason` goes to the journal and to the notifier. REFUSED: the machine is to blame."""

    reason: str
    outcome: Outcome = Outcome.GAVE_UP


def decide_restart(
    attempts: tuple[Attempt, ...],
    newest: Ref | None,
    policy: RestartPolicy,
    *,
    users: Collection[str] = (),
    boot_id: str | None = None,
) -> Succeeded | Retry | GiveUp:
    """
    Return what follows from the last attempt. `newest` is the checkpoint a launch would use now;
    `users` are names of variables that the user set, which no change touches; `boot_id` is this
    machine's, in its present life: what another one is to blame for is forgotten here.

    The budget counts only failed attempts in a row that made no progress: one that moved on is
    forgiven, one that was interrupted counts for nothing.
    """
    last = attempts[-1]
    assert last.ending is not None, "asked about a running attempt"
    assert last.ended_at is not None
    if last.ending is Ending.SUCCEEDED:
        return Succeeded()
    if last.ending is Ending.INTERRUPTED:
        return Retry(at=last.ended_at, env=last.env)
    if boot_id not in {None, last.boot_id} and _blamed(last.diagnosis) is Outcome.REFUSED:
        return Retry(at=last.ended_at, env=last.env)
    env = plan_env(attempts, users)
    is_changed = env != plan_env(attempts, users, offer=False)
    gave_up = _at_once(attempts) or (None if is_changed else _a_second_time(attempts))
    if gave_up:
        return gave_up
    failures = count_failures(attempts, newest)
    if failures >= policy.max_restarts_without_progress:
        return _give_up(f"{failures} attempts in a row made no progress", last)
    return Retry(at=last.ended_at + _delay(failures, policy), env=env)


def count_failures(attempts: tuple[Attempt, ...], newest: Ref | None) -> int:
    """
    How many of the last attempts failed without a checkpoint newer than the one they began with.

    One that a full disk kept from its first step, and from any word, failed for no fault of the job's.
    """
    count, after = 0, newest
    for attempt in reversed(attempts):
        if _is_newer(after, attempt.resume):
            break
        count += attempt.ending is Ending.FAILED and not _had_no_disk(attempt)
        after = attempt.resume
    return count


def _had_no_disk(attempt: Attempt) -> bool:
    found = attempt.diagnosis
    trained = attempt.told_step > (attempt.resume.step if attempt.resume else 0)
    return found is not None and found.label == DISK_FULL and not found.primary_line and not trained


def _is_newer(after: Ref | None, before: Ref | None) -> bool:
    return after is not None and (before is None or after > before)


def _delay(failures: int, policy: RestartPolicy) -> timedelta:
    exponent = min(max(failures - 1, 0), 32)
    seconds = policy.initial_delay.total_seconds() * policy.backoff_coefficient**exponent
    return min(timedelta(seconds=min(seconds, 86_400)), policy.max_delay)


# ------------------------------------------------------------------------- who is to blame


def _at_once(attempts: Sequence[Attempt]) -> GiveUp | None:
    """What no second attempt is needed for."""
    last = attempts[-1]
    found = last.diagnosis
    if found is None or found.confidence != "high":
        return None
    if found.decision is Decision.GIVE_UP_MACHINE:
        return _give_up("this machine is at fault", last)
    if found.decision is Decision.GIVE_UP_USER and _never_began(attempts, found):
        return _give_up("it fails before the first step and would again", last)
    return None


def _a_second_time(attempts: Sequence[Attempt]) -> GiveUp | None:
    """The same failure at the same step is no accident; on one machine's hardware, at no step."""
    last, before = attempts[-1], _same_failure(attempts)
    found = last.diagnosis
    if before is None or found is None:
        return None
    if found.category == "machine" and before.boot_id == last.boot_id:
        return _give_up(f"the same failure ({found.label}) a second time on this machine", last)
    if _is_same_step(before, last) and not _may_be_chance(found):
        return _give_up(f"the same failure ({found.label}) at step {last.step} a second time", last)
    return None


def _give_up(why: str, last: Attempt) -> GiveUp:
    """The reason names the error; who is to blame decides where the job may go on."""
    error = last.reason.partition("; see ")[0] or "no error was seen"
    found = last.diagnosis
    remedy = f"; {found.remedy}" if found and found.remedy and found.confidence == "high" else ""
    return GiveUp(f"{why}: {error}{remedy}", _blamed(found))


def _blamed(found: Diagnosis | None) -> Outcome:
    if found is None:
        return Outcome.GAVE_UP
    if found.decision is Decision.GIVE_UP_MACHINE or found.category in _OF_THE_MACHINE:
        return Outcome.REFUSED
    return Outcome.GAVE_UP


def _never_began(attempts: Sequence[Attempt], found: Diagnosis) -> bool:
    """Whether no attempt ever trained, and the last one ended at once with an error that time does not cure."""
    last = attempts[-1]
    assert last.ended_at is not None
    trained = any(a.told_step > (a.resume.step if a.resume else 0) for a in attempts)
    known = found.label in _CERTAIN or _CERTAIN_LINE.search(found.primary_line) is not None
    return known and not trained and last.ended_at - last.launched_at < START_UP


def _same_failure(attempts: Sequence[Attempt]) -> Attempt | None:
    """The failed attempt before the last one, if it failed in the same way at the same place."""
    last, *before = _failed(attempts)
    if last.diagnosis is None or not before or before[0].diagnosis is None:
        return None
    is_same = _place(last.diagnosis) == _place(before[0].diagnosis)
    return before[0] if is_same else None


def _failed(attempts: Sequence[Attempt]) -> Iterator[Attempt]:
    """The last two that failed, the newest first."""
    return islice((a for a in reversed(attempts) if a.ending is Ending.FAILED), 2)


def _place(found: Diagnosis) -> tuple[str, str]:
    """What it was and what it said, numbers aside: ranks that fail together speak in any order."""
    return found.label, _DIGITS.sub("", found.primary_line)


def _is_same_step(one: Attempt, other: Attempt) -> bool:
    """Step 0 is the start only if both ended soon: a script that tells no steps is always there."""
    is_known = one.told_step > 0 or all(a.ended_at and a.ended_at - a.launched_at < START_UP for a in (one, other))
    return is_known and abs(one.told_step - other.told_step) <= 1


def _may_be_chance(found: Diagnosis) -> bool:
    """Or nobody knows for certain what it was. An exception of the user's that comes back is as certain as it gets."""
    by_chance = found.category in _CHANCE or found.label == _KILLED or found.decision is Decision.RETRY_AS_IS
    is_users = found.category in _OF_THE_USER and found.decision is Decision.GIVE_UP_USER
    return by_chance or found.confidence not in ({"high", "medium"} if is_users else {"high"})


# ------------------------------------------------------------------------ the one change


def plan_env(attempts: Sequence[Attempt], users: Collection[str], *, offer: bool = True) -> Mapping[str, str]:
    """
    The changes of environment for the next attempt: those that helped stay, one that did not
    goes, and with `offer` one new one comes, if the last failure names one that was never tried.
    """
    env = _kept(attempts)
    found = attempts[-1].diagnosis
    if not offer or found is None or found.decision is not Decision.RETRY_ENV or not found.env:
        return env
    names = set(found.env)
    tried = any(found.env.items() <= a.env.items() for a in attempts)
    if tried or names & (set(users) | _UNSAFE):
        return env
    return {**env, **found.env}


def _kept(attempts: Sequence[Attempt]) -> Mapping[str, str]:
    """Without the last change if what it was made for came again."""
    last = attempts[-1]
    cause = next((a for a in reversed(attempts) if a.env != last.env), None)
    if cause is None or cause.diagnosis is None or last.diagnosis is None:
        return last.env
    return cause.env if cause.diagnosis.label == last.diagnosis.label else last.env
