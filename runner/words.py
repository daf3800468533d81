"""
What a person reads: one line an action, as `decide` named it, each with what and why; and
`status.json`. Pure: facts in, text out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from math import isfinite
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Final

from runner.adapters.frameworks import get_framework
from runner.adapters.providers import PROVIDERS
from runner.adapters.providers.contract import Answer, Keep
from runner.committed import MAX_LINEAGE
from runner.facts import (
    Attempt,
    Earlier,
    Ending,
    Failed,
    Finished,
    History,
    Lease,
    LeaseState,
    Observed,
    Outcome,
    Progress,
    Running,
    Server,
    ServerState,
    TaskKind,
    TaskState,
    Vacancy,
    Verdict,
)
from runner.figures import size, span
from runner.job import Job, OnLimit, format_duration
from runner.policy.actions import (
    EXIT_CODES,
    LEFT,
    LOCKED,
    WRONG_JOB,
    Accept,
    Action,
    Begin,
    Cease,
    Conclude,
    Discard,
    Distrust,
    End,
    GoOn,
    Interrupt,
    Join,
    Kill,
    Launch,
    Leave,
    Notify,
    Prune,
    RecordExit,
    Refused,
    SetAside,
    TrimLogs,
    Wait,
)
from runner.policy.cadence import MEAN_TIME, Rental, decide_cadence, observed_interval, time_between_failures
from runner.policy.finish import ALL_OUTPUTS, is_safe, tell_draining, tell_missing_outputs, tell_stuck_outputs
from runner.policy.goodput import Spending, goodput, share_out, useful_cost
from runner.policy.ledger import Running as RunningAttempt
from runner.policy.ledger import describe_machine, dump, identify_machine, merge
from runner.policy.limits import reserve
from runner.policy.money import billed, tariff_of
from runner.policy.notices import tell_vanished
from runner.policy.slow import ASK_AGAIN, REFUSED_AGAIN, WRITERS
from runner.policy.waiting import Waiting, tell_waiting
from runner.supervise.attempt import PREVENTION
from vramfarm.protocol import DAMAGED, Ref

OUTCOMES = {code: outcome.value for outcome, code in EXIT_CODES.items()} | {
    LEFT: "left",
    WRONG_JOB: "refused",
    LOCKED: "locked",
}
_A_FEW: Final = 4


def cost(
    server: Server | None, first_boot_at: datetime | None, now: datetime, earlier: Decimal = Decimal(0)
) -> str | None:
    """What this server and the earlier ones have cost by their prices; None without a price."""
    if server is None or not server.price_per_hour or first_boot_at is None:
        return f"{earlier} EUR" if earlier else None
    amount = billed(Decimal(server.price_per_hour), (now - first_boot_at).total_seconds(), tariff_of(server.provider))
    return f"{amount + earlier} {server.currency}"


# ------------------------------------------------------------------------------------- grace

_DOCKERS_GRACE_S = 10.0  # what `docker stop` waits where nobody says more
_LEAVING_S = 5.0  # from the commit to the end of the last process
_STEPS_TO_A_SAVE = 3  # a save is agreed on for a step that no rank has reached


@dataclass(frozen=True, slots=True)
class Grace:
    """The time between SIGTERM and SIGKILL, and whether a last save fits in it. `enough` None: nobody can say yet."""

    enough: bool | None
    line: str


def last_save_s(seen: Observed) -> float | None:
    """How long a last save takes, from the request on, judged by the one before; None before the first."""
    rate = seen.progress.steps_per_s
    if not seen.last_save_s or not rate:
        return None
    return seen.last_save_s + _STEPS_TO_A_SAVE / rate


def grace(save_s: float | None, stop_timeout: str) -> Grace:
    """`stop_timeout`: RUNNER_STOP_TIMEOUT, because a container cannot see what it was started with."""
    seconds = _seconds(stop_timeout)
    known = seconds is not None
    given_s = seconds if seconds is not None else _DOCKERS_GRACE_S
    waits = f"docker stop waits {span(given_s)}" + (
        " (RUNNER_STOP_TIMEOUT)" if known else " unless --stop-timeout said otherwise"
    )
    needed_s = max(120, round(2 * ((save_s or 0) + _LEAVING_S)))
    hint = f": start the container with --stop-timeout {needed_s} --env RUNNER_STOP_TIMEOUT={needed_s}"
    if save_s is None:
        return Grace(None, f"how long a last save takes is known after the first; {waits}{'' if known else hint}")
    enough = save_s + _LEAVING_S <= given_s
    verdict = "that is enough" if enough else f"that is too short, the last save may be lost{hint}"
    return Grace(enough, f"a last save takes about {max(save_s, 0.1):.1f}s; {waits}: {verdict}")


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text.strip().removesuffix("s"))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


# ---------------------------------------------------------------------------------- actions


def describe(action: Action | Refused) -> str:  # noqa: C901, PLR0911, PLR0912  # one line an action
    """The action in one line; empty for waiting, which is not worth one."""
    match action:
        case Refused(action=what, error=error):
            return f"{describe(what) or type(what).__name__.lower()}: not done: {error}; training goes on, and the runner tries again"
        case Accept():
            return "accept the job"
        case Begin(kind=TaskKind.SURVEY):
            return "look into the store"
        case Begin(kind=TaskKind.PREFLIGHT):
            return ""  # its findings are told
        case Begin(kind=TaskKind.STAGE):
            return "fetch the data"
        case Begin(kind=TaskKind.SETUP):
            return "fetch the source and run the set-up"
        case Begin(kind=TaskKind.REOPEN, subject=what):
            return f"open the run again in the store: it was over there ({what})"
        case Begin(kind=TaskKind.RESTORE, subject=name):
            return f"restore {name} from the store: this disk does not have it"
        case Begin(kind=TaskKind.FORK, subject=subject):
            return f"fork from {subject.partition(' ')[2]} (checkpoint.resume): this run has no checkpoint of its own"
        case Begin(kind=TaskKind.VERIFY, subject=name):
            return f"verify {name} in the store: sizes and checksums"
        case Begin(kind=TaskKind.EVIDENCE, subject=name):
            return f"{name} makes no progress and nothing explains it: its processes are looked at before it is killed"
        case Begin():
            return ""  # quick, and again and again: their ends are told
        case Join(earlier=earlier):
            return _describe_join(earlier)
        case Cease(kind=kind, reason=reason):
            return f"cease {kind}: {reason}"
        case Discard(name=name):
            why = "it is damaged, and the disk has no room" if name.startswith(DAMAGED) else "it was never committed"
            return f"discard {name}: {why}"
        case Prune(ref=ref, reason=reason):
            return f"prune {ref.name}: {reason}"
        case SetAside(ref=ref, reason=reason):
            return f"set aside {ref.name}: {reason}; it is kept as .damaged-{ref.name}"
        case Distrust(step=step, reason=reason):
            return f"distrust checkpoints from step {step} on: {reason}"
        case TrimLogs(max_bytes=max_bytes):
            return f"trim logs to {size(max_bytes)} (logs.max_size): beginnings and ends are kept"
        case Launch(number=number, resume=None, lineage=lineage):
            return f"launch attempt {number} from step 0 (lineage {lineage}){_changed(action.env)}"
        case Launch(number=number, resume=resume):
            assert resume is not None
            origin = f", a copy of {action.origin}: steps go on counting" if action.origin else ""
            return f"launch attempt {number} from step {resume.step} ({resume.name}{origin}){_changed(action.env)}"
        case RecordExit():
            return _describe_exit(action)
        case Interrupt(reason=reason):
            return f"interrupt: save and leave ({reason})"
        case Kill(reason=reason, savers=savers):
            return f"kill {'the saver' if savers else 'the attempt'}: {reason}"
        case Conclude(outcome=outcome, reason=reason):
            return f"conclude {outcome}: {reason}"
        case GoOn(reason=reason):
            return f"go on: {reason}"
        case Notify(event=event):
            return f"notify: {event}"
        case End():
            return ""  # the summary says it
        case Leave():
            return "leave: this boot ends, the job does not"
        case Wait():
            return ""


def _changed(env: Mapping[str, str]) -> str:
    """The environment that is not the job's own."""
    return f" with {', '.join(f'{name}={value}' for name, value in env.items())}" if env else ""


