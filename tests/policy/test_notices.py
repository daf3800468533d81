"""What is worth a message: over whole runs in simulated time."""

from dataclasses import replace
from datetime import timedelta

import pytest

from runner.facts import (
    Attempt,
    Checkpoint,
    Ending,
    Failed,
    Finished,
    History,
    Live,
    Observed,
    Progress,
    TaskKind,
)
from runner.job import Job
from runner.loop import _note_stuck
from runner.policy.actions import Launch, Notify
from runner.policy.finish import ALL_OUTPUTS, tell_stuck_outputs
from runner.policy.notices import decide_and_tell
from runner.storage import journal as events
from runner.storage.disk import Disk
from runner.storage.journal import Journal
from runner.words import changes
from tests.simworld import START, TURN, Elsewhere, boot
from vramfarm.protocol import Ref

JOB = Job.model_validate(
    {"name": "tiny", "command": "train.py", "offload": {"to": "s3://bucket/runs"}, "notify": ["NOTIFY_URL"]}
)

SEEN = Observed(now=START, boot_id="b", life="l", rented=True, local=())
BEGUN = History(accepted_at=START, opened_at=START, notified={f"started {START}": START})
CHECKPOINT = Checkpoint(ref=Ref(1, 100, 1, "0" * 8), size_bytes=1, world_size=1, written_at=START)
LEFT = Attempt(
    number=1,
    id="a",
    resume=None,
    lineage=1,
    boot_id="b",
    launched_at=START,
    ending=Ending.INTERRUPTED,
    ended_at=START,
)


def told(elsewhere: Elsewhere) -> list[str]:
    return [event for event, _ in elsewhere.messages]


def test_a_good_night_is_two_messages(tmp_path):
    """
    That it began, until when; and how it ended, before the server is stopped.
    """
    elsewhere = Elsewhere()

    boot(JOB, tmp_path, elsewhere)

    assert ["started", "ended"] == told(elsewhere)
    assert "off by 2026-01-02 00:00 UTC" in elsewhere.messages[0][1]
    assert "succeeded, step 500" in elsewhere.messages[1][1]


def test_a_checkpoint_that_is_gone_from_the_store_is_told_once(tmp_path):
    """
    Whoever has a lifecycle rule that removes them must hear of it before they are needed.
    """
    gone = replace(SEEN, vanished=frozenset({CHECKPOINT.ref.name}))

    message = decide_and_tell(JOB, BEGUN, gone)
    again = decide_and_tell(JOB, replace(BEGUN, notified={**BEGUN.notified, message.key: START}), gone)
    lines = [*changes(SEEN, gone), *changes(gone, gone)]

    assert isinstance(message, Notify)
    assert [message.text] == lines
    assert f"the store has lost {CHECKPOINT.ref.name}" in message.text
    assert not isinstance(again, Notify)


def test_nobody_to_tell_is_no_message(tmp_path):
    """
    The default.
    """
    elsewhere = Elsewhere()

    boot(JOB.model_copy(update={"notify": ()}), tmp_path, elsewhere)

    assert [] == elsewhere.messages


def test_a_failure_and_that_it_goes_on_are_told(tmp_path):
    """
    With its first error, and from where.
    """
    elsewhere = Elsewhere(crash_at_step={1: 200})

    boot(JOB, tmp_path, elsewhere)

    assert ["started", "failed", "resumed", "ended"] == told(elsewhere)
    assert "attempt 1 failed at step 200" in elsewhere.messages[1][1]
    assert "attempt 2 from step 100" in elsewhere.messages[2][1]


def test_failures_again_and_again_are_no_storm(tmp_path):
    """
    One message an hour; when it gives up, the last one says it all.
    """
    elsewhere = Elsewhere(crash_at_step=dict.fromkeys(range(1, 30), 100))

    boot(JOB, tmp_path, elsewhere)

    assert 3 <= len(elsewhere.launches)
    assert ["started", "failed", "ended"] == told(elsewhere)
    assert "gave_up" in elsewhere.messages[-1][1]


