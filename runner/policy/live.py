"""While processes of an attempt live: make them leave if it must end, end what hangs, else keep house."""

from datetime import timedelta

from runner.facts import Divergence, Hang, History, LeaseState, Live, Observed, Outcome, Running, TaskKind
from runner.job import Job
from runner.policy.actions import Action, Begin, Conclude, Distrust, Interrupt, Kill, Wait
from runner.policy.divergence import first_distrusted, newest_good
from runner.policy.house import keep_house
from runner.policy.limits import limit_at

STRAGGLER = timedelta(seconds=2)  # what an ended launcher's children get before they are killed
LAST_WORDS = timedelta(
    seconds=10
)  # before the deadline: the outcome and the last logs are told, and the lease is given back
_NAMED = 4
EVIDENCE_PATIENCE = timedelta(seconds=90)  # looking at what hangs may hang, too


def while_live(job: Job, history: History, seen: Observed, live: Live) -> Action:
    if not live.trainers:
        return _wait_for_savers(job, history, seen)
    reason = _why_leave(history, seen)
    if seen.exit is not None and not (reason and (seen.asked_live or seen.unasked)):
        return _end_stragglers(seen)
    if diverged := _end_diverged(job, history, seen):
        return diverged
    if reason:
        return _make_it_leave(job, seen, reason) or keep_house(job, history, seen) or Wait()
    if seen.hang is not None:
        return _end_hung(history, seen, seen.hang) or keep_house(job, history, seen) or Wait()
    return keep_house(job, history, seen) or Wait()


def _wait_for_savers(job: Job, history: History, seen: Observed) -> Action:
    """A staged save commits even when all ranks are dead; a saver that cannot is not waited for for ever."""
    gone = seen.trainers_gone_at or seen.now
    if seen.now >= gone + job.restart.grace_period:
        return Kill("the saver did not finish in the grace period", savers=True)
    return keep_house(job, history, seen) or Wait()


def _end_stragglers(seen: Observed) -> Action:
    """
    A launcher that was killed leaves its ranks alive; one that ended leaves workers that are just going. Who was
    asked to save is no straggler: a shell that SIGTERM ends leaves a trainer that saves on it.
    """
    since = seen.exit_seen_at or seen.now
    if seen.now >= since + STRAGGLER:
        return Kill(f"the launcher ended, these did not{_name(seen.live.left if seen.live else ())}", left=True)
    return Wait()


def _name(left: tuple[str, ...]) -> str:
    """What holds a card's memory, most likely: the next attempt would run out of it."""
    more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
    return f": {', '.join(left[:_NAMED])}{more}" if left else ""


def _end_diverged(job: Job, history: History, seen: Observed) -> Action | None:
    """
    Written down first: which checkpoints are of no use, and that the job is over. It is killed and
    not asked to save, since what it would save is spoilt.
    """
    if not job.guard.nan_patience or not history.attempts:
        return None
    attempt, found = history.attempts[-1], seen.divergence
    if attempt.number not in dict(history.distrusted):
        if found is None or found.num_steps < job.guard.nan_patience:
            return None
        return Distrust(attempt.number, first_distrusted(attempt, found), _describe(found))
    if history.conclusion is not None:
        since = f"{_describe(found)}: " if found else ""
        return Kill(f"guard.nan_patience: {since}what it learns now is of no use")
    good = newest_good(seen.local, history, None)
    go_on = f"go on from {good.name}" if good else "no checkpoint from before is here; start over"
    cause = f"the loss went wrong (guard.nan_patience: {job.guard.nan_patience})"
    return Conclude(
        Outcome.GAVE_UP,
        f"{cause}: {go_on}, with a lower learning rate or without the data of that step, and --go-on",
    )


def _describe(found: Divergence) -> str:
    return f"the loss is {found.loss:.6g} since step {found.since_step}, for {found.num_steps} steps"


def _why_leave(history: History, seen: Observed) -> str:
    limit = limit_at(history, seen)
    if seen.leaving:
        return "asked to leave (SIGTERM or Ctrl-C)"
    if seen.stop_requested:
        return "asked to stop"
    if history.conclusion:
        return "the job is over"
    if seen.lease.state is LeaseState.TAKEN:
        return f"another runner took this run: {seen.lease.who}"
    if limit is not None and seen.now >= limit:
        return f"{seen.deadline_why or 'the time limit'} is near"
    return ""


def _make_it_leave(job: Job, seen: Observed, reason: str) -> Action | None:
    if seen.leave_sent_at is None or seen.unasked:
        return Interrupt(reason)
    if not (seen.progress.attached or seen.terminated) and seen.now >= seen.leave_sent_at + STRAGGLER:
        return Kill(f"{reason}: nobody in it could be asked to save")
    last = max(seen.deadline_at - LAST_WORDS, seen.leave_sent_at + STRAGGLER) if seen.deadline_at else None
    if last is not None and not seen.progress.attached and seen.now >= last:
        return Kill(f"{reason}: it did not save and leave in time")
    if seen.now >= seen.leave_sent_at + job.restart.grace_period:
        return Kill(f"{reason}: it did not save and leave in {job.restart.grace_period.total_seconds():.0f} s")
    return None


def _end_hung(history: History, seen: Observed, hang: Hang) -> Action | None:
    """First what can be seen of it is written down, since a kill takes it away."""
    subject = f"attempt-{history.attempts[-1].number:04d}"
    match seen.tasks.get(TaskKind.EVIDENCE):
        case Running(started_at=started) if seen.now < started + EVIDENCE_PATIENCE:
            return None
        case Running():
            pass
        case state if state is None or state.subject != subject:
            return Begin(TaskKind.EVIDENCE, subject)
    return Kill(f"it hangs: {hang.reason}", hung=True)
