"""Nobody sleeps longer than there is reason to."""

import os
import subprocess
import sys
import threading
import time

import pytest

from runner.supervise.alarm import Alarm
from runner.supervise.process import identify

LONG_S = 60.0


@pytest.fixture
def alarm():
    alarm = Alarm()
    yield alarm
    alarm.close()


def slept_s(alarm, seconds, until=None, children=()):
    began = time.monotonic()
    alarm.sleep(seconds, until=until, children=children)
    return time.monotonic() - began


@pytest.fixture
def child():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


def test_a_ring_ends_the_sleep_and_one_that_came_before_is_not_lost(alarm):
    """
    A signal that comes while the loop works is answered as soon as it has worked.
    """
    alarm.ring()
    before = slept_s(alarm, LONG_S)
    threading.Timer(0.1, alarm.ring).start()
    meanwhile = slept_s(alarm, LONG_S)

    assert max(before, meanwhile) < LONG_S / 2
    assert slept_s(alarm, 0.2) >= 0.2  # it rang once


def test_the_end_of_the_process_ends_the_sleep(alarm, child):
    """
    A launcher that fails is seen at once: whoever waits pays.
    """
    shim = identify(child.pid)
    threading.Timer(0.1, child.stdin.close).start()

    assert slept_s(alarm, LONG_S, until=shim) < LONG_S / 2


def test_a_process_that_is_gone_is_not_slept_for_though_nobody_has_collected_it(alarm, child):
    """
    It is a zombie then, and its pid may soon be somebody else's.
    """
    shim = identify(child.pid)
    child.stdin.close()
    child.wait()

    assert slept_s(alarm, LONG_S, until=shim) < LONG_S / 2


def test_the_end_of_a_child_ends_the_sleep_also_if_it_was_before(alarm, child):
    """
    What a task found out is acted upon at once: a checkpoint is safe then, and not a look later.
    """
    threading.Timer(0.1, child.stdin.close).start()
    meanwhile = slept_s(alarm, LONG_S, children=[child.pid])
    before = slept_s(alarm, LONG_S, children=[child.pid])  # nobody has collected it

    assert max(meanwhile, before) < LONG_S / 2


@pytest.mark.parametrize("is_there", [False, True], ids=["an old Python", "an old kernel"])
def test_where_no_process_can_be_watched_the_time_is_all(alarm, child, monkeypatch, is_there):
    """
    A Python that was built for old kernels, as conda's, lacks the call; an old kernel, or a container's guard, refuses it.
    """

    def refuse(_):
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", refuse) if is_there else monkeypatch.delattr(os, "pidfd_open")

    assert slept_s(alarm, 0.1, until=identify(child.pid)) >= 0.1


def test_a_ring_after_the_end_hurts_nobody(alarm, tmp_path):
    """
    A signal may come when the files of the run are closed: their numbers are given to others.
    """
    other = Alarm()
    other.close()
    with (tmp_path / "journal").open("wb") as journal:
        other.ring()

    assert b"" == (tmp_path / "journal").read_bytes()
    assert journal.closed


def test_what_appears_under_its_name_rings(tmp_path):
    """
    A checkpoint that is committed, by a rename as the saver does it, is looked at at once.
    """
    alarm = Alarm({tmp_path: "step-"})
    (tmp_path / "tmp-1").mkdir()
    timer = threading.Timer(0.5, (tmp_path / "tmp-1").rename, [tmp_path / "step-1"])
    timer.start()

    slept = slept_s(alarm, LONG_S)
    alarm.close()

    assert True is (slept < LONG_S / 2)


def test_other_names_and_files_that_grow_do_not_ring(tmp_path):
    """
    The journal and the log beside it are written all the time.
    """
    (tmp_path / "stop-old").touch()
    alarm = Alarm({tmp_path: "stop"})
    (tmp_path / "journal").touch()
    with (tmp_path / "stop-old").open("a") as file:
        file.write("a line\n")

    slept = slept_s(alarm, 1.0)
    alarm.close()

    assert True is (slept >= 0.9)


def test_a_folder_that_cannot_be_watched_costs_no_more_than_the_time(tmp_path):
    """
    Watches are few on some systems, and a run must start without them.
    """
    alarm = Alarm({tmp_path / "nowhere": "stop"})

    slept = slept_s(alarm, 0.2)
    alarm.close()

    assert True is (0.1 < slept < LONG_S)