def _describe_join(earlier: Earlier) -> str:
    if not earlier.num_machines:
        return ""
    money = f", {earlier.cost} of its money" if earlier.cost else ""
    took = f"{span(earlier.duration.total_seconds())} of its time{money}"
    return f"go on after {earlier.num_machines} earlier machine{'s' * (earlier.num_machines != 1)}: {took} are used, {earlier.last_attempt} attempts were made"


def _describe_exit(action: RecordExit) -> str:
    code = action.exit.code
    how = "its exit was not seen" if code is None else f"signal {-code}" if code < 0 else f"exit {code}"
    is_told = action.ending is Ending.FAILED or action.exit.kills.count > 0
    reason = f": {action.reason}" if action.reason and is_told else ""
    found = action.diagnosis if action.ending is Ending.FAILED else None
    label = f" [{found.label}: {found.cause}]" if found else ""
    return f"attempt {action.ending} at step {action.step} ({how}){reason}{label}"


# --------------------------------------------------------------------------------- progress


def progress_line(seen: Observed) -> str:
    """`step 120/400  loss 2.3456  9.8 steps/s  about 28s left`."""
    progress = seen.progress
    total = f"/{progress.max_steps}" if progress.max_steps else ""
    parts = [f"step {progress.step}{total}"]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if progress.steps_per_s:
        rate = progress.steps_per_s
        parts.append(f"{rate:.2f} steps/s" if rate >= 0.1 else f"{1 / rate:.1f} s/step")  # noqa: PLR2004
    eta = eta_s(seen)
    if eta is not None:
        parts.append(f"about {span(eta)} left")
    return "  ".join(parts)


