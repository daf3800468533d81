"""What a server costs, to the hundredth of a cent."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from runner.simulator.terms import billed_minutes, cost

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("price", "lived", "minutes", "euros"),
    [
        pytest.param("2.36", timedelta(minutes=3), 15, "0.5900", id="4 x RTX 4090 for 3 minutes"),
        pytest.param("31.20", timedelta(seconds=61), 15, "7.8000", id="8 x H100 for 61 s"),
        pytest.param("31.20", timedelta(minutes=20, seconds=1), 21, "10.9200", id="8 x H100 for 20 min 1 s"),
        pytest.param("31.20", timedelta(minutes=20), 20, "10.4000", id="a whole minute is not rounded up"),
        pytest.param("0.59", timedelta(0), 15, "0.1475", id="not a second"),
        pytest.param("0.01", timedelta(minutes=16), 16, "0.0027", id="rounded up"),
        pytest.param("0.003", timedelta(minutes=17), 17, "0.0009", id="rounded half up"),
    ],
)
def test_a_bill_is_the_minutes_begun_and_fifteen_at_least(price, lived, minutes, euros):
    """
    The worked examples of the price list, and the edges of rounding.
    """
    billed = billed_minutes(START, START + lived)

    assert (minutes, Decimal(euros)) == (billed, cost(billed, Decimal(price)))


def test_a_server_that_never_ran_costs_nothing():
    """
    Provisioning is free.
    """
    assert 0 == billed_minutes(None, START)
