"""What slow work answered, some of which came out of a bucket."""

import json
from dataclasses import replace

import pytest

from runner.facts import Checkpoint, Conclusion, Failed, Finished, Outcome, Running, TaskKind
from runner.policy.slow import UNREADABLE
from runner.results import StoreView, dump_conclusion, parse_conclusion
from runner.tasks import dump_checkpoint
from tests.simworld import START
from vramfarm.protocol import Ref


def _listing(*steps, **more):
    found = [
        Checkpoint(ref=Ref(1, step, 1, f"{step:08x}"), size_bytes=1, world_size=1, written_at=START) for step in steps
    ]
    return Finished(subject="x", at=START, result={"checkpoints": [dump_checkpoint(c) for c in found], **more})


def test_a_checkpoint_that_the_store_had_and_has_not_any_more_is_missed():
    """
    But for those beyond `keep_last`, which the runner removes, and those that are there and damaged, or not shown.
    """
    view = StoreView(keep_last=2)
    names = {step: Ref(1, step, 1, f"{step:08x}").name for step in (100, 200, 300, 400)}

    view.learn({TaskKind.SURVEY: _listing(100, 200, 300)})
    view.learn({TaskKind.TIDY: _listing(200, 300)})
    tidied = view.vanished
    view.learn({TaskKind.UPLOAD: _listing(400, refused=[names[300]], spoilt={names[200]: ["", "why"]})})
    hidden = view.vanished
    view.learn({TaskKind.SURVEY: _listing(300, 400)})
    view.learn({TaskKind.SURVEY: _listing()})

    assert (frozenset(), frozenset()) == (tidied, hidden)
    assert {names[300], names[400]} == view.vanished


@pytest.mark.parametrize(
    ("failures", "waited", "is_lost"),
    [
        pytest.param(3, UNREADABLE, True, id="for long enough"),
        pytest.param(9, UNREADABLE / 2, False, id="a part of the store may start again"),
        pytest.param(2, 2 * UNREADABLE, False, id="hardly tried"),
    ],
)
def test_what_the_store_alone_fails_at_is_lost_after_a_while(failures, waited, is_lost):
    """
    An older one is taken then, or the run ends. An outage, of which nobody says that others can be read, is waited for.
    """
    name, view = Ref(1, 200, 1, f"{200:08x}").name, StoreView()
    failed = Failed(subject=name, at=START + waited, since=START, error="500", final=False, failures=failures)

    view.learn({TaskKind.SURVEY: _listing(200), TaskKind.RESTORE: failed})
    before = view.unusable_now()
    view.learn({TaskKind.RESTORE: replace(failed, unreadable=True)})

    assert (frozenset(), {name} if is_lost else frozenset()) == (before, view.unusable_now())


def test_outputs_that_do_not_get_into_the_store_are_known_until_they_do():
    """
    Also while the next copy runs; a failure to copy at all says nothing of them.
    """
    view, known = StoreView(), []
    for state in (
        Finished(subject="so far", at=START, result={"stuck": "x: no"}),
        Running(subject="so far", started_at=START),
        Failed(subject="so far", at=START, error="away", final=False, failures=1),
        Finished(subject="so far", at=START, result={}),
    ):
        view.learn({TaskKind.OUTPUTS: state})
        known.append(view.outputs_stuck)

    assert ["x: no", "x: no", "x: no", ""] == known


@pytest.mark.parametrize("identity", [None, 5, "x", [1], {"batch": []}, {"batch": {"global": "many"}}], ids=str)
def test_a_job_there_that_makes_no_sense_is_none(identity):
    """
    A runner that died of it would be started again, and die again.
    """
    view = StoreView()
    view.learn({TaskKind.SURVEY: Finished(subject="store", at=START, result={"job": {"identity": identity}})})

    assert 0 == view.global_batch()


@pytest.mark.parametrize("missing", ["", "not all outputs are in the store: x"])
def test_how_a_run_ended_is_read_as_it_was_written(missing):
    """
    With what of it is not in the store; nothing of it moves a cursor.
    """
    over = Conclusion(outcome=Outcome.SUCCEEDED, reason="done", at=START)
    told = dump_conclusion(over, attempt=3, missing=missing)

    assert replace(over, attempt=3, missing=missing) == parse_conclusion(json.loads(json.dumps(told)))
    assert "?[2J" == parse_conclusion({**told, "missing": "\x1b[2J"}).missing
