"""The whole life of a job, as one decision."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from runner.facts import (
    FULL_BYTES,
    Attempt,
    Conclusion,
    Diagnosis,
    Divergence,
    Earlier,
    Ending,
    Exit,
    Failed,
    Finished,
    Hang,
    History,
    LeaseState,
    Live,
    Observed,
    Outcome,
    Running,
    TaskKind,
    TaskState,
    Verdict,
)
from runner.job import AtEnd, Job
from runner.policy.divergence import first_distrusted, is_distrusted, newest_good
from runner.policy.ledger import sum_up
from runner.policy.limits import limit_at
from runner.policy.restart import DISK_FULL, GiveUp, Retry, Succeeded, decide_restart
from runner.policy.resume import NEVER, Fetch, Fork, From, plan_fork, plan_resume, resume_floor, stale_copies
from runner.policy.retention import plan_retention
from vramfarm.protocol import Ref

STRAGGLER = timedelta(seconds=2)  # what an ended launcher's children get before they are killed
PREFLIGHT_PATIENCE = timedelta(minutes=3)  # a check that hangs must not keep a job from starting
MACHINE, CODE = "machine", "code"  # the two parts of preflight: the second waits for the set-up
EVIDENCE_PATIENCE = timedelta(seconds=90)  # looking at what hangs may hang, too
STORE_PATIENCE = timedelta(minutes=30)  # the store may be down so long before the server is stopped without it
EXIT_CODES = {
    Outcome.SUCCEEDED: 0,
    Outcome.GAVE_UP: 6,
    Outcome.STOPPED: 8,
    Outcome.LIMIT: 7,
    Outcome.REFUSED: 3,
    Outcome.STORE: 4,
}
LEFT = 75
WRONG_JOB = 2
LOCKED = 5
SPARE_BYTES = 1 << 20
REFUSED_AGAIN = timedelta(minutes=2)  # a store that refuses may be emptied, or given the right credentials, meanwhile
STUCK = timedelta(minutes=30)  # without a piece that has moved
OUTPUTS_EVERY = timedelta(minutes=5)
ALL_OUTPUTS = "at the end"  # nobody writes to them any more
PUBLISH_EVERY = timedelta(minutes=10)
PUBLISH_PATIENCE = timedelta(minutes=1)
_COMMIT_TRIES = 3


@dataclass(frozen=True, slots=True)
class Accept:
    """This job is ours from now on."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Start slow work."""

    kind: TaskKind
    subject: str


@dataclass(frozen=True, slots=True)
class Join:
    """This machine goes on with what others did: their attempts, time and money count."""

    machine: str
    earlier: Earlier


