"""The ledger: what machines know of each other, and how time and money count over all of them."""

import json
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from runner.facts import (
    Attempt,
    Checkpoint,
    Conclusion,
    Earlier,
    Ending,
    Exit,
    Finished,
    History,
    Machine,
    Observed,
    Outcome,
    Server,
    TaskKind,
)
from runner.facts import Running as RunningTask
from runner.job import Job, Limits
from runner.policy.actions import Begin, Join
from runner.policy.house import publish_now_and_then
from runner.policy.ledger import Running, cost, describe_machine, dump, merge, parse, sum_up
from runner.policy.lifecycle import decide
from runner.policy.limits import deadline, ends
from runner.policy.money import affordable, billed, tariff_of
from runner.storage import journal as events
from runner.storage.journal import fold
from tests.simworld import START, TURN, Elsewhere, boot
from vramfarm.protocol import Ref

HOUR = timedelta(hours=1)
SERVER = Server(provider="vramfarm", id="srv_a", price_per_hour="12")


def attempt(number, **more):
    return Attempt(number=number, id=f"id-{number}", resume=None, lineage=1, boot_id="b", launched_at=START, **more)


def machine(name, *numbers, hours=1.0, **more):
    times = {"opened_at": START, "paid_from": START, "seen_at": START + hours * HOUR}
    known = {**times, "provider": "vramfarm", "price_per_hour": "12"}
    return Machine(id=name, attempts=tuple(attempt(number) for number in numbers), **(known | more))


def test_what_is_dumped_is_parsed():
    """
    All that a later machine needs of an earlier one.
    """
    ended = attempt(
        1, ending=Ending.FAILED, exit=Exit(code=-9), step=7, reason="CUDA error", ended_at=START, first_step_at=START
    )
    resumed = replace(attempt(2), resume=Ref(1, 5, 1, "0" * 8))
    machines = (
        machine("a", where="host:/w", outcome="gave_up", concluded_at=START),
        replace(machine("b"), attempts=(ended, resumed), distrusted=((1, 40), (2, 7))),
    )

    assert machines == parse(json.loads(json.dumps(dump(machines))))


def test_an_entry_with_a_time_of_no_zone_is_none():
    """
    It could not be compared with any other.
    """
    (entry,) = json.loads(json.dumps(dump((machine("a", concluded_at=START),))))["machines"]

    assert 1 == len(parse({"machines": [entry]}))
    assert () == parse({"machines": [entry | {"concluded_at": "2026-01-01T00:00:00"}]})


def test_what_an_attempt_came_to_is_not_written_over_by_the_last_look():
    """
    Its page is gone by then, and says nothing.
    """
    ended = attempt(1, ending=Ending.FAILED, step=300)
    history = History(accepted_at=START, opened_at=START, attempts=(ended,))
    looked = Running(step=0, first_step_at=None)

    assert (ended,) == describe_machine(history, machine("a"), START, looked).attempts


@pytest.mark.parametrize(
    "garbage",
    [None, [], {}, {"machines": 5}, {"machines": [5, {}, {"id": "a"}, None]}],
    ids=["nothing", "a list", "empty", "a number", "no entries"],
)
def test_what_is_no_ledger_has_no_machines(garbage):
    """
    Nothing in a store is trusted.
    """
    assert () == parse(garbage)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("price_per_hour", price) for price in ("NaN", "-1", "1e9", "twelve")),
        *(("opened_at", time) for time in ("9999-12-31T23:59:59+00:00", "2026-01-01T00:00:00", 5, "")),
    ],
)
def test_a_price_or_a_time_that_is_none_is_left_out(name, value):
    """
    One bad entry takes no other one with it, and no runner that would count with it.
    """
    fields = dump((machine("a"), machine("b")))
    fields["machines"][0][name] = value

    assert ["b"] == [found.id for found in parse(fields)]


def test_a_machine_replaces_its_own_entry_and_no_other():
    """
    Where it stands; and attempts that came along in a kept folder stay with who made them.
    """
    first, second = machine("a", 1, 2), machine("b", 3)
    again = replace(first, seen_at=START + 9 * HOUR)
    restored = machine("c", 1, 2, 3, 4)

    assert (again, second) == merge((first, second), again)
    assert (first, second, machine("c", 4)) == merge((first, second), restored)


