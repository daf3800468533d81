"""
How often to save. Less often than it pays costs training after a failure, more often costs
saving; less than an upload apart, and the newest checkpoint never gets into the store.

The interval is Daly's ("A higher order estimate of the optimum checkpoint interval for restart
dumps", 2006), which is Young's sqrt(2 x cost x time between failures) but for small terms. The
cost of a save is taken to be its whole duration: training hardly notices, the disk does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import pairwise
from typing import Final

from runner.facts import Attempt, Checkpoint, Ending, History


class Rental(StrEnum):
    """How a server is rented. INTERRUPTIBLE: it may be taken away at any moment."""

    ON_DEMAND = "on_demand"
    INTERRUPTIBLE = "interruptible"


MEAN_TIME: Final = {Rental.ON_DEMAND: timedelta(days=7), Rental.INTERRUPTIBLE: timedelta(hours=2)}
"""Between failures, where nothing is known: an assumption, and said to be one."""

_SHORTEST: Final = timedelta(minutes=1)
_MATTERS: Final = 0.01  # of the time
_ENOUGH_FAILURES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """`why` names what decided it; `matters`: the job's own interval loses a hundredth of the time or more."""

    interval: timedelta
    why: str
    matters: bool


def advise_interval(save_s: float, upload_s: float, between_failures: timedelta) -> timedelta:
    """Never below the upload, nor below the save itself; at least a minute."""
    best_s = _daly_s(save_s, between_failures.total_seconds())
    return max(timedelta(seconds=math.ceil(max(best_s, upload_s, save_s))), _SHORTEST)


def _daly_s(save_s: float, mean_s: float) -> float:
    ratio = save_s / (2 * mean_s)
    if ratio >= 1:
        return mean_s
    return math.sqrt(2 * save_s * mean_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def decide_cadence(now: timedelta, save_s: float, upload_s: float, between_failures: timedelta) -> Cadence:
    """What to write into `checkpoint.save_interval`, and whether it is worth it."""
    interval = advise_interval(save_s, upload_s, between_failures)
    lost = _overhead(now, save_s, between_failures) - _overhead(interval, save_s, between_failures)
    too_often = now.total_seconds() < upload_s
    by_upload = interval.total_seconds() <= upload_s
    return Cadence(
        interval=interval,
        why="an upload takes so long" if by_upload else "the best between saving and what a failure costs",
        matters=too_often or lost >= _MATTERS,
    )


def _overhead(interval: timedelta, save_s: float, between_failures: timedelta) -> float:
    """The share of the time that goes into saving, and into training again what a failure took."""
    return save_s / interval.total_seconds() + interval / (2 * between_failures)


def observed_interval(checkpoints: Iterable[Checkpoint], attempts: Iterable[Attempt]) -> timedelta | None:
    """
    The longest time between two saves of one attempt; where no attempt made two, from its first step to its save.

    What a script that saves for itself does: `checkpoint.save_interval` does not govern it.
    """
    begun = {attempt.number: attempt.first_step_at or attempt.launched_at for attempt in attempts}
    saved: dict[int, list[datetime]] = defaultdict(list)
    for checkpoint in checkpoints:
        if checkpoint.ref.attempt in begun:
            saved[checkpoint.ref.attempt].append(checkpoint.written_at)
    gaps = [later - sooner for times in saved.values() for sooner, later in pairwise(sorted(times))]
    gaps = gaps or [min(times) - begun[number] for number, times in saved.items()]
    return max((gap for gap in gaps if gap > timedelta()), default=None)


def time_between_failures(history: History, now: datetime) -> timedelta | None:
    """As this run has seen them; None before there are enough."""
    failures = sum(attempt.ending is Ending.FAILED for attempt in history.attempts)
    if failures < _ENOUGH_FAILURES:
        return None
    tried = sum(((a.ended_at or now) - a.launched_at for a in history.attempts), timedelta())
    return max(tried / failures, _SHORTEST)
