"""Resume, retention and limits: what a reader wants to see, and what always holds."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.facts import Checkpoint, Failed, History, Observed, Server
from runner.job import Limits
from runner.policy.house import plan_retention
from runner.policy.limits import deadline, limit_at, next_time, reserve
from runner.policy.resume import Fetch, From, plan_resume
from runner.policy.slow import retry_at
from tests.simworld import START
from vramfarm.protocol import Ref

SERVER = Server(provider="vramfarm", id="srv_abcdef", price_per_hour="31.20")
UNPRICED = Server(provider="command", id="box")


def ref(step, lineage=1):
    return Ref(lineage, step, 1, f"{step:08x}")


refs = st.sets(st.builds(ref, st.integers(0, 50), st.integers(1, 3)), max_size=12)


@given(local=refs, in_use=refs, keep_last=st.integers(2, 5))
def test_nothing_needed_is_pruned(local, in_use, keep_last):
    """
    The newest and what is in use are kept; every checkpoint is decided once.
    """
    plan = plan_retention(list(local), keep_last=keep_last, in_use=in_use)

    kept = {r for r, _ in plan.keep}
    assert kept | set(plan.remove) == local
    assert not kept & set(plan.remove)
    assert set(sorted(local)[-keep_last:]) <= kept
    assert local & in_use <= kept
    assert len(kept) <= keep_last + len(in_use)


def test_the_newest_lineage_counts_not_the_highest_step():
    """
    After a roll-back to step 2 the checkpoints of the abandoned line go first.
    """
    plan = plan_retention([ref(9), ref(10), ref(3, 2), ref(4, 2)], keep_last=2, in_use=())

    assert (ref(9), ref(10)) == plan.remove


@pytest.mark.parametrize(
    ("local", "offsite", "floor", "unusable", "expected"),
    [
        pytest.param([], [], 0, [], From(None, 1), id="nothing anywhere: step 0"),
        pytest.param([ref(5)], [], 0, [], From(ref(5), 1), id="this disk"),
        pytest.param([ref(5)], [ref(5)], 0, [], From(ref(5), 1), id="both"),
        pytest.param([ref(5)], [ref(7)], 0, [], Fetch(ref(7)), id="the store has a newer one"),
        pytest.param([ref(5)], [ref(7)], 0, [ref(7).name], From(ref(5), 2), id="it does not restore: roll back"),
        pytest.param([ref(9)], [], None, [], From(None, 2), id="start over"),
        pytest.param([ref(9), ref(1, 2)], [], 2, [], From(ref(1, 2), 2), id="crash after starting over"),
        pytest.param([ref(9)], [], 2, [], From(None, 2), id="crash after starting over, before a checkpoint"),
    ],
)
def test_where_an_attempt_begins(local, offsite, floor, unusable, expected):
    """
    The newest of the newest lineage, wherever it is.
    """
    assert expected == plan_resume(local, offsite, floor=floor, unusable=unusable)


@pytest.mark.parametrize(
    ("limits", "server", "expected"),
    [
        pytest.param({}, None, START + timedelta(hours=24), id="nothing set: a day"),
        pytest.param({"max_duration": "12h"}, None, START + timedelta(hours=12), id="duration"),
        pytest.param({"max_cost": "31.20"}, SERVER, START + timedelta(hours=1), id="money"),
        pytest.param({"max_cost": "31.20"}, None, START + timedelta(hours=24), id="money without a server"),
        pytest.param({"max_cost": "31.20"}, UNPRICED, START + timedelta(hours=24), id="money without a price"),
        pytest.param({"until": "07:00 UTC"}, None, START.replace(hour=7), id="clock"),
        pytest.param({"until": "07:00 UTC", "max_duration": "2h"}, None, START.replace(hour=2), id="the earliest"),
    ],
)
def test_deadline(limits, server, expected):
    """
    There is always one.
    """
    assert expected == deadline(Limits.model_validate(limits), START, server)


def test_the_end_of_the_rental_is_a_deadline_too():
    """
    Five minutes before it, so that the stop is ours.
    """
    server = Server(provider="vramfarm", id="srv_abcdef", rental_ends_at="2026-01-01T01:00:00+00:00")

    assert START + timedelta(minutes=55) == deadline(Limits(), START, server)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("07:00 Europe/Berlin", datetime(2026, 3, 28, 6, tzinfo=UTC), id="before the clocks change"),
        pytest.param("07:00 UTC", datetime(2026, 3, 28, 7, tzinfo=UTC), id="a zone with a T in its name"),
        pytest.param("2026-03-30T07:00:00", datetime(2026, 3, 30, 7, tzinfo=UTC), id="ISO without a zone is UTC"),
        pytest.param("2026-03-30T07:00:00+02:00", datetime(2026, 3, 30, 5, tzinfo=UTC), id="ISO with a zone"),
        pytest.param("2026-03-30", datetime(2026, 3, 30, tzinfo=UTC), id="a date is its beginning"),
        pytest.param("12:00 UTC", datetime(2026, 3, 28, 12, tzinfo=UTC), id="just now is tomorrow"),
        pytest.param("13:00 UTC", datetime(2026, 3, 27, 13, tzinfo=UTC), id="today"),
    ],
)
def test_next_time(text, expected):
    """
    A clock time is the next one there.
    """
    assert expected == next_time(text, datetime(2026, 3, 27, 12, tzinfo=UTC))


@pytest.mark.parametrize(
    ("sizes", "save_s", "expected"),
    [
        pytest.param((), 0.0, 30, id="nothing is known"),
        pytest.param((10**11, 10**9), 0.0, 430, id="by the size of the largest that is here"),
        pytest.param((10**11,), 60.0, 150, id="the last one was timed"),
    ],
)
def test_time_is_kept_for_the_last_save(sizes, save_s, expected):
    """
    Twice as long as it took, or as its bytes will take; and half a minute.
    """
    here = tuple(
        Checkpoint(ref=Ref(1, n, 1, f"{n:08x}"), size_bytes=size, world_size=1, written_at=START)
        for n, size in enumerate(sizes)
    )
    seen = Observed(
        now=START, boot_id="b", life="l", deadline_at=START + timedelta(hours=8), local=here, last_save_s=save_s
    )

    assert timedelta(seconds=expected) == reserve(History(opened_at=START), seen)


def test_a_short_limit_still_trains():
    """
    The reserve is never more than a quarter of the time.
    """
    history = History(accepted_at=START, opened_at=START)
    seen = Observed(now=START, boot_id="b", life="l", deadline_at=START + timedelta(minutes=1), last_upload_s=600)

    assert timedelta(seconds=15) == reserve(history, seen)
    assert START + timedelta(seconds=45) == limit_at(history, seen)


def test_a_store_that_is_back_is_noticed_within_a_quarter_of_a_minute():
    """
    However long it was away: until then nothing is safe, and a job that is over pays for an idle machine.
    """

    def wait(failures):
        failed = Failed(subject="of the run", at=START, error="no answer", final=False, failures=failures)
        return (retry_at(failed) - START).total_seconds()

    assert [2, 4, 8, 15, 15] == [wait(failures) for failures in (1, 2, 3, 4, 10_000)]
