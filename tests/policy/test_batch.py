"""The global batch is kept whatever the number of cards, or it is said what would keep it."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from runner.facts import Attempt, Checkpoint, History, Observed
from runner.job import Batch, Job
from runner.policy.actions import Launch
from runner.policy.batch import Split, Uneven, learning_rate_advice, split_batch, tell_batch
from vramfarm.protocol import Ref

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
REF = Ref(0, 500, 1, "0123abcd")


def batch(samples, per_card):
    return Batch.model_validate({"global": samples, "per_card": per_card})


def job(**fields):
    return Job.model_validate({"command": "train.py"} | fields)


def told(*, samples=256, cards=4, before=8, before_batch=256, resume=REF, whole=True):
    """What a launch on `cards` cards says after an attempt on `before` cards."""
    attempt = Attempt(
        number=1,
        id="a",
        resume=None,
        lineage=0,
        boot_id="b",
        launched_at=NOW,
        world_size=before,
        global_batch=before_batch,
    )
    checkpoint = Checkpoint(ref=REF, size_bytes=1, world_size=before, written_at=NOW)
    seen = Observed(
        now=NOW,
        boot_id="b",
        life="l",
        num_procs=cards,
        global_batch=samples,
        stored_batch=before_batch,
        local=(checkpoint,),
    )
    history = History(attempts=(attempt,) if whole else ())
    wish = {"batch": {"global": samples, "per_card": 4}} if samples else {}
    return list(tell_batch(job(**wish), Launch(2, resume, 0), history, seen))


def test_a_batch_that_changes_is_not_said_to_be_kept():
    """
    Nor is it told from how many cards it came: that is another line's.
    """
    first, second = told(samples=256, cards=4, before=8, before_batch=128)

    assert "global batch 256: 4 a card x 4 cards x 16 (VRAMFARM_GRAD_ACCUM)" == first
    assert second.startswith("the global batch changes, 128 before, 256 now")


@pytest.mark.parametrize(("cards", "expected"), [(1, 64), (2, 32), (4, 16), (8, 8)])
def test_fewer_cards_accumulate_more(cards, expected):
    """
    256 samples a step, 4 a card.
    """
    split = Split(samples=256, per_card=4, cards=cards, accumulation=expected)

    assert split == split_batch(batch(256, 4), cards)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 1024), st.integers(1, 1024))
def test_a_split_is_exact_on_any_number_of_cards(per_card, micro_batches, cards, other_cards):
    """
    The product is the global batch, or there is none: never a little more or less.
    """
    split = split_batch(batch(per_card * micro_batches, per_card), cards)

    if isinstance(split, Split):
        assert per_card * micro_batches == split.per_card * split.cards * split.accumulation
    else:
        assert 0 != micro_batches % cards


@given(st.integers(1, 4096), st.integers(1, 64))
def test_the_per_card_that_is_advised_works(micro_batches, cards):
    """
    Never more than was wished: that is what fits on a card.
    """
    wished = batch(micro_batches * 4, 4)
    found = wished.largest_per_card(cards)

    assert found is None or found <= 4
    assert (found is None) == (wished.global_ % cards != 0)
    assert found is None or isinstance(split_batch(batch(wished.global_, found), cards), Split)


def test_what_cannot_be_split_says_what_would_work():
    """
    Three cards instead of four, on a night when nobody looks.
    """
    expected = (
        "batch: global 256 is not a multiple of per_card 4 x 3 cards = 12; "
        "1, 2, 4, 8 or 16 cards do it with per_card 4, or another batch: global 252 or 264 (--accept-change)"
    )

    assert Uneven(expected) == split_batch(batch(256, 4), 3)


def test_a_smaller_batch_of_a_card_that_keeps_it_comes_first():
    """
    It is the one change that changes nothing.
    """
    split = split_batch(batch(24, 4), 4)

    assert isinstance(split, Uneven)
    assert "= 16; per_card 3 keeps it on 4 cards, or 1, 2, 3 or 6 cards" in split.reason


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ({"batch": {"global": 250, "per_card": 4}}, "global 250 is not a multiple of per_card 4; per_card 2 keeps it"),
        (
            {"cards": 4, "batch": {"global": 24, "per_card": 4}},
            "global 24 is not a multiple of per_card 4 x cards 4; per_card 3 keeps it",
        ),
        ({"cards": 3, "batch": {"global": 256, "per_card": 4}}, "no per_card keeps it on 3 cards"),
        ({"batch": {"global": 2, "per_card": 4}}, "per_card 2 keeps it"),
    ],
)
def test_a_job_that_can_never_keep_its_batch_is_refused(wish, expected):
    """
    Before anything is rented.
    """
    with pytest.raises(ValidationError, match=expected):
        job(**wish)


def test_another_number_of_cards_keeps_the_batch_and_says_so():
    """
    From eight cards to four: one line.
    """
    assert ["global batch 256 is kept: 4 a card x 4 cards x 16 (VRAMFARM_GRAD_ACCUM); before: 8 cards"] == told()


def test_a_first_launch_says_how_the_batch_comes_about():
    """
    There is nothing to compare with.
    """
    assert ["global batch 256: 4 a card x 8 cards x 8 (VRAMFARM_GRAD_ACCUM)"] == told(cards=8, resume=None)


def test_another_batch_comes_with_advice_on_the_learning_rate():
    """
    It was changed with --accept-change: linear for SGD, the square root for Adam.
    """
    advice = "the global batch changes, 256 before, 1024 now: learning rate x 4 for SGD, x 2 for Adam, with a warm-up"

    assert [advice] == told(samples=1024, cards=8, before=8)[1:]


def test_without_a_batch_in_the_job_other_cards_are_a_warning():
    """
    The same script on more cards makes the batch larger without anybody noticing.
    """
    (line,) = told(samples=0, before_batch=0)

    assert line.startswith("8 cards before, 4 now: with the same batch a card the global batch changes; `batch` in")
    assert line.endswith("learning rate x 0.5 for SGD, x 0.707 for Adam, with a warm-up")


def test_the_checkpoint_says_on_how_many_cards_it_was_made():
    """
    On a new machine the journal is new, too.
    """
    (line,) = told(samples=0, whole=False, before_batch=0)

    assert line.startswith("8 cards before, 4 now")


def test_the_store_says_with_which_batch_it_was_made():
    """
    The same change of the batch, on another machine than the one that began.
    """
    assert told(samples=1024, cards=8) == told(samples=1024, cards=8, whole=False)
    assert told() == told(whole=False)


@pytest.mark.parametrize("same", [{"samples": 0, "before_batch": 0, "before": 4}, {"samples": 0, "resume": None}])
def test_nothing_changed_says_nothing(same):
    """
    The same cards, or a start at step 0.
    """
    assert [] == told(**same)


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_advice_is_always_a_sentence(before, now):
    """
    Whatever the batches.
    """
    assert learning_rate_advice(before, now).endswith("with a warm-up")
