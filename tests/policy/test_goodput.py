"""Where time and money went: every second is told once, and what was trained twice is not called useful."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from runner.facts import Attempt, Ending, Exit, Machine
from runner.policy.goodput import goodput, share_out, useful_cost
from vramfarm.protocol import Ref

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(minutes):
    return START + timedelta(minutes=minutes)


def attempt(number, launched, first_step, ended, *, resume=0, step=0, ending=Ending.FAILED):
    return Attempt(
        number=number,
        id=f"id-{number}",
        resume=Ref(1, resume, number, "0" * 8) if resume else None,
        lineage=1,
        boot_id="b",
        launched_at=at(launched),
        first_step_at=None if first_step is None else at(first_step),
        ended_at=None if ended is None else at(ended),
        ending=None if ended is None else ending,
        exit=None if ended is None else Exit(code=1),
        step=step,
    )


def machine(*attempts, minutes=60, name="a"):
    return Machine(
        id=name, opened_at=at(1), paid_from=START, seen_at=at(minutes), price_per_hour="60", attempts=attempts
    )


def test_a_crash_costs_what_came_after_the_checkpoint():
    """
    40 of the 100 steps were trained again, and each start took two minutes.
    """
    first = attempt(1, 5, 7, 27, step=100)
    second = attempt(2, 30, 32, 52, resume=60, step=160, ending=Ending.SUCCEEDED)

    (spent,) = share_out((machine(first, second),), newest_step=160)

    assert [(120, 720, 480), (120, 1200, 0)] == [(s.startup_s, s.useful_s, s.lost_s) for s in spent.shares]
    assert (3600, 300, 3600 - 300 - 1320 - 1320) == (spent.total_s, spent.setup_s, spent.idle_s)
    assert (Decimal("60.00"), Decimal("32.00")) == (spent.cost, useful_cost(spent))


def test_over_machines_the_next_one_says_what_was_kept():
    """
    A machine that vanished after its last upload lost what it trained since.
    """
    gone = machine(attempt(1, 5, 5, None, step=100), minutes=25)
    heir = machine(attempt(2, 5, 5, 25, resume=50, step=100, ending=Ending.SUCCEEDED), name="b")

    first, second = share_out((gone, heir), newest_step=100)

    assert [(600, 600), (1200, 0)] == [(s.shares[0].useful_s, s.shares[0].lost_s) for s in (first, second)]


def test_what_runs_has_lost_nothing_yet_and_what_failed_last_keeps_its_checkpoint():
    """
    While an attempt lives all of it may be kept; when it died, the newest checkpoint counts.
    """
    live, dead = attempt(1, 0, 0, None, step=80), attempt(1, 0, 0, 60, step=80)

    assert [3600.0, 2700.0] == [share_out((machine(a),), newest_step=60)[0].useful_s for a in (live, dead)]


def test_an_attempt_that_made_no_step_was_only_started():
    """
    And a run without attempts was only set up.
    """
    (failed,) = share_out((machine(attempt(1, 5, None, 20)),), newest_step=0)
    (nothing,) = share_out((machine(),), newest_step=0)

    assert (900, 0, 0.0) == (failed.startup_s, failed.useful_s, goodput((failed,)))
    assert (3600, 0, 0.0) == (nothing.setup_s, nothing.idle_s, goodput(()))


def test_what_was_before_the_time_of_an_entry_is_not_in_its_parts():
    """
    `--start-over` begins a machine's time anew: attempts of before are listed, their seconds are not.
    """
    before = attempt(1, -60, -59, -30, step=100)
    spent = share_out((machine(before, attempt(2, 5, 7, 60, step=10), minutes=60),), newest_step=10)[0]

    assert [(0, 0, 0), (120, 3180, 0)] == [(s.startup_s, s.useful_s, s.lost_s) for s in spent.shares]
    assert (300, 0) == (spent.setup_s, spent.idle_s)


def test_time_after_the_conclusion_does_not_count_but_its_money_does():
    """
    A run that is over, and is run again to bring its outputs off, was not less well spent.
    """
    over = replace(machine(attempt(1, 0, 0, 30, step=10, ending=Ending.SUCCEEDED), minutes=120), concluded_at=at(30))

    (spent,) = share_out((over,), newest_step=10)

    assert (1800, 0, 1.0) == (spent.total_s, spent.idle_s, goodput((spent,)))
    assert (Decimal("120.00"), Decimal("30.00")) == (spent.cost, useful_cost(spent))


moments = st.lists(st.integers(0, 500), min_size=3, max_size=9).map(sorted)


@given(moments=moments, steps=st.lists(st.integers(0, 100), min_size=3, max_size=3), resumes=st.integers(0, 100))
def test_no_second_is_told_twice(moments, steps, resumes):
    """
    The parts are never negative and add up to the whole.
    """
    triples = zip(moments[0::3], moments[1::3], moments[2::3], strict=False)
    attempts = [attempt(n, *times, resume=resumes, step=steps[n]) for n, times in enumerate(triples)]

    (spent,) = share_out((machine(*attempts, minutes=501),), newest_step=50)

    parts = [spent.setup_s, spent.idle_s, *(x for s in spent.shares for x in (s.startup_s, s.useful_s, s.lost_s))]
    assert min(parts) >= 0
    assert abs(sum(parts) - spent.total_s) < 1e-6
    assert 0 <= goodput((spent, replace(spent))) <= 1


times = st.integers(-500, 500)


@given(
    attempts=st.lists(st.tuples(times, st.none() | times, st.none() | times, st.integers(0, 100)), max_size=5),
    ends=st.tuples(st.integers(-10, 500), st.none() | times),
    newest=st.integers(0, 100),
)
def test_the_parts_never_exceed_the_whole(attempts, ends, newest):
    """
    Whatever clocks did, whatever was reopened: goodput is between 0 and 100 %.
    """
    minutes, concluded = ends
    entry = machine(*(attempt(n, *a[:3], step=a[3]) for n, a in enumerate(attempts)), minutes=minutes)
    entry = replace(entry, concluded_at=None if concluded is None else at(concluded))

    (spent,) = share_out((entry,), newest)

    parts = [spent.setup_s, spent.idle_s, *(x for s in spent.shares for x in (s.startup_s, s.useful_s, s.lost_s))]
    assert min(parts) >= 0
    assert abs(sum(parts) - spent.total_s) < 1e-6
    assert 0 <= goodput((spent,)) <= 1
    assert 0 <= useful_cost(spent) <= spent.cost


def test_a_script_whose_log_counts_anew_trained_all_the_same():
    """
    Steps of a log may be fewer than the checkpoint has that was resumed from.
    """
    last = replace(attempt(1, 0, 2, 60, resume=60, step=32, ending=Ending.SUCCEEDED), from_log=True)

    (spent,) = share_out((machine(last),), newest_step=92)

    assert (120, 3480, 0) == (spent.startup_s, spent.useful_s, spent.lost_s)