def eta_s(seen: Observed) -> float | None:
    progress = seen.progress
    if not progress.max_steps or not progress.steps_per_s:
        return None
    return max(progress.max_steps - progress.step, 0) / progress.steps_per_s


Refusals = Mapping[TaskKind, Failed]  # that were told last, of tasks that have not succeeded since


def changes(
    before: Observed | None,
    after: Observed,
    told: Refusals = MappingProxyType({}),
    waiting: Waiting | None = None,
) -> Iterator[str]:
    """What came about between two looks and is worth a line; with what becomes of it where an attempt waits for the store."""
    if after.log_error and not (before and before.log_error):
        yield f"logs grow beyond logs.max_size, and this disk cannot give back their middle: {after.log_error}"
    old_local = {c.ref for c in before.local} if before else {c.ref for c in after.local}
    for checkpoint in after.local:
        if checkpoint.ref not in old_local:
            took = f" in {after.last_save_s:.1f}s" if after.last_save_s else ""
            yield f"checkpoint {checkpoint.ref.name} committed: {size(checkpoint.size_bytes)}{took}"
    if kills := after.kills.count - (before.kills.count if before else 0):
        yield replace(after.kills, count=kills).describe() + ("" if before else "; before this runner began")
    if before and _is_news(before.progress, after.progress):
        goes_on = "" if after.progress.is_waiting else "; training goes on"
        yield f"{after.progress.save_error}{goes_on}"
    if before and before.lease.state is not after.lease.state and (line := _lease_change(before.lease, after.lease)):
        yield line
    if gone := after.vanished - (before.vanished if before else frozenset()):
        yield tell_vanished(gone)
    if after.outputs_stuck != (before.outputs_stuck if before else "") and (line := tell_stuck_outputs(after)):
        yield line
    yield from _limit_near(before, after)
    if after.straggler and before and after.straggler != before.straggler:
        yield after.straggler
    yield from _task_changes(before, after, told, waiting)


def _is_news(before: Progress, after: Progress) -> bool:
    """A save that waits for a rank, or fails for a new reason; for the same one the 1st, 2nd, 4th, 8th... of a disk that stays full."""
    if after.is_waiting:
        return after.save_error != before.save_error
    if after.num_failed <= before.num_failed or not after.save_error:
        return False
    told, tells = (_DIGITS.sub("", progress.save_error) for progress in (before, after))
    return told != tells or after.num_failed.bit_length() > before.num_failed.bit_length()


_DIGITS = re.compile(r"\d+")
_WARN_BEFORE = (timedelta(hours=1), timedelta(minutes=15))


def _limit_near(before: Observed | None, after: Observed) -> Iterator[str]:
    """Once for each of the times before the end."""
    if before is None or before.deadline_at is None or after.deadline_at is None:
        return
    then, now = before.deadline_at - before.now, after.deadline_at - after.now
    if any(then > ahead >= now for ahead in _WARN_BEFORE) and now > timedelta():
        why = after.deadline_why or "the deadline"
        yield f"{why} ends this run in {span(now.total_seconds())}, at {after.deadline_at:%H:%M} UTC: it saves before that; a higher limit in job.yaml (limits) gives it more"


_VACANT = {
    Vacancy.SILENT: "it is silent",
    Vacancy.GIVEN_BACK: "it gave the run back",
    Vacancy.GONE: "its lease was removed from the store",
}


def _lease_change(before: Lease, after: Lease) -> str:
    match after.state:
        case LeaseState.WATCHING:
            return f"{after.who or 'another runner'} had this run last: watching for a minute whether it lives"
        case LeaseState.HELD if before.state is LeaseState.LAPSED:
            return "the lease of the run is renewed: copies go on"
        case LeaseState.HELD if before.state is LeaseState.WATCHING:
            return f"{_VACANT[after.vacancy]}; this runner has the run now (lease {after.fence})"
        case LeaseState.LAPSED:
            why = f": {after.trouble}" if after.trouble else ""
            return f"the lease of the run cannot be renewed{why}; copies wait, and nothing else does"
        case LeaseState.NOT_NEEDED:
            return "the store has no conditional writes: nothing here keeps a second machine from writing this run"
        case _:
            return ""


