import os
import signal
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from runner.facts import Failed, Finished, Running, TaskKind
from runner.supervise import process
from runner.supervise.tasks import TaskBoard
from tests.supervise.conftest import until
from vramfarm.protocol import Env

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SAY = (
    "import json, sys, time, os; arguments = json.load(sys.stdin); say = lambda **k: print(json.dumps(k), flush=True)\n"
)


@pytest.fixture
def board(marker, tmp_path):
    board = TaskBoard(tmp_path / "tasks", marker)
    yield board
    for kind in TaskKind:
        board.end(kind)


def start(board, code, subject="step-1", now=NOW, **arguments):
    board.start(TaskKind.UPLOAD, subject, (sys.executable, "-I", "-c", SAY + code), arguments, now)


def state(board, now=NOW):
    return board.states(now)[TaskKind.UPLOAD]


def ended(board, now=NOW):
    until(lambda: not isinstance(state(board, now), Running))
    return state(board, now)


def test_a_result_ends_a_task(board):
    """
    A task gets its arguments, and its result comes back.
    """
    start(board, "say(result={'twice': 2 * arguments['n']})", n=21)

    assert Finished(subject="step-1", at=NOW, result={"twice": 42}) == ended(board)


@pytest.mark.parametrize("trouble", ["full", "no folder"])
def test_a_result_comes_back_where_no_log_can_be_written(board, tmp_path, trouble):
    """
    What takes copies off a full disk must not end for want of room on it.
    """
    if trouble == "full":
        (tmp_path / "tasks").mkdir()
        for name in ("upload.jsonl", "upload.err"):
            (tmp_path / "tasks" / name).symlink_to("/dev/full")
    else:
        (tmp_path / "tasks").touch()

    start(board, "say(progress=0.5); print('why', file=sys.stderr); say(result={'n': 1})")

    assert Finished(subject="step-1", at=NOW, result={"n": 1}) == ended(board)


def test_progress_is_seen_while_it_runs(board):
    """
    The newest progress line counts; what libraries print in between does not.
    """
    start(board, "say(progress=0.1, note='a'); print('[1] noise {'); say(progress=0.4, note='b'); time.sleep(60)")

    until(lambda: state(board).progress == 0.4)

    assert Running(subject="step-1", started_at=NOW, progress=0.4, note="b", moved_at=NOW) == state(board)


def test_failures_of_a_subject_are_counted_in_a_row(board):
    """
    A failure carries the number and the beginning of its row; a success, or another subject, begins anew. A refusal
    after an outage is the first one, and is said. While it is tried again, what it failed of is known still.
    """
    later = NOW + timedelta(minutes=5)
    fail, succeed = "say(error='503', hint='wait', final=False)", "say(result={})"
    refuse = "say(error='403', hint='check the key', final=True)"
    counts, after = [], []
    for code, subject, now in (
        (fail, "a", NOW),
        (fail, "a", later),
        (refuse, "a", later),
        (fail, "b", later),
        (succeed, "a", later),
        (fail, "a", later),
    ):
        start(board, code, subject=subject, now=now)
        before = board._states[TaskKind.UPLOAD].after  # as it was begun: a look might find it ended
        after.append(before.error if before else None)
        told = ended(board, now)
        counts.append((told.failures, told.since) if isinstance(told, Failed) else None)

    assert [(1, NOW), (2, NOW), (1, NOW), (1, later), None, (1, later)] == counts
    assert [None, "503", "503", None, "403", None] == after


def test_a_final_error_is_passed_on(board):
    """
    A task that says that trying again cannot help is believed.
    """
    start(board, "say(error='403', hint='check the key', final=True); sys.exit(1)")

    expected = Failed(subject="step-1", at=NOW, error="403", hint="check the key", final=True, failures=1, since=NOW)
    assert expected == ended(board)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        pytest.param("os.kill(os.getpid(), 9)", "task upload was ended by SIGKILL", id="signal"),
        pytest.param(
            "raise ValueError('no')", "task upload exited 1 without a last word: ValueError: no", id="exception"
        ),
        pytest.param(
            "print('{\"result\": {}', end='')", "task upload exited 0 without a last word", id="torn last word"
        ),
    ],
)
def test_a_task_without_a_last_word_failed_for_now(board, code, error):
    """
    A death is a failure that may pass; its cause is named.
    """
    start(board, code)

    told = ended(board)

    assert (error, False) == (told.error, told.final)


def test_the_last_task_of_a_kind_is_not_taken_for_this_one(board):
    """
    Words of an earlier task, in the same log, say nothing about the next.
    """
    start(board, "say(result={'first': True}); print('old', file=sys.stderr)")
    ended(board)

    start(board, "")

    assert "task upload exited 0 without a last word" == ended(board).error


def test_what_a_task_started_goes_with_it(board, marker):
    """
    Nothing of a task that ended goes on working in its place.
    """
    start(board, "import subprocess; subprocess.Popen(['sleep', '60']); say(result={})")

    ended(board)

    until(lambda: process.find(Env.RUN, marker) == ())


