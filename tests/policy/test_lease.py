"""The lease of a run, in simulated time: several machines, one store, clocks that agree on nothing."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.facts import (
    Checkpoint,
    Failed,
    Finished,
    History,
    Lease,
    LeaseState,
    Live,
    Observed,
    Preflight,
    Running,
    TaskKind,
    Vacancy,
    Verdict,
)
from runner.job import Job
from runner.policy.actions import Begin, Cease, End, Interrupt, Kill, Wait
from runner.policy.lease import (
    Claim,
    Idle,
    Keeper,
    Look,
    Lost,
    Pace,
    Put,
    decide_move,
    failed,
    looked,
    may_write,
    put,
)
from runner.policy.lifecycle import decide
from vramfarm.protocol import Ref

PACE = Pace()


@dataclass
class Shelf:
    """The one object of a store, with conditional writes."""

    claim: Claim | None = None
    tag: str | None = None
    writes: int = 0

    def put_if(self, claim, tag):
        if tag != self.tag:
            return None
        self.writes += 1
        self.claim, self.tag = claim, f"tag-{self.writes}"
        return self.tag


@dataclass
class Machine:
    """A keeper on a machine whose clock began anywhere. `troubles` are lengths of requests, and what becomes of them."""

    name: str
    skew_s: float
    starts_s: float = 0.0
    dies_s: float = float("inf")
    troubles: list[tuple[float, str]] = field(default_factory=list)
    keeper: Keeper | None = None
    wakes_s: float = 0.0
    pending: tuple[str, object, float] | None = None

    def __post_init__(self):
        self.keeper = Keeper(holder=self.name, life=f"{self.name}'s", next_s=self.clock(self.starts_s))
        self.wakes_s = self.starts_s

    def clock(self, now_s):
        return now_s + self.skew_s

    def may_write(self, now_s):
        alive = now_s < self.dies_s and self.keeper.lost_to is None
        return alive and may_write(self.keeper.renewed_s, self.clock(now_s), PACE)

    def turn(self, shelf, now_s):
        """Begin or end a request; what happens to it in between is in `troubles`."""
        if self.pending is None:
            self._begin(shelf, now_s)
        else:
            self._end(shelf, now_s)

    def _begin(self, shelf, now_s):
        match decide_move(self.keeper, self.clock(now_s)):
            case Idle(until_s=until_s):
                self.wakes_s = max(until_s - self.skew_s, now_s + 0.001)
            case Lost():
                self.wakes_s = float("inf")
            case move:
                took_s, fate = self.troubles.pop(0) if self.troubles else (0.05, "fine")
                if isinstance(move, Look):
                    self.pending = ("look", fate, now_s)
                else:
                    late = fate == "late"  # it arrives when it ends
                    result = shelf.put_if(move.claim, move.tag) if fate in {"fine", "answer lost"} else None
                    self.pending = ("put", (move, fate, result, late), now_s)
                self.wakes_s = now_s + took_s

    def _end(self, shelf, now_s):
        (what, detail, began_s), self.pending = self.pending, None
        clock = self.clock(now_s)
        if what == "look":
            lost = detail in {"lost", "answer lost"}
            self.keeper = failed(self.keeper, clock) if lost else looked(self.keeper, shelf.claim, shelf.tag, clock)
        else:
            move, fate, result, late = detail
            result = shelf.put_if(move.claim, move.tag) if late else result
            lost = fate in {"lost", "answer lost"}
            self.keeper = (
                failed(self.keeper, clock) if lost else put(self.keeper, move.claim, result, self.clock(began_s))
            )
        self.wakes_s = now_s


def live(machines, until_s, shelf=None):
    """Return the moments at which somebody's turn ended, and who might write then."""
    shelf = shelf or Shelf()
    writers = []
    while (machine := min(machines, key=lambda m: m.wakes_s)).wakes_s < until_s:
        now_s = machine.wakes_s
        if now_s >= machine.dies_s:
            machine.wakes_s = float("inf")
            continue
        machine.turn(shelf, now_s)
        writers.append((now_s, [m.name for m in machines if m.may_write(now_s)]))
    return writers


