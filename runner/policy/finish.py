"""How a run ends: early, for the next boot to look again; or concluded, when everything is off the machine."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from runner.facts import (
    Attempt,
    Conclusion,
    Failed,
    Finished,
    History,
    LeaseState,
    Observed,
    Outcome,
    Running,
    TaskKind,
)
from runner.job import AtEnd, Job
from runner.policy.actions import EXIT_CODES, LOCKED, WRONG_JOB, Action, End, Leave, Wait
from runner.policy.house import newest_unsafe, set_aside, tidy
from runner.policy.slow import (
    STORE_PATIENCE,
    WRITERS,
    begin,
    end_stuck,
    failure_of,
    is_done,
    is_mended,
    is_stuck,
    may_write,
)

ALL_OUTPUTS = "at the end"  # nobody writes to them any more
_NO_TIME = "there was no time"
_CURE = "run it again there: it copies them and trains nothing"
_DRAINERS = (TaskKind.LEASE, TaskKind.VERIFY, *WRITERS)  # what `_bring_off` does, and no more
_NOT_AWAITED = frozenset({TaskKind.TIDY, TaskKind.REOPEN})  # if it fails, the end comes without it


def lock_out(job: Job, seen: Observed) -> End:
    """The loser stops itself only. What is only here stays here."""
    lease = seen.lease
    until = f", until {lease.until}" if lease.until else ""
    reason = f"another runner has this run: {lease.who or 'somebody'} (lease {lease.fence}{until})"
    return _end_early(LOCKED, reason, job, seen)


def refuse_job(reason: str, job: Job, seen: Observed) -> End:
    return _end_early(WRONG_JOB, reason, job, seen)


def refuse(outcome: Outcome, reason: str, job: Job, seen: Observed) -> End:
    return _end_early(EXIT_CODES[outcome], reason, job, seen)


def _end_early(code: int, reason: str, job: Job, seen: Observed) -> End:
    """Not journaled: the next boot looks again, and goes on if it was cured."""
    stop = job.finish.on_failure is AtEnd.STOP
    return End(code=code, stop=stop, keep=bool(seen.local or seen.only_here), reason=reason)


def after_the_end(job: Job, history: History, seen: Observed) -> Action:
    """Get everything off the machine, prove it, say so, and only then ask for the stop."""
    assert history.conclusion is not None
    if seen.leaving:
        return Leave()
    if seen.lease.state is LeaseState.TAKEN:
        return lock_out(job, seen)
    pending = _bring_off(job, history, seen)
    if pending is not None:
        return pending
    conclusion = history.conclusion
    succeeded = conclusion.outcome is Outcome.SUCCEEDED
    wish = job.finish.on_success if succeeded else job.finish.on_failure
    only_here = bool(seen.local) and not is_safe(job, seen)
    untold = _tell_untold(job, history, seen)
    unsaved = tell_unsaved(history.last, seen) if history.last else ""
    missing = tell_missing(job, history, seen) or (untold if succeeded else "")
    return End(
        code=EXIT_CODES[Outcome.STORE if missing else conclusion.outcome],
        stop=wish is AtEnd.STOP,
        keep=bool(seen.only_here or untold) or only_here or bool(unsaved),
        reason=f"{conclusion.reason}, but {missing}" if missing else conclusion.reason,
    )


def tell_unsaved(attempt: Attempt, seen: Observed) -> str:
    """
    Why training that is done is no success: its last checkpoint is none that can be read, or was set aside since,
    and what the folder has of it may still be of use to a person. Empty: it is here or in the store, or there was
    nothing to save.
    """
    if seen.end is None or seen.end.kind != "done" or not seen.end.step:
        return ""
    ours = [c.ref for c in (*seen.local, *seen.usable) if c.ref.lineage == attempt.lineage or c.ref == attempt.resume]
    newest = max((ref.step for ref in ours), default=None)
    if newest is not None and newest >= seen.end.step:
        return ""
    found = "there is none of it" if newest is None else f"the newest of it is of step {newest}"
    return f"training says that it is done at step {seen.end.step}, and its last checkpoint is not there: {found}"


def tell_missing(job: Job, history: History, seen: Observed) -> str:
    """
    What of a run that succeeded should be in the store and is not, and why; empty: it is all there.

    A machine that comes later and does nothing has it from the one that ended the run: it must not say that all is well.
    """
    if job.offload.to is None or history.conclusion is None or history.conclusion.outcome is not Outcome.SUCCEEDED:
        return ""
    if not history.attempts and seen.concluded_elsewhere and seen.concluded_elsewhere.missing:
        return seen.concluded_elsewhere.missing
    if history.last and (unsaved := tell_unsaved(history.last, seen)):
        return unsaved
    if seen.local and not is_safe(job, seen):
        return f"the store does not have it: {_why_not(seen)}"
    outputs = tell_missing_outputs(job, seen)
    return f"not all outputs are in the store: {outputs}; {_CURE}" if outputs else ""


def _why_not(seen: Observed) -> str:
    states = (seen.tasks.get(kind) for kind in (TaskKind.SURVEY, TaskKind.UPLOAD, TaskKind.VERIFY, TaskKind.LEASE))
    return next((s.error for s in states if isinstance(s, Failed)), _NO_TIME)


def _tell_untold(job: Job, history: History, seen: Observed) -> str:
    """Why the store does not know how it ended: without that, another machine is rented for it, and nobody reads why it failed."""
    if job.offload.to is None or not history.attempts or history.conclusion is None:
        return ""
    state = seen.tasks.get(TaskKind.PUBLISH)
    if is_done(TaskKind.PUBLISH, f"{history.conclusion.outcome}", seen):
        return ""
    return f"its end and its logs are not in the store: {state.error if isinstance(state, Failed) else _NO_TIME}"


def tell_missing_outputs(job: Job, seen: Observed) -> str:
    """Which of them the last copy left, or why there was none; empty: all are in the store."""
    match seen.tasks.get(TaskKind.OUTPUTS):
        case _ if not job.outputs or job.offload.to is None:
            return ""
        case Finished(subject=subject) as done if subject == ALL_OUTPUTS:
            return str(done.result.get("not_there", ""))
        case Failed() as failed:
            return failed.error
        case _:
            return f"{_NO_TIME} for a last copy"


def tell_stuck_outputs(seen: Observed) -> str:
    """What would make a run that ends well end with 4, while somebody can still mend it; empty: nothing so far."""
    copied = seen.tasks.get(TaskKind.OUTPUTS)
    if not seen.outputs_stuck or (copied and copied.subject == ALL_OUTPUTS):
        return ""
    return (
        f"of outputs this does not get into the store: {seen.outputs_stuck} "
        f"(mend it while it trains: else the run ends with exit {EXIT_CODES[Outcome.STORE]}, and its disk is kept)"
    )


def is_safe(job: Job, seen: Observed) -> bool:
    """Whether the newest checkpoint was compared with the store, and the store has it all."""
    newest = max((c.ref for c in seen.usable), default=None)
    verified = newest is not None and is_done(TaskKind.VERIFY, newest.name, seen)
    return job.offload.to is not None and verified and newest_unsafe(job, seen) is None


def _bring_off(job: Job, history: History, seen: Observed) -> Action | None:
    """The next thing to do before the end, or None when all is done, or cannot be."""
    if job.offload.to is None:
        return tidy(job, history, seen)
    assert history.conclusion is not None
    late = _patience_ends(history.conclusion, seen)
    deadline_near = seen.deadline_at is not None and seen.now >= seen.deadline_at - timedelta(seconds=20)
    if deadline_near:
        return None
    if not may_write(seen):
        return _try(TaskKind.LEASE, "of the run", history, seen, wanted=seen.now < late)
    return (
        _try(TaskKind.SURVEY, "store", history, seen, wanted=seen.offsite is None)
        or set_aside(seen)
        or _upload_last(job, history, seen)
        or _verify_last(job, history, seen)
        or _try(TaskKind.OUTPUTS, ALL_OUTPUTS, history, seen, wanted=bool(job.outputs))
        or tidy(job, history, seen)
        or _wait_for_tidying(seen)
        or _publish(history, seen)
    )


def _wait_for_tidying(seen: Observed) -> Action | None:
    """Whoever closes the store's door ends what still goes on in it."""
    return Wait() if isinstance(seen.tasks.get(TaskKind.TIDY), Running) else None