def _task_changes(before: Observed | None, after: Observed, told: Refusals, waiting: Waiting | None) -> Iterator[str]:
    for kind, state in after.tasks.items():
        if before is None or state == before.tasks.get(kind):
            continue
        if line := _tell_end(kind, state, after):
            yield line
        elif isinstance(state, Failed):
            if _is_same(told.get(kind), state):
                if state.at >= told[kind].at + _REFUSED_STILL:
                    yield f"again: {kind} {state.subject}: {state.error}"
                continue  # with its cure it was said before, of another checkpoint perhaps
            if state.failures > 1 and (state.final or not _is_power_of_two(state.failures)):
                continue  # said with the first one; a night of them is a dozen lines
            if waiting and state == waiting.failed:
                yield f"{waiting.line}, failure {state.failures}" if state.failures > 1 else waiting.line
                continue
            again = f" (failure {state.failures}; it is tried again)"
            if state.final or kind is TaskKind.PREFLIGHT:
                every = span(REFUSED_AGAIN.total_seconds())
                again = f" (training goes on; it is tried again every {every})" if _is_retried(kind, after) else ""
            hint = f"; {state.hint}" if state.hint else ""
            yield f"{kind} {state.subject} failed: {state.error}{hint}{again}"


def _tell_end(kind: TaskKind, state: TaskState, after: Observed) -> str:
    """What it came to, where that is not a failure like any other."""
    match state:
        case Finished():
            return _done(kind, state)
        case Failed(unreadable=True, subject=name, failures=number) if name in after.unusable_now:
            what = f"{kind} {name} failed {number} times: {state.error}"
            then = "an older one is taken, and this one stays there" if after.usable else "there is no other"
            return f"{what}; the store reads what is beside it, so it is not waited for any longer: {then}"
        case _:
            return ""


def note_refusals(told: Refusals, before: Observed | None, after: Observed) -> Refusals:
    """What was told, once `changes` of these two looks were."""
    noted = dict(told)
    for kind, state in after.tasks.items():
        if isinstance(state, Finished):
            noted.pop(kind, None)
        if before and isinstance(state, Failed) and state.final and state != before.tasks.get(kind):
            is_known = _is_same(told.get(kind), state) and state.at < told[kind].at + _REFUSED_STILL
            noted[kind] = told[kind] if is_known else state
    return noted


def _is_same(told: Failed | None, now: Failed) -> bool:
    """Whether a refusal is the one that was told, but for the names of checkpoints. Damage is each checkpoint's own."""
    if told is None or not now.final or now.damaged:
        return False
    return _NAMED.sub("", told.error) == _NAMED.sub("", now.error) and told.hint == now.hint


_NAMED = re.compile(r"(s3|file)://\S+|[0-9a-f]{8,}|\d{4,}")  # objects, steps, ids; no status: those have three digits
_REFUSED_STILL = timedelta(hours=1)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _is_retried(kind: TaskKind, seen: Observed) -> bool:
    return kind in ASK_AGAIN and seen.live is not None


def _done(kind: TaskKind, state: Finished) -> str:  # noqa: C901, PLR0911, PLR0912  # one line a kind
    """What a finished task was good for; empty where that shows elsewhere."""
    summary = str(state.result.get("summary", ""))
    match kind:
        case TaskKind.PREFLIGHT:
            return summary
        case TaskKind.COMMIT:
            return f"committed {summary}"
        case TaskKind.UPLOAD:
            return f"checkpoint {state.subject} is in the store: {summary}"
        case TaskKind.FORK:
            return f"checkpoint {summary}"
        case TaskKind.RESTORE:
            return f"checkpoint {state.subject} is back on this disk: {summary}"
        case TaskKind.VERIFY:
            return f"checkpoint {state.subject} verified in the store: {summary}"
        case TaskKind.SURVEY:
            return f"the store has {summary}"
        case TaskKind.PUBLISH if state.subject not in set(Outcome):
            return ""
        case TaskKind.PUBLISH:
            return f"journal, status, logs and outcome are in the store: {summary}"
        case TaskKind.STAGE:
            return f"the data is in place: {summary}"
        case TaskKind.OUTPUTS:
            is_told = state.subject == ALL_OUTPUTS or state.result.get("sent_bytes")
            return f"outputs {state.subject}: {summary}" if is_told else ""
        case TaskKind.SETUP:
            return f"the code is in place: {summary}"
        case TaskKind.REOPEN | TaskKind.TIDY | TaskKind.LEASE | TaskKind.NOTIFY:
            return ""
        case TaskKind.EVIDENCE:
            return f"evidence/{state.subject} has what was seen: {summary}"


def still_running(seen: Observed, *, longer_than: timedelta) -> Iterator[str]:
    """How far slow work has got, once it is slow enough to wonder about."""
    for kind, state in seen.tasks.items():
        if kind is not TaskKind.LEASE and isinstance(state, Running) and seen.now - state.started_at >= longer_than:
            note = f" ({state.note})" if state.note else ""
            so_far = span((seen.now - state.started_at).total_seconds())
            yield f"{kind} {state.subject}: {state.progress:.0%} after {so_far}{note}"