def test_an_upload_that_took_long_does_not_put_the_clock_back():
    """
    Two tasks write this machine's entry; the one that began later knows more.
    """
    begun, later = machine("a", 1, hours=1.0), machine("a", 1, 2, hours=2.0)

    assert (later,) == merge((later,), begun) == merge((begun,), later)


def test_others_time_money_and_numbers_are_summed_up():
    """
    Fifteen minutes at least each, in decimal; nothing where nobody bills.
    """
    ledger = (machine("a", 1, 2), machine("b", 3, hours=0.1), machine("me", 9), machine("c", price_per_hour=""))

    expected = Earlier(num_machines=3, last_attempt=3, duration=2.1 * HOUR, cost=Decimal("15.00"))
    assert expected == sum_up(ledger, but="me")


def test_a_run_that_was_reopened_counts_from_there():
    """
    `--go-on` gives the limits anew; numbers go on.
    """
    ledger = (machine("a", 1), machine("b", 2, is_anew=True), machine("c", 3))

    found = sum_up(ledger, but="me")

    assert (2 * HOUR, Decimal(24), 3) == (found.duration, found.cost, found.last_attempt)


@pytest.mark.parametrize(
    ("provider", "amount", "price", "minutes"),
    [
        pytest.param("vramfarm", "12", "12", 60, id="an hour"),
        pytest.param("vramfarm", "10.99", "12", 54, id="whole minutes"),
        pytest.param("vramfarm", "0.01", "12", 15, id="what is paid anyway is used"),
        pytest.param("vramfarm", "0", "12", 0, id="nothing left"),
        pytest.param("vramfarm", "-3", "12", 0, id="less than nothing"),
        pytest.param("runpod", "10.99", "12", 54.95, id="whole seconds"),
        pytest.param("vast", "0.01", "12", 0.05, id="nothing is paid anyway"),
        pytest.param("vast", "9999999", "0.0001", 365 * 24 * 60, id="a year at most"),
    ],
)
def test_how_long_money_lasts(provider, amount, price, minutes):
    """
    Never a step more than it buys, but the minimum that any start costs.
    """
    assert timedelta(minutes=minutes) == affordable(Decimal(amount), Decimal(price), tariff_of(provider))


@pytest.mark.parametrize(
    ("provider", "seconds", "amount"),
    [
        ("vramfarm", 61, "7.80"),
        ("vramfarm", 901, "8.32"),
        ("runpod", 61, "0.53"),
        ("runpod", 60.5, "0.53"),
        ("vast", 3600, "31.20"),
        ("docker", 0, "0.00"),
    ],
)
def test_a_bill_is_counted_as_the_provider_counts(provider, seconds, amount):
    """
    VRAMfarm begun minutes and fifteen of them at least, the others begun seconds: 8 x H100 at 31.20 an hour.
    """
    assert Decimal(amount) == billed(Decimal("31.20"), seconds, tariff_of(provider))


def test_limits_count_over_all_machines():
    """
    Time that others took is gone, and so is their money, which this one spends from its first boot on.
    """
    earlier = Earlier(num_machines=1, duration=5 * HOUR, cost=Decimal(6))
    time, money = Limits.model_validate({"max_duration": "6h"}), Limits.model_validate({"max_cost": 18})

    assert START + HOUR == deadline(time, START, SERVER, earlier)
    assert START - timedelta(minutes=2) + HOUR == deadline(money, START, SERVER, earlier, START - timedelta(minutes=2))
    assert START == deadline(time, START, SERVER, replace(earlier, duration=9 * HOUR))
    assert [(START + HOUR, "limits.max_cost")] == ends(money, START, SERVER, earlier)