def _upload_last(job: Job, history: History, seen: Observed) -> Action | None:
    ref = newest_unsafe(job, seen)
    if ref is None:
        return None
    return _try(TaskKind.UPLOAD, ref.name, history, seen, wanted=True)


def _verify_last(job: Job, history: History, seen: Observed) -> Action | None:
    """Nothing is proven by an older one where the newest is not there."""
    if not seen.usable or newest_unsafe(job, seen) is not None:
        return None
    newest = max(c.ref for c in seen.usable)
    return _try(TaskKind.VERIFY, newest.name, history, seen, wanted=True)


def _publish(history: History, seen: Observed) -> Action | None:
    assert history.conclusion is not None
    elsewhere = seen.concluded_elsewhere
    ours = bool(history.attempts) or elsewhere is None or elsewhere.outcome != history.conclusion.outcome
    # what an earlier machine published says how it was; an empty journal of ours must not replace it
    return _try(TaskKind.PUBLISH, f"{history.conclusion.outcome}", history, seen, wanted=ours)


def _try(kind: TaskKind, subject: str, history: History, seen: Observed, *, wanted: bool) -> Action | None:
    """Begin it, wait for it, try it again while there is patience; None when it is done or hopeless."""
    assert history.conclusion is not None
    if is_stuck(kind, seen):
        return end_stuck(seen) if seen.now < _patience_ends(history.conclusion, seen) else None
    if not wanted or is_done(kind, subject, seen):
        return None
    failed = failure_of(kind, subject, seen)
    if failed and (
        (_is_hopeless(failed) and not is_mended(kind, failed, seen))
        or _is_in_vain(history, seen)
        or seen.now >= _patience_ends(history.conclusion, seen)
    ):
        return None
    return begin(kind, subject, seen) or Wait()


