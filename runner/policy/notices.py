"""
What is worth a message to a person. A message is an action like any other: the next one due is
journaled, then sent, so that a restart does not repeat it and nothing waits for it but the end,
and that not longer than `SENDING`.

No storm: what may happen again and again is told at most as often as its pause says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from runner.facts import Attempt, Ending, Failed, History, Observed, Running, TaskKind
from runner.job import Job
from runner.policy.actions import EXIT_CODES, Action, Conclude, End, Launch, Leave, Notify, Wait
from runner.policy.finish import tell_stuck_outputs
from runner.policy.house import vanished_key
from runner.policy.lifecycle import decide
from runner.policy.limits import limit_at
from runner.policy.waiting import tell_waiting

SENDING: Final = timedelta(seconds=12)  # the end of the job waits so long for a message, no longer
_HOUR: Final = timedelta(hours=1)
_PATIENCE: Final = timedelta(minutes=10)  # a store that is away so long is worth a message
_RARELY: Final = timedelta(hours=6)
_NEVER: Final = datetime.min.replace(tzinfo=UTC)


def decide_and_tell(job: Job, history: History, seen: Observed) -> Action:
    """The next action, or the message that comes before it."""
    action = decide(job, history, seen)
    sending = seen.tasks.get(TaskKind.NOTIFY)
    if not job.notify or history.accepted_at is None:
        return action
    if not isinstance(sending, Running):
        return next(_due(job, history, seen, action), action)
    if isinstance(action, End) and seen.now < sending.started_at + SENDING:
        return Wait()
    return action


def _due(job: Job, history: History, seen: Observed, action: Action) -> Iterator[Notify]:
    """What is to be told now, in order of its time."""
    if (
        isinstance(action, Leave) or seen.wrong_job
    ):  # whoever reads that job.yaml is wrong is told by the one who read it
        return
    if history.conclusion is None:
        yield from _started(job, history, seen)
        yield from _stop_doubt(history, seen)
        yield from _failed(history, action)
        yield from _resumed(history, action)
        yield from _limit_near(history, seen)
    yield from _save_fails(history, seen)
    if not isinstance(action, End):  # whose reason it is
        yield from _copies_fail(job, history, seen)
    yield from _vanished(history, seen)
    yield from _stuck_outputs(history, seen, action)
    yield from _ended(history, action)


def _started(job: Job, history: History, seen: Observed) -> Iterator[Notify]:
    until = f"; off by {seen.deadline_at:%Y-%m-%d %H:%M} UTC at the latest" if seen.deadline_at else ""
    money = f", or when {job.limits.max_cost} are spent" if job.limits.max_cost is not None else ""
    yield from _once(history, "started", f"started {history.opened_at}", f"started: {job.command}{until}{money}")


def _stop_doubt(history: History, seen: Observed) -> Iterator[Notify]:
    """Now somebody can still mend it; at the deadline nobody may be awake."""
    if seen.stop_doubt:
        text = f"the stop of this server may fail in the end, and it would be billed on: {seen.stop_doubt}"
        yield from _once(history, "alert", f"doubt {seen.stop_doubt}", text)


def _failed(history: History, action: Action) -> Iterator[Notify]:
    """The last word of a job that is given up has it all: no message of its own."""
    last = history.last
    if last is None or last.ending is not Ending.FAILED or last.ended_at is None or isinstance(action, Conclude | End):
        return
    told = history.notified.get("failed", _NEVER)
    if told < last.ended_at and last.ended_at - told >= _HOUR:
        yield Notify("failed", "failed", f"attempt {last.number} failed at step {last.step}: {_why(last)}")


def _why(attempt: Attempt) -> str:
    remedy = f"; {attempt.diagnosis.remedy}" if attempt.diagnosis and attempt.diagnosis.remedy else ""
    return f"{attempt.reason or 'no error was found in its logs'}{remedy}"


def _resumed(history: History, action: Action) -> Iterator[Notify]:
    """After a failure that was told, and on a new machine."""
    if not isinstance(action, Launch) or action.resume is None:
        return
    told, failed = (history.notified.get(key, _NEVER) for key in ("resumed", "failed"))
    if told < failed or (not history.attempts and told == _NEVER):
        yield Notify("resumed", "resumed", f"goes on: attempt {action.number} from step {action.resume.step}")


def _limit_near(history: History, seen: Observed) -> Iterator[Notify]:
    """Half an hour before, or a tenth of a short run: time to raise the limit."""
    limit = limit_at(history, seen)
    if limit is None or seen.deadline_at is None or history.opened_at is None:
        return
    warning = min(_HOUR / 2, (seen.deadline_at - history.opened_at) / 10)
    if limit - warning <= seen.now < limit:
        left = (limit - seen.now).total_seconds() / 60
        text = f"the limit is near: in {left:.0f} min it saves and stops; a later one in job.yaml (limits) and a restart let it go on"
        yield from _once(history, "limit", f"limit {seen.deadline_at}", text)


def _save_fails(history: History, seen: Observed) -> Iterator[Notify]:
    if seen.progress.num_failed and seen.progress.save_error:
        yield from _rarely(history, seen, "save", f"a save failed, training goes on: {seen.progress.save_error}")


def _copies_fail(job: Job, history: History, seen: Observed) -> Iterator[Notify]:
    if waiting := tell_waiting(job, history, seen):
        if seen.now - waiting.since >= _PATIENCE:
            yield from _rarely(history, seen, "upload", f"nothing begins without the store: {waiting.line}")
        return
    for kind in (TaskKind.LEASE, TaskKind.SURVEY, TaskKind.UPLOAD):
        state = seen.tasks.get(kind)
        if isinstance(state, Failed) and (state.final or seen.now - (state.since or state.at) >= _PATIENCE):
            hint = f"; {state.hint}" if state.hint else ""
            text = f"nothing reaches the store, what is new is only on this disk: {state.error}{hint}"
            yield from _rarely(history, seen, "upload", text)


def _vanished(history: History, seen: Observed) -> Iterator[Notify]:
    if seen.vanished:
        newest = max(seen.vanished)
        yield from _once(history, "alert", vanished_key(newest), tell_vanished(seen.vanished))


def _stuck_outputs(history: History, seen: Observed, action: Action) -> Iterator[Notify]:
    text, told = tell_stuck_outputs(seen), history.notified.get("outputs", _NEVER)
    if text and not isinstance(action, End) and seen.now - told >= _RARELY:
        yield Notify("alert", "outputs", text)


def tell_vanished(names: Collection[str]) -> str:
    """What was safe, and is not any more; what is newer is sent as ever."""
    return (
        f"the store has lost {', '.join(sorted(names))}, which it had confirmed: no runner removes the newest ones; "
        "does a lifecycle rule of the bucket, or somebody, remove what is there?"
    )


def _ended(history: History, action: Action) -> Iterator[Notify]:
    if not isinstance(action, End):
        return
    outcome = next((outcome.value for outcome, code in EXIT_CODES.items() if code == action.code), "refused")
    disk = "something is only on its disk, which is kept" if action.keep else "nothing is only on its disk"
    then = f"the server is stopped next, {disk}" if action.stop else "the server stays, and is billed"
    steps = f", step {max(attempt.step for attempt in history.attempts)}" if history.attempts else ""
    yield from _once(
        history,
        "ended",
        f"ended {action.code} {action.reason} after {len(history.attempts)}",
        f"{outcome}{steps}: {action.reason}; {then}",
    )


def _once(history: History, event: str, key: str, text: str) -> Iterator[Notify]:
    if key not in history.notified:
        yield Notify(event, key, text)


def _rarely(history: History, seen: Observed, event: str, text: str) -> Iterator[Notify]:
    if seen.now - history.notified.get(event, _NEVER) >= _RARELY:
        yield Notify(event, event, text)
