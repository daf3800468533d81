"""
What `run` would do now. It decides as `run` does, from what is on the disk and in the store, and
does nothing: where the next decision would need a deed, the deed is taken as done.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from runner.adapters.secrets import with_store_keys
from runner.cli.load import LoadedJob
from runner.cli.runs import is_alive
from runner.errors import RunnerError, json_object
from runner.facts import Checkpoint, Conclusion, Finished, History, Machine, Observed, Running, TaskKind
from runner.figures import span
from runner.folder import RunFolder
from runner.job import Job
from runner.policy.actions import Accept, Action, Begin, Conclude, Discard, End, GoOn, Launch, Prune, RecordExit, Wait
from runner.policy.batch import tell_batch
from runner.policy.ledger import parse, sum_up
from runner.policy.lifecycle import decide
from runner.policy.limits import ends
from runner.results import parse_conclusion
from runner.storage import journal as events
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk
from runner.supervise import attempt as attempts
from runner.words import describe

_MOST_STEPS: Final = 20  # an honest foresight is short; a loop of it would be a fault
_FAR: Final = datetime.max.replace(tzinfo=UTC) - timedelta(
    days=1
)  # no wait that is foreseen makes slow work look stuck
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def foresee(loaded: LoadedJob, num_procs: int, *, ask_store: bool) -> Iterator[str]:
    """
    The next deeds of `run`, up to the launch or the end, in the words of its log.

    `num_procs` of 0: how many cards there will be is not known.
    """
    job, folder = loaded.job, RunFolder(root=Path(loaded.job.run_dir))
    if is_alive(folder.root):
        yield "a runner is at work on this run: see status; a second one is refused (exit 5)"
        return
    history = events.read(folder.journal)
    if history.running and attempts.live(history.running.id):
        yield f"attempt {history.running.number} is still training without its runner: `run` goes on watching it"
        return
    there, problem = _ask_store(job, ask_store=ask_store)
    if problem:
        yield problem
    if not history.machine and there.ledger:  # `run` joins with its first look into the store
        history = replace(history, earlier=sum_up(there.ledger, but=""))
    yield from _decide(job, history, _look(job, folder, history, num_procs, there))


def _look(job: Job, folder: RunFolder, history: History, num_procs: int, there: _Store) -> Observed:
    now = datetime.now(UTC)
    shelf = CheckpointDir(Path(job.checkpoint.dir), Disk()).look()
    until, why = min(ends(job.limits, history.opened_at or now, None, history.earlier))
    seen = Observed(
        now=now,
        boot_id=_boot_id(),
        life=uuid.uuid4().hex,
        local=shelf.committed,
        leftovers=shelf.leftovers,
        offsite=there.checkpoints,
        unusable=history.unusable,
        concluded_elsewhere=there.conclusion,
        machine=history.machine,
        ledger=there.ledger,
        num_procs=num_procs,
        global_batch=job.batch.global_ if job.batch else 0,
        set_up=True,
        stop_requested=folder.stop.exists(),
        deadline_at=until,
        deadline_why=why,
        # what is uploaded and tidied beside the run decides nothing of it
        tasks=dict.fromkeys((TaskKind.UPLOAD, TaskKind.TIDY), Running(subject="", started_at=now, moved_at=_FAR)),
    )
    if history.running:
        at = folder.attempt(history.running.number)
        seen = replace(seen, exit=attempts.read_exit(at), end=attempts.read_end(at))
    return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class _Store:
    """What the store says of the run; None: there is no store."""

    checkpoints: tuple[Checkpoint, ...] | None = ()
    conclusion: Conclusion | None = None
    ledger: tuple[Machine, ...] | None = ()


def _ask_store(job: Job, *, ask_store: bool) -> tuple[_Store, str]:
    """Where it cannot be asked it is taken for empty, which is said."""
    if job.offload.to is None:
        return _Store(checkpoints=None, ledger=None), ""
    if not ask_store:
        where = f"{job.offload.to}/{job.name}"
        return _Store(), f"the store {where} was not asked; a newer checkpoint there would be restored"
    from runner.storage.offsite import open_store, surveying  # noqa: PLC0415  # slow

    try:
        store = open_store(job.offload, with_store_keys(os.environ))
        survey, raw = surveying.survey(store, job.name), store.get(f"{job.name}/ledger.json", limit_bytes=16 << 20)
    except RunnerError as error:
        first = str(error).splitlines()[0]
        return _Store(), f"the store cannot be asked from here ({first}); a newer checkpoint there would be restored"
    over = parse_conclusion(survey.outcome) if survey.outcome else None
    return _Store(checkpoints=survey.checkpoints, conclusion=over, ledger=parse(json_object(raw))), ""


def _decide(job: Job, history: History, seen: Observed) -> Iterator[str]:
    for _ in range(_MOST_STEPS):
        action = decide(job, history, seen)
        if isinstance(action, End):
            yield f"end with exit code {action.code}: {action.reason}"
            return
        if isinstance(action, Wait) and action.until is not None:
            yield f"wait {span((action.until - seen.now).total_seconds())}: the last attempt failed just now"
        elif not isinstance(action, Accept) and (line := describe(action)):
            yield line
        if isinstance(action, Launch) and seen.num_procs:
            yield from tell_batch(job, action, history, seen)
        if (then := _as_done(action, history, seen)) is None:
            return
        history, seen = then


def _as_done(  # noqa: PLR0911  # one arm a deed
    action: Action, history: History, seen: Observed
) -> tuple[History, Observed] | None:
    """The facts after a deed of which the outcome is known; None: what follows cannot be told."""
    match action:
        case Accept():
            return events.fold(history, events.accepted(seen.now)), seen
        case RecordExit(ending=ending, exit=exit_, step=step, reason=reason):
            told = events.exited(ending, exit_, step=step, reason=reason, at=seen.now)
            return events.fold(history, told), replace(seen, exit=None, end=None)
        case Discard(name=name):
            return history, replace(seen, leftovers=tuple(n for n in seen.leftovers if n != name))
        case Prune(ref=ref):
            return history, replace(seen, local=tuple(c for c in seen.local if c.ref != ref))
        case Wait(until=at) if at is not None and at > seen.now:
            return history, replace(seen, now=at)
        case Begin(kind=kind, subject=subject):
            back = tuple(c for c in seen.offsite or () if kind is TaskKind.RESTORE and c.ref.name == subject)
            tasks = {**seen.tasks, kind: Finished(subject=subject, at=seen.now)}
            over = None if kind is TaskKind.REOPEN else seen.concluded_elsewhere
            return history, replace(seen, local=(*seen.local, *back), tasks=tasks, concluded_elsewhere=over)
        case GoOn():
            return events.fold(history, events.gone_on(seen.now)), seen
        case Conclude(outcome=outcome, reason=reason):
            conclusion = Conclusion(outcome=outcome, reason=reason, at=seen.now)
            return events.fold(history, events.concluded(conclusion)), seen
        case _:
            return None


def _boot_id() -> str:
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""
