"""How often to save: between what saving costs and what a failure does."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.facts import Attempt, Checkpoint, Ending, History
from runner.policy.cadence import (
    MEAN_TIME,
    Rental,
    advise_interval,
    decide_cadence,
    observed_interval,
    time_between_failures,
)
from vramfarm.protocol import Ref

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
WEEK = MEAN_TIME[Rental.ON_DEMAND]


def minutes(number):
    return timedelta(minutes=number)


def history(*endings):
    """Attempts of an hour each."""
    started = (NOW - timedelta(hours=n + 1) for n in range(len(endings)))
    return History(
        attempts=tuple(
            Attempt(
                number=n,
                id="a",
                resume=None,
                lineage=0,
                boot_id="b",
                launched_at=at,
                ending=ending,
                ended_at=at + timedelta(hours=1),
            )
            for n, (at, ending) in enumerate(zip(started, endings, strict=True), 1)
        )
    )


@pytest.mark.parametrize(
    ("save_s", "upload_s", "between", "expected"),
    [
        pytest.param(7, 60, WEEK, 48, id="a week between failures: three quarters of an hour"),
        pytest.param(7, 60, timedelta(hours=2), 5, id="a server that may be taken away: minutes"),
        pytest.param(7, 1800, timedelta(hours=2), 30, id="never below the upload"),
        pytest.param(1e6, 0, timedelta(hours=2), 1e6 / 60, id="never below the save"),
        pytest.param(0.001, 0, timedelta(minutes=1), 1, id="at least a minute"),
    ],
)
def test_the_interval_follows_what_a_save_and_a_failure_cost(save_s, upload_s, between, expected):
    """
    In minutes.
    """
    assert round(expected) == round(advise_interval(save_s, upload_s, between) / minutes(1))


def test_the_interval_is_dalys():
    """
    To the second, where a save is no small part of the time between failures: Young's would be 40 s longer.
    """
    assert timedelta(seconds=890) == advise_interval(60, 0, timedelta(hours=2))


@given(st.floats(0, 1e5), st.floats(0, 1e5), st.timedeltas(minutes(1), timedelta(days=1000)))
def test_no_interval_is_shorter_than_an_upload_or_a_save(save_s, upload_s, between):
    """
    Whatever was measured.
    """
    assert max(save_s, upload_s, 60) <= advise_interval(save_s, upload_s, between).total_seconds()


@given(st.floats(0.01, 1e4), st.timedeltas(minutes(1), timedelta(days=1000)), st.floats(1, 100))
def test_fewer_failures_never_shorten_it(save_s, between, factor):
    """
    Nor does a longer save.
    """
    now = advise_interval(save_s, 0, between)

    assert now <= advise_interval(save_s, 0, between * factor) + timedelta(seconds=1)


@pytest.mark.parametrize(
    ("now", "upload_s", "between", "expected"),
    [
        pytest.param(minutes(30), 60, WEEK, False, id="the default on a quiet machine"),
        pytest.param(minutes(30), 60, timedelta(hours=2), True, id="the default on one that may be taken away"),
        pytest.param(minutes(5), 900, WEEK, True, id="uploads that never catch up"),
    ],
)
def test_it_matters_where_time_or_the_copy_is_lost(now, upload_s, between, expected):
    """
    A hundredth of the time, or a store that always lacks the newest checkpoint.
    """
    assert expected == decide_cadence(now, 7, upload_s, between).matters


def test_time_between_failures_is_measured_once_there_are_two():
    """
    Three hours of attempts with two failures.
    """
    once = history(Ending.FAILED, Ending.INTERRUPTED)
    twice = history(Ending.FAILED, Ending.INTERRUPTED, Ending.FAILED)

    assert (None, minutes(90)) == (time_between_failures(once, NOW), time_between_failures(twice, NOW))


def saves(*times):
    """(attempt, minutes after it was launched) of each."""
    return tuple(
        Checkpoint(
            ref=Ref(1, n, attempt, f"{n:08x}"),
            size_bytes=1,
            world_size=2,
            written_at=NOW - timedelta(hours=attempt) + minutes(after),
        )
        for n, (attempt, after) in enumerate(times)
    )


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        pytest.param((), None, id="nothing was saved"),
        pytest.param(((1, 12),), 12, id="one: from the launch on"),
        pytest.param(((1, 12), (1, 20), (1, 30)), 10, id="the longest between two"),
        pytest.param(((1, 12), (2, 20), (2, 25)), 5, id="of one attempt"),
        pytest.param(((1, 12), (2, 20)), 20, id="two attempts, each saved once"),
        pytest.param(((0, 5),), None, id="a copy of another run's"),
    ],
)
def test_how_often_a_script_saves_is_seen(saved, expected):
    """
    `checkpoint.save_interval` does not govern a script that saves for itself.
    """
    attempts = history(Ending.FAILED, Ending.FAILED).attempts

    assert (None if expected is None else minutes(expected)) == observed_interval(saves(*saved), attempts)


def test_a_script_is_timed_from_its_first_step_on():
    """
    Not from its launch: it loads a model first.
    """
    (attempt,) = history(Ending.FAILED).attempts
    attempt = replace(attempt, first_step_at=attempt.launched_at + minutes(4))

    assert minutes(8) == observed_interval(saves((1, 12)), [attempt])