@dataclass(frozen=True, slots=True)
class Cease:
    """End slow work that may not go on; it is begun again when it may."""

    kind: TaskKind
    reason: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove what was never committed."""

    name: str


@dataclass(frozen=True, slots=True)
class Prune:
    """Remove what was committed and is not needed."""

    ref: Ref
    reason: str


@dataclass(frozen=True, slots=True)
class SetAside:
    """Take a checkpoint that must not be used out of sight, for a human."""

    ref: Ref
    reason: str = "its bytes are not what its manifest says"


@dataclass(frozen=True, slots=True)
class Distrust:
    """What this attempt saved from this step on is not to be used."""

    number: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class TrimLogs:
    """Give back what logs take beyond `max_bytes`."""

    max_bytes: int


@dataclass(frozen=True, slots=True)
class Launch:
    number: int
    resume: Ref | None
    lineage: int
    env: Mapping[str, str] = field(default_factory=dict)  # changes that preflight or earlier failures asked for
    origin: str = ""  # the checkpoint of another run that `resume` is a copy of


@dataclass(frozen=True, slots=True)
class RecordExit:
    ending: Ending
    exit: Exit
    step: int
    reason: str
    diagnosis: Diagnosis | None = None


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Ask the attempt to save and leave."""

    reason: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End every process of the attempt now."""

    reason: str
    savers: bool = False
    hung: bool = False  # it is to print its stacks, and triage is to know
    left: bool = False  # of an attempt that has ended, these are left

    @property
    def is_the_end(self) -> bool:
        """Whether training ends by this, and nothing that can be looked at again says why."""
        return not (self.savers or self.hung or self.left)


@dataclass(frozen=True, slots=True)
class Conclude:
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell a person. `key` is journaled: what it stands for was told then."""

    event: str
    key: str
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The last word to the guardian: stop the server (or not), exit with `code`."""

    code: int
    stop: bool
    keep: bool  # the folder: something is only here
    reason: str


@dataclass(frozen=True, slots=True)
class Leave:
    """End this boot. What is left to do, the next one will find."""


@dataclass(frozen=True, slots=True)
class Wait:
    until: datetime | None = None


Action = (
    Accept
    | Begin
    | Join
    | Cease
    | Discard
    | Prune
    | SetAside
    | Distrust
    | TrimLogs
    | Launch
    | RecordExit
    | Interrupt
    | Kill
    | Conclude
    | Notify
    | End
    | Leave
    | Wait
)


def decide(job: Job, history: History, seen: Observed) -> Action:
    """Return the next action. The rules are in order of urgency; the first that applies wins."""
    if history.accepted_at is None:
        return Accept()
    if _may_go_on(history, seen):
        history = replace(history, conclusion=None)
    if first := _cease(seen) or _set_aside_spoilt(history, seen):
        return first
    if seen.live is not None:
        return _while_live(job, history, seen, seen.live)
    if history.attempts and history.attempts[-1].ending is None:
        return _commit_last(seen) or _record_exit(history, history.attempts[-1], seen)
    if history.conclusion:
        return _after_the_end(job, history, seen)
    return _between_attempts(job, history, seen)


def _may_go_on(history: History, seen: Observed) -> bool:
    """A limit that was raised since is no end any more, nor is a machine at fault that this is not."""
    if history.conclusion is None:
        return False
    if history.conclusion.outcome is Outcome.REFUSED:
        last = history.attempts[-1] if history.attempts else None
        return last is not None and (last.boot_id != seen.boot_id or last.launched_at > history.conclusion.at)
    limit = limit_at(history, seen)
    return history.conclusion.outcome is Outcome.LIMIT and limit is not None and seen.now < limit


# ------------------------------------------------------------------------------ while live


def _while_live(job: Job, history: History, seen: Observed, live: Live) -> Action:
    if not live.trainers:
        return _wait_for_savers(job, history, seen)
    if seen.exit is not None:
        return _end_stragglers(seen)
    if diverged := _end_diverged(job, history, seen):
        return diverged
    reason = _why_leave(history, seen)
    if reason:
        return _make_it_leave(job, seen, reason) or _keep_house(job, history, seen) or Wait()
    if seen.hang is not None:
        return _end_hung(history, seen, seen.hang) or _keep_house(job, history, seen) or Wait()
    return _keep_house(job, history, seen) or Wait(limit_at(history, seen))


def _end_stragglers(seen: Observed) -> Action:
    """A launcher that was killed leaves its ranks alive; one that ended leaves workers that are just going."""
    since = seen.exit_seen_at or seen.now
    if seen.now >= since + STRAGGLER:
        return Kill("the launcher ended, these did not", left=True)
    return Wait(since + STRAGGLER)


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


def _wait_for_savers(job: Job, history: History, seen: Observed) -> Action:
    """A staged save commits even when all ranks are dead; a saver that cannot is not waited for for ever."""
    gone = seen.trainers_gone_at or seen.now
    if seen.now >= gone + job.restart.grace_period:
        return Kill("the saver did not finish in the grace period", savers=True)
    return _keep_house(job, history, seen) or Wait(gone + job.restart.grace_period)


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
    if seen.leave_sent_at is None:
        return Interrupt(reason)
    if not seen.progress.attached and seen.now >= seen.leave_sent_at + STRAGGLER:
        return Kill(f"{reason}: it has nothing to save that it would tell us of")
    if seen.now >= seen.leave_sent_at + job.restart.grace_period:
        return Kill(f"{reason}: it did not save and leave in {job.restart.grace_period.total_seconds():.0f} s")
    return None


# ------------------------------------------------------------------------------- the house


def _keep_house(job: Job, history: History, seen: Observed) -> Action | None:
    """What is always right, whoever is training: get copies off the machine, keep the disk free."""
    return (
        _trim_logs(job, seen)
        or _end_stuck(seen)
        or _hold_lease(job, seen)
        or _survey(job, seen)
        or _set_aside(seen)
        or _commit(seen)
        or _upload(job, seen)
        or _tidy(job, history, seen)
        or _copy_outputs(job, seen)
        or _publish_now_and_then(job, history, seen)
    )


def _publish_now_and_then(job: Job, history: History, seen: Observed) -> Action | None:
    """
    When this machine joined, after each attempt, and every few minutes: a machine that vanishes
    leaves in the store what it did and what it cost.
    """
    if job.offload.to is None or not history.machine or history.opened_at is None:
        return None
    last = history.attempts[-1] if history.attempts else None
    what = f"attempt {last.number} {last.ending or 'runs'}" if last else "joined"
    return _begin(TaskKind.PUBLISH, f"{what}, {(seen.now - history.opened_at) // PUBLISH_EVERY}", seen)


def _commit(seen: Observed) -> Action | None:
    return _begin(TaskKind.COMMIT, seen.ready, seen) if seen.ready else None


def _commit_last(seen: Observed) -> Action | None:
    """What a framework saved before it ended is committed before that end counts."""
    state = seen.tasks.get(TaskKind.COMMIT)
    if isinstance(state, Running):
        return Wait()
    if not seen.ready or (isinstance(state, Finished) and state.subject == seen.ready):
        return None
    if isinstance(state, Failed) and state.subject == seen.ready:
        if state.final or state.failures >= _COMMIT_TRIES:
            return None
        return _commit(seen) or Wait(retry_at(state))
    return _commit(seen)


def _trim_logs(job: Job, seen: Observed) -> Action | None:
    return TrimLogs(job.logs.max_size) if seen.log_bytes > job.logs.max_size else None


def _hold_lease(job: Job, seen: Observed) -> Action | None:
    """Taken before the store is touched, and kept as long as the runner lives."""
    if job.offload.to is None or seen.lease.state in {LeaseState.NOT_NEEDED, LeaseState.TAKEN}:
        return None
    return _begin(TaskKind.LEASE, "of the run", seen)


def may_write(seen: Observed) -> bool:
    """Whether this runner is the one that writes this run's part of the store."""
    return seen.lease.state in {LeaseState.HELD, LeaseState.NOT_NEEDED}


