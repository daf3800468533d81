"""Between two attempts: a reason to end, what must be true before a launch, and then the launch."""

from collections.abc import Mapping
from datetime import timedelta

from runner.committed import MAX_LINEAGE
from runner.facts import (
    FULL_BYTES,
    Conclusion,
    Ending,
    Failed,
    Finished,
    History,
    LeaseState,
    Observed,
    Outcome,
    Running,
    TaskKind,
    Verdict,
)
from runner.job import Job
from runner.policy.actions import OTHER_JOB, WRONG_JOB, Action, Begin, Conclude, Discard, Join, Launch, Leave, Wait
from runner.policy.divergence import is_distrusted
from runner.policy.finish import lock_out, refuse, refuse_job
from runner.policy.house import has_room, keep_house, publish_now_and_then, tell_end, tidy
from runner.policy.ledger import is_void, sum_up
from runner.policy.limits import limit_at
from runner.policy.restart import DISK_FULL, GiveUp, Retry, Succeeded, decide_restart
from runner.policy.resume import NEVER, Fetch, Fork, From, plan_fork, plan_resume, resume_floor, stale_copies
from runner.policy.slow import STORE_PATIENCE, begin, end_stuck, failure_of, is_last_word, may_write
from vramfarm.protocol import Ref

MACHINE, CODE = "machine", "code"  # the two parts of preflight: the second waits for the set-up
PREFLIGHT_PATIENCE = timedelta(minutes=3)  # a check that hangs must not keep a job from starting
PUBLISH_PATIENCE = timedelta(minutes=1)
JOIN_PATIENCE = timedelta(seconds=90)  # the lease of a machine that vanished is watched for a minute
# A run that hit a limit or failed may go on on another machine; one that is done or was stopped may not.
_OVER_EVERYWHERE = frozenset({Outcome.SUCCEEDED, Outcome.STOPPED})
_SETUP_TRIES = 5  # two minutes of trying
_A_FEW = 4
_ELSEWHERE = " (on an earlier machine)"


def between_attempts(job: Job, history: History, seen: Observed) -> Action:
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
        return lock_out(job, seen)
    if seen.wrong_job:
        return _join_first(job, history, seen) or refuse_job(seen.wrong_job, job, seen)
    if seen.refusal:
        return _join_first(job, history, seen) or refuse(Outcome.REFUSED, seen.refusal, job, seen)
    if limit is not None and seen.now >= limit:
        what = seen.deadline_why or "the time limit"
        return Conclude(Outcome.LIMIT, f"{what} is reached; with more in job.yaml (limits) it goes on")
    return None


def _join_first(job: Job, history: History, seen: Observed) -> Action | None:
    """
    A machine that can do nothing is paid for, too: the ledger has it before it ends, in the last words of
    whoever joined. A store that does not answer, or another's lease, keeps nobody for longer than a minute or two.
    """
    if job.offload.to is None or (may_write(seen) and seen.machine == history.machine):
        return None
    if may_write(seen) and seen.ledger is not None:
        return Join(seen.machine, sum_up(seen.ledger, but=seen.machine))
    kind, subject = (TaskKind.SURVEY, "store") if may_write(seen) else (TaskKind.LEASE, "of the run")
    match seen.tasks.get(kind):
        case Failed() | Finished():
            return None
        case Running(started_at=started_at) if seen.now >= started_at + JOIN_PATIENCE:
            return None
        case Running():
            return Wait()
        case _:
            return begin(kind, subject, seen)


def _prepare(job: Job, history: History, seen: Observed) -> Action | None:
    """What must be true before a launch: nothing half-written, the store known, the machine fit, the code in place."""
    if seen.leftovers:
        return Discard(seen.leftovers[0])
    return (
        end_stuck(seen)
        or _know_the_store(job, history, seen)
        or _expect_disk(job, history, seen)
        or _announce(job, history, seen)
        or _look_ahead(seen)
        or _judge_machine(job, seen)
        or _bring_in(job, seen)
        or keep_house(job, history, seen)
    )


def _know_the_store(job: Job, history: History, seen: Observed) -> Action | None:
    """Without knowing what the store has, a launch could start over what is half done."""
    if job.offload.to is None:
        return None
    if seen.offsite is None:
        return _look_meanwhile(seen) or _wait_for_lease(job, seen) or _wait_for_store(job, seen)
    if seen.other_job and not history.attempts and _has_trained(seen):
        return refuse_job(f"the store has another job of this name: {seen.other_job}; {OTHER_JOB}", job, seen)
    if seen.ledger is not None and seen.machine != history.machine:
        return Join(seen.machine, sum_up(seen.ledger, but=seen.machine))
    elsewhere = _over_there(seen)
    is_reopened = history.fresh_from or (history.reopened_on and history.reopened_on == seen.machine)
    if elsewhere and not history.attempts and not is_reopened and job.checkpoint.resume != NEVER:
        return Conclude(elsewhere.outcome, f"{elsewhere.reason.removesuffix(_ELSEWHERE)}{_ELSEWHERE}")
    return None


