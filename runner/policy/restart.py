"""Whether to try again, and when."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from runner.facts import Attempt, Ending
from runner.job import RestartPolicy
from vramfarm.protocol import Ref


@dataclass(frozen=True, slots=True)
class Succeeded:
    """Nothing left to train."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Launch again, no earlier than `at`."""

    at: datetime


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not launch again; `reason` goes to the journal and to the notifier."""

    reason: str


def decide_restart(
    attempts: tuple[Attempt, ...], newest: Ref | None, policy: RestartPolicy
) -> Succeeded | Retry | GiveUp:
    """
    Count only failed attempts in a row that made no progress: one that moved on is forgiven,
    one that was interrupted counts for nothing. `newest` is the checkpoint a launch would use now.
    """
    last = attempts[-1]
    assert last.ending is not None, "asked about a running attempt"
    assert last.ended_at is not None
    if last.ending is Ending.SUCCEEDED:
        return Succeeded()
    if last.ending is Ending.INTERRUPTED:
        return Retry(at=last.ended_at)
    failures = count_failures(attempts, newest)
    if failures >= policy.max_restarts_without_progress:
        error = last.reason.partition("; see ")[0] or "no error was seen"
        return GiveUp(reason=f"{failures} attempts in a row made no progress: {error}")
    return Retry(at=last.ended_at + _delay(failures, policy))


def count_failures(attempts: tuple[Attempt, ...], newest: Ref | None) -> int:
    """How many of the last attempts failed without a checkpoint newer than the one they began with."""
    count, after = 0, newest
    for attempt in reversed(attempts):
        if _is_newer(after, attempt.resume):
            break
        count += attempt.ending is Ending.FAILED
        after = attempt.resume
    return count


def _is_newer(after: Ref | None, before: Ref | None) -> bool:
    return after is not None and (before is None or after > before)


def _delay(failures: int, policy: RestartPolicy) -> timedelta:
    exponent = min(max(failures - 1, 0), 32)
    seconds = policy.initial_delay.total_seconds() * policy.backoff_coefficient**exponent
    return min(timedelta(seconds=min(seconds, 86_400)), policy.max_delay)