def _cease(seen: Observed) -> Cease | None:
    """Whoever lost the lease, or could not renew it for a while, stops writing before another one begins."""
    if may_write(seen):
        return None
    writing = (kind for kind in WRITERS if isinstance(seen.tasks.get(kind), Running))
    kind = next(writing, None)
    return None if kind is None else Cease(kind, "this runner does not have the lease of the run now")


def _survey(job: Job, seen: Observed) -> Action | None:
    if job.offload.to is None or seen.offsite is not None:
        return None
    return _begin(TaskKind.SURVEY, "store", seen)


def _set_aside(seen: Observed) -> Action | None:
    failed = seen.tasks.get(TaskKind.UPLOAD)
    if isinstance(failed, Failed) and failed.damaged:
        for checkpoint in seen.local:
            if checkpoint.ref.name == failed.subject:
                return SetAside(checkpoint.ref)
    return None


def _set_aside_spoilt(history: History, seen: Observed) -> Action | None:
    """Once nobody can add to them: newer than the good one, they would be taken for better."""
    spoilt = next((c.ref for c in seen.local if is_distrusted(c.ref, history)), None)
    if spoilt is None or seen.live is not None:
        return None
    return SetAside(spoilt, "it was saved after the loss went wrong")


def _upload(job: Job, seen: Observed) -> Action | None:
    """Only the newest: by the time an older one is there, it is worth nothing."""
    ref = newest_unsafe(job, seen)
    if seen.divergence is not None or ref is None:
        return None  # what is saved now may be spoilt, and would drive the good one out of the store
    begin = _begin(TaskKind.UPLOAD, ref.name, seen)
    if begin and isinstance(seen.tasks.get(TaskKind.OUTPUTS), Running):
        return Cease(TaskKind.OUTPUTS, "a checkpoint goes first")
    return begin


def _copy_outputs(job: Job, seen: Observed) -> Action | None:
    """Again and again, and never beside a checkpoint: that has the whole line."""
    if not job.outputs or job.offload.to is None or isinstance(seen.tasks.get(TaskKind.UPLOAD), Running):
        return None
    state = seen.tasks.get(TaskKind.OUTPUTS)
    if not isinstance(state, Finished):
        return _begin(TaskKind.OUTPUTS, "so far", seen)
    is_due = seen.now >= state.at + OUTPUTS_EVERY and may_write(seen)
    return Begin(TaskKind.OUTPUTS, "so far") if is_due else None


def newest_unsafe(job: Job, seen: Observed) -> Ref | None:
    """The newest checkpoint here, if the store has neither it nor a newer one."""
    if job.offload.to is None or seen.offsite is None or not seen.local:
        return None
    newest = max(c.ref for c in seen.local)
    return newest if newest > max((c.ref for c in seen.offsite), default=_NOTHING) else None


_NOTHING = Ref(-1, -1, -1, "")


def _tidy(job: Job, history: History, seen: Observed) -> Action | None:
    refs = [c.ref for c in seen.local]
    in_use = {ref for ref in refs if ref.name == _subject(seen.tasks.get(TaskKind.UPLOAD))}
    in_use |= {a.resume for a in history.attempts[-1:] if a.resume is not None and a.ending is None}
    if seen.divergence is not None and (good := newest_good(seen.local, history, seen.divergence)):
        in_use.add(good)
    plan = plan_retention(refs, keep_last=job.checkpoint.keep_last, in_use=in_use)
    if plan.remove:
        return Prune(plan.remove[0], f"the newest {job.checkpoint.keep_last} are kept")
    if not has_room(seen):
        cramped = plan_retention(refs, keep_last=1, in_use=in_use)
        if cramped.remove:
            return Prune(cramped.remove[0], f"the disk has no room for one more beside {len(refs)}; one is kept")
    if seen.offsite is not None and len(seen.offsite) > job.offload.keep_last and not seen.divergence:
        return _begin(TaskKind.TIDY, max(c.ref for c in seen.offsite).name, seen)
    return None