def test_a_restart_repeats_nothing(tmp_path):
    """
    What was told is in the journal: another boot after the end tells nobody again.
    """
    elsewhere = Elsewhere()
    boot(JOB, tmp_path, elsewhere)

    boot(JOB, tmp_path, elsewhere)

    assert ["started", "ended"] == told(elsewhere)
    assert {"started 2026-01-01 00:00:00+00:00"} < set(events.read(tmp_path / "journal.jsonl").notified)


def test_a_new_machine_says_that_it_goes_on(tmp_path):
    """
    The first is gone; nobody has to wonder where the second began.
    """
    elsewhere = Elsewhere(sigterms={START + 4 * TURN})
    boot(JOB, tmp_path / "first", elsewhere)

    boot(JOB, tmp_path / "second", elsewhere)

    assert ["started", "started", "resumed", "ended"] == told(elsewhere)


@pytest.mark.parametrize(
    ("attempts", "notified", "is_told"),
    [
        pytest.param((), {}, True, id="a new machine"),
        pytest.param((), {"resumed": START}, False, id="it was told already"),
        pytest.param((LEFT,), {}, False, id="after an interruption"),
        pytest.param((LEFT,), {"failed": START}, True, id="after a failure that was told"),
        pytest.param((LEFT,), {"failed": START, "resumed": START + TURN}, False, id="and that it goes on, too"),
    ],
)
def test_that_it_goes_on_is_told_after_a_failure_and_on_a_new_machine(attempts, notified, is_told):
    """
    Once; an interruption that somebody asked for is no news.
    """
    checked = {TaskKind.PREFLIGHT: Finished(subject="machine and code", at=START)}
    seen = Observed(now=START, boot_id="b", life="l", local=(CHECKPOINT,), tasks=checked)
    job = Job.model_validate({"name": "tiny", "command": "train.py", "notify": ["NOTIFY_URL"]})

    action = decide_and_tell(job, replace(BEGUN, attempts=attempts, notified={**BEGUN.notified, **notified}), seen)

    assert is_told is (action == Notify("resumed", "resumed", f"goes on: attempt {len(attempts) + 1} from step 100"))
    assert is_told or isinstance(action, Launch)


def test_a_store_that_is_away_is_told_once_it_is_serious(tmp_path):
    """
    After ten minutes, and not again while it lasts.
    """
    elsewhere = Elsewhere(store_down=(START + 2 * TURN, START + 25 * TURN))

    boot(JOB, tmp_path, elsewhere)

    assert ["started", "upload", "ended"] == told(elsewhere)
    assert "only on this disk: connection refused" in elsewhere.messages[1][1]


def test_outputs_that_do_not_get_into_the_store_are_told_while_somebody_can_mend_it(tmp_path):
    """
    Hours before the end, in the log, as a message and in the journal; not again with each copy, and not of the last one,
    whose end says it.
    """
    copied = Finished(subject="so far", at=START)
    clean = Observed(
        now=START,
        boot_id="b",
        life="l",
        live=Live(attempt_id="a", trainers=(1,), savers=()),
        tasks={TaskKind.OUTPUTS: copied},
    )
    seen = replace(clean, outputs_stuck="/d: the link /w/x leads here; name it")
    last = replace(seen, tasks={TaskKind.OUTPUTS: replace(copied, subject=ALL_OUTPUTS)})
    journal = Journal(tmp_path / "journal.jsonl", Disk())

    action = decide_and_tell(JOB, BEGUN, seen)
    again = decide_and_tell(JOB, replace(BEGUN, notified={**BEGUN.notified, "outputs": START}), seen)
    noted = _note_stuck("", tell_stuck_outputs(seen), seen, journal)
    _note_stuck(noted, tell_stuck_outputs(seen), seen, journal)

    assert ("alert", "outputs") == (action.event, action.key)
    assert (
        "/d: the link /w/x leads here; name it (mend it while it trains: else the run ends with exit 4" in action.text
    )
    assert not isinstance(again, Notify)
    assert "" == tell_stuck_outputs(last)
    assert [action.text] == [*changes(clean, seen)]
    assert [] == [*changes(seen, seen)]
    assert [("stuck", action.text)] == [(e["event"], e["what"]) for e in events.events(tmp_path / "journal.jsonl")]


