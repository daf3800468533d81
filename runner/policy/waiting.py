"""A store that is away before an attempt: for what a run waits, until when, and what happens then."""

from dataclasses import dataclass
from datetime import datetime

from runner.facts import Failed, History, Observed, Outcome, Running, TaskKind
from runner.job import AtEnd, Job
from runner.policy.actions import EXIT_CODES
from runner.policy.limits import limit_at
from runner.policy.slow import STORE_PATIENCE, UNREADABLE, is_last_word

_FIRST = (TaskKind.LEASE, TaskKind.SURVEY)  # what is here already is trained on without them
_BRINGERS = (TaskKind.STAGE, TaskKind.FORK, TaskKind.RESTORE, TaskKind.REOPEN)

_OF_CHECKPOINTS = frozenset({TaskKind.SURVEY, TaskKind.FORK, TaskKind.RESTORE})


@dataclass(frozen=True, slots=True)
class Waiting:
    """`failed` is why, `rule` what `between` does about it: in words, for log, status, journal and messages alike."""

    kind: TaskKind
    failed: Failed
    until: datetime
    rule: str

    @property
    def since(self) -> datetime:
        return self.failed.since or self.failed.at

    @property
    def line(self) -> str:
        hint = f"; {self.failed.hint}" if self.failed.hint else ""
        return f"{self.kind} {self.failed.subject} failed: {self.failed.error}{hint} ({self.rule})"


def tell_waiting(job: Job, history: History, seen: Observed) -> Waiting | None:
    """None: nothing holds up an attempt, or what does is said when it ends the run, which is now."""
    if seen.live is not None or history.conclusion is not None:
        return None
    is_known = seen.offsite is not None or bool(seen.local)
    for kind in (*(() if is_known else _FIRST), *_BRINGERS):
        failed = _failure(kind, seen)
        if failed is not None and not is_last_word(failed, seen):
            return _describe(kind, failed, job, limit_at(history, seen), seen)
    return None


def _failure(kind: TaskKind, seen: Observed) -> Failed | None:
    match seen.tasks.get(kind):
        case Failed() as failed:
            return failed
        case Running(after=failed):
            return failed
        case _:
            return None


def _describe(kind: TaskKind, failed: Failed, job: Job, limit: datetime | None, seen: Observed) -> Waiting:
    until = (failed.since or failed.at) + STORE_PATIENCE
    outcome, after = Outcome.STORE, "the next start asks again"
    if limit is not None and limit < until:
        until, outcome = limit, Outcome.LIMIT
        after = f"{seen.deadline_why or 'the time limit'} is reached, and more in job.yaml (limits) lets it go on"
    stop = f", {_SERVER[job.finish.on_failure]}" if seen.rented else ""
    rule = (
        f"it is tried again until {until:%H:%M} UTC at the latest, and nothing is trained before; "
        f"then exit {EXIT_CODES[outcome]}{stop}, nothing is lost: {after}"
    )
    given_up = (failed.since or failed.at) + UNREADABLE
    if kind in _OF_CHECKPOINTS and failed.unreadable and given_up < until:
        until, rule = given_up, _give_up(kind, f"{given_up:%H:%M} UTC", stop, seen)
    return Waiting(kind, failed, until, rule)


def _give_up(kind: TaskKind, when: str, stop: str, seen: Observed) -> str:
    """The store fails at this one alone: an hour more would bring it back no likelier than minutes do."""
    end = f"exit {EXIT_CODES[Outcome.STORE]}{stop}: mend the store, or --start-over begins at step 0"
    if kind is TaskKind.RESTORE and len(seen.usable) < 2:  # noqa: PLR2004  # itself and another
        return f"the store reads what is beside it: it is tried again until {when}; there is no other, so then {end}"
    older = f"the store can read others: from {when} on an older one is taken, and this one stays there"
    return older if kind is TaskKind.RESTORE else f"{older}; if there is none, {end}"


_SERVER = {AtEnd.STOP: "the server is stopped", AtEnd.KEEP: "the server stays and is billed"}