def has_room(seen: Observed) -> bool:
    """Whether one more checkpoint fits: without it no save is made at all, which is worse than to keep one less."""
    if seen.free_bytes is None or not seen.local:
        return True
    largest = max(c.size_bytes for c in seen.local)
    return seen.free_bytes >= largest + largest // 20 + SPARE_BYTES


def _subject(state: TaskState) -> str:
    return state.subject if isinstance(state, Running) else ""


# ------------------------------------------------------------------------------ slow work


# Each of these ends with a listing of the store. One at a time: a listing that was taken before
# the other's change would come after it, and be believed.
_LISTING = frozenset({TaskKind.SURVEY, TaskKind.UPLOAD, TaskKind.TIDY})
# These tell of each piece that has moved.
_MOVERS = (TaskKind.UPLOAD, TaskKind.OUTPUTS, TaskKind.STAGE, TaskKind.FORK, TaskKind.RESTORE, TaskKind.VERIFY)
WRITERS = (TaskKind.SURVEY, TaskKind.UPLOAD, TaskKind.TIDY, TaskKind.PUBLISH, TaskKind.OUTPUTS)
# A refusal of the store ends what waits for it; where nothing does, these ask again.
ASK_AGAIN = frozenset({TaskKind.LEASE, *WRITERS})


def _end_stuck(seen: Observed) -> Cease | None:
    """A server that answers a byte a minute breaks no time limit, and brings nothing about."""
    stuck = (kind for kind in _MOVERS if _is_stuck(kind, seen))
    kind = next(stuck, None)
    return None if kind is None else Cease(kind, f"nothing has moved for {STUCK.total_seconds() / 60:.0f} min")


def _is_stuck(kind: TaskKind, seen: Observed) -> bool:
    state = seen.tasks.get(kind)
    return kind in _MOVERS and isinstance(state, Running) and seen.now >= (state.moved_at or state.started_at) + STUCK


def _begin(kind: TaskKind, subject: str, seen: Observed) -> Begin | None:
    """Start it unless it runs, is done, cannot be done, has just failed, or another one is in its way."""
    if kind in _LISTING and any(isinstance(seen.tasks.get(other), Running) for other in _LISTING):
        return None
    if kind in WRITERS and not may_write(seen):
        return None
    match seen.tasks.get(kind):
        case Running():
            return None
        case Finished(subject=done) if done == subject:
            return None
        case Failed() as failed if failed.subject == subject and not _may_retry(kind, failed, seen):
            return None
        case _:
            return Begin(kind, subject)


def _may_retry(kind: TaskKind, failed: Failed, seen: Observed) -> bool:
    return (not failed.final or kind in ASK_AGAIN) and seen.now >= retry_at(failed)


def retry_at(failed: Failed) -> datetime:
    """2 s after the first failure, doubling to a minute: the store is tried as long as the run lives."""
    if failed.final:
        return failed.at + REFUSED_AGAIN
    return failed.at + timedelta(seconds=min(2.0 ** min(failed.failures, 6), 60.0))


# ------------------------------------------------------------------------- between attempts


def _record_exit(history: History, attempt: Attempt, seen: Observed) -> RecordExit:
    """Only now: everything the attempt left is committed, so a success cannot outlive its checkpoint."""
    exit_ = seen.exit or Exit(code=None)
    asked = history.interrupted == attempt.number
    if (seen.end and seen.end.kind == "done") or (not seen.end and not asked and exit_.code == 0):
        ending = Ending.SUCCEEDED
    elif asked or seen.end:
        ending = Ending.INTERRUPTED
    else:
        ending = Ending.FAILED
    step = max(seen.progress.step, seen.end.step if seen.end else 0, attempt.step)
    if attempt.killed and ending is not Ending.SUCCEEDED and (exit_.code is None or exit_.code < 0):
        return RecordExit(ending, exit_, step, f"the runner killed it: {attempt.killed}", None)
    diagnosis = None if ending is Ending.SUCCEEDED else seen.diagnosis
    return RecordExit(ending, exit_, step, diagnosis.summary if diagnosis else "", diagnosis)


def _between_attempts(job: Job, history: History, seen: Observed) -> Action:
    return _reason_to_end(job, history, seen) or _prepare(job, history, seen) or _next_attempt(job, history, seen)