def test_the_limit_is_told_before_it_comes(tmp_path):
    """
    In time to raise it.
    """
    elsewhere = Elsewhere()
    job = JOB.model_copy(update={"limits": JOB.limits.model_copy(update={"max_duration": timedelta(hours=2)})})

    boot(job, tmp_path, elsewhere, last_step=10**6)

    assert ["started", "limit", "ended"] == told(elsewhere)
    assert "limit" in elsewhere.messages[-1][1]


@pytest.mark.parametrize(
    ("seen", "history", "event"),
    [
        pytest.param({"progress": Progress(num_failed=1, save_error="no room")}, {}, "save", id="a save fails"),
        pytest.param(
            {"progress": Progress(num_failed=1, save_error="no room")}, {"save": START - TURN}, None, id="said already"
        ),
        pytest.param(
            {"progress": Progress(num_failed=1, save_error="no room")},
            {"save": START - timedelta(hours=7)},
            "save",
            id="seven hours later",
        ),
    ],
)
def test_what_goes_on_is_told_rarely(seen, history, event):
    """
    Every six hours at most.
    """
    action = decide_and_tell(JOB, replace(BEGUN, notified={**BEGUN.notified, **history}), replace(SEEN, **seen))

    assert event == (action.event if isinstance(action, Notify) else None)


@pytest.mark.parametrize("kind", [TaskKind.LEASE, TaskKind.SURVEY, TaskKind.UPLOAD])
def test_a_refused_store_is_told_at_once(kind):
    """
    Waiting cures nothing.
    """
    failed = Failed(subject="store", at=START, error="403", final=True, failures=1, hint="check the key")
    history = replace(BEGUN, notified={**BEGUN.notified})

    live = Live(attempt_id="a", trainers=(1,), savers=())
    action = decide_and_tell(JOB, history, replace(SEEN, live=live, tasks={kind: failed}))

    assert ("upload", True) == (action.event, "check the key" in action.text)


@pytest.mark.parametrize("hanging", [False, True], ids=["answers", "hangs"])
@pytest.mark.parametrize(
    "trouble",
    [
        {},
        {"crash_at_step": {1: 200, 2: 200}},
        {"store_down": (START, START + 20 * TURN)},
        {"store_down": (START + TURN, START + 300 * TURN)},
        {"store_refuses": True},
    ],
    ids=["none", "crashes", "store away", "store gone", "store refuses"],
)
def test_a_message_never_keeps_the_server_on(tmp_path, trouble, hanging):
    """
    Whoever is told, and whether they listen: the run ends as it does without, at most two turns later.
    """
    quiet, loud = Elsewhere(**trouble), Elsewhere(**trouble, hanging_listener=hanging)

    boot(JOB.model_copy(update={"notify": ()}), tmp_path / "quiet", quiet)
    boot(JOB, tmp_path / "loud", loud)

    assert quiet.ends == loud.ends
    assert quiet.now <= loud.now <= quiet.now + 2 * TURN


def test_a_stop_that_may_fail_is_told_while_somebody_is_awake():
    """
    Once; the deadline is at night.
    """
    seen = replace(SEEN, stop_doubt="runpod did not tell the state: HTTP 403")

    action = decide_and_tell(JOB, BEGUN, seen)
    again = decide_and_tell(JOB, replace(BEGUN, notified={**BEGUN.notified, action.key: START}), seen)

    assert ("alert", True) == (action.event, "HTTP 403" in action.text)
    assert not isinstance(again, Notify)
