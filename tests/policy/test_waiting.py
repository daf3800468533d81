"""What is said of an outage before an attempt is what becomes of it: until when, and with which exit code."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from runner.facts import (
    Checkpoint,
    Conclusion,
    Failed,
    Finished,
    History,
    Lease,
    LeaseState,
    Live,
    Observed,
    Outcome,
    Running,
    TaskKind,
)
from runner.job import Job
from runner.policy.actions import Begin, Conclude, End, Notify, Wait
from runner.policy.lifecycle import decide
from runner.policy.notices import decide_and_tell
from runner.policy.waiting import tell_waiting
from runner.results import StoreView
from vramfarm.protocol import Ref

START = datetime(2026, 1, 1, 17, 22, tzinfo=UTC)
HALF_AN_HOUR = timedelta(minutes=30)
JOB = Job.model_validate({"name": "j", "command": "t.py", "offload": {"to": "s3://b/runs"}, "notify": ["HOOK"]})
FORK = JOB.model_copy(
    update={"checkpoint": JOB.checkpoint.model_copy(update={"resume": "s3://b/other/step-00000500-0123abcd"})}
)
ACCEPTED = History(accepted_at=START, opened_at=START, machine="m")
REF = Ref(1, 500, 1, "0123abcd")
CHECKPOINT = Checkpoint(ref=REF, size_bytes=1, world_size=1, written_at=START)
BEGUN = {TaskKind.PREFLIGHT: Finished(subject="machine and code", at=START)}
OURS = {
    TaskKind.LEASE: Running(subject="of the run", started_at=START, moved_at=START + timedelta(hours=2)),
    TaskKind.PUBLISH: Running(subject="joined, 0", started_at=START),
}
HELD = Lease(state=LeaseState.HELD)


def away(subject, now=START):
    return Failed(subject=subject, at=now, error="no answer", hint="check it", final=False, failures=7, since=START)


def seen(kind, subject, now=START, **more):
    ours = {} if kind is TaskKind.LEASE else OURS
    first = {
        "boot_id": "b",
        "life": "l",
        "machine": "m",
        "rented": True,
        "lease": HELD if ours else Lease(state=LeaseState.UNKNOWN),
    }
    return Observed(**{"now": now, "tasks": BEGUN | ours | {kind: away(subject, now)}, **first, **more})


KNOWN = {"offsite": (), "ledger": ()}
OVER = Conclusion(outcome=Outcome.LIMIT, reason="it was late", at=START)
CASES = {
    "lease": (JOB, TaskKind.LEASE, "of the run", {}),
    "survey": (JOB, TaskKind.SURVEY, "store", {}),
    "stage": (JOB, TaskKind.STAGE, "d", {**KNOWN, "data_digest": "d"}),
    "restore": (JOB, TaskKind.RESTORE, REF.name, {**KNOWN, "offsite": (CHECKPOINT,)}),
    "fork": (FORK, TaskKind.FORK, f"1 {FORK.checkpoint.resume}", KNOWN),
    "reopen": (
        JOB,
        TaskKind.REOPEN,
        f"limit, {START.isoformat(timespec='seconds')}",
        {**KNOWN, "concluded_elsewhere": OVER},
    ),
}


@pytest.mark.parametrize(("limit_min", "code"), [(None, 4), (20, 7)], ids=["patience", "a limit before it"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_said_of_an_outage_is_what_becomes_of_it(case, limit_min, code):
    """
    Minute by minute until then the run goes on asking, and at that minute it ends as it was said.
    """
    job, kind, subject, more = CASES[case]
    if limit_min:
        more = {**more, "deadline_at": START + timedelta(minutes=limit_min + 1), "deadline_why": "limits.until"}
    waiting = tell_waiting(job, ACCEPTED, seen(kind, subject, **more))

    assert waiting is not None
    assert f"then exit {code}, the server is stopped" in waiting.line
    assert f"until {waiting.until:%H:%M} UTC" in waiting.line
    for minute in range(1, 31):
        now = START + timedelta(minutes=minute)
        action = decide(job, ACCEPTED, seen(kind, subject, now, **more))
        assert (now >= waiting.until) is isinstance(action, End | Conclude), (minute, action)
        if isinstance(action, End | Conclude):
            break
    ended = action.code if isinstance(action, End) else {Outcome.LIMIT: 7}[action.outcome]
    assert code == ended


OLDER = replace(CHECKPOINT, ref=replace(REF, step=400, id="00000190"))


@pytest.mark.parametrize("there", [(CHECKPOINT,), (OLDER, CHECKPOINT)], ids=["the only one", "there is an older one"])
def test_one_that_the_store_alone_fails_at_is_given_up_when_it_was_said(there):
    """
    Not after half an hour of an idle server: what answers for all else will not bring this one back.
    """
    first, *later = (_unreadable(minute, there) for minute in range(31))
    waiting = tell_waiting(JOB, ACCEPTED, first)
    actions = [(seen.now, decide(JOB, ACCEPTED, seen)) for seen in later]

    assert waiting is not None
    at, action = next((now, action) for now, action in actions if not isinstance(action, Wait | Notify))
    assert (waiting.until, START + timedelta(minutes=5)) == (at, at)
    if len(there) == 1:
        assert "then exit 4, the server is stopped: mend the store, or --start-over" in waiting.line
        assert isinstance(action, End)
        assert (4, f"checkpoints exist and none can be used ({REF.name}): no answer; check it") == (
            action.code,
            action.reason.partition("; --start-over")[0],
        )
    else:
        assert "from 17:27 UTC on an older one is taken" in waiting.line
        assert Begin(TaskKind.RESTORE, OLDER.ref.name) == action


def _unreadable(minute, there):
    """What is seen after so many minutes of a store that answers 500 for one file."""
    now, view = START + timedelta(minutes=minute), StoreView()
    failed = replace(away(REF.name, now), unreadable=True)
    view.learn({TaskKind.RESTORE: failed})
    lost = view.unusable_now()
    looked = seen(TaskKind.RESTORE, REF.name, now, **KNOWN | {"offsite": there}, unusable=lost, unusable_now=lost)
    # it is being tried again until it is lost
    state = failed if lost else Running(subject=REF.name, started_at=now, after=failed)
    return replace(looked, tasks=looked.tasks | {TaskKind.RESTORE: state})


@pytest.mark.parametrize("kind", [TaskKind.SURVEY, TaskKind.FORK])
def test_whoever_does_not_know_what_else_is_there_says_both(kind):
    """
    A manifest that cannot be read, or one of another run: whether there is an older one shows when this one is given up.
    """
    job, _, subject, more = CASES[kind]
    looked = seen(kind, subject, **more)
    waiting = tell_waiting(
        job, ACCEPTED, replace(looked, tasks=looked.tasks | {kind: replace(away(subject), unreadable=True)})
    )

    assert waiting is not None
    assert "from 17:27 UTC on an older one is taken, and this one stays there; if there is none, exit 4" in waiting.line


def test_while_it_is_tried_again_it_is_said_still():
    """
    A try against a server that swallows what it gets takes a minute, in which nothing else is known.
    """
    failed = seen(TaskKind.LEASE, "of the run")
    again = Running(subject="of the run", started_at=START, after=away("of the run"))
    trying = replace(failed, tasks=failed.tasks | {TaskKind.LEASE: again})

    assert tell_waiting(JOB, ACCEPTED, failed) == tell_waiting(JOB, ACCEPTED, trying)


@pytest.mark.parametrize(
    "change",
    [
        {"local": (CHECKPOINT,)},
        {"live": Live(attempt_id="a", trainers=(1,), savers=())},
        {"tasks": {TaskKind.LEASE: replace(away("of the run"), final=True)}},
        {"tasks": {TaskKind.UPLOAD: away("a checkpoint")}},
    ],
    ids=["it trains from what is here", "it trains", "it ends now", "that holds up nothing"],
)
def test_nobody_says_that_it_waits_where_it_does_not(change):
    """
    Until when and what then would be wrong.
    """
    assert None is tell_waiting(JOB, ACCEPTED, replace(seen(TaskKind.LEASE, "of the run"), **change))


def test_a_person_is_told_after_ten_minutes_that_nothing_has_begun():
    """
    Not that something is only on this disk: there is nothing.
    """
    told = replace(ACCEPTED, notified={f"started {START}": START})
    soon, later = (
        decide_and_tell(JOB, told, seen(TaskKind.LEASE, "of the run", START + timedelta(minutes=m))) for m in (9, 10)
    )

    assert not isinstance(soon, Notify)
    assert later.text.startswith("nothing begins without the store: lease of the run failed: no answer; check it (")
    assert "until 17:52 UTC" in later.text
