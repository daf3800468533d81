"""When a run must be over, and when it must begin to end for that."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

from runner.facts import Earlier, History, Machine, Observed, Server
from runner.job import Limits, format_duration
from runner.policy.ledger import sum_up
from runner.policy.money import affordable, tariff_of

DEFAULT_DURATION = timedelta(hours=24)
_LEAST = timedelta(seconds=30)
_RENTAL_MARGIN = timedelta(minutes=5)
_WORTH_IT = timedelta(minutes=1)  # less is no reason to pay for a machine's first quarter of an hour
# to see for a minute that the machine before does not live, to begin, to save, and to tell the store of the end
WORTH_RENTING = timedelta(minutes=3)
ASSUMED_RATE = 500_000_000  # bytes a second, of a script that writes with torch.save to a disk that is not slow
_TELLS_EVERY = timedelta(minutes=2)
_NOTHING = Earlier()


def deadline(
    limits: Limits,
    opened_at: datetime,
    server: Server | None,
    earlier: Earlier = _NOTHING,
    paid_from: datetime | None = None,
) -> datetime:
    """The instant after which nothing is paid for. There is always one."""
    return min(ends(limits, opened_at, server, earlier, paid_from))[0]


def ends(
    limits: Limits,
    opened_at: datetime,
    server: Server | None,
    earlier: Earlier = _NOTHING,
    paid_from: datetime | None = None,
) -> list[tuple[datetime, str]]:
    """
    What the user set (24 hours a machine where nothing is set) and the end of the rental, and
    what each is called. Time and money that `earlier` machines took are gone.
    """
    found = []
    if limits.max_duration:
        left = max(limits.max_duration - earlier.duration, timedelta())
        found.append((opened_at + left, "limits.max_duration"))
    if limits.until:
        found.append((next_time(limits.until, opened_at), "limits.until"))
    if limits.max_cost is not None and server and server.price_per_hour:
        money = affordable(limits.max_cost - earlier.cost, Decimal(server.price_per_hour), tariff_of(server.provider))
        found.append(((paid_from or opened_at) + money, "limits.max_cost"))
    if not found:
        found.append((opened_at + DEFAULT_DURATION, "24 hours, where limits say nothing"))
    if server and server.rental_ends_at:
        found.append((datetime.fromisoformat(server.rental_ends_at) - _RENTAL_MARGIN, "the end of the rental"))
    return found


def next_time(text: str, after: datetime) -> datetime:
    """`07:00 Europe/Berlin`: the first such time after it; an ISO date and time is itself (UTC without a zone)."""
    clock, _, zone = text.strip().partition(" ")
    if "T" in clock or "-" in clock:
        moment = datetime.fromisoformat(text)
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    hour, minute = clock.split(":")
    local = after.astimezone(ZoneInfo(zone))
    moment = local.replace(hour=int(hour), minute=int(minute), second=0, microsecond=0)
    if moment <= local:
        moment += timedelta(days=1)
    return moment.astimezone(UTC)


def is_raised(limits: Limits, machines: Sequence[Machine], stopped_for: datetime, now: datetime) -> bool:
    """
    Whether a run that reached its limit goes on by what job.yaml says now: `stopped_for` was the deadline
    of its last machine, which would have a later one, and another machine has time left, too.
    """
    last = machines[-1]
    server = Server(provider=last.provider, id=last.server, price_per_hour=last.price_per_hour)
    before = _NOTHING if last.is_anew else sum_up(tuple(machines), but=last.id)
    there = deadline(limits, last.opened_at, server, before, last.paid_from)
    here = deadline(limits, now, server, sum_up(tuple(machines), but=""))
    if limits.until:  # of that night, as for that machine: else each morning's would be raised by a day
        here = min(here, next_time(limits.until, last.opened_at))
    return there > stopped_for + _WORTH_IT and here > now + _WORTH_IT


def why_not_worth_renting(limits: Limits, now: datetime, earlier: Earlier = _NOTHING) -> str:
    """What the limits leave another machine, where that is too little to train and to tell the end; else nothing."""
    anybody = Server(provider="vramfarm", id="", price_per_hour="0")  # money is over or not; how long it lasts is its
    at, why = min(ends(limits, now, anybody, earlier))
    if at - now >= WORTH_RENTING:
        return ""
    left = format_duration(timedelta(seconds=int((at - now).total_seconds()))) if at > now else "no time"
    return f"{why} leaves {left}, and a rented machine takes {format_duration(WORTH_RENTING)} at least to begin, to save and to tell the store of its end"


def is_reached(deadline_at: datetime, told_at: datetime, now: datetime) -> bool:
    """Whether a machine that told no end came to its deadline: it told of itself every minute until then."""
    return now >= deadline_at and told_at >= deadline_at - _TELLS_EVERY


def limit_at(history: History, seen: Observed) -> datetime | None:
    """The instant to save and stop: the deadline less what the end takes. None: no deadline."""
    if seen.deadline_at is None:
        return None
    return seen.deadline_at - reserve(history, seen)


def time_for_end(save_s: float, upload_s: float) -> timedelta:
    """Twice what the last save and its upload are known to take, and half a minute."""
    return timedelta(seconds=2 * (save_s + upload_s)) + _LEAST


def save_s_of(size_bytes: int) -> float:
    """How long a save of this size takes where none was timed."""
    return size_bytes / ASSUMED_RATE


def reserve(history: History, seen: Observed) -> timedelta:
    """
    Time kept for the last save and its upload, but never more than a quarter of the whole time,
    so that a short limit still trains. A save that was not timed yet is judged by the checkpoints here.
    """
    largest = max((checkpoint.size_bytes for checkpoint in seen.local), default=0)
    wanted = time_for_end(seen.last_save_s or save_s_of(largest), seen.last_upload_s)
    if seen.deadline_at is None or history.opened_at is None:
        return wanted
    return min(wanted, max(seen.deadline_at - history.opened_at, timedelta()) / 4)