def _reason_to_end(  # noqa: PLR0911  # one line a reason
    job: Job, history: History, seen: Observed
) -> Action | None:
    recent = history.attempts[history.budget_from :]
    succeeded = bool(recent) and recent[-1].ending is Ending.SUCCEEDED
    limit = limit_at(history, seen)
    if succeeded:
        return Conclude(Outcome.SUCCEEDED, "training is done")
    if seen.stop_requested:
        return Conclude(Outcome.STOPPED, "asked to stop")
    if seen.leaving:
        return Leave()
    if seen.lease.state is LeaseState.TAKEN:
        return _lock_out(job, seen)
    if seen.refusal:
        return _refuse(Outcome.REFUSED, seen.refusal, job, seen)
    if limit is not None and seen.now >= limit:
        what = seen.deadline_why or "the time limit"
        return Conclude(Outcome.LIMIT, f"{what} is reached; with more in job.yaml (limits) it goes on")
    return None


def _prepare(job: Job, history: History, seen: Observed) -> Action | None:
    """What must be true before a launch: nothing half-written, the store known, the machine fit, the code in place."""
    if seen.leftovers:
        return Discard(seen.leftovers[0])
    return (
        _end_stuck(seen)
        or _know_the_store(job, history, seen)
        or _expect_disk(job, history, seen)
        or _announce(job, history, seen)
        or _look_ahead(seen)
        or _judge_machine(job, seen)
        or _bring_in(job, seen)
        or _keep_house(job, history, seen)
    )


def _expect_disk(job: Job, history: History, seen: Observed) -> Action | None:
    """
    Nothing is launched onto a full disk: it would die without a word, and be blamed for it. What may
    be removed goes first.
    """
    if seen.free_bytes is None or not _is_full(seen.free_bytes, history, seen):
        return None
    what = f"the disk of this run is full: {seen.free_bytes / 1e6:.1f} MB are free"
    hint = "free some space there, or put the run on a larger disk, and start it again; it goes on where it was"
    return _trim_logs(job, seen) or _tidy(job, history, seen) or _refuse(Outcome.REFUSED, f"{what}; {hint}", job, seen)


def _is_full(free_bytes: int, history: History, seen: Observed) -> bool:
    """Without any room; or an attempt died of it, and there still is none for one more checkpoint."""
    found = history.attempts[-1].diagnosis if history.attempts else None
    return free_bytes < FULL_BYTES or (found is not None and found.label == DISK_FULL and not has_room(seen))


def _announce(job: Job, history: History, seen: Observed) -> Action | None:
    """A machine that vanishes in its first minutes was paid for, too."""
    return None if history.attempts else _publish_now_and_then(job, history, seen)


def _look_ahead(seen: Observed) -> Action | None:
    """Preflight, once a life, when the lease is ours: it writes to the store. What needs the code, when it is there."""
    state = seen.tasks.get(TaskKind.PREFLIGHT)
    done = state.subject if isinstance(state, Finished | Failed) else ""
    if isinstance(state, Running) or CODE in done:
        return None
    is_ready = not seen.setup_digest or seen.set_up
    parts = ([] if done else [MACHINE]) + ([CODE] if is_ready else [])
    return Begin(TaskKind.PREFLIGHT, f"{' and '.join(parts)}") if parts else None


def _judge_machine(job: Job, seen: Observed) -> Action | None:
    """A verdict is waited for, but not for ever; one that never came refuses nothing."""
    if seen.preflight and seen.preflight.verdict is Verdict.REFUSE:
        return _refuse(Outcome.STORE, "; ".join(seen.preflight.reasons), job, seen)
    if seen.preflight and seen.preflight.verdict is Verdict.SWAP:
        return _publish_verdict(job, seen) or _refuse(Outcome.REFUSED, "; ".join(seen.preflight.reasons), job, seen)
    state = seen.tasks.get(TaskKind.PREFLIGHT)
    if isinstance(state, Running) and seen.now < state.started_at + PREFLIGHT_PATIENCE:
        return Wait(state.started_at + PREFLIGHT_PATIENCE)
    return None


def _know_the_store(job: Job, history: History, seen: Observed) -> Action | None:
    """Without knowing what the store has, a launch could start over what is half done."""
    if job.offload.to is None:
        return None
    if seen.offsite is None:
        return _wait_for_lease(job, seen) or _wait_for_store(job, seen)
    if seen.other_job and not history.attempts and _has_trained(seen):
        hint = "give the job another name, or pass --accept-change to go on with the change"
        return _refuse_job(f"the store has another job of this name: {seen.other_job}; {hint}", job, seen)
    if seen.ledger is not None and seen.machine != history.machine:
        return Join(seen.machine, sum_up(seen.ledger, but=seen.machine))
    elsewhere = seen.concluded_elsewhere
    over = elsewhere and elsewhere.outcome in _OVER_EVERYWHERE
    if elsewhere and over and not history.attempts and not history.fresh_from and job.checkpoint.resume != NEVER:
        return Conclude(elsewhere.outcome, f"{elsewhere.reason} (on an earlier machine)")
    return None


