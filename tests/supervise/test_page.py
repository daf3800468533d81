import os
from pathlib import Path

import pytest

from runner.facts import Progress
from runner.supervise import page
from vramfarm.protocol import ControlPage, Phase, Slot, Told, Word


@pytest.fixture
def control(marker, tmp_path):
    path = page.create(tmp_path, marker, num_ranks=2)
    with_page = page.find(tmp_path, marker)
    yield with_page
    with_page.close()
    path.unlink(missing_ok=True)


def tell(control, rank, **slots):
    control.put(rank, Slot.PID, os.getpid())
    for name, value in slots.items():
        control.put(rank, Slot[name], value)


def test_a_page_is_found_again(control, marker, tmp_path):
    """
    A runner that starts again opens the page of the attempt that lives on.
    """
    again = page.find(tmp_path, marker)
    page.request_leave(again)
    again.close()

    assert (True, 2) == (page.leave_requested(control), control.num_ranks)


def test_without_shared_memory_the_page_is_in_the_run_folder(marker, tmp_path, monkeypatch):
    """
    Where /dev/shm cannot be written the page is a file of the run.
    """
    monkeypatch.setattr(page, "_MEMORY", Path("/proc"))

    path = page.create(tmp_path, marker, num_ranks=1)

    assert tmp_path == path.parent
    page.find(tmp_path, marker).close()


def test_asking_for_saves_counts(control):
    """
    Each request for a save is one more.
    """
    page.request_save(control)
    page.request_save(control)

    assert 2 == control[Word.REQUEST_SAVE]


def test_nobody_attached_is_no_progress(control):
    """
    A script that does not use the library tells nothing.
    """
    assert Progress() == page.ProgressReader(control).read()


def test_progress_is_the_slowest_ranks(control):
    """
    The step is one that all attached ranks finished.
    """
    tell(control, 0, STEP=12, MAX_STEPS=100, PHASE=Phase.TRAINING)
    tell(control, 1, STEP=11, MAX_STEPS=100, PHASE=Phase.TRAINING)
    control.put_float(0, Slot.LOSS, 0.5)
    control.set_error("disk full")

    told = page.ProgressReader(control).read()

    expected = Progress(attached=True, step=11, max_steps=100, loss=0.5, phase="training", save_error="disk full")
    assert expected == told


def test_a_commit_makes_the_failure_before_it_history(control):
    """
    What is wrong now is told, not what once was.
    """
    reader = page.ProgressReader(control)
    control[Word.NUM_FAILED] = 1
    control.set_error("disk full")
    told = [reader.read().save_error, reader.read().save_error]
    control[Word.NUM_COMMITTED] = 4
    told.append(reader.read().save_error)
    control[Word.NUM_FAILED] = 2

    told.append(reader.read().save_error)
    control[Word.NUM_COMMITTED] = 5
    control.set_error("waiting: rank 1", Told.WAITING)

    last = reader.read()

    assert ["disk full", "disk full", "", "disk full", "waiting: rank 1"] == [*told, last.save_error]
    assert last.is_waiting


def test_the_rate_comes_from_the_beats(control):
    """
    Steps per second are measured between beats, not between looks.
    """
    reader = page.ProgressReader(control)
    tell(control, 0, STEP=10, BEAT_NS=1_000_000_000)
    first = reader.read().steps_per_s
    tell(control, 0, STEP=30, BEAT_NS=6_000_000_000)

    assert (None, 4.0) == (first, reader.read().steps_per_s)


def test_the_rate_forgets_what_is_long_ago(control):
    """
    A slow start does not spoil the rate for ever.
    """
    reader = page.ProgressReader(control)
    for step, second in ((1, 1), (2, 1000), (3, 1001), (4, 1002)):
        tell(control, 0, STEP=step, BEAT_NS=second * 10**9)
        rate = reader.read().steps_per_s

    assert 1.0 == rate


def test_a_phase_from_a_newer_library_is_unknown(control):
    """
    A number that this runner does not know breaks nothing.
    """
    tell(control, 0, PHASE=77)

    assert "unknown" == page.ProgressReader(control).read().phase


def test_pages_of_attempts_that_are_gone_are_removed(marker, tmp_path, run_python):
    """
    Memory is given back; the page of an attempt that lives, and of other runs, stays.
    """
    other_run = tmp_path / "other"
    other_run.mkdir()
    stale, alive = (page.create(tmp_path, name, num_ranks=1) for name in ("gone", marker))
    other = page.create(other_run, "gone", num_ranks=1)
    run_python("import time; time.sleep(60)")

    page.remove_stale(tmp_path)

    assert [False, True, True] == [p.exists() for p in (stale, alive, other)]
    alive.unlink()
    other.unlink()


def test_a_page_left_by_a_launch_that_never_was_is_replaced(marker, tmp_path):
    """
    A runner that died between making the page and launching can make it again.
    """
    page.create(tmp_path, marker, num_ranks=1)

    path = page.create(tmp_path, marker, num_ranks=4)

    control = ControlPage.open(path)
    assert 4 == control.num_ranks
    control.close()
    path.unlink()
