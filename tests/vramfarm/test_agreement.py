"""Decisions about saves: tables of examples, and a simulation of ranks that drift."""

import random

import pytest

from vramfarm.agreement import (
    AHEAD,
    Fate,
    Rank,
    Wishes,
    decide_fate,
    decide_reason,
    is_agreed,
    missing_at_the_end,
    next_ahead,
    propose_step,
)
from vramfarm.protocol import Arena, Phase, Reason

T, D = Phase.TRAINING, Phase.DONE


def rank(step=5, phase=T, *, alive=True, attached=True, ready=None, filling=None, void=0):
    arena = Arena.READY if ready else Arena.FILLING if filling else Arena.MAPPED
    return Rank(
        attached=attached,
        alive=alive,
        step=step,
        phase=phase,
        arena=arena,
        arena_step=ready or filling or 0,
        void_step=void,
    )


@pytest.mark.parametrize(
    ("ranks", "wishes", "expected"),
    [
        pytest.param([rank(), rank()], Wishes(), None, id="nothing is asked"),
        pytest.param([rank(), rank()], Wishes(due=True), Reason.INTERVAL, id="the clock"),
        pytest.param([rank(), rank()], Wishes(due=True, asked=True), Reason.ASKED, id="a request serves the clock too"),
        pytest.param([rank(), rank()], Wishes(leave=True, asked=True), Reason.LEAVE, id="leaving comes first"),
        pytest.param(
            [rank(phase=D), rank(phase=D)], Wishes(leave=True), Reason.FINAL, id="done counts for more than leaving"
        ),
        pytest.param([rank(), rank()], Wishes(due=True, asked=True, cold=True), None, id="memory is being prepared"),
        pytest.param([rank(), rank()], Wishes(leave=True, cold=True), Reason.LEAVE, id="leaving waits for no memory"),
        pytest.param([rank(phase=D), rank()], Wishes(leave=True, due=True), None, id="one is done: wait for the other"),
        pytest.param([rank(), rank(alive=False)], Wishes(leave=True), None, id="a dead rank"),
        pytest.param([rank(), rank(attached=False)], Wishes(due=True), None, id="a rank that is not there yet"),
        pytest.param([rank(), rank(phase=Phase.LOADING)], Wishes(due=True), None, id="a rank that is loading"),
    ],
)
def test_why_to_save_now(ranks, wishes, expected):
    """
    A save is begun only when all ranks can take part in it.
    """
    assert expected == decide_reason(ranks, wishes)


@pytest.mark.parametrize(
    ("ranks", "final", "expected"),
    [
        pytest.param([rank(6), rank(7)], False, Fate.WAIT, id="on their way"),
        pytest.param([rank(7, ready=7), rank(6)], False, Fate.WAIT, id="one is there"),
        pytest.param([rank(7, ready=7), rank(9, ready=7)], False, Fate.WRITE, id="all staged, one went on"),
        pytest.param(
            [rank(7, ready=7, alive=False), rank(7, ready=7, alive=False)], False, Fate.WRITE, id="all staged and died"
        ),
        pytest.param([rank(7, ready=7), rank(6, alive=False)], False, Fate.VOID, id="one died before"),
        pytest.param([rank(7, ready=7), rank(8)], False, Fate.VOID, id="one passed it"),
        pytest.param([rank(7, ready=7), rank(9, filling=7)], False, Fate.WAIT, id="one trains on while it is copied"),
        pytest.param([rank(7, ready=7), rank(9, D, filling=7)], False, Fate.WAIT, id="one is done while it is copied"),
        pytest.param([rank(7, ready=7), rank(9, filling=5)], False, Fate.VOID, id="one passed it with an older copy"),
        pytest.param([rank(7, ready=7), rank(9, filling=7, alive=False)], False, Fate.VOID, id="one died copying"),
        pytest.param([rank(7, ready=7), rank(9, filling=7, void=7)], False, Fate.VOID, id="one copied in vain"),
        pytest.param([rank(7, ready=7), rank(7, void=7)], False, Fate.VOID, id="one could not"),
        pytest.param([rank(6, D), rank(6, D)], False, Fate.VOID, id="done before it"),
        pytest.param([rank(7, D), rank(7, D, ready=7)], True, Fate.WAIT, id="final: done ranks stage"),
        pytest.param([rank(7, D, ready=7), rank(7, D, ready=7)], True, Fate.WRITE, id="final: all staged"),
        pytest.param([rank(7, ready=5), rank(7, ready=7)], False, Fate.WAIT, id="what is staged is older"),
    ],
)
def test_what_becomes_of_a_save(ranks, final, expected):
    """
    It is written when all have staged it, and void as soon as one never will.
    """
    assert expected == decide_fate(7, ranks, final=final)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param([rank(), rank(alive=False)], None, id="nobody is done"),
        pytest.param([rank(phase=D), rank(phase=D)], None, id="all are"),
        pytest.param([rank(phase=D), rank()], 1, id="one trains"),
        pytest.param([rank(phase=D), rank(), rank(alive=False)], 2, id="a dead one before a late one"),
        pytest.param([rank(phase=D), rank(phase=D, alive=False)], 1, id="one was done, and died before its last save"),
        pytest.param([rank(phase=D), rank(attached=False, alive=False)], 1, id="one that is not there yet"),
    ],
)
def test_whom_the_others_wait_for_at_the_end(ranks, expected):
    """
    The dead come first: they never will be done.
    """
    assert expected == missing_at_the_end(ranks)


def test_no_rank_misses_a_step_that_was_agreed():
    """
    However ranks drift while the saver proposes and looks again, an agreed step lies before all of them.
    """
    dice = random.Random(0)
    agreed = 0
    for _ in range(100_000):
        before = [dice.randrange(5) for _ in range(4)]
        step = propose_step([rank(s) for s in before])
        after = [s + dice.randrange(3) for s in before]
        if is_agreed(step, [rank(s) for s in after]):
            agreed += 1
            assert max(after) < step
    assert agreed > 50_000


def test_quick_ranks_are_asked_earlier():
    """
    A proposal that came too late doubles the lead; one that was in time halves it again.
    """
    leads = [AHEAD]
    for agreed in (False, False, True, True, True):
        leads.append(next_ahead(leads[-1], agreed=agreed))

    assert [2, 4, 8, 4, 2, 2] == leads
    assert 105 == propose_step([rank(90), rank(97)], leads[2])
