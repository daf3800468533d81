"""
Where the time of a run went, and its money: training that was kept, training that had to be
done again, starting, set-up, waiting.

A machine's time begins when it is paid for or the run is opened there, anew where the operator
reopens it, and ends with the conclusion. An attempt's training counts as useful as far as its steps are in what came after it: up to
the checkpoint the next attempt began with, or the newest there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import ROUND_HALF_UP, Decimal
from itertools import pairwise
from typing import Final

from runner.facts import Attempt, Ending, Machine
from runner.policy.ledger import cost

_CENT: Final = Decimal("0.01")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Seconds of one attempt: to its first step, of training that was kept, and of training that was not."""

    number: int
    startup_s: float
    useful_s: float
    lost_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Seconds of one machine until the run was over, which add up to `total_s`. `cost`: until it was last seen."""

    machine: Machine
    total_s: float
    setup_s: float  # before its first attempt
    idle_s: float  # between attempts, and after the last until the run is over
    shares: tuple[Share, ...]
    cost: Decimal

    @property
    def useful_s(self) -> float:
        return sum(share.useful_s for share in self.shares)

    @property
    def startup_s(self) -> float:
        return sum(share.startup_s for share in self.shares)

    @property
    def lost_s(self) -> float:
        return sum(share.lost_s for share in self.shares)


def share_out(machines: tuple[Machine, ...], newest_step: int) -> tuple[Spending, ...]:
    """How each machine's time was spent; `newest_step`: of the newest checkpoint there is."""
    attempts = [attempt for machine in machines for attempt in machine.attempts]
    kept = {a.id: _step_of(b) for a, b in pairwise(attempts)}
    if attempts:
        last = attempts[-1]
        is_whole = last.ending in {None, Ending.SUCCEEDED}  # one that runs has lost nothing yet
        kept[last.id] = _step_of(last) + _steps(last) if is_whole else newest_step
    return tuple(_spend(machine, kept) for machine in machines)


def _step_of(attempt: Attempt) -> int:
    return attempt.resume.step if attempt.resume else 0


def _steps(attempt: Attempt) -> int:
    """How many it made. A log that begins with less than the checkpoint counts anew in each attempt."""
    steps = attempt.step - _step_of(attempt)
    return attempt.step if attempt.from_log and steps <= 0 else steps


def _spend(machine: Machine, kept: dict[str, int]) -> Spending:
    begin = _begin(machine)
    end = max(begin, min(machine.seen_at, machine.concluded_at or machine.seen_at))
    shares: list[Share] = []
    free_from = begin  # no second is told twice, whatever a clock did and whatever was reopened
    for attempt in machine.attempts:
        launched, ended = (min(max(at, free_from), end) for at in (attempt.launched_at, attempt.ended_at or end))
        free_from = max(launched, ended)
        shares.append(_share(attempt, kept[attempt.id], launched, free_from))
    first = next((a.launched_at for a in machine.attempts if a.launched_at >= begin), end)
    setup_s = _seconds(begin, min(first, end))
    total_s = _seconds(begin, end)
    busy_s = sum(share.startup_s + share.useful_s + share.lost_s for share in shares)
    return Spending(
        machine=machine,
        total_s=total_s,
        setup_s=min(setup_s, max(total_s - busy_s, 0.0)),
        idle_s=max(total_s - setup_s - busy_s, 0.0),
        shares=tuple(shares),
        cost=cost(machine),
    )


def _begin(machine: Machine) -> datetime:
    """Attempts of before a reopening are listed, and their time is not counted."""
    return min(machine.paid_from, machine.opened_at)


def _share(attempt: Attempt, kept_step: int, launched: datetime, ended: datetime) -> Share:
    """Of the part of the attempt that counts: from `launched` to `ended`."""
    began, steps = _step_of(attempt), _steps(attempt)
    if steps <= 0:
        return Share(number=attempt.number, startup_s=_seconds(launched, ended), useful_s=0.0, lost_s=0.0)
    trained_from = min(max(attempt.first_step_at or launched, launched), ended)
    trained_s = _seconds(trained_from, ended)
    useful_s = trained_s * min(max(kept_step - began, 0) / steps, 1.0)
    return Share(
        number=attempt.number,
        startup_s=_seconds(launched, trained_from),
        useful_s=useful_s,
        lost_s=trained_s - useful_s,
    )


def _seconds(begin: datetime, end: datetime) -> float:
    return max((end - begin).total_seconds(), 0.0)


def goodput(spendings: tuple[Spending, ...]) -> float:
    """The share of all time that became training that was kept; 0 before there is any."""
    total_s = sum(spending.total_s for spending in spendings)
    return sum(spending.useful_s for spending in spendings) / total_s if total_s else 0.0


def useful_cost(spending: Spending) -> Decimal:
    """Its part of the bill, by time."""
    paid_s = _seconds(_begin(spending.machine), spending.machine.seen_at)
    if not paid_s:
        return Decimal(0)
    part = Decimal(str(spending.useful_s)) / Decimal(str(paid_s))
    return (spending.cost * part).quantize(_CENT, ROUND_HALF_UP)
