"""Whether to try again: tables, then a property."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.facts import Attempt, Ending, Exit
from runner.job import RestartPolicy
from runner.policy.restart import GiveUp, Retry, Succeeded, count_failures, decide_restart
from tests.simworld import START
from vramfarm.protocol import Ref

POLICY = RestartPolicy(initial_delay="10s", max_delay="1m")


def ref(step):
    return None if step is None else Ref(1, step, 1, "0" * 8)


def attempts(*rows):
    """Rows of (resumed at step, ending)."""
    return tuple(
        Attempt(
            number=n,
            id=str(n),
            resume=ref(step),
            lineage=1,
            boot_id="b",
            launched_at=START,
            ending=ending,
            exit=Exit(code=1),
            ended_at=START,
            reason="boom",
        )
        for n, (step, ending) in enumerate(rows, 1)
    )


FAILED, LEFT = Ending.FAILED, Ending.INTERRUPTED


@pytest.mark.parametrize(
    ("rows", "newest", "expected"),
    [
        pytest.param([(None, FAILED)], None, 1, id="first failure"),
        pytest.param([(None, FAILED)], 100, 0, id="it made a checkpoint"),
        pytest.param([(None, FAILED), (None, FAILED), (None, FAILED)], None, 3, id="never a checkpoint"),
        pytest.param([(None, FAILED), (100, FAILED), (100, FAILED)], 100, 2, id="moved once, then stuck"),
        pytest.param([(100, FAILED), (100, LEFT), (100, FAILED)], 100, 2, id="interrupted counts for nothing"),
        pytest.param([(100, FAILED), (100, FAILED)], 200, 0, id="the last one moved on"),
    ],
)
def test_failures_without_progress(rows, newest, expected):
    """
    Only failed attempts since the last new checkpoint count.
    """
    assert expected == count_failures(attempts(*rows), ref(newest))


def test_backoff_doubles_up_to_the_longest():
    """
    10 s, 20 s, then 1 m at most.
    """
    policy = POLICY.model_copy(update={"max_restarts_without_progress": 99})

    waits = [decide_restart(attempts(*[(None, FAILED)] * n), None, policy).at - START for n in (1, 2, 3, 4, 50)]

    assert [10, 20, 40, 60, 60] == [w.total_seconds() for w in waits]


def test_giving_up_names_the_error():
    """
    The reason carries what the last attempt said.
    """
    assert GiveUp("3 attempts in a row made no progress: boom") == decide_restart(
        attempts(*[(None, FAILED)] * 3), None, POLICY
    )


def test_success_ends_it():
    """
    Nothing is left to train, whatever came before.
    """
    assert Succeeded() == decide_restart(attempts((None, FAILED), (None, Ending.SUCCEEDED)), None, POLICY)


@given(
    rows=st.lists(st.tuples(st.none() | st.integers(0, 5), st.sampled_from([FAILED, LEFT])), min_size=1, max_size=12),
    newest=st.none() | st.integers(0, 6),
)
def test_a_retry_never_waits_longer_than_the_policy(rows, newest):
    """
    Whatever the history, the next launch is at most `max_delay` away, or there is none.
    """
    match decide_restart(attempts(*rows), ref(newest), POLICY):
        case Retry(at=at):
            assert timedelta() <= at - START <= POLICY.max_delay
        case decision:
            assert isinstance(decision, GiveUp)
