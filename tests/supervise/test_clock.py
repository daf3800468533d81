"""A runner's time goes on, whatever is done to the wall clock."""

from datetime import UTC, datetime, timedelta

import pytest

from runner.supervise.clock import Clock

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    ("jump", "now"),
    [
        pytest.param(timedelta(), NOON + HOUR, id="right"),
        pytest.param(-5 * HOUR, NOON + HOUR, id="set back"),
        pytest.param(5 * HOUR, NOON + 6 * HOUR, id="set forward"),
    ],
)
def test_an_hour_later_it_is_at_least_an_hour_later(jump, now):
    """
    A clock that is set back does not put off a limit; one that is set forward is believed.
    """
    wall, passed = [NOON], [100.0]
    clock = Clock(lambda: wall[0], lambda: passed[0])

    wall[0], passed[0] = NOON + HOUR + jump, 100.0 + 3600

    assert now == clock.now()


def test_it_tells_the_time():
    """
    As the wall does.
    """
    before = datetime.now(UTC)

    assert before <= Clock().now() <= datetime.now(UTC) + timedelta(seconds=1)
