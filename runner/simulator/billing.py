"""
What a server costs: by the minute, fifteen at least. Pure, in decimals.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from typing import Final

MINIMUM_MINUTES: Final = 15


def billed_minutes(started_at: datetime | None, until: datetime) -> int:
    """Minutes begun since the server first ran; none if it never did."""
    if started_at is None:
        return 0
    begun = -(-(until - started_at) // timedelta(minutes=1))
    return max(MINIMUM_MINUTES, begun)


def cost(minutes: int, price_per_hour: Decimal) -> Decimal:
    """Rounded half up, to the hundredth of a cent."""
    return (minutes * price_per_hour / 60).quantize(Decimal("0.0001"), ROUND_HALF_UP)