def _patience_ends(conclusion: Conclusion, seen: Observed) -> datetime:
    """An outage has its half hour, whenever after the end it begins; all that it holds up has the same one."""
    states = [seen.tasks.get(kind) for kind in (*WRITERS, TaskKind.VERIFY, TaskKind.LEASE)]
    since = [state.since or state.at for state in states if isinstance(state, Failed) and not _is_hopeless(state)]
    return max(conclusion.at, min(since, default=conclusion.at)) + STORE_PATIENCE


def _is_hopeless(failed: Failed) -> bool:
    """A key that expired in the night may be renewed, a full store may be emptied: that is waited for as an outage is."""
    return failed.final and not failed.curable


def _is_in_vain(history: History, seen: Observed) -> bool:
    """Nothing was made here that an outage could cost: whoever waits for its end pays for an idle machine."""
    return not (history.attempts or seen.local or seen.only_here)


@dataclass(frozen=True, slots=True)
class Draining:
    """What still goes on after the end of the job: for what it waits, and until when at the latest."""

    what: str
    until: datetime
    is_held_up: bool


def tell_draining(job: Job, history: History, seen: Observed) -> Draining | None:
    """None: the job is not over yet, or nothing holds up its end."""
    if history.conclusion is None or history.stop_sent_in == seen.life or job.offload.to is None:
        return None
    if _is_in_vain(history, seen):
        return None
    until = _patience_ends(history.conclusion, seen)
    until = until if seen.deadline_at is None else min(until, seen.deadline_at)
    for kind in _DRAINERS:
        match seen.tasks.get(kind):
            case Failed() as failed if kind not in _NOT_AWAITED and not _is_hopeless(failed):
                return Draining(f"{kind} {failed.subject} ({failed.error})", until, is_held_up=True)
            case Running(subject=subject) if kind is not TaskKind.LEASE:
                return Draining(f"{kind} {subject}", until, is_held_up=False)
            case _:
                pass
    return Draining("" if may_write(seen) else "the lease of the run", until, is_held_up=False)
