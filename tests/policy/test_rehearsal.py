"""Which check of a rehearsal is next, and what it came to: tables of what was seen."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.facts import Attempt, Checkpoint, Decision, Diagnosis, Ending, Exit
from runner.policy.rehearsal import (
    CHAIN,
    Beat,
    Check,
    Deed,
    Kill,
    Mark,
    Notes,
    Result,
    Scene,
    Seen,
    crash_costs_s,
    decide,
    exit_code,
    missing,
    saves_every_s,
    stall_s,
    verdict,
)
from vramfarm.protocol import Ref

AT = datetime(2026, 1, 1, tzinfo=UTC)
SCENE = Scene(limit_s=600, uses_library=True, has_store=True, save_interval_s=1800, keep_last=2, grace_s=120)
FRAMEWORK = replace(SCENE, uses_library=False)
FIRST = Attempt(number=1, id="a", resume=None, lineage=1, boot_id="b", launched_at=AT)
PACE = tuple(Beat(at_s=float(step), step=step) for step in range(1, 10))
GB = 10**9


def saved(step, attempt=1, size_bytes=GB):
    ref = Ref(1, step, attempt, f"{step:08x}")
    return Checkpoint(ref=ref, size_bytes=size_bytes, world_size=2, written_at=AT)


def failed(number=1, decision=Decision.RESUME, reason="rank 1: boom"):
    found = Diagnosis(
        label="boom",
        category="code",
        rank=1,
        primary_line="boom",
        primary_line_no=1,
        cause="a bug",
        remedy="mend it",
        decision=decision,
        env={},
        confidence="high",
    )
    return replace(
        FIRST, number=number, ending=Ending.FAILED, exit=Exit(code=1), step=7, reason=reason, diagnosis=found
    )


def after(*checks, **notes):
    return Notes(results=tuple(Result(check=check, mark=Mark.OK) for check in checks), **notes)


TRAINING = Seen(now_s=60, verdict="go", attempts=(FIRST,), launched_s=20, step=9, beats=PACE, free_bytes=10 * GB)
SAVED = replace(TRAINING, local=(saved(9),))
UNTIL = {check: after(*CHAIN[: CHAIN.index(check)]) for check in CHAIN}
KILLED = replace(UNTIL[Check.CRASH], killed=Kill(attempt=1, rank=1, step=12, at_s=30.0))
AGAIN = replace(FIRST, number=2, id="c", resume=saved(9).ref)
LEAVING = replace(UNTIL[Check.LEAVE], left_s=50.0, left_step=20)


@pytest.mark.parametrize(
    ("notes", "seen", "expected"),
    [
        pytest.param(Notes(), Seen(now_s=1), Deed.WAIT, id="nothing is known yet"),
        pytest.param(Notes(), Seen(now_s=9, verdict="go"), Deed.WAIT, id="the code is still to be looked at"),
        pytest.param(UNTIL[Check.FIRST_STEP], replace(TRAINING, step=0), Deed.WAIT, id="no step yet"),
        pytest.param(UNTIL[Check.FIRST_STEP], replace(TRAINING, attempts=(AGAIN,)), Deed.WAIT, id="where it began"),
        pytest.param(UNTIL[Check.SAVE], replace(TRAINING, beats=PACE[:2]), Deed.WAIT, id="no pace to compare with yet"),
        pytest.param(UNTIL[Check.SAVE], TRAINING, Deed.ASK_SAVE, id="a save is asked for"),
        pytest.param(replace(UNTIL[Check.SAVE], asked_s=9.5), TRAINING, Deed.WAIT, id="it is asked for once"),
        pytest.param(UNTIL[Check.STORE], SAVED, Deed.WAIT, id="the copy is not there yet"),
        pytest.param(UNTIL[Check.CRASH], SAVED, Deed.KILL_RANK, id="a rank is killed"),
        pytest.param(KILLED, replace(SAVED, attempts=(failed(),)), Deed.WAIT, id="this failure is ours"),
        pytest.param(KILLED, replace(SAVED, attempts=(failed(), AGAIN), step=9), Deed.WAIT, id="back, and no new step"),
        pytest.param(UNTIL[Check.LEAVE], replace(SAVED, beats=PACE[:3]), Deed.WAIT, id="it settles first"),
        pytest.param(UNTIL[Check.LEAVE], SAVED, Deed.ASK_LEAVE, id="it is told to leave"),
        pytest.param(LEAVING, SAVED, Deed.WAIT, id="it saves and leaves"),
        pytest.param(after(*CHAIN), SAVED, Deed.END, id="all is told"),
    ],
)
def test_the_next_deed_follows_from_what_is_seen(notes, seen, expected):
    """
    One deed at a time, each only when what it needs is there.
    """
    assert expected == decide(SCENE, notes, seen)


@pytest.mark.parametrize(
    ("scene", "notes", "seen", "check", "mark", "code"),
    [
        pytest.param(SCENE, Notes(), TRAINING, Check.PREFLIGHT, Mark.OK, 0, id="fit"),
        pytest.param(
            SCENE,
            Notes(),
            Seen(now_s=9, code=3, reason="no card"),
            Check.PREFLIGHT,
            Mark.FAILED,
            3,
            id="machine refused",
        ),
        pytest.param(SCENE, UNTIL[Check.FIRST_STEP], TRAINING, Check.FIRST_STEP, Mark.OK, 0, id="a step"),
        pytest.param(
            SCENE,
            UNTIL[Check.FIRST_STEP],
            replace(TRAINING, step=0, now_s=601),
            Check.FIRST_STEP,
            Mark.FAILED,
            6,
            id="no step in time",
        ),
        pytest.param(
            SCENE,
            UNTIL[Check.FIRST_STEP],
            replace(TRAINING, attempts=(failed(),)),
            Check.FIRST_STEP,
            Mark.FAILED,
            6,
            id="it crashes by itself",
        ),
        pytest.param(
            SCENE,
            UNTIL[Check.FIRST_STEP],
            replace(TRAINING, attempts=(failed(decision=Decision.GIVE_UP_MACHINE),)),
            Check.FIRST_STEP,
            Mark.FAILED,
            3,
            id="the machine crashes it",
        ),
        pytest.param(SCENE, UNTIL[Check.SAVE], SAVED, Check.SAVE, Mark.OK, 0, id="saved"),
        pytest.param(
            SCENE, UNTIL[Check.SAVE], replace(SAVED, free_bytes=2 * GB), Check.SAVE, Mark.FAILED, 3, id="disk too small"
        ),
        pytest.param(
            FRAMEWORK,
            UNTIL[Check.SAVE],
            replace(TRAINING, now_s=361),
            Check.SAVE,
            Mark.NOT_MADE,
            0,
            id="the framework saves later",
        ),
        pytest.param(
            replace(SCENE, has_store=False), UNTIL[Check.STORE], SAVED, Check.STORE, Mark.NOT_MADE, 0, id="no store"
        ),
        pytest.param(
            SCENE,
            UNTIL[Check.STORE],
            replace(SAVED, offsite=(saved(9).ref,), upload_s=100.0),
            Check.STORE,
            Mark.OK,
            0,
            id="in the store",
        ),
        pytest.param(
            SCENE,
            UNTIL[Check.STORE],
            replace(SAVED, offsite=(saved(9).ref,), upload_s=1900.0),
            Check.STORE,
            Mark.WARN,
            0,
            id="slower than the saves",
        ),
        pytest.param(
            SCENE,
            UNTIL[Check.STORE],
            replace(SAVED, store_error="403", store_gave_up=True),
            Check.STORE,
            Mark.FAILED,
            4,
            id="the store refuses",
        ),
        pytest.param(
            SCENE, KILLED, replace(SAVED, attempts=(failed(), AGAIN), step=10), Check.CRASH, Mark.OK, 0, id="recovered"
        ),
        pytest.param(
            SCENE,
            KILLED,
            replace(SAVED, attempts=(failed(), replace(AGAIN, resume=None)), step=10),
            Check.CRASH,
            Mark.FAILED,
            6,
            id="it began at step 0 although there is a checkpoint",
        ),
        pytest.param(
            SCENE,
            KILLED,
            replace(SAVED, attempts=(failed(reason=""), AGAIN), step=10),
            Check.CRASH,
            Mark.FAILED,
            6,
            id="nothing names the error",
        ),
        pytest.param(
            SCENE, LEAVING, replace(SAVED, code=75, local=(saved(21, 2),)), Check.LEAVE, Mark.OK, 0, id="left, saved"
        ),
        pytest.param(SCENE, LEAVING, replace(SAVED, code=75), Check.LEAVE, Mark.FAILED, 6, id="left without a save"),
        pytest.param(
            FRAMEWORK, LEAVING, replace(SAVED, code=75), Check.LEAVE, Mark.OK, 0, id="a framework saves nothing"
        ),
        pytest.param(SCENE, LEAVING, replace(SAVED, now_s=231), Check.LEAVE, Mark.FAILED, 6, id="it does not leave"),
        pytest.param(
            SCENE, UNTIL[Check.CRASH], replace(SAVED, code=0), Check.CRASH, Mark.NOT_MADE, 0, id="over before"
        ),
        pytest.param(
            SCENE, UNTIL[Check.CRASH], replace(SAVED, now_s=601), Check.CRASH, Mark.NOT_MADE, 0, id="no time for it"
        ),
    ],
)
def test_what_a_check_came_to(scene, notes, seen, check, mark, code):  # noqa: PLR0917  # columns
    """
    The check that is next is judged, and a failure has the code of what is to be mended.
    """
    found = decide(scene, notes, seen)

    assert isinstance(found, Result), found
    assert (check, mark, code) == (found.check, found.mark, found.code)


def test_a_failure_that_a_change_repairs_is_tried_again_as_at_night():
    """
    The runner changes the environment and starts again; the rehearsal waits for that.
    """
    seen = replace(TRAINING, step=0, attempts=(failed(decision=Decision.RETRY_ENV),))

    assert Deed.WAIT == decide(SCENE, UNTIL[Check.FIRST_STEP], seen)


@pytest.mark.parametrize("broken", [check for check in CHAIN[:-1] if check is not Check.STORE])
def test_after_a_failure_the_rest_is_not_made(broken):
    """
    What needs it is not tried, only named; but after a store that refuses all else is.
    """
    bad = Result(check=broken, mark=Mark.FAILED, code=6)
    notes = Notes(results=(*UNTIL[broken].results, bad))
    following = CHAIN[CHAIN.index(broken) + 1]

    found = decide(SCENE, notes, SAVED)

    assert (following, Mark.NOT_MADE) == (found.check, found.mark)
    store = Result(check=Check.STORE, mark=Mark.FAILED, code=4)
    assert Deed.KILL_RANK == decide(SCENE, Notes(results=(*UNTIL[Check.STORE].results, store)), SAVED)


def test_a_stall_is_what_the_slowest_step_took_longer_than_usual():
    """
    Steps of a second, and one of four while the save was copied.
    """
    beats = (*PACE, Beat(at_s=13.0, step=10), Beat(at_s=14.0, step=11))

    assert 3.0 == stall_s(beats, 9.5)
    assert 0.0 == stall_s((*PACE, Beat(at_s=11.0, step=11)), 9.5)  # two steps between two looks
    assert stall_s(PACE, 9.5) is None


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=30), st.integers(0, 30))
def test_no_stall_is_ever_negative(gaps, at):
    """
    Whatever the steps take.
    """
    beats = tuple(Beat(at_s=sum(gaps[:n]), step=n + 1) for n in range(len(gaps) + 1))

    stall = stall_s(beats, beats[min(at, len(gaps))].at_s)

    assert stall is None or stall >= 0


def test_the_verdict_names_what_is_not_ready_and_has_its_code():
    """
    The first failure in the order of the checks gives the exit code; what was not made is named, and is none.
    """
    good = [Result(check=check, mark=Mark.OK) for check in Check]
    bad = [Result(check=Check.NOTIFY, mark=Mark.FAILED, code=3), Result(check=Check.STORE, mark=Mark.FAILED, code=4)]
    left = Result(check=Check.STORE, mark=Mark.NOT_MADE)

    assert (0, "ready for the night") == (exit_code(good), verdict(good))
    assert (3, "not ready: notify, store") == (exit_code(bad), verdict(bad))
    assert "ready for the night, as far as it was rehearsed; not made: store" == verdict([left])
    assert {*Check} - {Check.STORE} == {*missing([left])}


def test_of_a_script_that_saves_for_itself_counts_how_often_it_was_seen_to():
    """
    Its upload is compared with that, and a crash costs that.
    """
    later = replace(saved(20), written_at=AT + timedelta(minutes=4))
    seen = replace(SAVED, local=(saved(10), later), offsite=(later.ref,), upload_s=300.0)

    found = decide(FRAMEWORK, after(Check.PREFLIGHT, Check.FIRST_STEP, Check.SAVE), seen)
    governed = decide(SCENE, after(Check.PREFLIGHT, Check.FIRST_STEP, Check.SAVE), seen)

    assert (240.0, Mark.WARN, "let the script save every 5m") == (
        saves_every_s(FRAMEWORK, seen),
        found.mark,
        found.cure,
    )
    assert (1800.0, Mark.OK) == (saves_every_s(SCENE, seen), governed.mark)
    assert 1800.0 == saves_every_s(FRAMEWORK, replace(seen, local=()))


@pytest.mark.parametrize(
    ("attempt", "label", "cure"),
    [(failed(), " [boom: a bug]", "mend it"), (replace(failed(), diagnosis=None), "", "")],
)
def test_an_attempt_that_fails_by_itself_is_told_with_what_triage_says(attempt, label, cure):
    """
    Where nobody knows what it was, the line of its log has to do.
    """
    found = decide(SCENE, UNTIL[Check.SAVE], replace(TRAINING, attempts=(attempt,)))

    assert (f"attempt 1 failed by itself at step 7: rank 1: boom{label}", cure) == (found.problem, found.cure)


def test_a_crash_costs_the_time_between_saves_a_save_and_the_way_back():
    """
    Known only where both were measured.
    """
    save = Result(check=Check.SAVE, mark=Mark.OK, figures={"seconds": 7.0})
    crash = Result(check=Check.CRASH, mark=Mark.OK, figures={"seconds": 33.0})

    assert 1840.0 == crash_costs_s(1800, [save, crash])
    assert crash_costs_s(1800, [save]) is None