# ------------------------------------------------------------------------------------ phase


def phase(history: History, seen: Observed) -> str:
    """One word for what is going on, for display only."""
    running = {kind for kind, state in seen.tasks.items() if isinstance(state, Running)}
    if history.stop_sent_in == seen.life:
        return "STOPPING"
    if history.conclusion:
        return "DRAINING"
    if seen.live is not None:
        return _live_phase(seen)
    if TaskKind.RESTORE in running:
        return "RESTORING"
    if running & {TaskKind.SETUP, TaskKind.STAGE}:
        return "SETUP"
    return "BACKOFF" if history.last and history.last.ending is Ending.FAILED else "PREFLIGHT"


def _live_phase(seen: Observed) -> str:
    if seen.leave_sent_at is not None:
        return "LEAVING"
    return "RUNNING" if seen.progress.step else "STARTING"


# ----------------------------------------------------------------------------------- status


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a status names beside history and the last look."""

    run_dir: str
    server: Server | None
    first_boot_at: datetime | None
    runner_pid: int


def status(  # noqa: PLR0913, PLR0917  # what a picture is made of
    job: Job, history: History, seen: Observed, around: Surroundings, message: str, end: End | None = None
) -> dict[str, Any]:
    """What `status --json` prints, and what `<run>/status.json` holds. `end`: the runner's last word."""
    over = history.conclusion
    code = EXIT_CODES[over.outcome] if over else None
    every = observed_interval(seen.local, history.attempts)
    return {
        "job": job.name,
        "phase": "LEFT" if end and end.code == LEFT else phase(history, seen),
        "step": _step(history, seen),
        "steps_from": _steps_from(history, seen),
        "max_steps": seen.progress.max_steps or None,
        "loss": seen.progress.loss if isfinite(seen.progress.loss or 0.0) else None,  # JSON has no word for NaN
        "loss_wrong_since": seen.divergence.since_step if seen.divergence else None,
        "steps_per_s": seen.progress.steps_per_s,
        "eta_s": eta_s(seen),
        "hang": seen.hang.reason if seen.hang else None,
        "straggler": seen.straggler or None,
        "save_error": seen.progress.save_error or None,
        "outputs_stuck": tell_stuck_outputs(seen) or None,
        "attempt": history.last.number if history.last else 0,
        "env_changes": dict(history.last.env) if history.last else {},
        "last_failure": _last_failure(history),
        "verdict": _verdict(seen),
        "checkpoints": _checkpoints(seen),
        "tasks": _tasks(seen),
        "store": f"{job.offload.to}/{job.name}" if job.offload.to else None,
        "deadline_at": seen.deadline_at.isoformat() if seen.deadline_at else None,
        "deadline_why": seen.deadline_why,
        "cost": cost(around.server, around.first_boot_at, seen.now, history.earlier.cost),
        "spent": _spent(history, seen, around),
        "machines": dump(tuple(spending.machine for spending in _spendings(history, seen, around)))["machines"],
        "server": around.server.id if around.server else None,
        "lease": {"state": seen.lease.state, "fence": seen.lease.fence, "who": seen.lease.who},
        "outcome": OUTCOMES[end.code] if over and end else over.outcome if over else None,
        "reason": end.reason if over and end else over.reason if over else None,
        "exit_code": end.code if over and end else code,
        "waiting": _waiting(job, history, seen),
        "draining": None if end else _draining(job, history, seen),
        "afterwards": afterwards(job, around.server, end) or None if end else None,
        "message": message,
        "run_dir": around.run_dir,
        "runner_pid": around.runner_pid,
        "save_took_s": seen.last_save_s or None,
        "saves_every_s": every.total_seconds() if every else None,
        "updated_at": seen.now.isoformat(),
    }


def describe_draining(job: Job, history: History, seen: Observed) -> str:
    """What a runner still waits for though the job is over; empty where nothing holds it up."""
    found = tell_draining(job, history, seen)
    if found is None or not found.is_held_up:
        return ""
    return (
        f"the job is over; copying data off the machine, until {found.until:%H:%M} UTC at the latest: "
        f"it waits for {found.what}; Ctrl-C or SIGTERM ends the runner before that, and the next one goes on with it"
    )


def _draining(job: Job, history: History, seen: Observed) -> Mapping[str, Any] | None:
    found = tell_draining(job, history, seen)
    return {"what": found.what, "until": found.until.isoformat()} if found else None


def _waiting(job: Job, history: History, seen: Observed) -> Mapping[str, Any] | None:
    found = tell_waiting(job, history, seen)
    return {"what": found.line, "until": found.until.isoformat()} if found else None


