"""
Which rank holds the others up. Ranks of one job go at the pace of the slowest, so there is a word
about it only when it is sure: the same rank again and again, or a card whose clocks are held down.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from runner.facts import CardPulse, Pulse, Stage

_LOOKS: Final = 24  # two minutes of them
_MOSTLY: Final = 0.8
_LATE: Final = 0.2  # of a step
_SAMPLES: Final = 3  # of cards, a minute apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Lags:
    """What was seen of ranks against each other since the last verdict."""

    last: Pulse | None = None
    num_looks: int = 0
    late: Mapping[int, int] = field(default_factory=dict)  # by rank: looks at which it was the last by far
    held: Mapping[int, int] = field(default_factory=dict)  # by card: samples in a row with its clocks held down
    slow_rank: int | None = None


def watch_lags(before: Lags, pulse: Pulse) -> Lags:
    """Return what is known after one more look."""
    last = before.last
    now = replace(before, last=pulse)
    if last is None or pulse.stage is not Stage.TRAINING:
        return now
    if pulse.cards and pulse.cards is not last.cards:
        held = {card.index: before.held.get(card.index, 0) + 1 for card in pulse.cards if card.throttled}
        now = replace(now, held=held)
    return now if (rank := _last_by_far(last, pulse)) == _UNKNOWN else _count(now, rank)


_UNKNOWN: Final = -1


def _last_by_far(last: Pulse, pulse: Pulse) -> int | None:
    """The rank that came to this step after all others, if by a good part of a step; `_UNKNOWN`: it does not show."""
    steps = {rank.step for rank in pulse.ranks}
    before = {rank.rank: rank for rank in last.ranks}
    if len(pulse.ranks) < 2 or len(steps) != 1 or before.keys() != {r.rank for r in pulse.ranks}:  # noqa: PLR2004
        return _UNKNOWN
    *others, latest = sorted(pulse.ranks, key=lambda rank: rank.beat_s)
    num_steps = latest.step - before[latest.rank].step
    if num_steps <= 0:
        return _UNKNOWN
    step_s = (latest.beat_s - before[latest.rank].beat_s) / num_steps
    return latest.rank if latest.beat_s - others[-1].beat_s > _LATE * step_s else None


def _count(now: Lags, rank: int | None) -> Lags:
    late = Counter(now.late)
    if rank is not None:
        late[rank] += 1
    if now.num_looks + 1 < _LOOKS:
        return replace(now, num_looks=now.num_looks + 1, late=late)
    slow = next((r for r, count in late.items() if count >= _MOSTLY * _LOOKS), None)
    return replace(now, num_looks=0, late={}, slow_rank=slow)


def straggler(lags: Lags) -> str:
    """One line for a person; empty where nothing is sure. It has no numbers that change from look to look."""
    cards = lags.last.cards if lags.last else ()
    held = {card.index: card for card in cards if lags.held.get(card.index, 0) >= _SAMPLES and card.throttled}
    if lags.slow_rank is not None:
        why = f"; its card is held down ({_why(held[lags.slow_rank])})" if lags.slow_rank in held else ""
        return f"rank {lags.slow_rank} holds the others up: it is the last at most steps{why}"
    if not held:
        return ""
    if len(held) == len(cards):
        return f"the clocks of every card are held down ({_why(next(iter(held.values())))})"
    names = ", ".join(f"card {index} ({_why(card)})" for index, card in sorted(held.items()))
    return f"clocks are held down: {names}; all ranks go at the pace of the slowest"


def _why(card: CardPulse) -> str:
    return ", ".join(card.throttled)