def _over_there(seen: Observed) -> Conclusion | None:
    """Done or stopped, by the store; and nobody has trained since."""
    over = seen.concluded_elsewhere
    if over is None or over.outcome not in _OVER_EVERYWHERE or is_void(over.attempt, seen.ledger or ()):
        return None
    return over


def _look_meanwhile(seen: Observed) -> Action | None:
    """Another's lease is watched for a minute that is paid for: what preflight puts into the store has names of its own."""
    return _look_ahead(seen) if seen.lease.state is LeaseState.WATCHING else None


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
        if is_last_word(state, seen):
            return refuse(Outcome.STORE, _with_hint(state), job, seen)
        if seen.local:
            return None  # there is something to go on with; the store is asked again while it trains
        if seen.now >= (state.since or state.at) + STORE_PATIENCE:
            waited = STORE_PATIENCE.total_seconds() / 60
            return refuse(Outcome.STORE, f"no answer for {waited:.0f} min: {state.error}", job, seen)
    return begin(kind, subject, seen) or Wait()


def _with_hint(failed: Failed) -> str:
    return f"{failed.error}; {failed.hint}" if failed.hint else failed.error


def _has_trained(seen: Observed) -> bool:
    """Whether the store has anything that another command could be mistaken for."""
    return _over_there(seen) is not None or bool(seen.offsite) or any(machine.attempts for machine in seen.ledger or ())


def _expect_disk(job: Job, history: History, seen: Observed) -> Action | None:
    """
    Nothing is launched onto a full disk: it would die without a word, and be blamed for it. What may
    be removed goes first.
    """
    if seen.free_bytes is None or not _is_full(seen.free_bytes, history, seen):
        return None
    what = f"the disk of this run is full: {seen.free_bytes / 1e6:.1f} MB are free"
    hint = "free some space there, or put the run on a larger disk, and start it again; it goes on where it was"
    return tidy(job, history, seen) or refuse(Outcome.REFUSED, f"{what}; {hint}", job, seen)


def _is_full(free_bytes: int, history: History, seen: Observed) -> bool:
    """Without any room; or an attempt died of it, and there still is none for one more checkpoint."""
    found = history.last.diagnosis if history.last else None
    return free_bytes < FULL_BYTES or (found is not None and found.label == DISK_FULL and not has_room(seen))


def _announce(job: Job, history: History, seen: Observed) -> Action | None:
    """A machine that vanishes in its first minutes was paid for, too."""
    return None if history.attempts else publish_now_and_then(job, history, seen)


def _look_ahead(seen: Observed) -> Action | None:
    """Preflight, once a life. What needs the code, when it is there."""
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
        return refuse(Outcome.STORE, "; ".join(seen.preflight.reasons), job, seen)
    if seen.preflight and seen.preflight.verdict is Verdict.SWAP:
        return _publish_verdict(job, seen) or refuse(Outcome.REFUSED, "; ".join(seen.preflight.reasons), job, seen)
    state = seen.tasks.get(TaskKind.PREFLIGHT)
    if isinstance(state, Running) and seen.now < state.started_at + PREFLIGHT_PATIENCE:
        return Wait()
    return None


def _publish_verdict(job: Job, seen: Observed) -> Action | None:
    """Whoever rented this machine from outside reads it in the store; one that does not answer changes nothing."""
    if job.offload.to is None:
        return None
    match seen.tasks.get(TaskKind.PUBLISH):
        case Running(started_at=started_at) if seen.now < started_at + PUBLISH_PATIENCE:
            return Wait()
        case Running() | Failed(subject="verdict"):
            return None
        case _:
            return begin(TaskKind.PUBLISH, "verdict", seen)


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
    failed = failure_of(TaskKind.SETUP, seen.setup_digest, seen)
    if failed and (failed.final or failed.failures >= _SETUP_TRIES):
        return Conclude(Outcome.GAVE_UP, failed.error)
    return begin(TaskKind.SETUP, seen.setup_digest, seen) or Wait()


