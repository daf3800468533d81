"""Processes that hang in a page fault: whoever looks at them goes on, and knows whose they are."""

import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from runner.supervise import attempt, memory, process
from runner.supervise.pulse import rank_of
from tests.supervise.conftest import until
from vramfarm.protocol import Env

PATIENCE_S = 60
# A page of the file is written to, in one thread, and memory is asked for, in another; so is whoever reads the memory behind them.
HANGS = """
import ctypes, mmap, os, sys, threading, time
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
file = os.open(sys.argv[1], os.O_RDWR)
place = libc.mmap(None, mmap.PAGESIZE, 3, mmap.MAP_SHARED, file, 0)
open(sys.argv[1] + ".there", "w").write(str(os.getpid()))
while not os.path.exists(sys.argv[1] + ".go"):
    time.sleep(0.02)
threading.Thread(target=libc.memset, args=(ctypes.c_void_p(place), 1, ctypes.c_size_t(8))).start()
time.sleep(0.2)
libc.mmap(None, mmap.PAGESIZE, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
"""
STARTS = "import subprocess, sys; subprocess.Popen([sys.executable, '-I', '-c', *sys.argv[1:]]).wait()"


def run(*argv):
    subprocess.run(argv, check=True, capture_output=True, timeout=PATIENCE_S)


@pytest.fixture
def disk(tmp_path):
    """ext4 of its own, which can be frozen."""
    if os.geteuid() or not shutil.which("fsfreeze"):
        pytest.skip("needs root, and fsfreeze")
    place, image = tmp_path / "disk", tmp_path / "image"
    place.mkdir()
    image.touch()
    os.truncate(image, 16 << 20)
    run("mkfs.ext4", "-q", "-J", "size=4", image)
    if subprocess.run(["mount", "-o", "loop", image, place], capture_output=True, check=False).returncode:
        pytest.skip("needs a container that may mount")
    yield place
    run("umount", "-l", place)


@contextmanager
def hanging(disk, start):
    """What `start` starts with these words hangs; it goes on when this ends, however it ends."""
    (disk / "file").touch()
    os.truncate(disk / "file", 8192)  # a hole: for what is in the cache the kernel locks no more than a mapping
    file = disk.parent / "linked"
    file.symlink_to(disk / "file")
    start(HANGS, str(file))
    there = disk.parent / "linked.there"
    pid = int(until(lambda: there.exists() and there.read_text(), PATIENCE_S))
    thaws = ["sh", "-c", 'cat >/dev/null; exec fsfreeze -u "$1"', "sh", disk]
    with subprocess.Popen(
        thaws, stdin=subprocess.PIPE, start_new_session=True
    ):  # leaving it closes the pipe, and waits
        run("fsfreeze", "-f", disk)
        (disk.parent / "linked.go").touch()
        until(lambda: is_unreadable(pid), PATIENCE_S)
        yield pid


def is_unreadable(pid):
    try:
        subprocess.run(["cat", f"/proc/{pid}/environ"], stdout=subprocess.DEVNULL, timeout=0.5, check=False)
    except subprocess.TimeoutExpired:
        return True
    return False


def test_a_process_that_hangs_in_a_page_fault_is_found_by_who_started_it(disk, marker):
    """
    Nobody waits for the disk: what it is called, which rank it is and whose it is are said of all others, and of it as well
    as can be. Later, too, when it goes on.
    """

    started = []

    def start(*argv):
        env = {**os.environ, Env.ATTEMPT_ID: marker, "LOCAL_RANK": "3"}
        started.append(process.spawn((sys.executable, "-I", "-c", STARTS, *argv), env=env, cwd="/"))

    with hanging(disk, start) as pid:
        parent = started[0].pid
        began = time.monotonic()
        found = {p.pid for p in process.find(Env.ATTEMPT_ID, marker)}
        names, ranks = [process.name(pid), process.name(parent)], [rank_of(pid), rank_of(parent)]
        again = {p.pid for p in process.find(Env.ATTEMPT_ID, marker)}
        took_s = time.monotonic() - began
    assert {parent, pid} == found == again
    assert [None, 3] == ranks
    assert names[0].startswith(f"{pid} (python")
    assert "-I -c" in names[1]
    assert took_s < PATIENCE_S / 2


def test_an_end_is_written_down_though_something_of_it_hangs(disk, marker, tmp_path):
    """
    The shim looks at what the script left behind; of one that nobody can look at it says nothing, and it writes.
    """
    run_dir, end = tmp_path / "run", tmp_path / "end"
    code = f"import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-I', '-c', *sys.argv[1:]])\nwhile not os.path.exists({str(end)!r}): time.sleep(0.02)\nos._exit(7)"
    folder = run_dir / "logs" / "attempt-0001"

    def start(*argv):
        attempt.start(
            attempt.LaunchSpec(
                number=1,
                id=marker,
                argv=(sys.executable, "-I", "-c", code, *argv),
                cwd=tmp_path,
                run_dir=run_dir,
                folder=folder,
                control=run_dir / "page",
                job="job",
                checkpoint_dir=run_dir / "checkpoints",
                save_interval_s=1800.0,
                lineage=1,
            )
        )

    with hanging(disk, start):
        end.touch()
        ended = until(lambda: attempt.read_exit(folder), PATIENCE_S)

    assert 7 == ended.code


def test_who_does_not_answer_is_not_asked_again_and_answers_when_it_can(tmp_path):
    """
    A pipe that nobody writes to is the process that hangs. Others are answered meanwhile, by another thread.
    """
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    silent = [memory.ask(str(pipe), 1)]
    began = time.monotonic()
    silent += [memory.ask(str(pipe), 1) for _ in range(100)]
    took_s = time.monotonic() - began
    other = memory.ask("/proc/self/comm", 1)
    with pipe.open("w") as end:
        end.write("there")
    answer = until(lambda: memory.ask(str(pipe), 1), PATIENCE_S)

    assert [None] * 101 == silent
    assert took_s < 1
    assert other
    assert b"there" == answer


def test_threads_that_hang_are_left_behind_up_to_a_number(tmp_path):
    """
    A machine on which everything hangs is not filled with threads of ours; all of them end when it goes on.
    """
    before, pipes = threading.active_count(), [tmp_path / f"pipe-{number}" for number in range(6)]
    for pipe in pipes:
        os.mkfifo(pipe)
    desk = memory._Desk(max_held=4)

    answers = [desk.ask((str(pipe), 1)) for pipe in pipes]
    held = threading.active_count() - before
    for pipe in pipes[:4]:
        os.close(os.open(pipe, os.O_RDWR))

    assert [None] * len(pipes) == answers
    assert 4 == held
    until(lambda: threading.active_count() <= before + 1, PATIENCE_S)


def test_a_child_that_is_forked_asks_anew():
    """
    It has none of our threads: what it waited for would never come.
    """
    code = (
        "import os\nfrom runner.supervise import memory\nask = lambda: memory.ask('/proc/self/comm', 1)\nask()\n"
        "child = os.fork()\nif child == 0: os._exit(0 if ask() else 3)\n"
        "os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )

    asked = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=PATIENCE_S, check=False)

    assert 0 == asked.returncode


def test_a_process_that_is_gone_is_told_so():
    """
    That is no silence.
    """
    with pytest.raises(OSError, match="No such file"):
        memory.ask("/proc/4194305/environ", 1)
