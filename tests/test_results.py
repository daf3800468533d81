"""What slow work answered, some of which came out of a bucket."""

import pytest

from runner.facts import Finished, TaskKind
from runner.results import StoreView
from tests.simworld import START


@pytest.mark.parametrize("identity", [None, 5, "x", [1], {"batch": []}, {"batch": {"global": "many"}}], ids=str)
def test_a_job_there_that_makes_no_sense_is_none(identity):
    """
    A runner that died of it would be started again, and die again.
    """
    view = StoreView()
    view.learn({TaskKind.SURVEY: Finished(subject="store", at=START, result={"job": {"identity": identity}})})

    assert 0 == view.global_batch()
