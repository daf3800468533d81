"""What is known of a loss that goes wrong."""

import math

import pytest
from pydantic import ValidationError

from runner.facts import Attempt, Checkpoint, Divergence, History, Progress
from runner.job import GuardPolicy
from runner.policy.divergence import LossWatch, divergence, first_distrusted, newest_good, watch_loss
from tests.simworld import START
from vramfarm.protocol import Ref

NAN = math.nan
GUARD = GuardPolicy(nan_patience=20, divergence_threshold=50.0)


def looked(*rows, guard=GUARD):
    """Rows of (step, loss)."""
    watch = LossWatch()
    for step, loss in rows:
        watch = watch_loss(watch, Progress(step=step, loss=loss), guard)
    return divergence(watch)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param([(1, 2.0), (9, 1.0)], None, id="fine"),
        pytest.param([(1, None), (9, None)], None, id="never told"),
        pytest.param([(0, NAN)], None, id="before the first step"),
        pytest.param([(5, 1.0), (9, NAN), (20, NAN)], (5, 9, 12), id="not a number"),
        pytest.param([(5, 1.0), (9, -math.inf)], (5, 9, 1), id="infinite"),
        pytest.param([(5, 1.0), (9, 50.5)], (5, 9, 1), id="too large"),
        pytest.param([(5, NAN), (9, 1.0)], None, id="it recovered"),
        pytest.param([(5, NAN), (9, 1.0), (12, NAN)], (9, 12, 1), id="and went wrong again"),
        pytest.param([(5, 1.0), (9, NAN), (9, 1.0)], (5, 9, 1), id="the same step, looked at in the middle"),
        pytest.param([(7, NAN), (9, NAN)], (None, 7, 3), id="never fine"),
    ],
)
def test_since_when_the_loss_is_wrong(rows, expected):
    """
    From the first look that was wrong, with the last one that was fine.
    """
    found = looked(*rows)

    assert expected == (found and (found.good_step, found.since_step, found.num_steps))


@pytest.mark.parametrize(("good", "resumed", "expected"), [(5, 3, 5), (None, 3, 4), (None, None, 0)])
def test_from_which_step_on_nothing_is_trusted(good, resumed, expected):
    """
    A fine loss speaks for the weights before its step; without one, all that the attempt saved is suspect.
    """
    resume = None if resumed is None else Ref(1, resumed, 1, "0" * 8)
    attempt = Attempt(number=2, id="a", resume=resume, lineage=1, boot_id="b", launched_at=START)

    assert expected == first_distrusted(attempt, Divergence(good_step=good, since_step=7, num_steps=1, loss=NAN))


def test_a_threshold_without_patience_is_refused():
    """
    It would never do anything.
    """
    with pytest.raises(ValidationError, match="needs nan_patience"):
        GuardPolicy(divergence_threshold=3.0)


def test_a_checkpoint_of_before_is_good_although_no_attempt_is_known_here():
    """
    It came from another machine.
    """
    found = Divergence(good_step=5, since_step=7, num_steps=1, loss=NAN)
    checkpoint = Checkpoint(ref=Ref(1, 3, 1, "0" * 8), size_bytes=1, world_size=1, written_at=START)

    assert checkpoint.ref == newest_good((checkpoint,), History(), found)