def test_a_task_gives_way_to_training(board, marker):
    """
    Tasks run at a lower priority, also where the kernel shares out processors among sessions.
    """
    lower, sessions = 10 + os.nice(0), Path("/proc/self/autogroup")
    has_sessions = sessions.exists() and os.geteuid() == 0  # of others the kernel takes few changes a second
    code = f"""
def session():
    return open("{sessions}").read().split()[-1] if {has_sessions} else "10"
end = time.monotonic() + 5
while (os.nice(0), session()) != ({lower}, "10") and time.monotonic() < end: time.sleep(0.01)
say(result={{"nice": os.nice(0), "session": session()}})
"""
    start(board, code)

    assert {"nice": lower, "session": "10"} == ended(board).result


def test_leftovers_of_an_earlier_runner_are_ended(board, marker, tmp_path):
    """
    Tasks of an earlier life are ended; those of this one, and training, are not.
    """
    earlier = TaskBoard(tmp_path / "earlier", marker)
    start(earlier, "time.sleep(60)")
    start(board, "time.sleep(60)")
    trainer = process.spawn(("sleep", "60"), env={Env.RUN: marker}, cwd="/")

    left = board.kill_leftovers()

    assert () == left
    assert "task upload was ended by SIGKILL" == ended(earlier).error
    assert (True, None) == (isinstance(state(board), Running), trainer.poll())


def test_an_ended_task_is_forgotten(board):
    """
    A task that we ended is not a failure.
    """
    start(board, "time.sleep(60)")

    board.end(TaskKind.UPLOAD)

    assert {} == board.states(NOW)


def test_signals_are_named(board):
    """
    A task that is ended by the kernel or a person says by what.
    """
    start(board, "say(progress=0.5); time.sleep(60)")
    until(lambda: state(board).progress)

    os.kill(board._tasks[TaskKind.UPLOAD].popen.pid, signal.SIGTERM)

    assert "task upload was ended by SIGTERM" == ended(board).error


AHEAD = "import json, sys, os; print('{}', flush=True); raw = sys.stdin.read(); print(json.dumps({'result': {'pid': os.getpid(), 'bytes': len(raw)}}) if raw else '')\n"


def prepare(board, code=AHEAD):
    """Start a task ahead, and return its pid when it has come to life."""
    board.prepare(TaskKind.UPLOAD, (sys.executable, "-I", "-c", code))
    task = board._ready[TaskKind.UPLOAD].task
    until(lambda: task.out.tail(1))
    return task.popen.pid


def test_a_task_that_was_started_ahead_begins_with_its_arguments(board):
    """
    An upload need not wait for its process; and one only is kept, which no state tells of.
    """
    pid = prepare(board)
    board.prepare(TaskKind.UPLOAD, ("false",))
    states = board.states(NOW)
    start(board, "say(result={})", n=21)

    assert {} == states
    assert {"pid": pid, "bytes": len('{"n": 21}')} == ended(board).result


@pytest.mark.parametrize("size", [10, 900_000, 3_000_000])
def test_arguments_of_any_size_arrive_whole_whoever_is_ready(board, size):
    """
    A pipe holds a megabyte at most: what is more is taken by a process that is started for it.
    """
    prepare(board)
    start(board, "say(result={'bytes': len(json.dumps(arguments))})", text="x" * size)

    assert size + len('{"text": ""}') == ended(board).result["bytes"]


def test_one_that_was_stopped_ahead_of_its_time_is_not_waited_for(board):
    """
    It would have its arguments and do nothing with them: another one is started, and it is ended.
    """
    stopped = prepare(board)
    os.kill(stopped, signal.SIGSTOP)
    until(lambda: process.stat_fields(stopped)[0] == b"T")
    start(board, "say(result={})")

    assert Finished(subject="step-1", at=NOW, result={}) == ended(board)
    assert [] == process.stat_fields(stopped)


def test_one_that_is_stopped_at_its_work_shows(board):
    """
    And whether it has said a word at all. One that goes on again is as any other.
    """
    start(board, "say(progress=0.1); time.sleep(60)")
    silent = board._states[TaskKind.UPLOAD]
    until(lambda: state(board).has_spoken)
    (pid,) = board.pids()
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state(board).stopped_at == NOW)
    later = state(board, NOW + timedelta(minutes=1)).stopped_at
    os.kill(pid, signal.SIGCONT)
    until(lambda: state(board).stopped_at is None)

    assert (False, NOW) == (silent.has_spoken, later)


def test_one_that_died_ahead_of_its_time_does_no_harm(board):
    """
    It is not started again and again, and the work is done by another one.
    """
    os.kill(prepare(board), signal.SIGKILL)
    until(lambda: board._ready[TaskKind.UPLOAD].task.popen.poll() is not None)
    board.prepare(TaskKind.UPLOAD, ("false",))
    start(board, "say(result={})")

    assert Finished(subject="step-1", at=NOW, result={}) == ended(board)


def test_who_waits_for_work_ends_with_whoever_would_give_it(board, marker):
    """
    A runner that is killed leaves nobody behind; the end of the kind ends the one that is ready, too.
    """
    prepare(board)
    board.end(TaskKind.UPLOAD)

    assert () == process.find(Env.RUN, marker)
    assert {} == board.states(NOW)

    prepare(board)
    orphan = board._ready.pop(TaskKind.UPLOAD)
    os.close(orphan.writer)  # as the kernel does

    assert 0 == orphan.task.popen.wait(20)
    orphan.task.close()
