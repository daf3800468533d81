"""Whether more cards bring what they should: only what is sure is said."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from runner.facts import Attempt, Ending, History, Observed, Progress
from runner.job import Job
from runner.policy.scaling import judge, tell_scaling

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
BEFORE = Attempt(
    number=1,
    id="a",
    resume=None,
    lineage=0,
    boot_id="b",
    launched_at=NOW - timedelta(hours=2),
    ended_at=NOW - timedelta(hours=1),
    ending=Ending.INTERRUPTED,
    world_size=1,
    global_batch=256,
    steps_per_s=1.0,
)
CURRENT = replace(BEFORE, number=2, launched_at=NOW - timedelta(minutes=5), ended_at=None, ending=None, world_size=2)


JOB = Job.model_validate({"command": "train.py", "model": {"parameters": 8e9, "strategy": "fsdp_full_shard"}})


def told(before=BEFORE, now=CURRENT, *, rate=1.2, step=100):
    seen = Observed(now=NOW, boot_id="b", life="l", progress=Progress(step=step, steps_per_s=rate))
    return tell_scaling(JOB, History(attempts=(before, now)), seen)


def told_of_plan(*, card="NVIDIA GeForce RTX 4090", rate=0.25, job=JOB, num_procs=8):
    """What an only attempt says."""
    progress = Progress(step=100, steps_per_s=rate)
    seen = Observed(now=NOW, boot_id="b", life="l", progress=progress, card=card, num_procs=num_procs)
    return tell_scaling(job, History(attempts=(replace(CURRENT, number=1, world_size=num_procs),)), seen)


def test_two_cards_that_are_hardly_faster_than_one_are_told_of():
    """
    And where to look.
    """
    expected = (
        "2 cards are 1.2 times 1 card, 2 would be perfect: look at the link between the cards first "
        "(nvidia-smi topo -m); still more cards will not mend it"
    )

    assert expected == told()


@pytest.mark.parametrize(("few", "many"), [((1, 1.0), (2, 1.7)), ((4, 2.0), (8, 3.5)), ((1, 1.0), (4, 3.0))])
def test_what_is_usual_is_not_worth_a_line(few, many):
    """
    1.7 times on two cards, 3 on four.
    """
    assert not judge(few, many)


def test_going_from_eight_cards_to_four_tells_of_the_eight():
    """
    Half the cards at nearly the same speed: the eight were waiting.
    """
    before, now = replace(BEFORE, world_size=8), replace(CURRENT, world_size=4)

    assert told(before, now, rate=0.9).startswith("8 cards are 1.1 times 4 cards, 2 would be perfect")


UNSURE = {
    "the first minutes": {"now": replace(CURRENT, launched_at=NOW - timedelta(minutes=2))},
    "a few steps": {"step": 10},
    "another batch": {"before": replace(BEFORE, global_batch=128)},
    "a batch that only the script knows": {
        "before": replace(BEFORE, global_batch=0),
        "now": replace(CURRENT, global_batch=0),
    },
    "another machine": {"before": replace(BEFORE, boot_id="c")},
    "an attempt that died at once": {"before": replace(BEFORE, ended_at=BEFORE.launched_at + timedelta(minutes=1))},
    "the same cards": {"before": replace(BEFORE, world_size=2)},
    "nothing measured": {"before": replace(BEFORE, steps_per_s=0.0)},
    "no rate yet": {"rate": None},
    "an attempt that is over": {"now": replace(CURRENT, ending=Ending.FAILED)},
}


@pytest.mark.parametrize("change", UNSURE.values(), ids=UNSURE)
def test_what_is_not_sure_is_not_said(change):
    """
    A wrong hint at night costs a machine.
    """
    assert not told(**change)


def test_cards_that_wait_for_the_weights_are_told_of():
    """
    FULL_SHARD of 8B over PCIe: 42 GB a card and step, at 16 GB/s, of a step of three seconds.
    """
    expected = (
        "a step takes 3.0 s, and 2.6 s of that is what each card must send (42 GB with FSDP FULL_SHARD): the cards wait "
        "for the link between them; a strategy that sends less, or cards on NVLink, would not"
    )

    assert expected == told_of_plan(rate=1 / 3)


NOT_THE_LINK = {
    "a slow step": {"rate": 0.1},
    "NVLink": {"card": "NVIDIA H100 80GB HBM3"},
    "one card": {"num_procs": 1},
    "no card": {"card": ""},
    "no model in the job": {"job": Job.model_validate({"command": "train.py"})},
    "a strategy that sends less": {
        "job": Job.model_validate({"command": "t", "model": {"parameters": 8e9, "strategy": "lora"}})
    },
}


@pytest.mark.parametrize("change", NOT_THE_LINK.values(), ids=NOT_THE_LINK)
def test_a_step_that_the_link_does_not_explain_is_not_blamed_on_it(change):
    """
    The script, the loader, the model: there are many reasons to be slow.
    """
    assert not told_of_plan(**({"rate": 1 / 3} | change))
