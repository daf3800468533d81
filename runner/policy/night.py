"""
A night that is started from outside: what a cron line does next, given what the store and the
provider say. Asked again and again; a line that is repeated rents nothing twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final

from runner.facts import Machine, Offer, Outcome, RentedServer, ServerState
from runner.job import Job
from runner.policy.batch import accumulation
from runner.policy.fleet import holders
from runner.policy.planning import GB, disk_bytes, workload

SILENCE: Final = timedelta(minutes=12)  # a machine that says nothing so long is given back within its paid minutes
ONE_NIGHT: Final = timedelta(hours=12)  # servers that never trained count for so long, whichever cron line rented them
STORE_REST: Final = timedelta(hours=1)  # a store that was away is given this before a machine is paid for again
_LEAST_DISK_GB: Final = 100
_WRONG_JOB: Final = 2
_OVER: Final = frozenset({Outcome.SUCCEEDED, Outcome.STOPPED, Outcome.GAVE_UP, Outcome.LIMIT})
_CAN_GO_ON: Final = _OVER - {Outcome.SUCCEEDED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """How a server's start ended when the job or the store was at fault. `is_same`: of the job as it is now."""

    server: str
    code: int
    reason: str
    is_same: bool
    age: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """
    What is seen from outside. `told_by`: the server that wrote the store's status last; the three
    after it are that status. `outcome`: how the run ended, by the store; empty: it did not.
    """

    outcome: str = ""
    reason: str = ""
    missing: str = ""  # what of it is not in the store, though it succeeded
    rentals: tuple[RentedServer, ...] = ()  # of this run, newest first, those that are gone, too
    refused: Collection[str] = ()  # servers that were given back
    told_by: str = ""
    verdict: str = ""
    verdict_reason: str = ""
    has_begun: bool = False
    silent_for: timedelta = timedelta()  # since the live server was rented, while it has not told anything
    is_raised: bool = False  # job.yaml has a higher limit than the one that was reached
    refusal: Refusal | None = None
    rented_at: Mapping[str, datetime] = field(default_factory=dict)  # every server of this run that is known of
    trained: Collection[str] = ()  # those of them on which an attempt began
    reopened: Collection[str] = ()  # those of them on which the run was begun again, by the ledger
    now: datetime | None = None  # None: nothing is too long ago
    no_time: str = ""  # why what limits leave is not worth a machine
    no_time_anew: str = ""  # the same of a run that is begun again


@dataclass(frozen=True, slots=True)
class Over:
    """There is nothing to rent for. `missing`: what of it is not in the store all the same."""

    outcome: Outcome
    reason: str
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """The next server would end as the last one did."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class TooShort:
    """Whatever machine is rented would end before it has trained."""

    reason: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """A server trains, or is about to: nothing to do until it ends."""

    rental: RentedServer


@dataclass(frozen=True, slots=True)
class Watch:
    """A server has not said yet whether it is fit."""

    rental: RentedServer


@dataclass(frozen=True, slots=True)
class GiveBack:
    """A server that is not fit; the next one is rented when it is gone."""

    rental: RentedServer
    reason: str


@dataclass(frozen=True, slots=True)
class Rent:
    """The `number`th server of this run, counted from 1. `reopens`: it is told to go on, and has all limits anew."""

    number: int
    reopens: bool = False


@dataclass(frozen=True, slots=True)
class NoMore:
    """So many servers were no help that the next one will be none, either."""

    reason: str


Step = Over | Refused | TooShort | Accepted | Watch | GiveBack | Rent | NoMore


def decide_step(job: Job, night: Night, *, go_on: bool, rented_now: Collection[str] = ()) -> Step:
    """
    `go_on`: a run that is over and not done is begun again, once, and what was in vain before is
    forgotten. `rented_now`: servers that this command has rented.
    """
    # an order that a server has carried out is done: how the run ended after it is how it ended
    reopens = go_on and not any(server in night.reopened for server in rented_now)
    live = next((rental for rental in night.rentals if rental.state is not ServerState.GONE), None)
    if live is not None:
        return _judge(live, night)
    goes_on = (reopens and night.outcome in _CAN_GO_ON) or (night.is_raised and night.outcome == Outcome.LIMIT)
    if night.outcome in _OVER and not goes_on:
        return Over(Outcome(night.outcome), night.reason, night.missing)
    if reason := night.no_time_anew if reopens else night.no_time:
        return Over(Outcome.LIMIT, reason) if night.trained and not reopens else TooShort(reason)
    if refused := _why_in_vain(night, go_on=go_on, rented_now=rented_now):
        return refused
    futile = _count_futile(night, go_on=go_on, rented_now=rented_now)
    if futile >= job.provider.max_machines:
        return NoMore(f"{futile} servers were rented and none trains (provider.max_machines)")
    return Rent(len(night.rentals) + 1, reopens=reopens)


def is_outdated(at: datetime | None, machines: Sequence[Machine]) -> bool:
    """Whether the run was begun again after it had ended `at`, by a machine that may have vanished before it trained."""
    return at is not None and any(machine.is_anew and machine.opened_at > at for machine in machines)


def _why_in_vain(night: Night, *, go_on: bool, rented_now: Collection[str]) -> Refused | None:
    """The newest server's word counts: one that came later found out more."""
    told = night.refusal
    if told is None or not told.is_same or (night.rentals and night.rentals[0].id != told.server):
        return None
    if told.server not in rented_now and (go_on or (told.code != _WRONG_JOB and told.age >= STORE_REST)):
        return None
    return Refused(told.code, f"{told.server}: {told.reason}")