fates = st.tuples(
    st.sampled_from([0.01, 0.5, 9.0, 30.0, 44.0, 58.0, 61.0, 200.0]),
    st.sampled_from(["fine", "fine", "late", "lost", "answer lost"]),
)


@settings(max_examples=300, deadline=None)
@given(
    skews=st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3),
    starts=st.lists(st.floats(0, 300), min_size=3, max_size=3),
    deaths=st.lists(st.sampled_from([100.0, 200.0, float("inf")]), min_size=3, max_size=3),
    troubles=st.lists(st.lists(fates, max_size=25), min_size=3, max_size=3),
)
def test_never_two_write_at_once(skews, starts, deaths, troubles):
    """
    Whatever is slow, lost, suspended or dead, and whatever the clocks say.
    """
    machines = [Machine(n, *rest) for n, *rest in zip("abc", skews, starts, deaths, troubles, strict=True)]

    assert [] == [(at, names) for at, names in live(machines, 900.0) if len(names) > 1]


@given(skew=st.floats(-1e9, 1e9), dies_s=st.floats(1, 100), comes_s=st.floats(1, 100))
def test_a_dead_holder_is_taken_over_within_a_minute_or_so(skew, dies_s, comes_s):
    """
    Counted from when both are true: it is dead, and another one watches.
    """
    dead, heir = Machine("a", 0.0, dies_s=dies_s), Machine("b", skew, starts_s=comes_s)

    first = next((at for at, names in live([dead, heir], 400.0) if names == ["b"]), None)

    renewed = heir.keeper.lost_to is not None  # it came while the other one lived
    assert renewed or (first is not None and first <= max(dies_s, comes_s) + PACE.watch_s + 1.0)


def test_a_holder_that_lives_keeps_the_run():
    """
    The second one knows it after one renewal, and says who.
    """
    first, second = Machine("a", 0.0), Machine("b", 5e5, starts_s=20.0)

    writers = live([first, second], 120.0)

    assert all(names == ["a"] for at, names in writers if at > 1.0)
    assert ("a", True) == (second.keeper.lost_to.holder, second.keeper.lost_to.beat > 0)


def test_a_holder_that_was_suspended_is_fenced():
    """
    It wakes, its renewal is refused, and it knows that it has lost the run.
    """
    asleep = Machine("a", 0.0, troubles=[(0.05, "fine"), (0.05, "fine"), (300.0, "late")])
    heir = Machine("b", 0.0, starts_s=20.0)

    writers = live([asleep, heir], 500.0)

    assert "b" == asleep.keeper.lost_to.holder
    assert (2, ["b"]) == (heir.keeper.mine.fence, writers[-1][1])


def test_a_lost_answer_is_no_conflict():
    """
    A write that arrived and was answered to nobody is found to be our own.
    """
    alone = Machine("a", 0.0, troubles=[(0.05, "fine"), (9.0, "answer lost"), (0.05, "fine"), (9.0, "answer lost")])

    writers = live([alone], 200.0)

    assert (None, ["a"], 1) == (alone.keeper.lost_to, writers[-1][1], alone.keeper.mine.fence)


def test_the_same_run_folder_takes_it_at_once_and_so_does_anybody_after_a_release():
    """
    A runner that was killed, and a run that ended cleanly, cost the next one nothing.
    """
    theirs = Claim(holder="a", life="before", fence=3)
    again = looked(Keeper(holder="a", life="now"), theirs, "t", 10.0)
    after = looked(Keeper(holder="b", life="now"), replace(theirs, released=True), "t", 10.0)

    assert [Put(Claim(holder=h, life="now", fence=4), "t") for h in "ab"] == [
        decide_move(keeper, 10.0) for keeper in (again, after)
    ]