def _next_attempt(job: Job, history: History, seen: Observed) -> Action:
    local = {c.ref for c in seen.local}
    offsite = {c.ref for c in seen.offsite or ()}
    floor = resume_floor(history, never=job.checkpoint.resume == NEVER)
    spoilt = {ref.name for ref in local | offsite if is_distrusted(ref, history)}
    spoilt |= stale_copies((*seen.local, *(seen.offsite or ())), job.checkpoint.resume)
    plan: From | Fetch | Fork = plan_resume(
        local - {r for r in local if r.name in spoilt},
        offsite,
        floor=floor,
        unusable=seen.unusable | spoilt,
        last_resort=seen.unusable - seen.unusable_now - spoilt,
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
    launch = _launch(history, seen, plan, floor, env, job)
    return (_open_again(job, seen) if isinstance(launch, Launch) else None) or launch


def _expect_lineage(lineage: int, job: Job, seen: Observed) -> Action | None:
    """What is saved in one that nobody believes would be no checkpoint: nothing is trained in vain."""
    if lineage <= MAX_LINEAGE:
        return None
    newest = max(c.ref for c in (*seen.local, *(seen.offsite or ())))
    what = f"{newest.name}: its manifest claims lineage {newest.lineage}, and none can come after that"
    return refuse(Outcome.STORE, f"{what}; remove it, here and in the store, if no run of yours made it", job, seen)


def _open_again(job: Job, seen: Observed) -> Action | None:
    """A machine that vanishes must not leave behind that the run is over: that is taken back before it trains."""
    over = seen.concluded_elsewhere
    if over is None or job.offload.to is None:
        return None
    if not may_write(seen):
        return _answer(TaskKind.LEASE, "of the run", job, seen)
    return _bring(TaskKind.REOPEN, tell_end(over), job, seen)


def _fetch(job: Job, seen: Observed, ref: Ref) -> Action:
    """
    Bring it back. A damaged copy shows as `unusable` and the next older one is planned; a full
    disk or a store that refuses is no reason to train from an older one.
    """
    return _bring(TaskKind.RESTORE, ref.name, job, seen)


def _fork(job: Job, seen: Observed, plan: Fork) -> Action:
    """The first checkpoint is that of another run; without it there is nothing to train from."""
    return _expect_lineage(plan.lineage, job, seen) or _bring(TaskKind.FORK, f"{plan.lineage} {plan.place}", job, seen)


def _bring(kind: TaskKind, subject: str, job: Job, seen: Observed) -> Action:
    """What a launch cannot do without; a store that is away is waited for."""
    state, failed = seen.tasks.get(kind), failure_of(kind, subject, seen)
    if failed and (is_last_word(failed, seen) or seen.now >= (failed.since or failed.at) + STORE_PATIENCE):
        reason, is_usage = _with_hint(failed), failed.exit_code == WRONG_JOB
        return refuse_job(reason, job, seen) if is_usage else refuse(Outcome.STORE, reason, job, seen)
    if isinstance(state, Finished) and state.subject == subject:
        return Begin(kind, subject)  # it came and is gone again: removed by hand, or set aside since
    return begin(kind, subject, seen) or Wait()


def _launch(  # noqa: PLR0913, PLR0917  # all that one launch depends on
    history: History, seen: Observed, plan: From, floor: int | None, env: Mapping[str, str], job: Job
) -> Action:
    """A run that had a checkpoint never starts over by itself."""
    lost = _lost(seen, floor)
    if plan.ref is None and lost:
        more = f" and {len(lost) - _A_FEW} more" if len(lost) > _A_FEW else ""
        reason = f"checkpoints exist and none can be used ({', '.join(lost[:_A_FEW])}{more})"
        failed = seen.tasks.get(TaskKind.RESTORE)
        why = f": {_with_hint(failed)}" if isinstance(failed, Failed) and failed.subject in lost else ""
        return refuse(Outcome.STORE, f"{reason}{why}; --start-over begins at step 0", job, seen)
    if no_lineage := _expect_lineage(plan.lineage, job, seen):
        return no_lineage
    needed = seen.preflight.env if seen.preflight else {}
    origin = next((c.origin for c in seen.local if c.ref == plan.ref), "")
    return Launch(history.next_number, plan.ref, plan.lineage, {**needed, **env}, origin)


def _lost(seen: Observed, floor: int | None) -> list[str]:
    """What this run had and cannot use; nobody misses it where the run starts over, or has, for all that names tell."""
    if floor is None:
        return []
    return sorted({*seen.unusable, *seen.damaged, *(seen.spoilt if floor == 0 else ())})