def _last_failure(history: History) -> Mapping[str, Any] | None:
    """What the last failed attempt died of, as triage says it."""
    failed = next((a for a in reversed(history.attempts) if a.ending is Ending.FAILED), None)
    if failed is None:
        return None
    found = failed.diagnosis
    told = {} if found is None else {k: getattr(found, k) for k in ("label", "rank", "cause", "remedy", "decision")}
    return {"attempt": failed.number, "step": failed.step, "reason": failed.reason, **told}


def _verdict(seen: Observed) -> Mapping[str, Any] | None:
    """What is said of this machine: go, changes or swap, and why; None before anybody has looked."""
    if seen.refusal:
        return {"verdict": Verdict.SWAP, "reasons": [seen.refusal], "env": {}}
    found = seen.preflight
    return {"verdict": found.verdict, "reasons": list(found.reasons), "env": dict(found.env)} if found else None


def _step(history: History, seen: Observed) -> int:
    """The newest step known: of the running attempt, of the last one, of the checkpoints."""
    if seen.progress.from_log:
        return seen.progress.step  # saves without a number in their names are only counted
    of_attempts = max((a.step for a in history.attempts[-1:]), default=0)
    of_checkpoints = max((c.ref for c in (*seen.local, *(seen.offsite or ()))), default=None)
    return max(seen.progress.step, of_attempts, of_checkpoints.step if of_checkpoints else 0)


def _steps_from(history: History, seen: Observed) -> str | None:
    """Who says the steps of the last attempt: ranks through the library, or lines of the log, which is a guess."""
    if seen.progress.from_log or (history.last and history.last.from_log):
        return "log"
    return "library" if seen.progress.attached else None


def _checkpoints(seen: Observed) -> list[Mapping[str, Any]]:
    local = {c.ref for c in seen.local}
    offsite = {c.ref for c in seen.offsite or ()}
    written = {c.ref: c.written_at.isoformat() for c in (*(seen.offsite or ()), *seen.local)}
    verified = seen.tasks.get(TaskKind.VERIFY)
    name = verified.subject if isinstance(verified, Finished) else ""
    return [
        {
            "step": ref.step,
            "id": ref.id,
            "lineage": ref.lineage,
            "written_at": written[ref],
            "local": ref in local,
            "offsite": ref in offsite,
            "verified": (ref in offsite or ref.name == name) and ref.name not in seen.unusable,
        }
        for ref in sorted(local | offsite)
    ]


def _tasks(seen: Observed) -> list[Mapping[str, Any]]:
    """Slow work under way."""
    return [
        {"kind": kind, "subject": state.subject, "progress": state.progress, "note": state.note}
        for kind, state in seen.tasks.items()
        if isinstance(state, Running) and kind is not TaskKind.LEASE
    ]


# ---------------------------------------------------------------------------------- summary


def opening(job: Job, around: Surroundings, machine: str) -> list[str]:
    """What is going to happen and why, before anything does."""
    server = around.server
    price = f" at {server.price_per_hour} {server.currency}/h" if server and server.price_per_hour else ""
    where = f"server {server.id}{price}" if server else "this machine (no provider: nothing to stop)"
    copies = f"copies go to {job.offload.to}/{job.name}" if job.offload.to else "no copy leaves this disk (offload.to)"
    return [
        f"job {job.name}: {job.command}",
        f"on {where}; {machine}",
        f"run folder {around.run_dir}",
        f"saves every {span(job.checkpoint.save_interval.total_seconds())}, keeps {job.checkpoint.keep_last}; {copies}",
        f"{len(PREVENTION)} variables are set in every attempt, unless you set them: {', '.join(list(PREVENTION)[:2])}, … (docs/preflight.md)",
    ]


def tell_end(job: Job, history: History, seen: Observed, server: Server | None) -> str:
    """What the end will take, in time and money, what is kept for it, and what becomes of what does not fit."""
    kept = span(reserve(history, seen).total_seconds())
    if job.limits.on_limit is OnLimit.STOP_ANYWAY:
        missed = "what does not fit is lost (limits.on_limit: stop_anyway)"
    elif server:
        rate = f" and bills {server.keeping} for" if server.keeping else ""
        missed = f"what does not fit stays in {job.finish.save_folder}, which the provider keeps{rate}"
    else:
        missed = "what does not fit stays on this disk"
    who = "" if get_framework(job).uses_library else " (where the script makes one at SIGTERM)"
    if job.offload.to is None:
        return f"{kept} is reserved before the limit for a last save{who}, without a copy"
    if not seen.last_upload_s or not seen.local:
        return f"{kept} is reserved before the limit for a last save{who} and its upload; {missed}"
    seconds, largest = seen.last_save_s + seen.last_upload_s, max(c.size_bytes for c in seen.local)
    price = Decimal(server.price_per_hour) * Decimal(seconds) / 3600 if server and server.price_per_hour else None
    money = "" if price is None or server is None else f", {price:.2f} {server.currency}"
    took = f"a save{who} {span(seen.last_save_s)}, the upload of {size(largest)} {span(seen.last_upload_s)}"
    return f"the end takes about {span(seconds)}{money}: {took}; {kept} is reserved for it before the limit; {missed}"