def test_a_kept_folder_on_another_machine_begins_its_own_time():
    """
    What the journal says of the machine before stands in the ledger, and would count twice.
    """
    events_so_far = [
        events.accepted(START),
        events.joined("a", Earlier(), START),
        events.launched(attempt(1)),
        events.joined("b", Earlier(num_machines=1, last_attempt=1, duration=HOUR), START + 3 * HOUR),
    ]
    history = History()
    for event in events_so_far:
        history = fold(history, event)

    assert (START + 3 * HOUR, HOUR, 2) == (history.opened_at, history.earlier.duration, history.next_number)
    again = fold(history, events.reopened(start_over=True, order="o", at=START + 4 * HOUR, machine="b"))
    assert (timedelta(), True, 2) == (again.earlier.duration, again.earlier.is_anew, again.fresh_from)


def test_the_second_machine_has_what_the_first_left_of_the_time(tmp_path):
    """
    A machine that vanished after its last word to the store took at least that much.
    """
    job = Job.model_validate(
        {
            "name": "tiny",
            "command": "train.py",
            "offload": {"to": "s3://bucket/runs"},
            "limits": {"max_duration": "100m"},
        }
    )
    elsewhere = Elsewhere(sigterms={START + 50 * TURN})
    boot(job, tmp_path / "first", elsewhere, last_step=100_000)
    elsewhere.sigterms = set()
    before = elsewhere.now

    end, _ = boot(job, tmp_path / "second", elsewhere, last_step=100_000)

    took = elsewhere.now - before
    assert 7 == end.code
    assert 40 * TURN <= took <= 60 * TURN, "the whole limit once more, or nothing of it"
    assert [1, 2] == [number for number, _ in elsewhere.launches]


def test_a_first_step_is_remembered_over_the_death_of_a_runner():
    """
    The next one adopts the attempt hours later: they were no start-up, whether it lives or has ended by then.
    """
    first_at = START + TURN
    history = History()
    for event in (events.accepted(START), events.launched(attempt(1)), events.stepped(1, first_at)):
        history = fold(history, event)

    unseen = Running(step=9, first_step_at=None)
    live = describe_machine(history, machine("a"), START + 10 * HOUR, unseen).attempts[0]
    ended = fold(history, events.exited(Ending.FAILED, Exit(code=1), step=9, reason="", at=START + 10 * HOUR))

    assert [first_at] * 3 == [a.first_step_at for a in (history.attempts[0], live, ended.attempts[0])]


def test_a_step_that_was_read_in_a_log_is_marked_as_a_guess():
    """
    In the journal, and in the ledger that other machines read.
    """
    history = History()
    for event in (
        events.accepted(START),
        events.launched(attempt(1)),
        events.exited(Ending.SUCCEEDED, Exit(code=0), step=92, reason="", at=START + HOUR, from_log=True),
    ):
        history = fold(history, event)

    (told,) = parse(dump((describe_machine(history, machine("a"), START + HOUR),)))

    assert [(92, True, 0)] * 2 == [(a.step, a.from_log, a.told_step) for a in (*history.attempts, *told.attempts)]


def test_the_first_step_of_an_attempt_is_written_down_once_when_it_is_seen(tmp_path):
    """
    And not with its end: a runner may die in between.
    """
    job = Job.model_validate({"name": "tiny", "command": "train.py"})

    elsewhere = Elsewhere(crash_at_step={1: 250})
    boot(job, tmp_path, elsewhere, last_step=500)

    found = [event for path in tmp_path.rglob("*.jsonl") for event in events.events(path)]
    names = [event["event"] for event in found if event["event"] in {"launched", "stepped", "exited"}]
    assert ["launched", "stepped", "exited"] * len(elsewhere.launches) == names


def test_an_entry_says_when_the_run_was_over():
    """
    Time after it is no part of what the run was about.
    """
    over = Conclusion(outcome=Outcome.SUCCEEDED, reason="done", at=START + HOUR)
    history = fold(fold(History(), events.accepted(START)), events.concluded(over))

    assert START + HOUR == describe_machine(history, machine("a"), START + 2 * HOUR).concluded_at
    again = fold(history, events.reopened(start_over=True, order="o", at=START + 3 * HOUR))
    assert describe_machine(again, machine("a"), START + 4 * HOUR).concluded_at is None


