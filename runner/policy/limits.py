"""When a run must begin to end, so that it ends in time."""

from datetime import datetime, timedelta

from runner.facts import History, Observed

_LEAST = timedelta(seconds=30)


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