def closing(job: Job, history: History, seen: Observed, around: Surroundings, end: End) -> list[str]:
    """What happened, where the weights are, what it cost, and what becomes of the server."""
    outcome = OUTCOMES[end.code]
    lines = [
        f"outcome      {outcome}: {end.reason}",
        f"steps        {_step(history, seen)}",
        f"attempts     {_attempts(history.attempts)}{_attempts_before(history.earlier)}",
        f"checkpoints  {_kept(seen)}",
        f"weights      {_weights(job, seen)}",
        *([f"outputs      {_outputs(job, seen)}"] if job.outputs else ()),
    ]
    spendings = _spendings(history, seen, around)
    if any(spending.useful_s for spending in spendings):
        lines.append(f"goodput      {describe_goodput(spendings)}")
    if spent := cost(around.server, around.first_boot_at, seen.now, history.earlier.cost):
        useful = sum((useful_cost(spending) for spending in spendings), Decimal(0))
        lines.append(f"cost         {spent} so far, {useful} of it for training that was kept")
    if advice := tell_cadence(job, history, seen):
        lines.append(f"cadence      {advice}")
    lines.append(f"server       {_server_end(job, around.server, seen, end)}")
    if after := afterwards(job, around.server, end):
        lines.append(f"after it     {after}")
    return lines


def _spendings(history: History, seen: Observed, around: Surroundings) -> tuple[Spending, ...]:
    """Of all machines of the run, this one last."""
    paid_from = around.first_boot_at or history.opened_at or seen.now
    known = identify_machine(seen.machine or "here", around.run_dir, around.server, paid_from)
    running = RunningAttempt(step=seen.progress.step, first_step_at=seen.first_step_at, from_log=seen.progress.from_log)
    machines = merge(seen.ledger or (), describe_machine(history, known, seen.now, running))
    newest = max((c.ref for c in (*seen.local, *(seen.offsite or ()))), default=None)
    return share_out(machines, newest.step if newest else 0)


def describe_goodput(spendings: tuple[Spending, ...]) -> str:
    """`83% of 5h 02m became training that was kept: 12m 03s set-up, …`."""
    total = sum(spending.total_s for spending in spendings)
    parts = {
        "set-up": sum(spending.setup_s for spending in spendings),
        "starting": sum(spending.startup_s for spending in spendings),
        "trained in vain": sum(spending.lost_s for spending in spendings),
        "idle": sum(spending.idle_s for spending in spendings),
    }
    rest = ", ".join(f"{span(seconds)} {what}" for what, seconds in parts.items() if seconds >= 1)
    return f"{goodput(spendings):.0%} of {span(total)} became training that was kept" + (f"; {rest}" if rest else "")


def _spent(history: History, seen: Observed, around: Surroundings) -> Mapping[str, Any]:
    """For `status --json`: seconds and money, of all machines."""
    spendings = _spendings(history, seen, around)
    return {
        "machines": len(spendings),
        "goodput": round(goodput(spendings), 4),
        "total_s": round(sum(s.total_s for s in spendings)),
        "useful_s": round(sum(s.useful_s for s in spendings)),
        "startup_s": round(sum(s.startup_s for s in spendings)),
        "lost_s": round(sum(s.lost_s for s in spendings)),
        "setup_s": round(sum(s.setup_s for s in spendings)),
        "idle_s": round(sum(s.idle_s for s in spendings)),
        "paid": str(sum((s.cost for s in spendings), Decimal(0))),
        "useful": str(sum((useful_cost(s) for s in spendings), Decimal(0))),
        "currency": around.server.currency if around.server else None,
    }


def tell_cadence(job: Job, history: History, seen: Observed) -> str:
    """Another `save_interval` for the next run, where that is worth a hundredth of the time; else empty."""
    if not seen.last_save_s:
        return ""
    measured = time_between_failures(history, seen.now)
    between = measured or MEAN_TIME[Rental.ON_DEMAND]
    now, key = job.checkpoint.save_interval, "checkpoint.save_interval:"
    if not get_framework(job).uses_library:
        observed = observed_interval((*seen.local, *(seen.offsite or ())), history.attempts)
        if observed is None:
            return ""
        now, key = (
            timedelta(seconds=max(round(observed.total_seconds()), 1)),
            "the script (save_steps or the like) may save every",
        )
    found = decide_cadence(now, seen.last_save_s, seen.last_upload_s, between)
    if not found.matters:
        return ""
    upload = f", an upload {span(seen.last_upload_s)}" if seen.last_upload_s else ""
    basis = "as seen in this run" if measured else "assumed"
    return (
        f"{key} {format_duration(found.interval)} instead of {format_duration(now)}: {found.why} "
        f"(a save takes {max(seen.last_save_s, 0.1):.1f}s{upload}; a failure every {span(between.total_seconds())}, {basis})"
    )


