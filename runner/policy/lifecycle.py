"""The whole life of a job, as one decision. The phases are read in the order in which `decide` asks for them."""

from runner.facts import Attempt, Decision, Diagnosis, Ending, Exit, History, Observed, Outcome
from runner.job import Job
from runner.policy.actions import Accept, Action, GoOn, RecordExit, TrimLogs
from runner.policy.between import between_attempts
from runner.policy.finish import after_the_end, tell_unsaved
from runner.policy.house import commit_last, set_aside_spoilt
from runner.policy.limits import limit_at
from runner.policy.live import while_live
from runner.policy.slow import cease


def decide(job: Job, history: History, seen: Observed) -> Action:
    """Return the next action. The rules are in order of urgency; the first that applies wins."""
    if history.accepted_at is None:
        return Accept()
    if first := _go_on(history, seen) or cease(seen) or _trim_logs(job, seen) or set_aside_spoilt(history, seen):
        return first
    if seen.live is not None:
        return while_live(job, history, seen, seen.live)
    if history.running:
        return commit_last(seen) or _record_exit(history, history.running, seen)
    if history.conclusion:
        return after_the_end(job, history, seen)
    return between_attempts(job, history, seen)


def _go_on(history: History, seen: Observed) -> GoOn | None:
    """
    A limit that was raised since is no end any more, nor is a machine at fault that this is not.

    Journaled: what is told and published while it trains must not say that it is over.
    """
    over = history.conclusion
    if over is not None and over.outcome is Outcome.REFUSED:
        last = history.last
        is_other = last is not None and (last.boot_id != seen.boot_id or last.launched_at > over.at)
        return GoOn("this is not the machine that was at fault") if is_other else None
    limit = limit_at(history, seen)
    if over is not None and over.outcome is Outcome.LIMIT and limit is not None and seen.now < limit:
        return GoOn("the limit that was reached is a later one now")
    return None


def _trim_logs(job: Job, seen: Observed) -> TrimLogs | None:
    """Whatever else goes on, and once more when it is over: what a flood left behind is for nobody."""
    return TrimLogs(job.logs.max_size) if seen.log_bytes > job.logs.max_size else None


def _record_exit(history: History, attempt: Attempt, seen: Observed) -> RecordExit:
    """Only now: everything the attempt left is committed, so a success cannot outlive its checkpoint."""
    exit_ = seen.exit or Exit(code=None)
    asked = history.interrupted == attempt.number
    cut = _cut_short(seen) if exit_.code == 0 and not seen.end and not asked else ""
    if cut:
        return RecordExit(Ending.FAILED, exit_, max(seen.progress.step, attempt.step), cut, None)
    unsaved = _diagnose_unsaved(attempt, seen)
    if unsaved:
        ending = Ending.FAILED
    elif (seen.end and seen.end.kind == "done") or (not seen.end and not asked and exit_.code == 0):
        ending = Ending.SUCCEEDED
    elif asked or seen.end:
        ending = Ending.INTERRUPTED
    else:
        ending = Ending.FAILED
    step = max(seen.progress.step, seen.end.step if seen.end else 0, attempt.step)
    if attempt.killed and ending is not Ending.SUCCEEDED and not unsaved and (exit_.code is None or exit_.code < 0):
        return RecordExit(ending, exit_, step, f"the runner killed it: {attempt.killed}", None)
    is_as_asked = asked and not seen.end  # by SIGTERM, and that is no error
    diagnosis = unsaved or (None if ending is Ending.SUCCEEDED or is_as_asked else seen.diagnosis)
    reason = diagnosis.summary if diagnosis else exit_.kills.describe() if exit_.kills.count else ""
    return RecordExit(ending, exit_, step, reason, diagnosis)


def _diagnose_unsaved(attempt: Attempt, seen: Observed) -> Diagnosis | None:
    """
    Done is what was saved. A final checkpoint that was set aside since, or that nobody can read, is a failure, and
    one that comes back is the job's end: the folder stays for a person.
    """
    what = tell_unsaved(attempt, seen)
    if not what:
        return None
    return Diagnosis(
        label="end_not_saved",
        category="checkpoint",
        rank=None,
        primary_line="",
        primary_line_no=None,
        cause="the final state is in no checkpoint that can be used",
        remedy="vramfarm-runner checkpoints verify says what is in the folder and is none",
        decision=Decision.RESUME,
        env={},
        confidence="high",
        summary=what,
    )


def _cut_short(seen: Observed) -> str:
    """
    Why exit 0 is no success, of a script that uses the library: that saves at every end that Python sees.

    The step that it was at is none that was lost.
    """
    told, saved = seen.progress, max((c.ref for c in seen.local), default=None)
    if not told.attached or told.ended:
        return ""
    lost = told.step - (saved.step if saved else 0)
    if lost > 1:
        return f"it ended with exit 0 and without its last save: {lost} steps were lost; os._exit skips it, and the log says where it failed"
    if told.step < told.max_steps:
        return f"it ended with exit 0 at step {told.step} of {told.max_steps}, by os._exit or similar; leave the loop, or call sys.exit, where training is done"
    return ""
