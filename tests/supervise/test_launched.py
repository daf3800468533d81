"""
Logs of torchrun whose ranks failed in a known way: what `benchmarks/gpu/first_error.py` left, with fewer steps and fewer
repeated warnings. `gloo`: torch 2.13 on the processor; `nccl`: torch 2.11 and NCCL 2.28.9 on two H200.
"""

from pathlib import Path

import pytest

from runner.facts import Decision
from runner.supervise.recorder import Recorded, compare, missing, read_dumps, tell
from runner.supervise.triage import first_error

LOGS = Path(__file__).parents[1] / "data" / "launched"
TRUTH = {
    "value_error": ("user_exception", 1, Decision.GIVE_UP_USER),
    "sigkill": ("sigkill_unknown", 1, Decision.RESUME),
    "sigkill_0": ("sigkill_unknown", 0, Decision.RESUME),
    "segfault": ("segfault", 1, Decision.RESUME),
    "segfault_bare": ("segfault", 1, Decision.RESUME),
    "abort": ("segfault", 1, Decision.RESUME),
    "exit_1": ("user_exception", 1, Decision.GIVE_UP_USER),
    "exit_0": ("uneven_data", 1, Decision.GIVE_UP_USER),
    "hang": ("rank_stuck", 1, Decision.RESUME),
    "import_error": ("missing_module", None, Decision.GIVE_UP_USER),
    "before_init": ("user_exception", 0, Decision.GIVE_UP_USER),
    "restarts": ("user_exception", 1, Decision.GIVE_UP_USER),
    "recorded": ("user_exception", 1, Decision.GIVE_UP_USER),
    "sighup": ("sighup", None, Decision.RESUME),
    "sigint": ("sigterm_external", None, Decision.RESUME),
    "sigterm": ("sigterm_external", None, Decision.RESUME),
    "sizes": ("collective_mismatch", None, Decision.GIVE_UP_USER),
    "sizes_detail": ("collective_mismatch", None, Decision.GIVE_UP_USER),
    "mismatch": ("collective_mismatch", None, Decision.GIVE_UP_USER),
    "out_of_memory": ("cuda_oom", 1, Decision.GIVE_UP_USER),
    "illegal_access": ("cuda_illegal_access", 1, Decision.GIVE_UP_USER),
    "device_assert": ("device_side_assert", 1, Decision.GIVE_UP_USER),
}
WITHOUT_A_WORD = ("nccl_timeout_missing_rank", 1, Decision.RESUME)
ON_CARDS = {"hang": WITHOUT_A_WORD, "exit_0": WITHOUT_A_WORD}
"""NCCL only knows that nothing came."""


@pytest.mark.parametrize("log", sorted(LOGS.glob("*/*.log")), ids=lambda log: f"{log.parent.name} {log.stem}")
def test_the_rank_that_failed_first_is_named(log):
    """
    Whatever the others print, and whomever torchrun's table calls the root cause.
    """
    found = first_error(log)

    expected = (ON_CARDS if log.parent.name == "nccl" else {}).get(log.stem, TRUTH[log.stem])
    assert expected == (found.label, found.rank, found.decision)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("asleep", Recorded(behind=1)),
        ("loader", Recorded(behind=1)),
        (
            "mismatch",
            Recorded(
                differ={
                    0: "all_reduce of [[16777216]], in fault (failing.py:64)",
                    1: "all_gather, in fault (failing.py:62)",
                }
            ),
        ),
    ],
)
def test_dumps_of_real_ranks_that_hang_name_who_and_what(case, expected):
    """
    As torch 2.11 wrote them on two H200 when the runner asked; `benchmarks/gpu/hang.py` did the rest.
    """
    dumps = read_dumps(LOGS / "dumps" / case)

    assert {0, 1} == set(dumps)
    assert expected == compare(dumps)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("asleep", "rank 1 did not come to collective 74, all_reduce of [[4]], in main (failing.py:116)"),
        (
            "mismatch",
            "rank 0 is in all_reduce of [[16777216]], in fault (failing.py:64); rank 1 is in all_gather, in fault (failing.py:62)",
        ),
    ],
)
def test_the_evidence_says_in_its_first_line_who_did_not_come(case, expected):
    """
    Whoever opens flight-recorder.txt at night need not compare numbers.
    """
    dumps = read_dumps(LOGS / "dumps" / case)

    assert expected == tell(compare(dumps), dumps)


def test_who_writes_no_dump_while_all_others_wait_is_named():
    """
    Torch dumps without Python: a rank that does not is stopped, or gone. Of two such ranks none is named.
    """
    dumps = {0: read_dumps(LOGS / "dumps" / "loader")[0]}

    assert (1, None) == (missing(dumps, {0, 1}), missing(dumps, {0, 1, 2}))
    assert tell(Recorded(behind=1), dumps, {1}).endswith(", and wrote no dump")


def test_every_case_is_there():
    """
    A fixture that is lost tests nothing.
    """
    on_cards = {"out_of_memory", "illegal_access", "device_assert"}
    assert set(TRUTH) - on_cards == {log.stem for log in LOGS.glob("gloo/*.log")}
    assert set(TRUTH) - {"sizes"} == {log.stem for log in LOGS.glob("nccl/*.log")}  # NCCL lets other sizes pass
