"""When slow work begins, is tried again, and is ended; and who may write to the store at all."""

from datetime import datetime, timedelta

from runner.facts import Failed, Finished, LeaseState, Observed, Running, TaskKind
from runner.policy.actions import Begin, Cease

STORE_PATIENCE = timedelta(minutes=30)  # the store may be down so long before the server is stopped without it
REFUSED_AGAIN = timedelta(minutes=2)  # a store that refuses may be emptied, or given the right credentials, meanwhile
AGAIN = timedelta(seconds=15)  # a store that is away is asked, at the latest
UNREADABLE, UNREADABLE_TRIES = (
    timedelta(minutes=5),
    3,
)  # nothing trains meanwhile; an older one costs what was trained since
_VERIFY_TRIES = 3  # of one checkpoint: a store that damages what it gets is no store
SILENT = timedelta(minutes=3)  # longer than a keeper's two questions with all their repetitions
_SLOW_START = timedelta(minutes=10)
# Without a piece that has moved. What is slow and sound may be silent for 16 minutes: a part of 32 MiB on a line that
# just keeps the limit of half a megabyte in 15 s, the checksums of an output of 100 GB from a disk of 100 MB/s.
# What can be told sooner is: who was stopped, and who never began.
STUCK = timedelta(minutes=30)
STOPPED = timedelta(seconds=10)  # a tool that takes a picture of a process holds it for less
# To start Python and read the arguments is half a second of a core: a minute, with its niceness beside 25 busy processes a core.
NO_WORD = timedelta(minutes=5)
# Each of these ends with a listing of the store. One at a time: a listing that was taken before
# the other's change would come after it, and be believed.
_LISTING = frozenset({TaskKind.SURVEY, TaskKind.UPLOAD, TaskKind.TIDY})
# These tell of each piece that has moved.
_MOVERS = (TaskKind.UPLOAD, TaskKind.OUTPUTS, TaskKind.STAGE, TaskKind.FORK, TaskKind.RESTORE, TaskKind.VERIFY)
WRITERS = (TaskKind.SURVEY, TaskKind.REOPEN, TaskKind.UPLOAD, TaskKind.TIDY, TaskKind.PUBLISH, TaskKind.OUTPUTS)
# A refusal of the store ends what waits for it; where nothing does, these ask again.
ASK_AGAIN = frozenset({TaskKind.LEASE, *WRITERS})


def begin(kind: TaskKind, subject: str, seen: Observed) -> Begin | None:
    """Start it unless it runs, is done, cannot be done, has just failed, or another one is in its way."""
    if kind in _LISTING and any(isinstance(seen.tasks.get(other), Running) for other in _LISTING):
        return None
    if kind in WRITERS and not may_write(seen):
        return None
    match seen.tasks.get(kind):
        case Running():
            return None
        case Finished() if is_done(kind, subject, seen):
            return None
        case Failed() as failed if failed.subject == subject and not _may_retry(kind, failed, seen):
            return None
        case _:
            return Begin(kind, subject)


def is_done(kind: TaskKind, subject: str, seen: Observed) -> bool:
    """Whether this very work is done. What is found damaged in the store since is to be sent there again, but not for ever."""
    state, verified = seen.tasks.get(kind), failure_of(TaskKind.VERIFY, subject, seen)
    may_help = verified is None or verified.failures < _VERIFY_TRIES
    is_undone = kind is TaskKind.UPLOAD and subject in seen.unusable and may_help
    return isinstance(state, Finished) and state.subject == subject and not is_undone


def is_mended(kind: TaskKind, failed: Failed, seen: Observed) -> bool:
    """Whether what was found damaged in the store was sent there again since."""
    return kind is TaskKind.VERIFY and failed.damaged and failed.subject not in seen.unusable


def _may_retry(kind: TaskKind, failed: Failed, seen: Observed) -> bool:
    return is_mended(kind, failed, seen) or (
        (not failed.final or failed.curable or kind in ASK_AGAIN) and seen.now >= retry_at(failed)
    )


