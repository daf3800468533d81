"""What a rented server costs, in decimal: whole minutes, fifteen at least. A year of them is exact to the cent."""

from __future__ import annotations

from datetime import timedelta
from decimal import ROUND_HALF_UP, Decimal
from typing import Final

MINIMUM_MINUTES: Final = 15  # billed at least
FOR_EVER: Final = timedelta(days=365)
_CENT: Final = Decimal("0.01")


def billed(price_per_hour: Decimal, seconds: float) -> Decimal:
    """Whole minutes, at least fifteen."""
    minutes = max(MINIMUM_MINUTES, -int(-seconds // 60))
    return (price_per_hour * minutes / 60).quantize(_CENT, ROUND_HALF_UP)


def affordable(amount: Decimal, price_per_hour: Decimal) -> timedelta:
    """
    How long a server may stay for this much: whole minutes. What is paid anyway is used, if
    anything is left at all.
    """
    if amount <= 0:
        return timedelta()
    if price_per_hour <= 0:
        return FOR_EVER
    minutes = max(int(amount * 60 / price_per_hour), MINIMUM_MINUTES)
    return min(timedelta(minutes=minutes), FOR_EVER)