def test_it_is_known_why_a_lease_was_free():
    """
    Whoever watched another one for a minute, or saw it leave, or saw nothing any more, can say so.
    """
    theirs = Claim(holder="a", life="theirs", fence=3)
    watching = looked(Keeper(holder="b", life="now"), theirs, "t", 0.0)
    ends = (
        looked(watching, theirs, "t", 60.0),
        looked(watching, replace(theirs, released=True), "t2", 5.0),
        looked(watching, None, None, 5.0),
    )

    assert [Vacancy.SILENT, Vacancy.GIVEN_BACK, Vacancy.GONE] == [keeper.vacancy for keeper in ends]
    assert all(isinstance(decide_move(keeper, 60.0), Put) for keeper in ends)


def test_a_lease_that_cannot_be_read_is_watched_like_any():
    """
    A newer runner's, or garbage: whoever rewrites it lives.
    """
    keeper = looked(Keeper(holder="b", life="now"), None, "t", 0.0)

    assert isinstance(decide_move(keeper, 1.0), Idle)
    assert isinstance(decide_move(looked(keeper, None, "t2", 5.0), 5.0), Lost)
    assert isinstance(decide_move(looked(keeper, None, "t", 60.0), 60.0), Put)


# ----------------------------------------------------------------- what the loop makes of it

NOW = datetime(2026, 1, 1, tzinfo=UTC)
JOB = Job.model_validate({"name": "tiny", "command": "train.py", "offload": {"to": "s3://bucket/runs"}})
HISTORY = History(accepted_at=NOW, opened_at=NOW)
HERE = Checkpoint(ref=Ref(1, 5, 1, "0" * 8), size_bytes=1, world_size=1, written_at=NOW)
LIVE = Live(attempt_id="a", trainers=(1,), savers=())
KEEPING = {TaskKind.LEASE: Running(subject="of the run", started_at=NOW)}


def seen(state, **more):
    lease = Lease(state=state, who="server srv_b", fence=3, until="12:00")
    return replace(Observed(now=NOW, boot_id="b", life="l", lease=lease), **more)


@pytest.mark.parametrize(
    ("told_s", "age_s", "expected"),
    [
        pytest.param(0, 170, False, id="it told something not long ago"),
        pytest.param(0, 190, True, id="it is silent"),
        pytest.param(None, 500, False, id="it begins"),
        pytest.param(None, 700, True, id="it never began"),
    ],
)
def test_a_keeper_that_says_nothing_is_ended_and_another_one_begun(told_s, age_s, expected):
    """
    One that was stopped (SIGSTOP), or hangs, renews nothing and tells nothing for ever.
    """
    moved_at = None if told_s is None else NOW + timedelta(seconds=told_s)
    keeper = Running(subject="of the run", started_at=NOW, moved_at=moved_at)
    lapsed = seen(LeaseState.LAPSED, tasks={TaskKind.LEASE: keeper}, now=NOW + timedelta(seconds=age_s), local=(HERE,))

    action = decide(JOB, HISTORY, lapsed)
    then = decide(JOB, HISTORY, replace(lapsed, tasks={}))

    assert expected == (isinstance(action, Cease) and action.kind is TaskKind.LEASE)
    assert Begin(TaskKind.LEASE, "of the run") == then


def test_before_anything_is_written_the_lease_is_taken():
    """
    Not even a look into the store, which writes a word there, comes before it.
    """
    assert Begin(TaskKind.LEASE, "of the run") == decide(JOB, HISTORY, seen(LeaseState.UNKNOWN))
    ahead = {TaskKind.PREFLIGHT: Finished(subject="machine and code", at=NOW)}
    assert isinstance(decide(JOB, HISTORY, seen(LeaseState.WATCHING, tasks=KEEPING | ahead)), Wait)
    assert Begin(TaskKind.SURVEY, "store") == decide(JOB, HISTORY, seen(LeaseState.HELD, tasks=KEEPING))


