"""What a rented server costs, in decimal, by its provider's way to count time. A year of it is exact to the cent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from decimal import ROUND_HALF_UP, Decimal
from typing import Final

FOR_EVER: Final = timedelta(days=365)
_CENT: Final = Decimal("0.01")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tariff:
    """Time is billed in whole steps, and so much of it at least."""

    step: timedelta
    minimum: timedelta = timedelta()


VRAMFARM: Final = Tariff(step=timedelta(minutes=1), minimum=timedelta(minutes=15))
BY_THE_SECOND: Final = Tariff(step=timedelta(seconds=1))
_TARIFFS: Final[Mapping[str, Tariff]] = {"vramfarm": VRAMFARM}  # sources: docs/providers.md


def tariff_of(provider: str) -> Tariff:
    """Others than VRAMfarm bill what was used, to the second."""
    return _TARIFFS.get(provider, BY_THE_SECOND)


def billed(price_per_hour: Decimal, seconds: float, tariff: Tariff) -> Decimal:
    """The steps that were begun, and the minimum at least."""
    steps = -(-timedelta(seconds=seconds) // tariff.step)
    time = max(tariff.minimum, steps * tariff.step)
    return (price_per_hour * int(time.total_seconds()) / 3600).quantize(_CENT, ROUND_HALF_UP)


def affordable(amount: Decimal, price_per_hour: Decimal, tariff: Tariff) -> timedelta:
    """
    How long a server may stay for this much: whole steps. What is paid anyway is used, if
    anything is left at all.
    """
    if amount <= 0:
        return timedelta()
    if price_per_hour <= 0:
        return FOR_EVER
    steps = int(amount * 3600 / price_per_hour / int(tariff.step.total_seconds()))
    return min(max(min(steps, FOR_EVER // tariff.step) * tariff.step, tariff.minimum), FOR_EVER)