def is_lost_there(failed: Failed) -> bool:
    """
    Whether a checkpoint is as good as damaged in the store: one that fails at its bytes, and reads what is beside
    them, is waited for as long as a part of it may take to start again, and no longer. It stays there.
    """
    waited = failed.at - (failed.since or failed.at)
    is_given_up = failed.unreadable and failed.failures >= UNREADABLE_TRIES and waited >= UNREADABLE
    return failed.damaged or is_given_up


def failure_of(kind: TaskKind, subject: str, seen: Observed) -> Failed | None:
    """How this very work failed, if that is how it ended last."""
    state = seen.tasks.get(kind)
    return state if isinstance(state, Failed) and state.subject == subject else None


def is_last_word(failed: Failed, seen: Observed) -> bool:
    """
    Whoever starts a run is told at once what is wrong. A later life has work on this disk, and nobody may be there to
    read it: what may be cured is an outage then, as it is while it trains.
    """
    return failed.final and not (failed.curable and seen.local)


def retry_at(failed: Failed) -> datetime:
    """
    2 s after the first failure, 4, 8, then every 15 s: the store is tried as long as the run lives.

    Who waits longer leaves a machine idle beside a store that is back; a try is one process that asks one
    question, 0.4 CPU seconds, and in an outage only the lease's is made.
    """
    if failed.final:
        return failed.at + REFUSED_AGAIN
    return failed.at + min(timedelta(seconds=2.0 ** min(failed.failures, 6)), AGAIN)


def may_write(seen: Observed) -> bool:
    """Whether this runner is the one that writes this run's part of the store."""
    return seen.lease.state in {LeaseState.HELD, LeaseState.NOT_NEEDED}


def cease(seen: Observed) -> Cease | None:
    """
    Whoever lost the lease, or could not renew it for a while, stops writing before another one begins. A keeper
    that says nothing renews nothing, and its place is another one's.
    """
    if _is_silent(seen):
        return Cease(TaskKind.LEASE, "who keeps the lease says nothing: it is ended, and another one is begun")
    if may_write(seen):
        return None
    writing = (kind for kind in WRITERS if isinstance(seen.tasks.get(kind), Running))
    kind = next(writing, None)
    return None if kind is None else Cease(kind, "this runner does not have the lease of the run now")


def _is_silent(seen: Observed) -> bool:
    """It tells of every renewal and of every failure to renew; the first may come after a long look at the store."""
    state = seen.tasks.get(TaskKind.LEASE)
    if not isinstance(state, Running):
        return False
    return seen.now >= (state.moved_at + SILENT if state.moved_at else state.started_at + _SLOW_START)


def end_stuck(seen: Observed) -> Cease | None:
    """A server that answers a byte a minute breaks no time limit, and brings nothing about; nor does who was stopped."""
    found = ((kind, _why_stuck(kind, seen)) for kind in TaskKind)
    return next((Cease(kind, why) for kind, why in found if why), None)


def is_stuck(kind: TaskKind, seen: Observed) -> bool:
    return bool(_why_stuck(kind, seen))


def _why_stuck(kind: TaskKind, seen: Observed) -> str:
    state = seen.tasks.get(kind)
    if not isinstance(state, Running):
        return ""
    if state.stopped_at and seen.now >= state.stopped_at + STOPPED:
        return "its process was stopped (SIGSTOP): another one does its work"
    if not state.has_spoken and seen.now >= state.started_at + NO_WORD:
        return f"it has not begun within {_minutes(NO_WORD)}: another one is tried"
    if kind in _MOVERS and seen.now >= (state.moved_at or state.started_at) + STUCK:
        return f"nothing has moved for {_minutes(STUCK)}"
    return ""


def _minutes(time: timedelta) -> str:
    return f"{time.total_seconds() / 60:.0f} min"
