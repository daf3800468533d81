"""What the guardian decides, as tables."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runner.facts import Server, ServerState
from runner.policy.guard import (
    Armed,
    Death,
    End,
    Waits,
    arm,
    decide_restart,
    decide_wait,
    dump_armed,
    hold_until,
    is_due,
    names_run,
    parse_armed,
    parse_word,
    rearm,
)

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
WAITS = Waits()
OURS = Server(provider="vramfarm", id="srv_1")
BOX = Server(provider="command", id="box", currency="", stop_command=("off", "-h"))
ARMED = Armed(server="srv_1", first_boot_at=NOON, deadline_at=NOON + timedelta(hours=24), keep="/workspace")


@pytest.mark.parametrize(
    ("rental_ends", "hours"),
    [(None, 24), (NOON + timedelta(hours=30), 24), (NOON + timedelta(hours=3), 3), (NOON - timedelta(hours=1), -1)],
    ids=["unknown", "later", "earlier", "past"],
)
def test_there_is_always_a_deadline(rental_ends, hours):
    """
    A day, or what is left of the rental.
    """
    ends = rental_ends.isoformat() if rental_ends else ""
    armed = arm(now=NOON, rented=Server(provider="vramfarm", id="srv_1", rental_ends_at=ends), keep="/workspace")

    assert NOON + timedelta(hours=hours) == armed.deadline_at


@pytest.mark.parametrize(
    ("wall_s", "mono_s", "due"),
    [
        pytest.param(-1, -1, False, id="before"),
        pytest.param(0, -1, True, id="by the wall clock: it was set forward, or the machine slept"),
        pytest.param(-1, 0, True, id="by the time that passed: the wall clock was set back"),
    ],
)
def test_the_deadline_is_here_when_either_clock_says_so(wall_s, mono_s, due):
    """
    Neither clock can lengthen a rental.
    """
    assert due is is_due(NOON, NOON + timedelta(seconds=wall_s), 1000.0, 1000.0 + mono_s)


def _deaths(*lives: tuple[float, float]) -> list[Death]:
    return [Death(lived, at) for lived, at in lives]


@pytest.mark.parametrize(
    ("deaths", "delay"),
    [
        pytest.param(_deaths((1, 0)), 1, id="first"),
        pytest.param(_deaths((1, 0), (1, 2)), 2, id="second"),
        pytest.param(_deaths((1, 0), (1, 2), (1, 5), (1, 10)), 8, id="fourth"),
        pytest.param(_deaths((1, 0), (1, 2), (1, 5), (1, 10), (1, 19)), None, id="fifth"),
        pytest.param(_deaths((1, 0), (1, 2), (1, 5), (60, 70), (1, 72)), 1, id="a minute of life forgives"),
        pytest.param(_deaths((900, 900)), 1, id="long life"),
        pytest.param(
            _deaths((9, 0), (9, 200), (9, 400), (9, 500), (9, 601)), 16, id="five, but not within ten minutes"
        ),
        pytest.param(_deaths(*[(9, 200 * n) for n in range(9)]), 30, id="no longer than half a minute"),
    ],
)
def test_a_runner_that_died_is_started_again_later_and_later(deaths, delay):
    """
    Until five deaths within ten minutes, none after a minute of life.
    """
    assert delay == decide_restart(deaths, WAITS)


@pytest.mark.parametrize(
    ("state", "retry_after", "tries", "seconds"),
    [
        (ServerState.UNKNOWN, 0, 1, 2),
        (ServerState.UNKNOWN, 0, 3, 8),
        (ServerState.UNKNOWN, 0, 10_000, 60),
        (ServerState.UNKNOWN, 17, 1, 17),
        (ServerState.UNKNOWN, 1e9, 1, 3600),
        (ServerState.RUNNING, 0, 2, 4),
        (ServerState.STOPPING, 0, 9, 2),
        (ServerState.STOPPING, 5, 1, 5),
    ],
)
def test_a_provider_is_asked_slower_and_slower_and_never_too_early(state, retry_after, tries, seconds):
    """
    For ever: a minute at most, an hour if it insists.
    """
    assert seconds == decide_wait(state, retry_after, tries, WAITS)


@pytest.mark.parametrize(
    ("end", "override", "minutes"),
    [
        pytest.param(End(code=3, stop=True), "", 15, id="early end: the paid minutes"),
        pytest.param(End(code=3, stop=True, hold_s=0), "", 5, id="none wanted"),
        pytest.param(End(code=3, stop=True, hold_s=1200), "", 25, id="as stated"),
        pytest.param(End(code=3, stop=True, hold_s=1200), "60", 6, id="overridden"),
        pytest.param(End(code=3, stop=True), "soon", 15, id="an override that is no number"),
        pytest.param(End(code=3, stop=True), "nan", 15, id="an override that is no time"),
        pytest.param(End(code=0, stop=True), "", 5, id="done"),
        pytest.param(End(code=6, stop=True), "", 5, id="gave up"),
        pytest.param(End(code=3, stop=True, hold_s=1e30), "", 24 * 60, id="never past the deadline"),
    ],
)
def test_a_server_is_held_for_a_look(end, override, minutes):
    """
    Five minutes after its first boot: until when, in minutes after that boot.
    """
    now = NOON + timedelta(minutes=5)

    assert NOON + timedelta(minutes=minutes) == hold_until(end, replace(ARMED, rented=OURS), now, override)


@pytest.mark.parametrize("rented", [Server(provider="runpod", id="pod"), BOX, None])
def test_where_no_minutes_are_paid_anyway_nobody_is_billed_for_a_look(rented):
    """
    RunPod and Vast bill what was used: an early end stops at once, unless the job says how long to hold.
    """
    now = NOON + timedelta(minutes=5)
    armed = replace(ARMED, rented=rented)

    assert now == hold_until(End(code=3, stop=True), armed, now, "")
    assert now + timedelta(minutes=20) == hold_until(End(code=3, stop=True, hold_s=1200), armed, now, "")


def test_the_runners_words_are_understood():
    """
    A new deadline, with what is not said left as it was; and the end.
    """
    deadline = parse_word(b'{"deadline": "2026-01-01T07:00:00+01:00", "stop_anyway": false}', ARMED)
    end = parse_word(b'{"end": {"code": 6, "stop": true, "keep": "/w", "hold_s": 1.5, "reason": "a\\nb"}}', ARMED)

    rented = parse_word(
        b'{"server": {"provider": "command", "id": "box", "stop_command": ["off", "-h"], "currency": ""}}', ARMED
    )

    assert replace(ARMED, deadline_at=datetime(2026, 1, 1, 6, tzinfo=UTC)) == deadline
    assert replace(ARMED, server="box", rented=BOX) == rented
    assert replace(ARMED, server="", rented=None) == parse_word(b'{"server": null}', rented)
    assert End(code=6, stop=True, keep="/w", hold_s=1.5, reason="a b") == end


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"x",
        b"[]",
        b"{}",
        b"7",
        b'{"end": 7}',
        b'{"end": {}}',
        b'{"end": {"code": 1e400, "stop": true}}',
        b'{"end": {"code": 0, "stop": "no"}}',
        b'{"deadline": "07:00"}',
        b'{"deadline": null}',
        b'{"server": 7}',
        b'{"server": {"provider": "vast"}}',
    ],
)
def test_other_words_are_refused(raw):
    """
    With the one error that the guardian expects.
    """
    with pytest.raises(ValueError):  # noqa: PT011  # json's too
        parse_word(raw, ARMED)


@pytest.mark.parametrize(
    ("stored", "found", "armed"),
    [
        pytest.param(ARMED, OURS, replace(ARMED, rented=OURS), id="this server"),
        pytest.param(ARMED, replace(OURS, id="srv_2"), None, id="another server"),
        pytest.param(ARMED, None, None, id="a server then, none now"),
        pytest.param(replace(ARMED, rented=BOX), None, replace(ARMED, rented=BOX), id="what a job named, here"),
        pytest.param(replace(ARMED, rented=replace(BOX, id="cage")), None, None, id="what a job named, elsewhere"),
    ],
)
def test_an_earlier_boot_is_remembered_on_the_same_server_only(stored, found, armed):
    """
    A folder that came from another machine must not end this one.
    """
    assert armed == rearm(stored, found, "box")


@given(st.datetimes(timezones=st.just(UTC)), st.text(), st.one_of(st.none(), st.text()))
def test_what_is_kept_across_boots_comes_back(deadline, server, keep):
    """
    Whatever the values.
    """
    armed = replace(ARMED, deadline_at=deadline, server=server, keep=keep, rented=BOX)

    assert armed == parse_armed(dump_armed(armed))


@given(st.binary())
@example(b"")
@example(b"[1]")
@example(b'{"first_boot_at": 7, "deadline_at": null}')
@example(b"\xff" * 100)
def test_bytes_that_are_something_else_are_a_value_error(raw):
    """
    Nothing on the disk can end the guardian.
    """
    with pytest.raises(ValueError):  # noqa: PT011  # json's too
        parse_armed(raw)


@pytest.mark.parametrize(
    "fields", [{"deadline_at": "2026-01-01T00:00:00+00:00"}, {"first_boot_at": "2026-01-01T00:00:00+00:00"}]
)
def test_half_of_what_was_kept_is_nothing(fields):
    """
    Both moments are needed, of the first boot and of the end.
    """
    with pytest.raises(ValueError, match="first_boot_at and deadline_at"):
        parse_armed(json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("word", "run"),
    [
        ({"deadline": "2026-01-01T00:00:00+00:00", "run": "/workspace/job"}, "/workspace/job"),
        ({"deadline": "2026-01-01T00:00:00+00:00"}, ""),
        ({"notify": [], "run": "/workspace/job"}, ""),
    ],
)
def test_only_a_deadline_names_the_run_that_was_accepted(word, run):
    """
    A runner that died before it accepted a job is started again as a person would.
    """
    assert run == names_run(json.dumps(word).encode())
