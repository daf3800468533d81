"""Lines of several ranks in the order of time; whatever they print, no rank's lines change their order."""

import os
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.supervise.logs import Merger, stamp

NOW = datetime.fromisoformat("2026-01-02T12:00:00")
AT = datetime.fromisoformat("2026-01-01T03:04:05")


@dataclass(frozen=True)
class Said:
    stream: int
    text: str
    number: int = 0


@pytest.fixture
def zone():
    """Whoever reads is somewhere."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "Europe/Zurich"
    time.tzset()
    yield
    os.environ.pop("TZ") if before is None else os.environ.update(TZ=before)
    time.tzset()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[rank1]:W0101 03:04:05.250000 4121 torch/distributed/run.py:1] warns", AT.replace(microsecond=250_000)),
        ("E0101 03:04:05.000 17 torch/distributed/elastic/multiprocessing/api.py:869] failed", AT),
        ("[rank0]:[E101 03:04:05.250000000 ProcessGroupNCCL.cpp:632] timed out", AT.replace(microsecond=250_000)),
        ("2026-01-01 03:04:05,250 INFO root: step 1", AT.replace(microsecond=250_000)),
        ("[2026-01-01 03:04:05] box:17:17 [0] NCCL WARN Call to connect failed", AT),
        ("[INFO|trainer.py:23] 2026-01-01 03:04:05,000 >> Running training", AT),
        ("2026-01-01T03:04:05 step 1", AT),
        ('{"ts": "2026-01-01T02:04:05Z", "msg": "step 1"}', AT),
        ("2026-01-01T05:04:05.5+0300 step 1", AT.replace(microsecond=500_000)),
        ("01/01/2026 03:04:05 - INFO - __main__ - step 1", AT),
        ("2026/01/01 03:04:05 step 1", AT),
        ("I1231 23:59:59.000 17 main.py:1] last year", datetime.fromisoformat("2025-12-31T23:59:59")),
        ("step 1 loss 0.5", None),
        ("2026-02-30 03:04:05 no such day", None),
        ("2031-01-01 00:00:00 is when the license ends", None),
        ("99999999999 03:04:05", None),
        ("x" * 80 + " 2026-01-01 03:04:05", None),
        ("", None),
    ],
)
def test_when_a_line_was_written(zone, text, expected):
    """
    As torch, glog, Python's logging, NCCL and ISO 8601 write it; a zone is heeded, and what cannot be is not believed.
    """
    assert expected == stamp(text, NOW)


def merged(*streams, merger=None):
    pieces = [(number, [Said(number, text) for text in texts]) for number, texts in enumerate(streams)]
    return [(said.stream, said.text.rpartition(" ")[2]) for said in (merger or Merger()).merge(pieces, NOW)]


def test_ranks_are_merged_by_time_and_a_traceback_stays_together():
    """
    What is without a time goes with the line before it.
    """
    one = ["2026-01-01 03:00:01,000 a", "Traceback b", "  File c", "2026-01-01 03:00:03,000 d"]
    two = ["I0101 03:00:00.500000 7 x.py:1] e", "2026-01-01T03:00:02 f"]

    assert [(1, "e"), (0, "a"), (0, "b"), (0, "c"), (1, "f"), (0, "d")] == merged(one, two)


def test_streams_without_times_follow_each_other():
    """
    As before: nothing is guessed.
    """
    assert [(0, "a"), (0, "b"), (1, "c")] == merged(["a", "b"], ["c"])


def test_what_a_stream_said_last_counts_in_the_next_piece():
    """
    The rest of a traceback that was still being written does not come before what others said meanwhile.
    """
    merger = Merger()
    first = merged(["2026-01-01 03:00:05 a"], ["2026-01-01 03:00:01 b"], merger=merger)
    second = merged(["more c"], ["2026-01-01 03:00:02 d"], merger=merger)

    assert [(1, "b"), (0, "a")] == first
    assert [(1, "d"), (0, "c")] == second


TIMES = st.none() | st.integers(0, 20).map(lambda s: f"{NOW - timedelta(days=1, seconds=s):%Y-%m-%d %H:%M:%S} ")


@given(st.lists(st.lists(TIMES, max_size=6), max_size=4))
def test_no_line_is_lost_and_none_overtakes_one_of_its_stream(streams):
    """
    Whatever the clocks of the ranks do.
    """
    pieces = [(n, [Said(n, time or "", i) for i, time in enumerate(times)]) for n, times in enumerate(streams)]

    lines = list(Merger().merge(pieces, NOW))

    assert sum(map(len, streams)) == len(lines)
    for number in range(len(streams)):
        mine = [said.number for said in lines if said.stream == number]
        assert all(before < after for before, after in pairwise(mine))
