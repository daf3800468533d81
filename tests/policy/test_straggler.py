"""Which rank holds the others up: only when it is sure."""

import random

import pytest

from runner.facts import CardPulse, Pulse, RankPulse, Stage
from runner.policy.straggler import Lags, straggler, watch_lags

CHANCE = random.Random(1)
COOL, HOT = (), ("too hot",)


def looked(late_s, *, looks=60, held=(), num_ranks=4, stage=Stage.TRAINING):
    """Five-second looks at steps of one second; `late_s(rank)`: how much later than the first it is at each."""
    known, cards = Lags(), ()
    for look in range(1, looks + 1):
        if look % 12 == 1:
            cards = tuple(CardPulse(index=r, throttled=HOT if r in held else COOL) for r in range(num_ranks))
        ranks = tuple(
            RankPulse(rank=r, pid=r + 1, state="S", step=5 * look, beat_s=5.0 * look + late_s(r))
            for r in range(num_ranks)
        )
        known = watch_lags(known, Pulse(at_s=5.0 * look, stage=stage, ranks=ranks, cards=cards))
    return straggler(known)


def test_the_same_rank_again_and_again_is_named():
    """
    It comes to every step a good part of a step after all others.
    """
    assert "rank 2 holds the others up: it is the last at most steps" == looked(lambda r: 0.3 if r == 2 else 0.01 * r)


def test_a_slow_rank_whose_card_is_hot_is_told_why():
    """
    The cause is in the same line.
    """
    said = looked(lambda r: 0.3 * (r == 2), held={2})

    assert said.endswith("it is the last at most steps; its card is held down (too hot)")


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({1}, "clocks are held down: card 1 (too hot); all ranks go at the pace of the slowest"),
        ({0, 1, 2, 3}, "the clocks of every card are held down (too hot)"),
        ((), ""),
    ],
)
def test_cards_whose_clocks_are_held_down(held, said):
    """
    Though all ranks come to every step together, as they do where each waits for all.
    """
    assert said == looked(lambda _: 0.0, held=held)


@pytest.mark.parametrize(
    "late_s",
    [
        pytest.param(lambda r: 0.05 * r, id="a little"),
        pytest.param(lambda _: CHANCE.random() * 0.9, id="now one, now another"),
        pytest.param(lambda r: 0.4 * (r >= 2), id="two of four"),
    ],
)
def test_what_is_not_sure_is_not_said(late_s):
    """
    No word about ranks that differ as ranks do.
    """
    assert "" == looked(late_s)


def test_a_short_time_proves_nothing():
    """
    Two minutes of looks at least.
    """
    assert "" == looked(lambda r: 0.3 * (r == 2), looks=20)


def test_a_card_that_was_hot_twice_proves_nothing():
    """
    Looks between two samples show the same sample, and are no further ones.
    """
    assert "" == looked(lambda _: 0.0, looks=24, held={1})


def test_one_rank_has_nobody_to_hold_up():
    """
    And is never called slow.
    """
    assert "" == looked(lambda _: 0.3, num_ranks=1)