@pytest.mark.parametrize("found", [LeaseState.HELD, LeaseState.TAKEN])
def test_the_machine_is_looked_at_while_anothers_lease_is_watched(found):
    """
    That minute is paid for. What preflight finds counts once the lease is ours, and not at all if it is another's.
    """
    looking = KEEPING | {TaskKind.PREFLIGHT: Running(subject="machine and code", started_at=NOW)}
    bad = Preflight(verdict=Verdict.SWAP, reasons=("the fabric is down",))

    watching = decide(JOB, HISTORY, seen(LeaseState.WATCHING, tasks=KEEPING))
    meanwhile = decide(JOB, HISTORY, seen(LeaseState.WATCHING, tasks=looking, preflight=bad))
    then = decide(JOB, HISTORY, seen(found, tasks=looking, preflight=bad))

    assert (Begin(TaskKind.PREFLIGHT, "machine and code"), Wait()) == (watching, meanwhile)
    assert 5 == then.code if found is LeaseState.TAKEN else Begin(TaskKind.SURVEY, "store") == then


def test_whoever_comes_second_ends_with_5_and_says_who_was_first():
    """
    On a rented server only this one is stopped; its folder is kept if it holds anything.
    """
    end = decide(JOB, HISTORY, seen(LeaseState.TAKEN))
    with_something = decide(JOB, HISTORY, seen(LeaseState.TAKEN, local=(HERE,)))

    assert (5, True, False) == (end.code, end.stop, end.keep)
    assert "another runner has this run: server srv_b (lease 3, until 12:00)" == end.reason
    assert isinstance(with_something, End)
    assert with_something.keep


@pytest.mark.parametrize("state", [LeaseState.LAPSED, LeaseState.TAKEN])
@pytest.mark.parametrize("kind", [TaskKind.UPLOAD, TaskKind.TIDY, TaskKind.PUBLISH, TaskKind.SURVEY])
def test_without_the_lease_nothing_goes_on_writing(state, kind):
    """
    A holder that was suspended or cut off ends its uploads before it does anything else.
    """
    tasks = {kind: Running(subject="x", started_at=NOW)}

    assert kind == decide(JOB, HISTORY, seen(state, live=LIVE, tasks=tasks)).kind
    assert isinstance(decide(JOB, HISTORY, seen(state, live=LIVE, tasks=tasks)), Cease)


def test_a_renewal_that_fails_does_not_disturb_training():
    """
    Cut off from the store it trains on, and copies nothing until it has the lease again.
    """
    cut_off = seen(LeaseState.LAPSED, live=LIVE, local=(HERE,), offsite=(), tasks=KEEPING)

    assert isinstance(decide(JOB, HISTORY, cut_off), Wait)
    back = replace(cut_off, lease=Lease(state=LeaseState.HELD))
    assert Begin(TaskKind.UPLOAD, HERE.ref.name) == decide(JOB, HISTORY, back)


def test_an_attempt_whose_run_was_taken_saves_and_leaves():
    """
    What it has is saved on its own disk.
    """
    taken = seen(LeaseState.TAKEN, live=LIVE)

    assert Interrupt("another runner took this run: server srv_b") == decide(JOB, HISTORY, taken)
    assert isinstance(decide(JOB, HISTORY, replace(taken, leave_sent_at=NOW - timedelta(minutes=5))), Kill)


def test_a_store_that_never_answers_is_given_up_as_before():
    """
    With nothing on this disk after half an hour; with a checkpoint here training goes on without the lease.
    """
    down = Failed(
        subject="of the run", at=NOW, error="no answer", final=False, failures=9, since=NOW - timedelta(hours=1)
    )
    unknown = seen(LeaseState.UNKNOWN, tasks={TaskKind.LEASE: down})

    assert 4 == decide(JOB, HISTORY, unknown).code
    fit = Finished(subject="machine and code", at=NOW)
    here = replace(unknown, local=(HERE,), tasks={**unknown.tasks, TaskKind.PREFLIGHT: fit})
    assert "Launch" == type(decide(JOB, HISTORY, here)).__name__


def test_a_store_that_cannot_exclude_anybody_is_used_all_the_same():
    """
    The keeper found no conditional writes: it is said, and the run goes on.
    """
    done = {TaskKind.LEASE: Finished(subject="of the run", at=NOW)}

    assert Begin(TaskKind.SURVEY, "store") == decide(JOB, HISTORY, seen(LeaseState.NOT_NEEDED, tasks=done))