def _has_trained(seen: Observed) -> bool:
    """Whether the store has anything that another command could be mistaken for."""
    elsewhere = seen.concluded_elsewhere
    over = elsewhere is not None and elsewhere.outcome in _OVER_EVERYWHERE
    return over or bool(seen.offsite) or any(machine.attempts for machine in seen.ledger or ())


# A run that hit a limit or failed may go on on another machine; one that is done or was stopped may not.
_OVER_EVERYWHERE = frozenset({Outcome.SUCCEEDED, Outcome.STOPPED})


def _wait_for_lease(job: Job, seen: Observed) -> Action | None:
    """A store that does not answer is for `_answer`; another's lease is watched before anything is done."""
    if may_write(seen):
        return None
    return _answer(TaskKind.LEASE, "of the run", job, seen)


def _wait_for_store(job: Job, seen: Observed) -> Action | None:
    if not may_write(seen):
        return None  # there is something here to go on with
    return _answer(TaskKind.SURVEY, "store", job, seen)


def _answer(kind: TaskKind, subject: str, job: Job, seen: Observed) -> Action | None:
    """Have the store's answer; None: it has none, and there is something on this disk to go on with."""
    state = seen.tasks.get(kind)
    if isinstance(state, Failed):
        if state.final:
            return _refuse(Outcome.STORE, f"{state.error}; {state.hint}" if state.hint else state.error, job, seen)
        if not seen.local and seen.now >= (state.since or state.at) + STORE_PATIENCE:
            waited = STORE_PATIENCE.total_seconds() / 60
            return _refuse(Outcome.STORE, f"no answer for {waited:.0f} min: {state.error}", job, seen)
        if seen.local:
            return None  # there is something to go on with; the store is asked again while it trains
        return _begin(kind, subject, seen) or Wait(retry_at(state))
    return _begin(kind, subject, seen) or Wait()


def _publish_verdict(job: Job, seen: Observed) -> Action | None:
    """Whoever rented this machine from outside reads it in the store; one that does not answer changes nothing."""
    if job.offload.to is None or not may_write(seen):
        return None
    match seen.tasks.get(TaskKind.PUBLISH):
        case Running(started_at=started_at) if seen.now < started_at + PUBLISH_PATIENCE:
            return Wait(started_at + PUBLISH_PATIENCE)
        case Running() | Failed(subject="verdict"):
            return None
        case _:
            return _begin(TaskKind.PUBLISH, "verdict", seen)


def _bring_in(job: Job, seen: Observed) -> Action | None:
    """Code and data at the same time; a launch waits for both."""
    data = _stage(job, seen)
    if isinstance(data, Wait):
        return _set_up(seen) or data
    return data or _set_up(seen)


def _stage(job: Job, seen: Observed) -> Action | None:
    """A store that is away is waited for: to train without the data would cost more."""
    if not seen.data_digest or seen.staged:
        return None
    return _bring(TaskKind.STAGE, seen.data_digest, job, seen)


def _set_up(seen: Observed) -> Action | None:
    if not seen.setup_digest or seen.set_up:
        return None
    match seen.tasks.get(TaskKind.SETUP):
        case Failed(subject=subject, final=True, error=error) if subject == seen.setup_digest:
            return Conclude(Outcome.GAVE_UP, error)
        case Failed(subject=subject, failures=failures, error=error) if (
            subject == seen.setup_digest and failures >= 5  # noqa: PLR2004  # two minutes of trying
        ):
            return Conclude(Outcome.GAVE_UP, error)
        case Failed() as failed:
            return _begin(TaskKind.SETUP, seen.setup_digest, seen) or Wait(retry_at(failed))
        case _:
            return _begin(TaskKind.SETUP, seen.setup_digest, seen) or Wait()


def _next_attempt(job: Job, history: History, seen: Observed) -> Action:
    local = {c.ref for c in seen.local}
    offsite = {c.ref for c in seen.offsite or ()}
    floor = resume_floor(history, never=job.checkpoint.resume == NEVER)
    spoilt = {ref.name for ref in local | offsite if is_distrusted(ref, history)}
    spoilt |= stale_copies((*seen.local, *(seen.offsite or ())), job.checkpoint.resume)
    plan: From | Fetch | Fork = plan_resume(
        local - {r for r in local if r.name in spoilt}, offsite, floor=floor, unusable=seen.unusable | spoilt
    )
    if isinstance(plan, From) and plan.ref is None and not _lost(seen, floor):
        plan = plan_fork(job.checkpoint.resume, seen.local, local | offsite, plan)
    recent = history.attempts[history.budget_from :]
    env: Mapping[str, str] = {}
    if recent:
        users = {*job.env, *job.secrets}
        ref = None if isinstance(plan, Fork) else plan.ref
        match decide_restart(recent, ref, job.restart, users=users, boot_id=seen.boot_id):
            case Succeeded():
                return Conclude(Outcome.SUCCEEDED, "training is done")
            case GiveUp(reason=reason, outcome=outcome):
                return Conclude(outcome, reason)
            case Retry(at=at) if seen.now < at:
                return Wait(at)
            case Retry(env=changes):
                env = changes
    if isinstance(plan, Fork):
        return _fork(job, seen, plan)
    if isinstance(plan, Fetch):
        return _fetch(job, seen, plan.ref)
    return _launch(history, seen, plan, floor, env, job)


