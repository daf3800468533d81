"""
The farm's terms, pure. A server costs by the minute, fifteen at least, in decimals. Two hours without load
or connections bring an email, an hour more the stop.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from typing import Final

from runner.simulator.model import Activity, Idle

EMAIL_AFTER: Final = timedelta(hours=2)
STOP_AFTER: Final = timedelta(hours=1)  # after the email
MINIMUM_MINUTES: Final = 15


def is_busy(activity: Activity) -> bool:
    return any((activity.gpu_util_percent, activity.ssh_connections, activity.jupyter_connections))


def follow(idle: Idle, *, busy: bool, now: datetime) -> Idle:
    """What is known of the server's idleness from now on. `stops_at` is set together with `email_sent_at`."""
    if not idle.enabled or busy:
        return Idle(enabled=idle.enabled)
    since = idle.idle_since or now
    if idle.email_sent_at is None and now - since >= EMAIL_AFTER:
        return Idle(enabled=True, idle_since=since, email_sent_at=now, stops_at=now + STOP_AFTER)
    return idle.model_copy(update={"idle_since": since})


def billed_minutes(started_at: datetime | None, until: datetime) -> int:
    """Minutes begun since the server first ran; none if it never did."""
    if started_at is None:
        return 0
    begun = -(-(until - started_at) // timedelta(minutes=1))
    return max(MINIMUM_MINUTES, begun)


def cost(minutes: int, price_per_hour: Decimal) -> Decimal:
    """Rounded half up, to the hundredth of a cent."""
    return (minutes * price_per_hour / 60).quantize(Decimal("0.0001"), ROUND_HALF_UP)
