"""When a run must be over, and when it must begin to end for that."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

from runner.facts import History, Observed, Server
from runner.job import Limits

DEFAULT_DURATION = timedelta(hours=24)
_LEAST = timedelta(seconds=30)
_RENTAL_MARGIN = timedelta(minutes=5)


def deadline(limits: Limits, opened_at: datetime, server: Server | None) -> datetime:
    """
    The instant after which nothing is paid for. There is always one: the earliest of what the
    user set (24 hours where nothing is set) and the end of the rental.
    """
    ends = [opened_at + limits.max_duration] if limits.max_duration else []
    if limits.until:
        ends.append(next_time(limits.until, opened_at))
    if limits.max_cost is not None and server and server.price_per_hour:
        ends.append(opened_at + _affordable(limits.max_cost, Decimal(server.price_per_hour)))
    if not ends:
        ends.append(opened_at + DEFAULT_DURATION)
    if server and server.rental_ends_at:
        ends.append(datetime.fromisoformat(server.rental_ends_at) - _RENTAL_MARGIN)
    return min(ends)


def _affordable(amount: Decimal, price_per_hour: Decimal) -> timedelta:
    """Whole minutes, since minutes are what is billed."""
    if price_per_hour <= 0:
        return DEFAULT_DURATION
    return timedelta(minutes=int(amount * 60 / price_per_hour))


def next_time(text: str, after: datetime) -> datetime:
    """`07:00 Europe/Berlin`: the first such time after; an ISO date and time is itself (UTC without a zone)."""
    clock, _, zone = text.strip().partition(" ")
    if "T" in text or "-" in clock:
        moment = datetime.fromisoformat(text)
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    hour, minute = clock.split(":")
    local = after.astimezone(ZoneInfo(zone or "UTC"))
    moment = local.replace(hour=int(hour), minute=int(minute), second=0, microsecond=0)
    if moment <= local:
        moment += timedelta(days=1)
    return moment.astimezone(UTC)


def limit_at(history: History, seen: Observed) -> datetime | None:
    """The instant to save and stop: the deadline less what the end takes. None: no deadline."""
    if seen.deadline_at is None:
        return None
    return seen.deadline_at - reserve(history, seen)


def reserve(history: History, seen: Observed) -> timedelta:
    """
    Time kept for the last save and its upload: twice what they took in this run, and half a
    minute; never more than a quarter of the whole time, so that a short limit still trains.
    """
    wanted = timedelta(seconds=2 * (seen.last_save_s + seen.last_upload_s)) + _LEAST
    if seen.deadline_at is None or history.opened_at is None:
        return wanted
    return min(wanted, max(seen.deadline_at - history.opened_at, timedelta()) / 4)
