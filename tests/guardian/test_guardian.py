"""The guardian as a process: it keeps the runner alive, and ends when it should."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.farmhouse import wait_until
from tests.guardian.conftest import GUARD


def _lives(folder: Path) -> list[int]:
    path = folder / "lives"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


END = 'say {"end": {"code": %d, "stop": true, "keep": null, "hold_s": 0, "reason": "test"}}; exit %d'


@pytest.mark.parametrize("code", [0, 2, 8])
def test_the_exit_code_is_that_of_the_last_word(at_home, code):
    """
    With no server to stop, the guardian ends with the run.
    """
    guardian = at_home(END % (code, 0))

    assert code == guardian.wait(20)


def test_every_line_of_the_log_says_who_speaks(at_home, tmp_path):
    """
    Time, name, plain words; nothing else comes to stderr.
    """
    guardian = at_home("die", "say nonsense; say {}; say []; " + END % (0, 0))

    lines = guardian.communicate(timeout=20)[1].splitlines()

    assert 5 == len(lines), lines
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d guardian: [^A-Z].*", line) for line in lines), lines


@pytest.mark.parametrize("death", ["die", "exit 0", "exit 3"])
def test_a_runner_that_dies_without_a_last_word_is_started_again(at_home, tmp_path, death):
    """
    Whatever its exit code: only the last word counts.
    """
    guardian = at_home(death, death, END % (6, 0))

    assert (6, 3) == (guardian.wait(20), len(_lives(tmp_path)))


def test_a_command_line_that_is_not_understood_is_not_tried_again(at_home, tmp_path):
    """
    Exit code 2 without a last word: an early end, after one life.
    """
    guardian = at_home("exit 2")

    assert (2, 1) == (guardian.wait(20), len(_lives(tmp_path)))


def test_a_runner_that_is_killed_from_outside_is_started_again(at_home, tmp_path):
    """
    By anybody, at any moment.
    """
    guardian = at_home("sleep 600", "sleep 600", "sleep 600", END % (0, 0))

    for life in (1, 2, 3):
        pid = wait_until(lambda life=life: len(_lives(tmp_path)) == life and _lives(tmp_path)[-1])
        os.kill(pid, signal.SIGKILL)

    assert 0 == guardian.wait(20)


def test_a_runner_that_dies_again_and_again_is_given_up(at_home, tmp_path):
    """
    Five deaths without a minute of life: an early end.
    """
    guardian = at_home("die")

    assert (1, 5) == (guardian.wait(20), len(_lives(tmp_path)))


def test_a_runner_that_cannot_be_started_is_given_up(tmp_path):
    """
    Its interpreter is gone with the disk: that is a death like another.
    """
    program = (
        "import sys; from runner.guardian import Waits, main\n"
        "sys.exit(main([], runner=('/nowhere/python',), waits=Waits(restart_first=0.01)))"
    )
    env = {**os.environ, "VRAMFARM_WORKSPACE": str(tmp_path)}

    done = subprocess.run([sys.executable, "-I", "-c", program], env=env, timeout=20, check=False)

    assert 1 == done.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_leave_is_passed_on_once_as_sigterm(at_home, tmp_path, number):
    """
    The runner's 75 becomes the guardian's.
    """
    guardian = at_home("sleep 600")
    wait_until(lambda: _lives(tmp_path))
    time.sleep(0.3)  # the fake runner's handler is in place

    guardian.send_signal(number)

    assert 75 == guardian.wait(20)


def test_a_closed_laptop_ends_nothing(at_home, tmp_path):
    """
    SIGHUP is ignored by the guardian and by what it starts.
    """
    guardian = at_home("sleep 1; " + END % (0, 0))
    runner = wait_until(lambda: _lives(tmp_path))[0]

    guardian.send_signal(signal.SIGHUP)
    os.kill(runner, signal.SIGHUP)

    assert (0, 1) == (guardian.wait(20), len(_lives(tmp_path)))


def test_the_runner_ends_when_the_guardian_is_killed(at_home, tmp_path):
    """
    Through the lifeline; what it started lives on.
    """
    guardian = at_home("stray; sleep 600")
    wait_until(lambda: (tmp_path / "stray").exists() and (tmp_path / "stray").read_text())
    stray = int((tmp_path / "stray").read_text())

    guardian.kill()

    runner = _lives(tmp_path)[0]
    wait_until(lambda: not _alive(runner))
    assert _alive(stray)
    os.kill(stray, signal.SIGKILL)


def test_a_runner_that_does_not_end_after_its_last_word_is_killed(at_home):
    """
    The end was said: nobody waits for ever.
    """
    guardian = at_home('deaf; say {"end": {"code": 0, "stop": true}}; sleep 600')

    assert 0 == guardian.wait(20)


def test_a_runner_that_has_to_leave_and_says_nothing_is_not_waited_for(at_home, tmp_path):
    """
    It may hang on a disk. The run ends with what is left of it, and can be gone on with.
    """
    guardian = at_home("deaf; stray; sleep 600")
    wait_until(lambda: (tmp_path / "stray").exists() and (tmp_path / "stray").read_text())

    guardian.terminate()

    assert 75 == guardian.wait(40)
    assert not _alive(int((tmp_path / "stray").read_text()))
    assert not _alive(_lives(tmp_path)[0])


def test_a_runner_that_has_to_leave_is_waited_for_as_long_as_it_makes_turns(at_home, tmp_path):
    """
    Saving takes what it takes: longer than anything may be silent.
    """
    turns = 'say {"alive": true}; sleep 1; ' * 7
    guardian = at_home(f"deaf; {turns}exit 75")
    wait_until(lambda: _lives(tmp_path))
    time.sleep(0.5)

    guardian.terminate()

    log = guardian.communicate(timeout=60)[1]
    assert 75 == guardian.returncode
    assert "says nothing" not in log
    assert "ignored" not in log


def test_a_runner_that_says_nothing_for_long_is_told_of_once_and_left_alone(at_home):
    """
    What trains goes on without it: that is no reason to end anything, and one for a person to look.
    """
    guardian = at_home('deaf; sleep 6; say {"alive": true}; sleep 1; ' + END % (0, 0), GUARD_UNHEARD_S="3")

    log = guardian.communicate(timeout=60)[1]

    assert 0 == guardian.returncode
    assert 1 == log.count("alert: the runner says nothing for 3 s: does its disk answer?"), log


def test_a_guardian_that_may_start_nothing_more_stops_the_server_when_it_may(at_home, tmp_path):
    """
    To hold the server for a look it has a process that looks for the stop file; where there is none, it does without.
    """
    (tmp_path / "state").write_text("running")
    commands = {
        "stop_command": ["touch", str(tmp_path / "stopped")],
        "status_command": ["cat", str(tmp_path / "state")],
    }
    server = {"server": {"provider": "command", "id": "box", **commands}}
    end = {"end": {"code": 3, "stop": True, "hold_s": 1, "reason": "test"}}
    guardian = at_home(f"say {json.dumps(server)}; sleep 3; say {json.dumps(end)}; exit 3")
    wait_until(lambda: _lives(tmp_path))
    time.sleep(0.5)
    limit = resource.prlimit(guardian.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(guardian.pid, resource.RLIMIT_NOFILE, (3, limit[1]))
    time.sleep(5)
    resource.prlimit(guardian.pid, resource.RLIMIT_NOFILE, limit)
    wait_until((tmp_path / "stopped").exists, 30)
    (tmp_path / "state").write_text("gone")

    assert 3 == guardian.wait(30)


def test_all_that_was_said_is_in_a_log_that_is_a_file(tmp_path):
    """
    Another process writes it, since its disk may not answer; that one ends when all is written.
    """
    env = {**os.environ, "VRAMFARM_WORKSPACE": str(tmp_path)}
    with (tmp_path / "log").open("wb") as log:
        done = subprocess.run([*GUARD, "die", END % (6, 0)], env=env, stderr=log, timeout=40, check=False)

    assert 6 == done.returncode
    lines = (tmp_path / "log").read_text().splitlines()
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d guardian: [^A-Z].*", line) for line in lines), lines
    assert ["deadline", "the runner died"] == [
        line[19 : 19 + len(words)] for line, words in zip(lines, ("deadline", "the runner died"), strict=True)
    ]


def test_at_the_deadline_the_run_and_its_strays_end(at_home, tmp_path):
    """
    The deadline wins over a runner that does not listen.
    """
    guardian = at_home("deaf; stray; deadline 0.7; sleep 600")

    assert 7 == guardian.wait(20)
    assert not _alive(int((tmp_path / "stray").read_text()))
    assert not _alive(_lives(tmp_path)[0])


def test_strays_of_an_earlier_life_end_at_the_deadline_too(at_home, tmp_path):
    """
    They carry the mark of the run, not of this guardian.
    """
    first = at_home("stray; sleep 600")
    wait_until(lambda: (tmp_path / "stray").exists() and (tmp_path / "stray").read_text())
    first.kill()
    stray = int((tmp_path / "stray").read_text())

    second = at_home("deadline 0.3; sleep 600")

    assert 7 == second.wait(20)
    assert not _alive(stray)


def test_adopted_orphans_are_reaped(at_home, tmp_path):
    """
    No zombie stays while the run goes on.
    """
    guardian = at_home("orphans; sleep 600")
    wait_until(lambda: _lives(tmp_path))

    def children():
        return Path(f"/proc/{guardian.pid}/task/{guardian.pid}/children").read_text().split()

    time.sleep(0.5)
    wait_until(lambda: children() == [str(_lives(tmp_path)[0])])


def test_a_reader_of_the_log_that_sleeps_costs_nothing(at_home):
    """
    A full pipe must not keep the guardian from its work.
    """
    more_than_a_pipe_holds = ["say " + "x" * 150] * 600

    guardian = at_home("; ".join([*more_than_a_pipe_holds, END % (0, 0)]))

    assert 0 == guardian.wait(20)


def test_it_runs_by_its_path_in_an_interpreter_without_our_packages(tmp_path):
    """
    `python -I -S`: no site-packages; it finds its own package, last on the path.
    """
    script = Path(__file__).parents[2] / "runner" / "guardian.py"
    env = {**os.environ, "VRAMFARM_WORKSPACE": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(script)], env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        assert "guardian: deadline" in (process.stderr.readline())
    finally:
        process.kill()
        process.communicate(timeout=10)
