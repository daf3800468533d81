"""What slow work answered, some of which came out of a bucket."""

import pytest

from runner.facts import Checkpoint, Finished, TaskKind
from runner.results import StoreView
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


@pytest.mark.parametrize("identity", [None, 5, "x", [1], {"batch": []}, {"batch": {"global": "many"}}], ids=str)
def test_a_job_there_that_makes_no_sense_is_none(identity):
    """
    A runner that died of it would be started again, and die again.
    """
    view = StoreView()
    view.learn({TaskKind.SURVEY: Finished(subject="store", at=START, result={"job": {"identity": identity}})})

    assert 0 == view.global_batch()
