"""What a cron line does next, by what the store and the provider say."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from runner.facts import Earlier, Machine, Offer, Outcome, RentedServer, Server, ServerState
from runner.job import Job, Limits
from runner.policy.limits import WORTH_RENTING, deadline, is_raised, is_reached, why_not_worth_renting
from runner.policy.night import (
    ONE_NIGHT,
    SILENCE,
    STORE_REST,
    Accepted,
    GiveBack,
    Night,
    NoMore,
    Over,
    Refusal,
    Refused,
    Rent,
    TooShort,
    Watch,
    Wish,
    choose,
    decide_step,
    disk_gb,
    is_outdated,
    why_none,
    wish_of,
)

JOB = Job.model_validate({"command": "train.py", "provider": {"max_machines": 2}})


def server(id_: str = "srv_1", state: ServerState = ServerState.RUNNING) -> RentedServer:
    return RentedServer(
        id=id_,
        state=state,
        detail=state,
        label="run:job",
        machine="m_1",
        created_at="2026-01-01T00:00:00+00:00",
        rental_ends_at="",
        price_per_hour=Decimal(10),
        cost=Decimal(0),
    )


def offer(id_: str, price: str, cards: int = 8, **more: object) -> Offer:
    fields = {"card": "h100", "name": "H100", "card_bytes": 80 * 10**9, "cpu_cores": 64, "disk_bytes": 10**12}
    ram = 80 * 10**9 * cards
    return Offer(**{"id": id_, "cards": cards, "price_per_hour": Decimal(price), "ram_bytes": ram, **fields, **more})  # type: ignore[arg-type]


LIVE, GONE = server(), server("srv_0", ServerState.GONE)
SWAP = {"told_by": "srv_1", "verdict": "swap", "verdict_reason": "the fabric is down"}


@pytest.mark.parametrize(
    ("night", "expected"),
    [
        pytest.param(Night(), Rent(1), id="nothing there: rent"),
        pytest.param(Night(rentals=(GONE,)), Rent(2), id="one is gone and the run is not over: the next"),
        pytest.param(Night(rentals=(LIVE, GONE)), Watch(LIVE), id="it has not said anything yet"),
        pytest.param(Night(rentals=(LIVE,), told_by="srv_0", has_begun=True), Watch(LIVE), id="an earlier one's word"),
        pytest.param(Night(rentals=(LIVE,), told_by="srv_1", has_begun=True), Accepted(LIVE), id="it trains"),
        pytest.param(Night(rentals=(LIVE,), **SWAP), GiveBack(LIVE, "the fabric is down"), id="it is no good"),
        pytest.param(Night(rentals=(LIVE,), refused={"srv_1"}, **SWAP), Watch(LIVE), id="it was given back, and goes"),
        pytest.param(
            Night(rentals=(LIVE,), silent_for=SILENCE),
            GiveBack(LIVE, "no word in the store for 12 minutes"),
            id="it says nothing",
        ),
        pytest.param(
            Night(rentals=(server(state=ServerState.STOPPING),), silent_for=SILENCE),
            Watch(server(state=ServerState.STOPPING)),
            id="it stops by itself",
        ),
        pytest.param(
            Night(rentals=(server(state=ServerState.UNKNOWN),)), Watch(server(state=ServerState.UNKNOWN)), id="unknown is not gone"
        ),
        pytest.param(Night(outcome="succeeded", reason="done"), Over(Outcome.SUCCEEDED, "done"), id="done: nothing to rent"),
        pytest.param(
            Night(outcome="succeeded", reason="done", missing="x"), Over(Outcome.SUCCEEDED, "done", "x"), id="done, and not all is there"
        ),
        pytest.param(Night(outcome="gave_up", reason="x"), Over(Outcome.GAVE_UP, "x"), id="a fault of the job is not paid for again"),
        pytest.param(Night(outcome="refused"), Rent(1), id="a machine at fault: another one"),
        pytest.param(
            Night(rentals=(LIVE,), outcome="succeeded", told_by="srv_1"), Watch(LIVE), id="done, and its server is just going"
        ),
    ],
)  # fmt: skip
def test_the_next_step(night: Night, expected: object):
    """
    Nothing is rented twice, and nothing that is over is paid for.
    """
    assert expected == decide_step(JOB, night, go_on=False)


@pytest.mark.parametrize(
    ("outcome", "expected"), [("gave_up", Rent), ("limit", Rent), ("stopped", Rent), ("succeeded", Over)]
)
def test_go_on_begins_again_what_is_not_done(outcome: str, expected: type):
    """
    What is done stays done.
    """
    assert isinstance(decide_step(JOB, Night(outcome=outcome), go_on=True), expected)


@pytest.mark.parametrize(
    ("rented_now", "reopened", "expected"),
    [
        pytest.param((), (), Rent(2, reopens=True), id="the first server is told"),
        pytest.param((), {"srv_0"}, Rent(2, reopens=True), id="an earlier order was another"),
        pytest.param({"srv_0"}, (), Rent(2, reopens=True), id="it vanished before it began again: the next is told"),
        pytest.param({"srv_0"}, {"srv_0"}, Over(Outcome.LIMIT, "enough"), id="it began again and reached the limit again"),
    ],
)  # fmt: skip
def test_an_order_to_go_on_is_carried_out_once(rented_now, reopened, expected):
    """
    Its server gets all limits anew; no later one does, and another end is the end.
    """
    night = Night(outcome="limit", reason="enough", rentals=(GONE,), reopened=reopened)

    assert expected == decide_step(JOB, night, go_on=True, rented_now=rented_now)


@pytest.mark.parametrize(("outcome", "expected"), [("limit", Rent(1)), ("gave_up", Over(Outcome.GAVE_UP, "x"))])
def test_a_raised_limit_is_enough_to_go_on(outcome: str, expected: object):
    """
    The next machine is not told to go on: what the run has used counts.
    """
    assert expected == decide_step(JOB, Night(outcome=outcome, reason="x", is_raised=True), go_on=False)


YESTERDAY = datetime(2026, 1, 1, 22, tzinfo=UTC)
USED = Machine(
    id="m",
    provider="vramfarm",
    price_per_hour="10",
    opened_at=YESTERDAY,
    paid_from=YESTERDAY,
    seen_at=YESTERDAY + timedelta(hours=1),
)


@pytest.mark.parametrize(
    ("reached", "limits", "expected"),
    [
        ({"max_duration": "1h"}, {"max_duration": "1h"}, False),
        ({"max_duration": "1h"}, {"max_duration": "50m"}, False),
        ({"max_duration": "1h"}, {"max_duration": "2h"}, True),
        ({"max_duration": "1h"}, {"max_duration": "2h", "until": "23:00 UTC"}, False),
        ({"until": "23:00 UTC"}, {"until": "23:00 UTC"}, False),
        ({"until": "23:00 UTC"}, {"until": "23:30 UTC"}, False),  # that is over, too
        ({"until": "23:00 UTC"}, {"until": "2026-01-03T07:00"}, True),
        ({"max_cost": "10"}, {"max_cost": "10"}, False),
        ({"max_cost": "10"}, {"max_cost": "9"}, False),
        ({"max_cost": "10"}, {"max_cost": "20"}, True),
        ({}, {}, False),
        ({"max_duration": "1h"}, {}, True),
    ],
)
@pytest.mark.parametrize("is_anew", [False, True])
def test_a_limit_is_raised_when_the_machine_would_have_had_longer(reached, limits, expected, is_anew):
    """
    By the rule that set its deadline; and the next machine must have time left.
    """
    machine = replace(USED, is_anew=is_anew)
    server = Server(provider="vramfarm", id="", price_per_hour="10")
    stopped_for = deadline(Limits.model_validate(reached), YESTERDAY, server, paid_from=YESTERDAY)
    now = YESTERDAY + timedelta(hours=12)

    assert expected == is_raised(Limits.model_validate(limits), (machine,), stopped_for, now)


@pytest.mark.parametrize(
    ("limits", "earlier", "expected"),
    [
        ({"max_duration": "3m"}, {}, ""),
        ({"max_duration": "179s"}, {}, "limits.max_duration leaves 2m59s, and a rented machine takes 3m"),
        ({"max_duration": "1h"}, {"duration": timedelta(minutes=58)}, "limits.max_duration leaves 2m,"),
        ({"max_duration": "1h"}, {"duration": timedelta(hours=2)}, "limits.max_duration leaves no time,"),
        ({"until": "2026-01-01T07:00"}, {}, "limits.until leaves no time,"),
        ({"until": "22:01 UTC"}, {}, "limits.until leaves 1m,"),
        ({"max_cost": "10"}, {"cost": Decimal(10)}, "limits.max_cost leaves no time,"),
        ({"max_cost": "10"}, {"cost": Decimal("9.99")}, ""),  # a quarter of an hour is paid anyway
        ({}, {"duration": timedelta(hours=30)}, ""),
    ],
)
def test_no_machine_is_rented_for_what_is_over_before_it_trains(limits, earlier, expected):
    """
    It is named which limit it is, and what it leaves.
    """
    found = why_not_worth_renting(Limits.model_validate(limits), YESTERDAY, Earlier(**earlier))

    assert bool(expected) == bool(found), found
    assert expected in found


@pytest.mark.parametrize(
    ("night", "go_on", "expected"),
    [
        pytest.param(Night(no_time="x"), False, TooShort("x"), id="a wrong job.yaml"),
        pytest.param(Night(no_time="x", trained={"srv_0"}), False, Over(Outcome.LIMIT, "x"), id="its time was used"),
        pytest.param(Night(no_time="x", trained={"srv_0"}), True, Rent(1, reopens=True), id="all limits anew"),
        pytest.param(Night(no_time_anew="x", outcome="limit"), True, TooShort("x"), id="and those are too short"),
        pytest.param(Night(no_time="x", rentals=(LIVE,), told_by="srv_1", has_begun=True), False, Accepted(LIVE), id="it trains"),
        pytest.param(Night(no_time="x", outcome="succeeded"), False, Over(Outcome.SUCCEEDED, ""), id="done"),
    ],
)  # fmt: skip
def test_a_limit_that_leaves_no_time_is_the_end_of_the_run(night, go_on, expected):
    """
    A machine that came to it may have had no time to tell the store: the ledger says it, too.
    """
    assert expected == decide_step(JOB, night, go_on=go_on)


@pytest.mark.parametrize(("told", "now", "expected"), [(-1, 1, True), (-1, -0.5, False), (-3, 60, False), (0, 0, True)])
def test_a_machine_that_told_of_itself_until_its_deadline_came_to_it(told: float, now: float, expected: bool):
    """
    One that fell silent long before vanished, and another may go on.
    """
    moment, minute = YESTERDAY, timedelta(minutes=1)

    assert expected == is_reached(moment, moment + told * minute, moment + now * minute)
    assert minute < WORTH_RENTING  # for which the lease of one that vanished is watched


def test_after_a_server_that_went_on_the_next_one_just_joins():
    """
    It vanished in the middle: what is left of the new limits is for the next.
    """
    night = Night(rentals=(GONE,), reopened={"srv_0"}, trained={"srv_0"})

    assert Rent(2) == decide_step(JOB, night, go_on=True, rented_now={"srv_0"})


@pytest.mark.parametrize(("minutes", "is_anew", "expected"), [(1, True, True), (1, False, False), (-1, True, False)])
def test_an_end_counts_until_the_run_is_begun_again(minutes: int, is_anew: bool, expected: bool):
    """
    The store may have the old word still.
    """
    end = datetime(2026, 1, 2, tzinfo=UTC)
    begun = end + timedelta(minutes=minutes)
    machine = Machine(id="m", opened_at=begun, paid_from=begun, seen_at=begun, is_anew=is_anew)

    assert expected == is_outdated(end, (machine,))


def test_machines_are_not_tried_for_ever():
    """
    provider.max_machines: a job that no machine is good for costs that many minimums a night at most,
    whichever cron lines rented them; one that trained, another night and --go-on count anew.
    """
    now = datetime(2026, 1, 2, tzinfo=UTC)
    two = {"srv_0": now - timedelta(hours=1), "srv_1": now - timedelta(minutes=30)}
    night = Night(rentals=(GONE,), rented_at=two, now=now)

    assert isinstance(decide_step(JOB, night, go_on=False), NoMore)
    assert Rent(2, reopens=True) == decide_step(JOB, night, go_on=True, rented_now={"srv_1"})
    assert isinstance(decide_step(JOB, night, go_on=True, rented_now={"srv_0", "srv_1"}), NoMore)
    assert Rent(2) == decide_step(JOB, replace(night, trained={"srv_1"}), go_on=False)
    assert Rent(2) == decide_step(JOB, replace(night, now=now + ONE_NIGHT), go_on=False)


IN_VAIN = Refusal(server="srv_0", code=2, reason="no train.py", is_same=True, age=timedelta())


@pytest.mark.parametrize(
    ("change", "go_on", "rented_now", "expected"),
    [
        pytest.param({}, False, (), Refused(2, "srv_0: no train.py"), id="the job is at fault: the next would end likewise"),
        pytest.param({"age": ONE_NIGHT}, False, (), Refused(2, "srv_0: no train.py"), id="it does not mend itself"),
        pytest.param({"is_same": False}, False, (), Rent(2), id="job.yaml or the code has changed"),
        pytest.param({}, True, (), Rent(2, reopens=True), id="go on"),
        pytest.param({}, True, {"srv_0"}, Refused(2, "srv_0: no train.py"), id="went on, and it is the same again"),
        pytest.param({"server": "srv_9"}, False, (), Rent(2), id="a later server got further"),
        pytest.param({"code": 4}, False, (), Refused(4, "srv_0: no train.py"), id="the store is at fault"),
        pytest.param({"code": 4, "age": STORE_REST}, False, (), Rent(2), id="it may be well again"),
    ],
)  # fmt: skip
def test_a_fault_that_no_machine_mends_is_not_paid_for_again(change, go_on, rented_now, expected):
    """
    The last server's own word ends the night, until something has changed.
    """
    night = Night(rentals=(GONE,), refusal=replace(IN_VAIN, **change))

    assert expected == decide_step(JOB, night, go_on=go_on, rented_now=rented_now)


WISH = Wish(cards=None, card=None, max_price=None, days=1)


def test_the_cheapest_machine_that_will_do_comes_first():
    """
    One that was given back does not come again.
    """
    offers = (offer("b", "31"), offer("a", "29"), offer("c", "10", cards=2), offer("d", "5", available=False))

    assert ["c", "a", "b"] == [one.id for one in choose(JOB, WISH, offers)]
    assert ["a", "b"] == [one.id for one in choose(JOB, WISH, offers, refused={"c"})]
    assert ["a", "b"] == [one.id for one in choose(JOB, Wish(cards=8, card=None, max_price=None, days=1), offers)]


def test_a_machine_must_hold_the_model():
    """
    By the plan, not by its price.
    """
    job = Job.model_validate({"command": "x", "model": {"parameters": 8e9, "strategy": "fsdp_full_shard"}})
    small = offer("small", "1", cards=1, card_bytes=24 * 10**9)

    assert ["large"] == [one.id for one in choose(job, WISH, (small, offer("large", "30")))]
    assert "the plan says" in why_none(job, WISH, (small,))


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        (Wish(cards=4, card=None, max_price=None, days=1), "8 cards, not 4 (cards)"),
        (Wish(cards=None, card="h200", max_price=None, days=1), "h100, not h200 (provider.gpu)"),
        (Wish(cards=None, card=None, max_price=Decimal(25), days=1), "31 EUR/h, more than 25"),
    ],
)
def test_without_a_machine_the_nearest_is_named(wish: Wish, expected: str):
    """
    So that a person knows what to change.
    """
    assert () == choose(JOB, wish, (offer("b", "31"),))
    assert f"no machine of 1 will do; the nearest, 8 x H100: {expected}" == why_none(JOB, wish, (offer("b", "31"),))


@pytest.mark.parametrize(("hours", "days"), [(1, 1), (22, 1), (23.5, 2), (47, 2), (48, 3)])
def test_a_rental_outlasts_the_run(hours: float, days: int):
    """
    By an hour at least: the end of the rental is a deadline, too.
    """
    assert days == wish_of(JOB, at_most=None, lasts=timedelta(hours=hours)).days


def test_the_lower_of_two_prices_counts():
    """
    job.yaml's and the command line's.
    """
    job = Job.model_validate({"command": "x", "provider": {"max_price": 20}})

    assert Decimal(20) == wish_of(job, at_most=Decimal(25), lasts=timedelta(hours=1)).max_price
    assert Decimal(15) == wish_of(job, at_most=Decimal(15), lasts=timedelta(hours=1)).max_price


@pytest.mark.parametrize(("cards", "expected"), [("all", None), (4, 4)])
def test_all_cards_are_however_many_a_machine_has(cards, expected):
    """
    A number is that number.
    """
    job = Job.model_validate({"command": "train.py", "cards": cards})

    assert expected == wish_of(job, at_most=None, lasts=timedelta(hours=1)).cards


def test_the_disk_has_room_for_the_checkpoints():
    """
    Of an 8B model with AdamW 112 GB each, and not more than the machine has.
    """
    job = Job.model_validate({"command": "x", "model": {"parameters": 8e9}})

    assert 100 == disk_gb(JOB, offer("a", "1"))
    assert disk_gb(job, offer("a", "1")) >= 4 * 112
    assert 200 == disk_gb(job, offer("a", "1", disk_bytes=200 * 10**9))
