"""The communication test with real processes that talk over gloo, and one of them that does not."""

import os
import sys

import pytest

from runner.facts import Severity, TrialEnding
from runner.policy.comm import Setting, judge_trials
from runner.probes.comm import CPU_SIZES, Wish, try_all

PAIR = [(0, 1)]
CPU = Setting(num=2, on_cards=False)


def wish(**fault):
    silent_s = 6.0 if fault.get("what") in {"stop", "sleep"} else 60.0
    env = {"PATH": os.environ["PATH"], "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return Wish(python=sys.executable, env=env, on_cards=False, start_s=100.0, silent_s=silent_s, fault=fault or None)


def run(**fault):
    (trial,) = try_all(wish(**fault), PAIR, {}, limit_s=120)
    return trial


def test_processes_that_talk():
    """
    The right sums at every size, with the bandwidth of each.
    """
    trial = run()

    assert (TrialEnding.GOOD, "", 0) == (trial.ending, trial.message, trial.num_wrong)
    assert list(CPU_SIZES) == [size for size, _ in trial.speeds]
    assert all(busbw > 0 for _, busbw in trial.speeds)
    assert 2 == len(trial.devices)
    assert Severity.OK is judge_trials([trial], CPU)[0].severity


@pytest.mark.parametrize(
    ("what", "where", "told"),
    [("stop", "reduce", "rank 1, summing, stopped"), ("sleep", "join", "rank 1, before joining the others")],
)
def test_a_rank_that_hangs_is_named(what, where, told):
    """
    As a card that does not answer: nobody raises, so only silence tells, and who stayed behind.
    """
    trial = run(rank=1, what=what, where=where)

    assert (TrialEnding.SILENT, (1,)) == (trial.ending, trial.silent)
    assert f"no word for 6 s: {told}" == trial.message


def test_a_rank_that_raises_is_an_error_and_is_named():
    """
    Its own words, not those of the rank that lost it.
    """
    trial = run(rank=1, what="raise", where="reduce")

    assert (TrialEnding.ERROR, "rank 1: RuntimeError: injected by the test") == (trial.ending, trial.message)


def test_a_wrong_sum_is_seen():
    """
    One element is enough, at each size.
    """
    trial = run(rank=1, what="wrong", where="reduce")

    assert (TrialEnding.WRONG, len(CPU_SIZES)) == (trial.ending, trial.num_wrong)


def test_slow_is_told_by_the_floor_and_is_no_hang():
    """
    It ends, with sums that are right, below what was asked for.
    """
    trial = run(rank=1, what="slow", where="reduce")

    assert TrialEnding.GOOD is trial.ending
    finding = judge_trials([trial, trial], Setting(num=2, on_cards=False, floor=0.5))[0]
    assert Severity.REFUSE is finding.severity
    assert "preflight.min_bus_bandwidth is 0.5" in finding.message


def test_an_interpreter_without_torch_says_nothing_of_the_cards(tmp_path):
    """
    The test is not made, and refuses nothing.
    """
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    program.chmod(0o755)

    (trial,) = try_all(Wish(python=str(program), env={}, on_cards=False), PAIR, {}, limit_s=100)

    assert TrialEnding.LATE is trial.ending
    assert "No module named 'torch'" in trial.message
    assert Severity.WARN is judge_trials([trial], CPU)[0].severity


def test_a_process_that_dies_without_a_word_is_an_error():
    """
    By signal or exit code.
    """
    (trial,) = try_all(Wish(python="/usr/bin/false", env={}, on_cards=False), PAIR, {}, limit_s=100)

    assert (TrialEnding.ERROR, "rank 0 died: exit code 1") == (trial.ending, trial.message)
