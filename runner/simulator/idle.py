"""
Idle detection: two hours without load or connections bring an email, an hour more the stop. Pure.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from runner.simulator.model import Activity, Idle

EMAIL_AFTER: Final = timedelta(hours=2)
STOP_AFTER: Final = timedelta(hours=1)  # after the email


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
