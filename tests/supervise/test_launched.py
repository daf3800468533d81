"""Logs of torchrun whose ranks failed in a known way: what `benchmarks/gpu/first_error.py` left, with fewer steps."""

from pathlib import Path

import pytest

from runner.facts import Decision
from runner.supervise.triage import first_error

LOGS = Path(__file__).parents[1] / "data" / "launched"
TRUTH = {
    "value_error": ("user_exception", 1, Decision.GIVE_UP_USER),
    "sigkill": ("sigkill_unknown", 1, Decision.RESUME),
    "segfault": ("segfault", 1, Decision.RESUME),
    "segfault_bare": ("segfault", 1, Decision.RESUME),
    "abort": ("segfault", 1, Decision.RESUME),
    "exit_1": ("user_exception", 1, Decision.GIVE_UP_USER),
    "exit_0": ("uneven_data", 1, Decision.GIVE_UP_USER),
    "hang": ("rank_stuck", 1, Decision.RESUME),
    "import_error": ("missing_module", None, Decision.GIVE_UP_USER),
    "before_init": ("user_exception", 0, Decision.GIVE_UP_USER),
    "restarts": ("user_exception", 1, Decision.GIVE_UP_USER),
    "sigterm": ("sigterm_external", None, Decision.RESUME),
    "sizes": ("collective_mismatch", None, Decision.GIVE_UP_USER),
    "mismatch": ("collective_mismatch", None, Decision.GIVE_UP_USER),
}


@pytest.mark.parametrize("log", sorted(LOGS.glob("*/*.log")), ids=lambda log: f"{log.parent.name} {log.stem}")
def test_the_rank_that_failed_first_is_named(log):
    """
    Whatever the others print, and whomever torchrun's table calls the root cause.
    """
    found = first_error(log)

    assert TRUTH[log.stem] == (found.label, found.rank, found.decision)


def test_every_case_is_there():
    """
    A fixture that is lost tests nothing.
    """
    assert set(TRUTH) == {log.stem for log in LOGS.glob("gloo/*.log")}