def _count_futile(night: Night, *, go_on: bool, rented_now: Collection[str]) -> int:
    """Servers since the last one that trained, over all cron lines of a night; after `go_on` this command's only."""
    futile = 0
    for server, at in sorted(night.rented_at.items(), key=lambda one: one[1], reverse=True):
        is_old = night.now is not None and night.now - at >= ONE_NIGHT
        if server in night.trained or (server not in rented_now and (go_on or is_old)):
            break
        futile += 1
    return futile


def _judge(live: RentedServer, night: Night) -> Step:
    if live.id in night.refused or live.state is ServerState.STOPPING:
        return Watch(live)  # it goes
    if night.told_by == live.id:
        if night.verdict == "swap":
            return GiveBack(live, night.verdict_reason or "its preflight says: swap this machine")
        if night.has_begun:
            return Accepted(live)
    elif night.silent_for >= SILENCE:
        return GiveBack(live, f"no word in the store for {SILENCE.total_seconds() / 60:.0f} minutes")
    return Watch(live)


# ---------------------------------------------------------------------------------- machines


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a machine must have, beside what the plan says."""

    cards: int | None
    card: str | None
    max_price: Decimal | None  # an hour, the whole machine
    days: int


def wish_of(job: Job, *, at_most: Decimal | None, lasts: timedelta) -> Wish:
    """The stricter of job.yaml and the command line; whole days, with an hour to spare."""
    prices = [price for price in (at_most, job.provider.max_price) if price is not None]
    days = -(-(lasts + timedelta(hours=1)) // timedelta(days=1))
    return Wish(
        cards=None if job.cards == "all" else job.cards,
        card=job.provider.gpu,
        max_price=min(prices, default=None),
        days=max(days, 1),
    )


def choose(job: Job, wish: Wish, offers: Sequence[Offer], *, refused: Collection[str] = ()) -> tuple[Offer, ...]:
    """Machines that will do, the best first. `refused`: ids of machines that were given back."""
    fitting = [offer for offer in offers if offer.id not in refused and not any(_objections(wish, offer))]
    if job.model is None:
        return tuple(sorted(fitting, key=lambda offer: (offer.price_per_hour, offer.id)))
    per_card = job.batch.per_card if job.batch else 1
    steps = accumulation(job, wish.cards) if wish.cards else 1
    work = workload(job.model, per_card=per_card, accumulation=steps)
    held = holders(work, fitting, keep_last=job.checkpoint.keep_last)
    return tuple(holder.offer for holder in held if not holder.lacks)


def why_none(job: Job, wish: Wish, offers: Sequence[Offer], *, refused: Collection[str] = ()) -> str:
    """What is wrong with the machines there are, the fewest objections first."""
    if not offers:
        return "the provider offers no machine now"
    told = [
        (list(_objections(wish, offer)) or [_short_of(job, offer, refused)], f"{offer.cards} x {offer.name}")
        for offer in offers
    ]
    objections, name = min(told, key=lambda one: len(one[0]))
    return f"no machine of {len(offers)} will do; the nearest, {name}: {', '.join(objections)}"


def _short_of(job: Job, offer: Offer, refused: Collection[str]) -> str:
    if offer.id in refused:
        return "it was given back before"
    return "the plan says that the model does not fit (vramfarm-runner plan)" if job.model else "it was taken meanwhile"


def _objections(wish: Wish, offer: Offer) -> Iterator[str]:
    if not offer.available:
        yield "taken"
    if wish.cards is not None and offer.cards != wish.cards:
        yield f"{offer.cards} cards, not {wish.cards} (cards)"
    if wish.card is not None and offer.card != wish.card:
        yield f"{offer.card}, not {wish.card} (provider.gpu)"
    if wish.max_price is not None and offer.price_per_hour > wish.max_price:
        yield f"{offer.price_per_hour} {offer.currency}/h, more than {wish.max_price}"
    if offer.max_rental_days and offer.max_rental_days < wish.days:
        yield f"rented out for {offer.max_rental_days} days at most, not {wish.days}"
    if offer.ram_bytes < offer.card_bytes * offer.cards:
        yield f"{offer.ram_bytes // GB} GB of memory, less than its cards have"


def disk_gb(job: Job, offer: Offer) -> int:
    """What to ask for: room for the checkpoints where the model is known, never more than there is."""
    needed = _LEAST_DISK_GB
    if job.model is not None:
        needed = max(needed, -(-disk_bytes(workload(job.model), keep_last=job.checkpoint.keep_last) // GB))
    return min(needed, offer.disk_bytes // GB)
