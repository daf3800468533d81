import os
import signal
import subprocess
import sys
from dataclasses import replace

from runner.supervise import process
from tests.supervise.conftest import until
from vramfarm.protocol import Env

SLEEP = "import time; time.sleep(60)"


def pids(marker):
    return {p.pid for p in process.find(Env.ATTEMPT_ID, marker)}


def test_finds_what_carries_the_marker(marker, run_python):
    """
    A process is found by a variable of its environment; its role stands beside it.
    """
    trainer, saver = run_python(SLEEP), run_python(SLEEP, **{Env.ROLE: "saver"})

    found = {p.pid: p.role for p in process.find(Env.ATTEMPT_ID, marker)}

    assert {trainer.pid: "", saver.pid: "saver"} == found


def test_a_process_is_found_from_its_first_moment(marker):
    """
    Right after its exec a process has no environment yet: `find` looks again.
    """
    env = {**os.environ, Env.ATTEMPT_ID: marker}
    for _ in range(50):
        child = process.spawn(("sleep", "60"), env=env, cwd="/")
        assert child.pid in pids(marker)
        child.kill()
        child.wait()


def test_other_values_are_not_found(marker, run_python):
    """
    A process of another attempt is none of ours.
    """
    run_python(SLEEP)

    assert set() == pids(marker + "0")


def test_a_worker_without_environment_belongs_to_its_parent(marker, run_python):
    """
    Workers that wipe their environment are found through their ancestors.
    """
    run_python("import subprocess; subprocess.run(['env', '-i', 'sleep', '60'])", **{Env.ROLE: "saver"})

    until(lambda: len(pids(marker)) == 2)

    assert {"saver"} == {p.role for p in process.find(Env.ATTEMPT_ID, marker)}


def test_a_process_seen_before_its_exec_is_found_after_it(marker, tmp_path):
    """
    Between fork and exec a child shows its parent's environment: that is not remembered.
    """
    code = f"""
import os, time
if os.fork() == 0:
    open("forked", "w").close()
    while not os.path.exists("go"): time.sleep(0.01)
    os.execve("/bin/sleep", ["sleep", "60"], {{"{Env.ATTEMPT_ID}": "{marker}"}})
os.wait()
"""
    parent = subprocess.Popen([sys.executable, "-I", "-c", code], cwd=tmp_path)
    until((tmp_path / "forked").exists)
    assert set() == pids(marker)

    (tmp_path / "go").touch()

    assert 1 == len(until(lambda: pids(marker)))
    process.end_all(lambda: process.find(Env.ATTEMPT_ID, marker))
    parent.wait(10)


def test_a_pid_with_another_start_time_is_somebody_else():
    """
    A pid that was given away again is not taken for the process that had it, nor signalled.
    """
    other = subprocess.Popen(["sleep", "60"])
    stranger = replace(process.identify(other.pid), started=1)

    process.kill([stranger], signal.SIGKILL)

    assert (False, None) == (process.is_alive(stranger), other.poll())
    other.kill()
    other.wait()


def test_a_zombie_is_gone(marker, run_python):
    """
    A process that ended is gone, whether or not its parent asked for its code.
    """
    child = run_python("")
    identity = process.Process(child.pid, 0)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert (set(), False) == (pids(marker), process.is_alive(identity))


def test_ending_goes_on_until_none_is_left(marker, run_python):
    """
    Processes that ignore SIGTERM and fork while they are being ended are ended too.
    """
    run_python(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "for _ in range(40):\n"
        "    time.sleep(0.02)\n"
        "    if os.fork() == 0: time.sleep(60)\n"
    )
    until(lambda: len(pids(marker)) > 3)

    left = process.end_all(lambda: process.find(Env.ATTEMPT_ID, marker), grace_s=0.1, timeout_s=20)

    assert ((), set()) == (left, pids(marker))


def test_a_name_is_one_line_whatever_is_in_it():
    """
    As all that others wrote is shown.
    """
    with subprocess.Popen(["a\nb \x1b[2J", "30"], executable="/bin/sleep") as odd:
        try:
            until(lambda: process.name(odd.pid).endswith(" 30"))
            shown = process.name(odd.pid)
        finally:
            odd.kill()

    assert f"{odd.pid} a b ?[2J 30" == shown


def test_what_will_not_go_is_named_in_time(marker, run_python):
    """
    Ending is bounded: what is left after the time limit is returned.
    """
    stubborn = process.identify(run_python(SLEEP).pid)
    hidden = replace(stubborn, started=1)  # never signalled, as it is somebody else

    left = process.end_all(lambda: (hidden,), timeout_s=0.1)

    assert (hidden,) == left


def test_adopted_strays_are_collected_and_codes_of_children_kept(tmp_path):
    """
    A subreaper collects orphans; the exit code of a child of `spawn` can still be read after.
    """
    script = tmp_path / "reaper.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "from runner.supervise import process\n"
        "process.be_subreaper()\n"
        "child = process.spawn(['sh', '-c', 'exit 7'], env={}, cwd='/')\n"
        "subprocess.run(['sh', '-c', 'sleep 0.1 & echo $! > stray'])\n"
        "time.sleep(0.5)\n"
        "stray = int(open('stray').read())\n"
        "seen = os.path.exists(f'/proc/{stray}')\n"
        "process.reap()\n"
        "print(seen, os.path.exists(f'/proc/{stray}'), child.poll())\n"
    )

    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=20, check=True
    )

    assert "True False 7\n" == done.stdout