def _fetch(job: Job, seen: Observed, ref: Ref) -> Action:
    """
    Bring it back. A damaged copy shows as `unusable` and the next older one is planned; a full
    disk or a store that refuses is no reason to train from an older one.
    """
    return _bring(TaskKind.RESTORE, ref.name, job, seen)


def _fork(job: Job, seen: Observed, plan: Fork) -> Action:
    """The first checkpoint is that of another run; without it there is nothing to train from."""
    return _bring(TaskKind.FORK, f"{plan.lineage} {plan.place}", job, seen)


def _bring(kind: TaskKind, subject: str, job: Job, seen: Observed) -> Action:
    """What a launch cannot do without; a store that is away is waited for."""
    state = seen.tasks.get(kind)
    if isinstance(state, Failed) and state.subject == subject:
        if state.final or seen.now >= (state.since or state.at) + STORE_PATIENCE:
            reason = f"{state.error}; {state.hint}" if state.hint else state.error
            is_usage = state.exit_code == WRONG_JOB
            return _refuse_job(reason, job, seen) if is_usage else _refuse(Outcome.STORE, reason, job, seen)
        return _begin(kind, subject, seen) or Wait(retry_at(state))
    if isinstance(state, Finished) and state.subject == subject:
        return Begin(kind, subject)  # it came and is gone again: removed by hand, or set aside since
    return _begin(kind, subject, seen) or Wait()


def _launch(  # noqa: PLR0913, PLR0917  # all that one launch depends on
    history: History, seen: Observed, plan: From, floor: int | None, env: Mapping[str, str], job: Job
) -> Action:
    """A run that had a checkpoint never starts over by itself."""
    lost = _lost(seen, floor)
    if plan.ref is None and lost:
        reason = f"checkpoints exist and none can be used ({', '.join(lost)}); --start-over begins at step 0"
        return _refuse(Outcome.STORE, reason, job, seen)
    needed = seen.preflight.env if seen.preflight else {}
    origin = next((c.origin for c in seen.local if c.ref == plan.ref), "")
    return Launch(history.next_number, plan.ref, plan.lineage, {**needed, **env}, origin)


def _lost(seen: Observed, floor: int | None) -> list[str]:
    """What this run had and cannot use; nobody misses it where the run starts over."""
    return [] if floor is None else sorted({*seen.unusable, *seen.damaged})


def _lock_out(job: Job, seen: Observed) -> End:
    """The loser stops itself only. What is only here stays here."""
    lease = seen.lease
    until = f", until {lease.until}" if lease.until else ""
    reason = f"another runner has this run: {lease.who or 'somebody'} (lease {lease.fence}{until})"
    return _end_early(LOCKED, reason, job, seen)


def _refuse_job(reason: str, job: Job, seen: Observed) -> End:
    return _end_early(WRONG_JOB, reason, job, seen)


def _refuse(outcome: Outcome, reason: str, job: Job, seen: Observed) -> End:
    return _end_early(EXIT_CODES[outcome], reason, job, seen)


def _end_early(code: int, reason: str, job: Job, seen: Observed) -> End:
    """Not journaled: the next boot looks again, and goes on if it was cured."""
    stop = job.finish.on_failure is AtEnd.STOP
    return End(code=code, stop=stop, keep=bool(seen.local or seen.only_here), reason=reason)


# --------------------------------------------------------------------------- after the end


def _after_the_end(job: Job, history: History, seen: Observed) -> Action:
    """Get everything off the machine, prove it, say so, and only then ask for the stop."""
    assert history.conclusion is not None
    if seen.leaving:
        return Leave()
    if seen.lease.state is LeaseState.TAKEN:
        return _lock_out(job, seen)
    pending = _bring_off(job, history, seen)
    if pending is not None:
        return pending
    conclusion = history.conclusion
    succeeded = conclusion.outcome is Outcome.SUCCEEDED
    wish = job.finish.on_success if succeeded else job.finish.on_failure
    only_here = bool(seen.local) and not is_safe(job, seen)
    missing = succeeded and job.offload.to is not None and only_here
    return End(
        code=EXIT_CODES[Outcome.STORE if missing else conclusion.outcome],
        stop=wish is AtEnd.STOP,
        keep=bool(seen.only_here) or only_here,
        reason=f"{conclusion.reason}, but the store does not have it: {_why_not(seen)}"
        if missing
        else conclusion.reason,
    )