def test_an_entry_says_what_it_cost():
    """
    Until it was last seen, by its own clock.
    """
    history = fold(History(), events.accepted(START))
    entry = describe_machine(history, machine("a"), START + 2 * HOUR)

    assert (Decimal("24.00"), START) == (cost(entry), entry.opened_at)


def test_a_machine_says_that_it_came_before_it_does_anything_else():
    """
    It joins once it knows that this is its job, and never writes into another one's history.
    """
    job = Job.model_validate({"name": "tiny", "command": "train.py", "offload": {"to": "s3://bucket/runs"}})
    seen = Observed(now=START, boot_id="b", life="l", machine="me", ledger=(machine("a", 1),), offsite=())
    new = History(accepted_at=START, opened_at=START)
    joined = replace(new, machine="me", earlier=sum_up(seen.ledger, but="me"))

    assert Join("me", sum_up(seen.ledger, but="me")) == decide(job, new, seen)
    assert Begin(TaskKind.PUBLISH, "joined, 0") == decide(job, joined, seen)
    assert 2 == decide(job, new, replace(seen, other_job="command: there a, here b")).code


UPLOADS = RunningTask(subject="step-00000100-0123abcd", started_at=START)


@pytest.mark.parametrize(
    ("minutes", "told", "uploads", "expected"),
    [
        (4, "joined, 0", None, None),
        (4, "joined, 0", UPLOADS, None),
        (5, "joined, 0", None, Begin(TaskKind.PUBLISH, "joined, 1")),
        (5, "joined, 0", UPLOADS, Begin(TaskKind.PUBLISH, "joined, 1, no logs")),
        (6, "joined, 1, no logs", UPLOADS, None),
        (6, "joined, 1, no logs", None, Begin(TaskKind.PUBLISH, "joined, 1")),
    ],
    ids=["just told", "just told, then a checkpoint", "later", "a checkpoint goes before logs", "still", "behind it"],
)
def test_a_machine_tells_how_it_is_every_five_minutes(minutes, told, uploads, expected):
    """
    One that vanishes leaves journal, logs and report behind; logs never take the line from a checkpoint.
    """
    job = Job.model_validate({"name": "tiny", "command": "train.py", "offload": {"to": "s3://bucket/runs"}})
    joined = History(accepted_at=START, opened_at=START, machine="me")
    tasks = {TaskKind.PUBLISH: Finished(subject=told, at=START)} | ({TaskKind.UPLOAD: uploads} if uploads else {})
    seen = Observed(now=START + timedelta(minutes=minutes), boot_id="b", life="l", machine="me", tasks=tasks)

    assert expected == publish_now_and_then(job, joined, seen)


def test_what_one_machine_distrusts_no_other_resumes_from():
    """
    Checkpoints from after the loss went wrong are in the store, and newer than the good one; they are passed over.
    """
    job = Job.model_validate({"name": "tiny", "command": "train.py", "offload": {"to": "s3://bucket/runs"}})
    good, spoilt = (
        Checkpoint(ref=Ref(1, step, 1, f"{step:08x}"), size_bytes=1, world_size=1, written_at=START)
        for step in (100, 200)
    )
    there = fold(History(accepted_at=START, opened_at=START), events.distrusted(1, 150, "the loss is nan"))
    entry = describe_machine(there, machine("a", 1), START)
    ledger = parse(json.loads(json.dumps(dump((replace(entry, attempts=(attempt(1),)),)))))
    seen = Observed(
        now=START,
        boot_id="b",
        life="l",
        machine="me",
        ledger=ledger,
        offsite=(good, spoilt),
        tasks={
            TaskKind.PREFLIGHT: Finished(subject="machine and code", at=START),
            TaskKind.PUBLISH: Finished(subject="joined, 0", at=START),
        },
    )
    new = History(accepted_at=START, opened_at=START)
    join = decide(job, new, seen)
    joined = fold(new, json.loads(json.dumps(events.joined("me", join.earlier, START))))

    assert Begin(TaskKind.RESTORE, good.ref.name) == decide(job, joined, seen)
    assert ((1, 150),) == describe_machine(joined, machine("me"), START).distrusted  # and goes on being told
