"""
Where the time of a run went, and its money: training that was kept, training that had to be
done again, starting, set-up, waiting.

An attempt's training counts as useful as far as its steps are in what came after it: up to
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
    """Seconds of one machine, which add up to `total_s`. `cost`: of all of it."""

    machine: Machine
    total_s: float
    setup_s: float  # before its first attempt
    idle_s: float  # between attempts, and after the last
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
        kept[last.id] = last.step if is_whole else newest_step
    return tuple(_spend(machine, kept) for machine in machines)


def _step_of(attempt: Attempt) -> int:
    return attempt.resume.step if attempt.resume else 0


def _spend(machine: Machine, kept: dict[str, int]) -> Spending:
    begin, end = min(machine.paid_from, machine.opened_at), machine.seen_at
    shares = tuple(_share(attempt, kept[attempt.id], end) for attempt in machine.attempts)
    total_s = max((end - begin).total_seconds(), 0.0)
    first = machine.attempts[0].launched_at if machine.attempts else end
    setup_s = min(max((first - begin).total_seconds(), 0.0), total_s)
    busy_s = sum(share.startup_s + share.useful_s + share.lost_s for share in shares)
    return Spending(
        machine=machine,
        total_s=total_s,
        setup_s=setup_s,
        idle_s=max(total_s - setup_s - busy_s, 0.0),
        shares=shares,
        cost=cost(machine),
    )


def _share(attempt: Attempt, kept_step: int, seen_at: datetime) -> Share:
    ended = attempt.ended_at or max(seen_at, attempt.launched_at)
    began, steps = _step_of(attempt), attempt.step - _step_of(attempt)
    if steps <= 0:
        return Share(number=attempt.number, startup_s=_seconds(attempt.launched_at, ended), useful_s=0.0, lost_s=0.0)
    trained_from = attempt.first_step_at or attempt.launched_at
    trained_s = _seconds(trained_from, ended)
    useful_s = trained_s * min(max(kept_step - began, 0) / steps, 1.0)
    return Share(
        number=attempt.number,
        startup_s=_seconds(attempt.launched_at, trained_from),
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
    if not spending.total_s:
        return Decimal(0)
    part = Decimal(str(spending.useful_s)) / Decimal(str(spending.total_s))
    return (spending.cost * part).quantize(_CENT, ROUND_HALF_UP)
