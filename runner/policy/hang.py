"""
Whether training hangs, and who it waits for. Pure: a memory of the looks so far goes in with
one more look, and comes out; a second function judges it.

No single sign is enough. A job that makes no step may compile, evaluate or tokenise; one that
uses processor time may only spin while it waits; a card that is "100 % busy" at idle power
waits, too. So: a limit for the time without a step, learned from this run, and beside it signs
of life, which put the verdict off. Time in which nobody looked counts for nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from runner.facts import CardPulse, Hang, Pulse, RankPulse, Stage
from runner.job import HangPolicy

_STOPPED: Final = frozenset("Tt")
_MAX_GAPS: Final = 200
_AT_WORK: Final = 0.5  # of its power in training: what a card draws at least that computes
_SURELY_AT_WORK: Final = 0.75  # and where nothing reads or writes its memory, as training does
_USES_MEMORY: Final = 3.0  # per cent of the time, in training
_AT_WORK_OF_LIMIT: Final = 0.3  # of its power limit, where nothing was learned yet
_FULL: Final = 90.0  # per cent of use
_NONE: Final = 5.0
_OFTEN_S: Final = 0.5  # between two looks
_SELDOM_S: Final = 5.0
_CARDS_S: Final = (5.0, 15.0, 60.0)  # between two questions to the driver: at least, when a step is late, else


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Floors and thresholds, in seconds where nothing else is said. Tests shorten them."""

    step_s: float = 180.0  # no learned limit is shorter
    evaluation_s: float = 900.0
    checkpoint_s: float = 600.0
    ending_s: float = 600.0  # after training is done: at most so long, and not more than the start may take
    quiet_s: float = 45.0  # without a sign of life, once the limit is reached
    longest_s: float = 3600.0  # signs of one kind only are believed for so long at least
    unwatched_s: float = 15.0  # of the time between two looks no more counts
    learned_after: int = 3  # steps: the first ones compile and warm up
    busy_cores: float = 0.1  # processor time of one rank and its workers that is work
    spin_cores: float = 1.3  # and how much of it may be a wait for the card
    busy_bytes_per_s: float = 1e6  # read, written or received


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What the looks so far say. Times are of `clock_s`, the time that was watched."""

    clock_s: float = 0.0
    last: Pulse | None = None
    moved_s: float = 0.0  # the last step, or line of progress
    num_steps: int = 0  # made while it was watched
    gaps_s: tuple[float, ...] = ()  # between moves, the newest last
    longest_s: float = 0.0  # of all gaps
    talked_s: float = 0.0  # something was printed
    worked_s: float = 0.0  # something was computed, read or received
    stopped_since_s: float | None = None  # a rank is stopped (SIGSTOP) since then
    healthy_w: tuple[float, ...] = ()  # power of each card while steps are made
    healthy_memory: tuple[float, ...] = ()  # how much of the time its memory is used meanwhile
    judged: tuple[CardPulse, ...] = ()  # the sample that this was last learned from, or that came before training


def watch(before: Watch, pulse: Pulse, patience: Patience) -> Watch:
    """Return the memory after one more look."""
    last = before.last
    if last is None:
        return replace(before, last=pulse)
    passed = max(pulse.at_s - last.at_s, 0.0)
    clock = before.clock_s + min(passed, patience.unwatched_s)
    now = replace(before, clock_s=clock, last=pulse)
    if pulse.log_bytes != last.log_bytes:
        now = replace(now, talked_s=clock)
    if passed > 0 and any(_work(before, last, pulse, passed, patience)):
        now = replace(now, worked_s=clock)
    is_stopped = any(rank.state in _STOPPED for rank in pulse.ranks)
    now = replace(now, stopped_since_s=(before.stopped_since_s or clock) if is_stopped else None)
    return _moved(now, last, pulse, patience) if _has_moved(last, pulse) else now


def _has_moved(last: Pulse, pulse: Pulse) -> bool:
    """The slowest rank made a step; of a script that tells no steps, a line of progress changed."""
    if any(rank.step for rank in pulse.ranks):
        return _slowest(pulse.ranks) > _slowest(last.ranks)
    return bool(pulse.progress) and pulse.progress != last.progress


def _slowest(ranks: Sequence[RankPulse]) -> int:
    return min((rank.step for rank in ranks), default=0)


def _moved(now: Watch, last: Pulse, pulse: Pulse, patience: Patience) -> Watch:
    gap = now.clock_s - now.moved_s
    learns = now.num_steps >= patience.learned_after
    now = _learn(now, pulse.cards) if learns and pulse.cards != now.judged else now
    return replace(
        now,
        moved_s=now.clock_s,
        num_steps=now.num_steps + max(_slowest(pulse.ranks) - _slowest(last.ranks), 1),
        gaps_s=(*now.gaps_s, gap)[-_MAX_GAPS:] if learns else (),
        longest_s=max(now.longest_s, gap) if learns else 0.0,
        judged=pulse.cards,
    )


def _learn(now: Watch, cards: Sequence[CardPulse]) -> Watch:
    return replace(
        now,
        healthy_w=_average(now.healthy_w, [card.power_w for card in cards]),
        healthy_memory=_average(now.healthy_memory, [card.memory_percent for card in cards]),
    )


def _average(known: Sequence[float], told: Sequence[float | None]) -> tuple[float, ...]:
    """A slow one: samples are rare and fall between steps, too."""
    values = [value for value in told if value is not None]
    if len(values) != len(told):
        return tuple(known)
    if len(known) != len(values):
        return tuple(values)
    return tuple(0.7 * k + 0.3 * v for k, v in zip(known, values, strict=True))


def _work(before: Watch, last: Pulse, pulse: Pulse, passed: float, patience: Patience) -> Iterator[bool]:
    """Signs that something is computed, read or received."""
    known = {rank.pid: rank for rank in last.ranks}
    waiting = {card.index for card in pulse.cards if _waits(card, before)}
    for rank in pulse.ranks:
        if (earlier := known.get(rank.pid)) is None:
            yield True  # a rank that has just come
            continue
        cores = (rank.cpu_s - earlier.cpu_s) / passed
        yield cores >= (patience.spin_cores if rank.rank in waiting else patience.busy_cores)
        yield (rank.io_bytes - earlier.io_bytes) / passed >= patience.busy_bytes_per_s
    yield (pulse.received_bytes - last.received_bytes) / passed >= patience.busy_bytes_per_s
    waits_for_disk = any(rank.state == "D" for rank in pulse.ranks)
    yield waits_for_disk and abs(pulse.dirty_bytes - last.dirty_bytes) / passed >= patience.busy_bytes_per_s
    yield pulse.stage is Stage.SAVING and pulse.saver_bytes > last.saver_bytes
    yield any(_computes(card, before) for card in pulse.cards)


def _computes(card: CardPulse, before: Watch) -> bool:
    """It draws the power of work: being in use alone says nothing, a collective that waits is, too."""
    if card.use_percent is None or card.use_percent < _NONE or card.power_w is None:
        return False
    if card.index < len(before.healthy_w):
        least = _SURELY_AT_WORK if _leaves_memory(card, before) else _AT_WORK
        return card.power_w >= least * before.healthy_w[card.index]
    return card.limit_w is not None and card.power_w >= _AT_WORK_OF_LIMIT * card.limit_w


def _leaves_memory(card: CardPulse, before: Watch) -> bool:
    """A collective that waits spins on a flag; training that draws little power at least uses the memory."""
    is_known = card.index < len(before.healthy_memory) and before.healthy_memory[card.index] >= _USES_MEMORY
    return is_known and card.memory_percent == 0


def _waits(card: CardPulse, before: Watch) -> bool:
    return card.use_percent is not None and card.use_percent >= _FULL and not _computes(card, before)


# ------------------------------------------------------------------------------- the verdict


def limit_s(watch: Watch, policy: HangPolicy, patience: Patience, *, last_save_s: float = 0.0) -> float:
    """
    How long there may be no step in the present stage. What the user set takes the place of
    what was learned.
    """
    stage = watch.last.stage if watch.last else Stage.STARTING
    step, start = (
        _of_user(policy.step_timeout) or _learned(watch, policy, patience),
        policy.startup_timeout.total_seconds(),
    )
    if stage is Stage.ENDING:
        return min(start, patience.ending_s)
    if step is None or not _has_begun(watch, patience) or stage is Stage.STARTING:
        return start
    if stage is Stage.SAVING:
        save = _of_user(policy.checkpoint_timeout) or max(patience.checkpoint_s, policy.safety_factor * last_save_s)
        return max(step, save)
    return max(step, patience.evaluation_s) if stage is Stage.EVALUATING else step


def _has_begun(watch: Watch, patience: Patience) -> bool:
    return watch.num_steps > patience.learned_after


def _learned(watch: Watch, policy: HangPolicy, patience: Patience) -> float | None:
    if not watch.gaps_s:
        return None
    return max(patience.step_s, policy.safety_factor * median(watch.gaps_s), 1.5 * watch.longest_s)


def look_every_s(policy: HangPolicy) -> float:
    """Often enough for the shortest limit that can apply, and not more often than half a second."""
    shortest = min(policy.startup_timeout.total_seconds(), _of_user(policy.step_timeout) or _SELDOM_S * 10)
    return min(max(shortest / 10, _OFTEN_S), _SELDOM_S)


def cards_every_s(since_s: float, limit: float) -> float:
    """How often the cards are asked. Only they tell a rank that waits at full use from one that works, so soon when a step is late."""
    often, soon, seldom = _CARDS_S
    return min(max(limit / 4, often), soon) if since_s >= limit / 2 else seldom


def _of_user(value: object) -> float | None:
    return None if value == "auto" else value.total_seconds()  # type: ignore[attr-defined]  # "auto" or a timedelta


def judge(watch: Watch, policy: HangPolicy, patience: Patience, *, last_save_s: float = 0.0) -> Hang | None:
    """Return the hang, if it is one: no step beyond the limit, and nothing that explains it."""
    pulse = watch.last
    since = watch.clock_s - watch.moved_s
    limit = limit_s(watch, policy, patience, last_save_s=last_save_s)
    if (
        pulse is None
        or since < limit
        or not (_is_quiet(watch, limit, patience) or _is_too_long(watch, since, limit, patience))
    ):
        return None
    rank, who = _who(pulse, watch)
    return Hang(
        rank=rank,
        stage=pulse.stage,
        step=_slowest(pulse.ranks),
        waited_s=round(since, 1),
        limit_s=round(limit, 1),
        reason="; ".join(filter(None, (_silence(watch, since, limit), who, _use(pulse), _question(pulse)))),
    )


def keep(before: Hang | None, now: Hang | None, *, has_moved: bool) -> Hang | None:
    """
    A hang stays one until a step is made: who is looked at prints and computes, dumps of the flight
    recorder for one, and that is no life of its own.
    """
    return None if has_moved else now or before


def _is_quiet(watch: Watch, limit: float, patience: Patience) -> bool:
    """No sign of life; while there was no step to learn from, for a third of the limit."""
    needed = patience.quiet_s if _has_begun(watch, patience) else limit / 3
    needed = min(needed, limit)
    if watch.stopped_since_s is not None and watch.clock_s - watch.stopped_since_s >= needed:
        return True
    return watch.clock_s - max(watch.talked_s, watch.worked_s, watch.moved_s) >= needed


def _is_too_long(watch: Watch, since: float, limit: float, patience: Patience) -> bool:
    """A rank that spins says nothing, one that only complains computes nothing; both together are believed."""
    alive = all(watch.clock_s - sign < limit for sign in (watch.talked_s, watch.worked_s))
    return since >= max(4 * limit, patience.longest_s) and not alive


def _silence(watch: Watch, since: float, limit: float) -> str:
    signs = [
        f"no output for {watch.clock_s - watch.talked_s:.0f} s" if watch.clock_s - watch.talked_s >= 1 else "",
        f"no work for {watch.clock_s - watch.worked_s:.0f} s" if watch.clock_s - watch.worked_s >= 1 else "",
    ]
    return ", ".join([f"no step for {since:.0f} s (limit {limit:.0f} s)", *filter(None, signs)])


def _use(pulse: Pulse) -> str:
    """Full use at little power is a wait: whoever reads this is to see it."""
    known = [(c.use_percent, c.power_w) for c in pulse.cards if c.use_percent is not None and c.power_w is not None]
    told = ", ".join(f"{use:.0f} % and {power:.0f} W" for use, power in known)
    return f"{'cards' if len(known) > 1 else 'card'} at {told}" if told else ""


def _who(pulse: Pulse, watch: Watch) -> tuple[int | None, str]:
    """The rank that the others wait for, as far as it shows from outside."""
    for chosen, why in (
        ([r for r in pulse.ranks if r.state in _STOPPED], "is stopped (SIGSTOP)"),
        (_behind(pulse.ranks), "is behind the others"),
        ([r for r in pulse.ranks if r.state == "D"], "waits in the kernel (state D: disk, network storage or driver)"),
        (_idle_card(pulse, watch), "uses no card while the others' cards wait"),
    ):
        if len(chosen) == 1 and len(pulse.ranks) > 1:
            return chosen[0].rank, f"rank {chosen[0].rank} {why}"
        if chosen and len(chosen) == len(pulse.ranks):
            return (0, f"the rank {why}") if len(chosen) == 1 else (None, f"every rank {why}")
    return (0, "") if len(pulse.ranks) == 1 else (None, "")


def _behind(ranks: Sequence[RankPulse]) -> list[RankPulse]:
    behind = [r for r in ranks if r.step == _slowest(ranks)]
    return behind if len(behind) < len(ranks) else []


def _idle_card(pulse: Pulse, watch: Watch) -> list[RankPulse]:
    cards = {card.index: card for card in pulse.cards}
    idle = [r for r in pulse.ranks if (c := cards.get(r.rank)) and c.use_percent is not None and c.use_percent < _NONE]
    others = [r for r in pulse.ranks if r not in idle]
    all_wait = all(r.rank in cards and _waits(cards[r.rank], watch) for r in others)
    return idle if others and all_wait else []


def _question(pulse: Pulse) -> str:
    if not pulse.question:
        return ""
    return f"it asks {pulse.question!r} and nobody will answer: standard input is empty; answer it by an option or a variable"