def _attempts(attempts: tuple[Attempt, ...]) -> str:
    endings = [a.ending for a in attempts]
    parts = [f"{endings.count(e)} {e}" for e in Ending if e in endings]
    return f"{len(attempts)}" + (f" ({', '.join(parts)})" if parts else "")


def _attempts_before(earlier: Earlier) -> str:
    many = "s" * (earlier.num_machines != 1)
    return (
        f", after {earlier.last_attempt} on {earlier.num_machines} earlier machine{many}"
        if earlier.num_machines
        else ""
    )


def _kept(seen: Observed) -> str:
    """How many can be used, here or in the store, and what becomes of the others: nobody looks for one in vain."""
    here, there = {c.ref for c in seen.local}, set(_stored(seen))
    newest = f", newest {max(here | there).name}" if here | there else ""
    passed = sorted(ref.name for ref in here - there if there and ref < max(there))
    only = f"; only on this disk, since a newer one went to the store: {_names(passed)}" if passed else ""
    useless = sorted({c.ref.name for c in seen.offsite or ()} - {ref.name for ref in here | there} | seen.spoilt)
    return f"{len(here | there)} kept{newest}{only}" + (
        f"; of no use in the store: {_names(useless)}" if useless else ""
    )


def _stored(seen: Observed) -> list[Ref]:
    """What the store has for a resume: none that is damaged there, nor one of a lineage that no run ever comes to."""
    return [c.ref for c in seen.usable if c.ref.lineage < MAX_LINEAGE]


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _A_FEW} more" if len(names) > _A_FEW else ""
    return f"{', '.join(names[:_A_FEW])}{more}"


def _weights(job: Job, seen: Observed) -> str:
    here, there = max((c.ref for c in seen.local), default=None), max(_stored(seen), default=None)
    if there and (here is None or here <= there):
        return f"{job.offload.to}/{job.name}/checkpoints/{there.name}"
    is_known = job.offload.to is None or seen.offsite is not None
    if here:
        older = f"; {_tell_there(there, seen)}" if there else ""
        where = f"only on this disk{older}" if is_known else "on this disk; what the store has is not known"
        return f"{job.checkpoint.dir}/{here.name} ({where})"
    if not is_known:
        return "none on this disk; what the store has is not known"
    return "none that can be used" if seen.offsite or seen.spoilt or seen.damaged else "none were saved"


def _tell_there(newest: Ref, seen: Observed) -> str:
    """What was heard of it last may be an hour old, and the bucket gone."""
    is_away = any(isinstance(seen.tasks.get(kind), Failed) for kind in WRITERS)
    return f"the store had {newest.name} when it last answered" if is_away else f"the store has {newest.name}"


def _outputs(job: Job, seen: Observed) -> str:
    state, missing = seen.tasks.get(TaskKind.OUTPUTS), tell_missing_outputs(job, seen)
    if isinstance(state, Finished) and state.subject == ALL_OUTPUTS:
        return f"{state.result.get('there', 'in the store')}{f'; not there: {missing}' * bool(missing)}"
    return f"not all in the store: {missing}"


def _server_end(job: Job, server: Server | None, seen: Observed, end: End) -> str:
    if server is None:
        return "none to stop"
    if not end.stop:
        return f"{server.id} is kept, and billed"
    if not end.keep:
        return f"{server.id} is being stopped; its disk is thrown away: nothing is only there"
    folder = PurePath(job.finish.save_folder)  # names in it are relative, as they are told
    beyond = [name for name in seen.only_here if not (folder / name).is_relative_to(folder)]
    others = "checkpoints are" if seen.local and not is_safe(job, seen) else "its logs are"
    why = ", ".join(name for name in seen.only_here if name not in beyond) or others
    lost = f"; not in it, and gone with the server: {', '.join(beyond)}" if beyond else ""
    kept = "" if beyond == list(seen.only_here) and beyond else f": {why} only there"
    return f"{server.id} is being stopped; its folder is kept by the provider{kept}{lost}"


def afterwards(job: Job, server: Server | None, end: End) -> str:
    """What is billed when the server is off, and until when; of one that stays, what that costs."""
    if server is None:
        return ""
    if not end.stop:
        return f"{_price(server) or 'the server'} until the deadline, or until you stop it (finish)"
    keep = Keep(job.finish.save_folder if end.keep else None, stop_anyway=job.limits.on_limit is OnLimit.STOP_ANYWAY)
    return PROVIDERS[server.provider].explain(keep, Answer(ServerState.STOPPING, keeping=server.keeping))


def _price(server: Server) -> str:
    return f"{server.price_per_hour} {server.currency} an hour" if server.price_per_hour else ""