def _why_not(seen: Observed) -> str:
    states = (seen.tasks.get(kind) for kind in (TaskKind.SURVEY, TaskKind.UPLOAD, TaskKind.VERIFY))
    return next((s.error for s in states if isinstance(s, Failed)), "there was no time")


def is_safe(job: Job, seen: Observed) -> bool:
    """Whether the newest checkpoint was compared with the store, and the store has it all."""
    state = seen.tasks.get(TaskKind.VERIFY)
    newest = max((c.ref for c in seen.offsite or ()), default=None)
    verified = newest is not None and isinstance(state, Finished) and state.subject == newest.name
    return job.offload.to is not None and verified and newest_unsafe(job, seen) is None


def _bring_off(job: Job, history: History, seen: Observed) -> Action | None:
    """The next thing to do before the end, or None when all is done, or cannot be."""
    if job.offload.to is None:
        return _tidy(job, history, seen)
    assert history.conclusion is not None
    late = _patience_ends(history.conclusion, seen)
    deadline_near = seen.deadline_at is not None and seen.now >= seen.deadline_at - timedelta(seconds=20)
    if deadline_near:
        return None
    if not may_write(seen):
        return _try(TaskKind.LEASE, "of the run", history, seen, wanted=seen.now < late)
    return (
        _try(TaskKind.SURVEY, "store", history, seen, wanted=seen.offsite is None)
        or _set_aside(seen)
        or _upload_last(job, history, seen)
        or _verify_last(history, seen)
        or _try(TaskKind.OUTPUTS, ALL_OUTPUTS, history, seen, wanted=bool(job.outputs))
        or _tidy(job, history, seen)
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


def _verify_last(history: History, seen: Observed) -> Action | None:
    if not seen.offsite:
        return None
    newest = max(c.ref for c in seen.offsite)
    return _try(TaskKind.VERIFY, newest.name, history, seen, wanted=True)


def _publish(history: History, seen: Observed) -> Action | None:
    assert history.conclusion is not None
    elsewhere = seen.concluded_elsewhere
    ours = bool(history.attempts) or elsewhere is None or elsewhere.outcome != history.conclusion.outcome
    # what an earlier machine published says how it was; an empty journal of ours must not replace it
    return _try(TaskKind.PUBLISH, f"{history.conclusion.outcome}", history, seen, wanted=ours)


def _patience_ends(conclusion: Conclusion, seen: Observed) -> datetime:
    """An outage has its half hour, whenever after the end it begins; all that it holds up has the same one."""
    states = [seen.tasks.get(kind) for kind in (*WRITERS, TaskKind.VERIFY, TaskKind.LEASE)]
    since = [state.since or state.at for state in states if isinstance(state, Failed) and not state.final]
    return max(conclusion.at, min(since, default=conclusion.at)) + STORE_PATIENCE


def _try(kind: TaskKind, subject: str, history: History, seen: Observed, *, wanted: bool) -> Action | None:
    """Begin it, wait for it, try it again while there is patience; None when it is done or hopeless."""
    assert history.conclusion is not None
    state = seen.tasks.get(kind)
    if _is_stuck(kind, seen):
        return _end_stuck(seen) if seen.now < _patience_ends(history.conclusion, seen) else None
    if not wanted or (isinstance(state, Finished) and state.subject == subject):
        return None
    if isinstance(state, Failed) and state.subject == subject:
        if state.final or _is_in_vain(history, seen) or seen.now >= _patience_ends(history.conclusion, seen):
            return None
        return _begin(kind, subject, seen) or Wait(retry_at(state))
    return _begin(kind, subject, seen) or Wait()


def _is_in_vain(history: History, seen: Observed) -> bool:
    """Nothing was made here that an outage could cost: whoever waits for its end pays for an idle machine."""
    return not (history.attempts or seen.local or seen.only_here)


@dataclass(frozen=True, slots=True)
class Draining:
    """What still goes on after the end of the job: for what it waits, and until when at the latest."""

    what: str
    until: datetime
    is_held_up: bool


_DRAINERS = (TaskKind.LEASE, TaskKind.VERIFY, *WRITERS)  # what `_bring_off` does, and no more


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
            case Failed(final=False) as failed:
                return Draining(f"{kind} {failed.subject} ({failed.error})", until, is_held_up=True)
            case Running(subject=subject) if kind is not TaskKind.LEASE:
                return Draining(f"{kind} {subject}", until, is_held_up=False)
            case _:
                pass
    return Draining("" if may_write(seen) else "the lease of the run", until, is_held_up=False)
