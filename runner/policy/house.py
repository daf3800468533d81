"""The house of a run, kept whoever is training: the lease, copies off the machine, room on the disk."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta

from runner.facts import Conclusion, Failed, Finished, History, LeaseState, Observed, Running, TaskKind, TaskState
from runner.job import Job
from runner.policy.actions import Action, Begin, Cease, Discard, Prune, SetAside, Wait
from runner.policy.divergence import is_distrusted, newest_good
from runner.policy.slow import begin, end_stuck, failure_of, is_done, may_write
from vramfarm.protocol import Ref

SPARE_BYTES = 1 << 20
OUTPUTS_EVERY = timedelta(minutes=5)
PUBLISH_EVERY = timedelta(minutes=5)
NO_LOGS = "no logs"  # in the subject of what is published beside a checkpoint
_COMMIT_TRIES = 3
_NOTHING = Ref(-1, -1, -1, "")


def keep_house(job: Job, history: History, seen: Observed) -> Action | None:
    """What is always right, whoever is training: get copies off the machine, keep the disk free."""
    return (
        end_stuck(seen)
        or _hold_lease(job, seen)
        or _survey(job, seen)
        or _open_again(history, seen)
        or set_aside(seen)
        or _commit(seen)
        or _upload(job, seen)
        or tidy(job, history, seen)
        or _copy_outputs(job, seen)
        or publish_now_and_then(job, history, seen)
    )


def _hold_lease(job: Job, seen: Observed) -> Action | None:
    """Taken before the store is touched, and kept as long as the runner lives."""
    if job.offload.to is None or seen.lease.state in {LeaseState.NOT_NEEDED, LeaseState.TAKEN}:
        return None
    return begin(TaskKind.LEASE, "of the run", seen)


def _survey(job: Job, seen: Observed) -> Action | None:
    if job.offload.to is None or seen.offsite is not None:
        return None
    return begin(TaskKind.SURVEY, "store", seen)


def _open_again(history: History, seen: Observed) -> Action | None:
    """Of an attempt that was launched while the store was away; before what it saves is sent there."""
    if seen.concluded_elsewhere is None or history.running is None:
        return None
    return begin(TaskKind.REOPEN, tell_end(seen.concluded_elsewhere), seen)


def tell_end(over: Conclusion) -> str:
    """How the store's word is named, apart from any other."""
    return f"{over.outcome}, {over.at.isoformat(timespec='seconds')}"


def set_aside(seen: Observed) -> Action | None:
    failed = seen.tasks.get(TaskKind.UPLOAD)
    if isinstance(failed, Failed) and failed.damaged:
        for checkpoint in seen.local:
            if checkpoint.ref.name == failed.subject:
                return SetAside(checkpoint.ref)
    return None


def set_aside_spoilt(history: History, seen: Observed) -> Action | None:
    """Once nobody can add to them: newer than the good one, they would be taken for better."""
    spoilt = next((c.ref for c in seen.local if is_distrusted(c.ref, history)), None)
    if spoilt is None or seen.live is not None:
        return None
    return SetAside(spoilt, "it was saved after the loss went wrong")


def _commit(seen: Observed) -> Action | None:
    return begin(TaskKind.COMMIT, seen.ready, seen) if seen.ready else None


def commit_last(seen: Observed) -> Action | None:
    """What a framework saved before it ended is committed before that end counts."""
    state = seen.tasks.get(TaskKind.COMMIT)
    if isinstance(state, Running):
        return Wait()
    if not seen.ready or (isinstance(state, Finished) and state.subject == seen.ready):
        return None
    failed = failure_of(TaskKind.COMMIT, seen.ready, seen)
    if failed and (failed.final or failed.failures >= _COMMIT_TRIES):
        return None
    return _commit(seen) or Wait()


def _upload(job: Job, seen: Observed) -> Action | None:
    """Only the newest: by the time an older one is there, it is worth nothing."""
    ref = newest_unsafe(job, seen)
    if seen.divergence is not None or ref is None:
        return None  # what is saved now may be spoilt, and would drive the good one out of the store
    if _is_crowded(job, seen):
        return None
    copy = begin(TaskKind.UPLOAD, ref.name, seen)
    if copy and isinstance(seen.tasks.get(TaskKind.OUTPUTS), Running):
        return Cease(TaskKind.OUTPUTS, "a checkpoint goes first")
    return copy


def newest_unsafe(job: Job, seen: Observed) -> Ref | None:
    """The newest checkpoint here, if the store has neither it nor a newer one; what is damaged there it has not."""
    if job.offload.to is None or seen.offsite is None or not seen.local:
        return None
    newest = max(c.ref for c in seen.local)
    return newest if newest > max((c.ref for c in seen.usable), default=_NOTHING) else None


def tidy(job: Job, history: History, seen: Observed) -> Action | None:
    refs = [c.ref for c in seen.local]
    in_use = {ref for ref in refs if ref.name == _subject(seen.tasks.get(TaskKind.UPLOAD))}
    in_use |= {history.running.resume} if history.running and history.running.resume else set()
    if seen.divergence is not None and (good := newest_good(seen.local, history, seen.divergence)):
        in_use.add(good)
    plan = plan_retention(refs, keep_last=job.checkpoint.keep_last, in_use=in_use)
    if plan.remove:
        why = f"the newest {job.checkpoint.keep_last} are kept"
        return Prune(plan.remove[0], f"{why}{_tell_missing(plan.remove[0], history, seen)}")
    if not has_room(seen):
        if seen.damaged:  # evidence, and large: a checkpoint that can be used is worth more
            return Discard(seen.damaged[0])
        cramped = plan_retention(refs, keep_last=1, in_use=in_use)
        if cramped.remove and has_room(seen, without=cramped.remove[0]):
            return Prune(cramped.remove[0], f"the disk has no room for one more beside {len(refs)}; one is kept")
    return None if seen.divergence else _tidy_store(job, seen)


