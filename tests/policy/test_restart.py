"""Whether to try again: tables, then a property."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.facts import Attempt, Decision, Diagnosis, Ending, Exit, Outcome
from runner.job import RestartPolicy
from runner.policy.restart import GiveUp, Retry, Succeeded, count_failures, decide_restart
from tests.simworld import START
from vramfarm.protocol import Ref

POLICY = RestartPolicy(initial_delay="10s", max_delay="1m")


def ref(step):
    return None if step is None else Ref(1, step, 1, "0" * 8)


def attempts(*rows):
    """Rows of (resumed at step, ending)."""
    return tuple(
        Attempt(
            number=n,
            id=str(n),
            resume=ref(step),
            lineage=1,
            boot_id="b",
            launched_at=START,
            ending=ending,
            exit=Exit(code=1),
            ended_at=START,
            reason="boom",
        )
        for n, (step, ending) in enumerate(rows, 1)
    )


FAILED, LEFT = Ending.FAILED, Ending.INTERRUPTED


def test_a_full_disk_takes_nothing_from_the_budget():
    """
    Nothing was trained and nothing could be said. A second time with room at the launch, the machine is given up.
    """
    full = diagnosis("disk_full", "resume", category="disk")
    one, two = (replace(a, diagnosis=full) for a in attempts((None, FAILED), (None, FAILED)))
    only = RestartPolicy(initial_delay="10s", max_restarts_without_progress=1)

    again = decide_restart((one, two), None, only)

    assert 0 == count_failures((one, two), None)
    assert 1 == count_failures((replace(one, step=5),), None)
    assert isinstance(decide_restart((one,), None, only), Retry)
    assert isinstance(again, GiveUp)
    assert Outcome.REFUSED is again.outcome


@pytest.mark.parametrize(
    ("rows", "newest", "expected"),
    [
        pytest.param([(None, FAILED)], None, 1, id="first failure"),
        pytest.param([(None, FAILED)], 100, 0, id="it made a checkpoint"),
        pytest.param([(None, FAILED), (None, FAILED), (None, FAILED)], None, 3, id="never a checkpoint"),
        pytest.param([(None, FAILED), (100, FAILED), (100, FAILED)], 100, 2, id="moved once, then stuck"),
        pytest.param([(100, FAILED), (100, LEFT), (100, FAILED)], 100, 2, id="interrupted counts for nothing"),
        pytest.param([(100, FAILED), (100, FAILED)], 200, 0, id="the last one moved on"),
    ],
)
def test_failures_without_progress(rows, newest, expected):
    """
    Only failed attempts since the last new checkpoint count.
    """
    assert expected == count_failures(attempts(*rows), ref(newest))


def test_backoff_doubles_up_to_the_longest():
    """
    10 s, 20 s, then 1 m at most.
    """
    policy = POLICY.model_copy(update={"max_restarts_without_progress": 99})

    waits = [decide_restart(attempts(*[(None, FAILED)] * n), None, policy).at - START for n in (1, 2, 3, 4, 50)]

    assert [10, 20, 40, 60, 60] == [w.total_seconds() for w in waits]


def test_giving_up_names_the_error():
    """
    The reason carries what the last attempt said.
    """
    assert GiveUp("3 attempts in a row made no progress: boom") == decide_restart(
        attempts(*[(None, FAILED)] * 3), None, POLICY
    )


def test_success_ends_it():
    """
    Nothing is left to train, whatever came before.
    """
    assert Succeeded() == decide_restart(attempts((None, FAILED), (None, Ending.SUCCEEDED)), None, POLICY)


@given(
    rows=st.lists(st.tuples(st.none() | st.integers(0, 5), st.sampled_from([FAILED, LEFT])), min_size=1, max_size=12),
    newest=st.none() | st.integers(0, 6),
)
def test_a_retry_never_waits_longer_than_the_policy(rows, newest):
    """
    Whatever the history, the next launch is at most `max_delay` away, or there is none.
    """
    match decide_restart(attempts(*rows), ref(newest), POLICY):
        case Retry(at=at):
            assert timedelta() <= at - START <= POLICY.max_delay
        case decision:
            assert isinstance(decision, GiveUp)


# --------------------------------------------------------------------- what triage is good for


MINUTE = timedelta(minutes=1)


def diagnosis(label, decision, *, category="user_code", line="", env=None, confidence="high"):
    return Diagnosis(
        label=label,
        category=category,
        rank=0,
        primary_line=line,
        primary_line_no=1,
        cause="cause",
        remedy="",
        decision=Decision(decision),
        env=env or {},
        confidence=confidence,
        summary=line,
    )


def died(number, found, *, step=300, resume=200, env=None, ending=FAILED, lasted=MINUTE):
    return Attempt(
        number=number,
        id=str(number),
        resume=ref(resume),
        lineage=1,
        boot_id="b",
        launched_at=START,
        env=env or {},
        ending=ending,
        exit=Exit(code=1),
        step=step,
        ended_at=START + lasted,
        reason="boom",
        diagnosis=found,
    )


BUG = diagnosis("user_exception", "give_up_user", line="rank 3: ValueError: sample 17")
BOOM = replace(BUG, primary_line="[rank0]: RuntimeError: boom at 60", confidence="medium")
SYNTAX = diagnosis("user_exception", "give_up_user", line="SyntaxError: invalid syntax")
MODULE = diagnosis("missing_module", "give_up_user", category="user_config", line="ModuleNotFoundError: x")
ECC = diagnosis("gpu_ecc", "give_up_machine", category="machine")
ONE_ECC = diagnosis("gpu_ecc", "resume", category="machine")
STUCK = diagnosis("rank_stuck", "resume", category="process", line="rank 2 is stuck")
KILLED = diagnosis("sigkill_unknown", "resume", category="process", confidence="medium")
RESET = diagnosis("network_reset", "resume", category="network_storage")
NO_P2P = {"NCCL_P2P_DISABLE": "1"}
P2P = diagnosis("p2p_hang", "retry_env", category="nccl", env=NO_P2P)
OFFLINE = diagnosis("wandb_prompt", "retry_env", category="stall", env={"WANDB_MODE": "offline"})
PICKLE = diagnosis("weights_only", "retry_env", env={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"})

GAVE_UP, REFUSED = Outcome.GAVE_UP, Outcome.REFUSED


@pytest.mark.parametrize(
    ("history", "outcome"),
    [
        pytest.param([died(1, SYNTAX, step=0, resume=None)], GAVE_UP, id="a syntax error before the first step"),
        pytest.param([died(1, MODULE, step=200)], GAVE_UP, id="a missing package, on a machine that resumes"),
        pytest.param([died(1, MODULE, step=0, resume=None, lasted=60 * MINUTE)], None, id="after an hour, who knows"),
        pytest.param([died(1, SYNTAX, step=201)], None, id="a syntax error after a step"),
        pytest.param([died(1, BUG, step=0, resume=None)], None, id="an exception that may be chance"),
        pytest.param([died(1, None)], None, id="nobody looked"),
        pytest.param([died(1, ECC)], REFUSED, id="the machine, for certain"),
        pytest.param([died(1, replace(ECC, confidence="medium"))], None, id="the machine, perhaps"),
        pytest.param([died(1, ONE_ECC), died(2, ONE_ECC, step=900)], REFUSED, id="the same hardware twice"),
        pytest.param([died(1, BUG), died(2, BUG)], GAVE_UP, id="the same error at the same step"),
        pytest.param([died(1, BUG), died(2, BUG, step=301)], GAVE_UP, id="the same error one step on"),
        pytest.param([died(1, BUG), died(2, BUG, step=450, resume=400)], None, id="the same error elsewhere"),
        pytest.param(
            [died(1, BUG, resume=None), died(2, BUG, resume=200)], GAVE_UP, id="progress does not forgive the same step"
        ),
        pytest.param(
            [died(1, BUG), died(2, replace(BUG, primary_line="rank 1: ValueError: sample 9"))],
            GAVE_UP,
            id="the same words with other numbers",
        ),
        pytest.param([died(1, BUG), died(2, SYNTAX)], None, id="another error"),
        pytest.param(
            [died(1, replace(P2P, env={})), died(2, P2P)], None, id="the same, and a change was not tried yet"
        ),
        pytest.param([died(1, BUG, step=0), died(2, BUG, step=0)], GAVE_UP, id="the same error at the start"),
        pytest.param(
            [died(1, STUCK, step=0, lasted=60 * MINUTE), died(2, STUCK, step=0, lasted=90 * MINUTE)],
            None,
            id="a script that tells no steps",
        ),
        pytest.param([died(1, BUG), died(2, None, ending=LEFT), died(3, BUG)], GAVE_UP, id="left between"),
        pytest.param([died(1, STUCK), died(2, STUCK)], GAVE_UP, id="stuck at the same step"),
        pytest.param([died(1, KILLED), died(2, KILLED)], None, id="killed from outside twice"),
        pytest.param([died(1, RESET), died(2, RESET)], None, id="the network twice"),
        pytest.param([died(1, BOOM, resume=None), died(2, BOOM)], GAVE_UP, id="a plain exception at the same step"),
        pytest.param([died(1, BOOM, step=0), died(2, BOOM, step=0)], GAVE_UP, id="a plain exception at the start"),
        pytest.param(
            [
                died(1, replace(BOOM, primary_line="[rank0]: RuntimeError: bad tensor at 0x7F3A")),
                died(2, replace(BOOM, primary_line="[rank1]: RuntimeError: bad tensor at 0x7F4B")),
            ],
            GAVE_UP,
            id="a plain exception, another rank and address",
        ),
        pytest.param([died(1, BOOM), died(2, BOOM, step=450, resume=400)], None, id="a plain exception further on"),
        pytest.param(
            [died(1, BOOM), died(2, replace(BOOM, primary_line="[rank0]: EOFError"))], None, id="another exception"
        ),
        pytest.param(
            [died(n, replace(BOOM, confidence="low")) for n in (1, 2)], None, id="an exception that is hardly seen"
        ),
        *(
            pytest.param([died(n, replace(BOOM, category=category)) for n in (1, 2)], None, id=f"perhaps {category}")
            for category in ("network_storage", "nccl", "machine_memory", "process", "signal", "unknown")
        ),
        pytest.param(
            [died(n, replace(BOOM, decision=Decision.RESUME)) for n in (1, 2)],
            None,
            id="perhaps, and worth another try",
        ),
        pytest.param([died(1, P2P, step=0), died(2, P2P, step=0, env=NO_P2P)], REFUSED, id="the change did not help"),
        pytest.param([died(1, PICKLE), died(2, PICKLE)], GAVE_UP, id="what nobody may change"),
        pytest.param([died(n, RESET, step=n, resume=200) for n in (1, 2, 3)], GAVE_UP, id="the budget"),
        pytest.param(
            [died(n, replace(ECC, confidence="low")) for n in (1, 2, 3)], REFUSED, id="the budget, and the machine"
        ),
    ],
)
def test_who_is_to_blame(history, outcome):
    """
    Certain ends come at once, repetitions at the second, the rest by the budget; the outcome names who.
    """
    decided = decide_restart(tuple(history), ref(history[-1].resume.step) if history[-1].resume else None, POLICY)

    assert outcome == (decided.outcome if isinstance(decided, GiveUp) else None), decided


@pytest.mark.parametrize(
    ("history", "users", "expected"),
    [
        pytest.param([died(1, BUG)], (), {}, id="no change is asked for"),
        pytest.param([died(1, P2P)], (), NO_P2P, id="the change is made"),
        pytest.param([died(1, P2P)], ("NCCL_P2P_DISABLE",), {}, id="the user has set it"),
        pytest.param([died(1, PICKLE)], (), {}, id="a change that would run what a file holds"),
        pytest.param([died(1, P2P), died(2, BUG, env=NO_P2P)], (), NO_P2P, id="it helped and is kept"),
        pytest.param(
            [died(1, P2P), died(2, OFFLINE, env=NO_P2P)],
            (),
            {**NO_P2P, "WANDB_MODE": "offline"},
            id="one more, beside what helped",
        ),
        pytest.param([died(1, P2P), died(2, None, env=NO_P2P, ending=LEFT)], (), NO_P2P, id="left between"),
        pytest.param(
            [died(1, RESET), died(2, P2P, step=1), died(3, RESET, step=2, env=NO_P2P)], (), NO_P2P, id="another failure"
        ),
    ],
)
def test_the_environment_of_a_retry(history, users, expected):
    """
    One change a retry, never over the user's; what helped stays.
    """
    decided = decide_restart(tuple(history), ref(1000), POLICY, users=users)

    assert expected == dict(decided.env)


def test_a_change_that_did_not_help_goes():
    """
    The next attempt has its own change only, or none.
    """
    other = replace(P2P, env={"NCCL_SHM_DISABLE": "1"})

    decided = decide_restart((died(1, P2P), died(2, other, step=1, env=NO_P2P)), ref(1000), POLICY)

    assert {"NCCL_SHM_DISABLE": "1"} == dict(decided.env)


def test_giving_up_says_what_would_help():
    """
    The reason carries error and remedy.
    """
    found = replace(SYNTAX, remedy="correct the script")

    decided = decide_restart((died(1, found, step=0, resume=None),), None, POLICY)

    assert GiveUp("it fails before the first step and would again: boom; correct the script") == decided


def test_a_guess_by_the_log_gives_nothing_up():
    """
    Steps that were only read in a log are as good as none: at which one it died is not known to the step.
    """
    long = [replace(died(n, STUCK, lasted=60 * MINUTE), from_log=True) for n in (1, 2)]
    early = replace(died(1, SYNTAX, step=201), from_log=True)

    assert isinstance(decide_restart(tuple(long), ref(200), POLICY), Retry)
    assert 0 == early.told_step