def _tidy_store(job: Job, seen: Observed) -> Action | None:
    """
    An older one goes when the newest is proven: it came whole from here, or came back whole, or was verified.

    What a listing shows is not enough, since bytes may be wrong in the newest; what is damaged there counts for nothing.
    """
    usable = sorted(c.ref for c in seen.usable)
    if len(usable) <= job.offload.keep_last:
        return None
    newest, is_crowded = usable[-1].name, _is_crowded(job, seen)
    proofs = (TaskKind.VERIFY,) if is_crowded else (TaskKind.UPLOAD, TaskKind.RESTORE, TaskKind.VERIFY)
    states = (seen.tasks.get(kind) for kind in proofs)
    if any(isinstance(state, Finished) and state.subject == newest for state in states):
        return begin(TaskKind.TIDY, newest, seen)
    return begin(TaskKind.VERIFY, newest, seen) if is_crowded else None


def _is_crowded(job: Job, seen: Observed) -> bool:
    """
    Whether the store has so many that tidying comes before the next upload. Where an upload takes as long as the next save, one follows the
    other, and the store would fill up. Never while leaving: there may be time for one upload and no more.
    """
    usable = [c.ref for c in seen.usable]
    if len(usable) <= 2 * job.offload.keep_last or seen.leave_sent_at is not None or seen.divergence is not None:
        return False
    newest = max(usable).name
    failed = any(failure_of(kind, newest, seen) for kind in (TaskKind.VERIFY, TaskKind.TIDY))
    return not failed and not is_done(TaskKind.TIDY, newest, seen)


def _tell_missing(ref: Ref, history: History, seen: Observed) -> str:
    """The store keeps its newest: what is newer than its oldest and not there was never sent, or was lost there."""
    there = {c.ref for c in seen.offsite or ()}
    if not there or ref in there or ref.name in seen.spoilt:
        return ""
    if ref.name in seen.vanished or vanished_key(ref.name) in history.notified:
        return "; the store had it, and has it no more"
    newer = ": a newer one did" if ref < max(there) else ""
    return f"; it never left this machine{newer}" if ref > min(there) else ""


def vanished_key(name: str) -> str:
    """Under which the journal notes that a person was told: it outlives the life that saw it there."""
    return f"vanished {name}"


def _subject(state: TaskState) -> str:
    return state.subject if isinstance(state, Running) else ""


def has_room(seen: Observed, *, without: Ref | None = None) -> bool:
    """
    Whether one more checkpoint fits: without it no save is made at all, which is worse than to keep one less.

    Where it would not fit `without` that one either, removing it is a loss and no help.
    """
    if seen.free_bytes is None or not seen.local:
        return True
    largest = max(c.size_bytes for c in seen.local)
    spare = sum(c.size_bytes for c in seen.local if c.ref == without)
    return seen.free_bytes + spare >= largest + largest // 20 + SPARE_BYTES


def _copy_outputs(job: Job, seen: Observed) -> Action | None:
    """Again and again, and never beside a checkpoint: that has the whole line."""
    if not job.outputs or job.offload.to is None or isinstance(seen.tasks.get(TaskKind.UPLOAD), Running):
        return None
    state = seen.tasks.get(TaskKind.OUTPUTS)
    if not isinstance(state, Finished):
        return begin(TaskKind.OUTPUTS, "so far", seen)
    is_due = seen.now >= state.at + OUTPUTS_EVERY and may_write(seen)
    return Begin(TaskKind.OUTPUTS, "so far") if is_due else None


def publish_now_and_then(job: Job, history: History, seen: Observed) -> Action | None:
    """
    When this machine joined, after each attempt, and every few minutes: a machine that vanishes
    leaves in the store what it did, how it went and what it cost. Logs wait for a checkpoint that is on its way.
    """
    if job.offload.to is None or not history.machine or history.opened_at is None:
        return None
    last = history.last
    what = f"attempt {last.number} {last.ending or 'runs'}" if last else "joined"
    whole = f"{what}, {(seen.now - history.opened_at) // PUBLISH_EVERY}"
    state = seen.tasks.get(TaskKind.PUBLISH)
    if isinstance(state, Finished) and state.subject == whole:
        return None
    is_busy = isinstance(seen.tasks.get(TaskKind.UPLOAD), Running)
    return begin(TaskKind.PUBLISH, f"{whole}, {NO_LOGS}" if is_busy else whole, seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to keep, each with the reason a human will ask for, and what to remove, oldest first."""

    keep: tuple[tuple[Ref, str], ...]
    remove: tuple[Ref, ...]


def plan_retention(local: Sequence[Ref], *, keep_last: int, in_use: Collection[Ref]) -> Plan:
    """
    Keep the newest `keep_last`, and what is being uploaded or resumed from.

    An outage of the store must not fill the disk: an older one goes even if it never got off
    the machine, since the newer ones that stay are worth more.
    """
    order = sorted(local, reverse=True)
    reasons = {ref: reason for age, ref in enumerate(order) if (reason := _reason(ref, age, keep_last, in_use))}
    return Plan(keep=tuple(reasons.items()), remove=tuple(ref for ref in reversed(order) if ref not in reasons))


def _reason(ref: Ref, age: int, keep_last: int, in_use: Collection[Ref]) -> str | None:
    if age < keep_last:
        return f"among the newest {keep_last}"
    if ref in in_use:
        return "in use"
    return None
