"""
A disk that answers nobody: whoever changes anything on it hangs in the kernel, where no signal reaches.

What must happen all the same is the guardian's: the end of this boot, the deadline, the stop of the server.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.chaos.disk import run
from benchmarks.chaos.disks import BYTES, Night, frozen
from runner.supervise.process import find
from tests.chaos.witness import check_checkpoint
from tests.fake_trainer import content
from tests.farmhouse import wait_until
from vramfarm.folder import committed
from vramfarm.protocol import Env

PATIENCE_S = 120
STRAY = """
import ctypes, mmap, os, sys, threading, time
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(file, mmap.PAGESIZE)
place = libc.mmap(None, mmap.PAGESIZE, 3, mmap.MAP_SHARED, file, 0)
print("there", flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.05)
threading.Thread(target=libc.memset, args=(ctypes.c_void_p(place), 1, ctypes.c_size_t(8))).start()
time.sleep(0.3)
libc.mmap(None, mmap.PAGESIZE, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
"""


@pytest.fixture
def night(tmp_path: Path, library: Path) -> Iterator[Callable[..., Night]]:
    if os.geteuid() or not shutil.which("fsfreeze"):
        pytest.skip("needs root, and fsfreeze")
    made: list[Night] = []

    def start(**options) -> Night:
        made.append(Night(tmp_path, library, steps=100_000, **options))
        return made[-1]

    yield start
    for one in made:
        with suppress(Exception):  # it is not frozen any more
            run("fsfreeze", "-u", one.place)
        one.end()


def stand_in_the_way(night: Night, folder: Path) -> subprocess.Popen[str]:
    """Of the run. Once `go` is there it hangs in a page fault, and whoever reads its environment hangs, too."""
    argv = [sys.executable, "-c", STRAY, night.place / "mapped", folder / "go"]
    env = {**os.environ, Env.RUN: str(night.run_dir)}
    stray = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)
    with stray.stdout as words:
        assert "there\n" == words.readline()
    return stray


def is_unreadable(stray: subprocess.Popen[str]) -> bool:
    try:
        subprocess.run(["cat", f"/proc/{stray.pid}/environ"], stdout=subprocess.DEVNULL, timeout=1, check=False)
    except subprocess.TimeoutExpired:
        return True
    return False


def test_a_boot_ends_on_sigterm_though_its_disk_answers_nobody(night):
    """
    The runner hangs in the kernel and cannot be asked. When the disk is back what was committed is there, and nobody lives.
    """
    run_ = night(CHAOS_SILENCE_S="4")
    run_.until(lambda: len(run_.committed()) > 1, "two checkpoints")

    with frozen(run_):
        time.sleep(1)
        run_.guardian.terminate()
        assert 75 == run_.guardian.wait(PATIENCE_S)
    said = run_.log()

    assert "the runner says nothing for 4 s, its disk may not answer: this boot ends without it" in said
    wait_until(lambda: not find(Env.RUN, str(run_.run_dir)), PATIENCE_S)
    stored = committed(run_.run_dir / "checkpoints")
    assert len(stored) >= 2
    for one in stored:
        assert one.manifest.step == check_checkpoint(one.path, lambda rank, step: content(rank, step, BYTES))


def test_the_deadline_stops_the_server_though_its_disk_takes_not_even_the_log(night, tmp_path):
    """
    Run folder, guardian.json and the guardian's own log are all on it, and a process of the run is so stuck that who asks the
    kernel for its environment is stuck, too.
    """
    stopped = tmp_path / "stopped"
    stop = tmp_path / "stop.sh"
    stop.write_text(f"#!/bin/sh\ntouch {stopped}\n")
    stop.chmod(0o755)
    server = f"limits: {{max_duration: 25s}}\nprovider: {{kind: command, stop_command: [{stop}], status_command: [cat, {tmp_path / 'state'}]}}\n"
    (tmp_path / "state").write_text("running")
    run_ = night(more=server, log="disk/log")
    run_.until(run_.committed, "a checkpoint")

    stray = stand_in_the_way(run_, tmp_path)

    with frozen(run_):
        (tmp_path / "go").touch()
        wait_until(lambda: is_unreadable(stray), PATIENCE_S)
        wait_until(stopped.exists, PATIENCE_S)
        (tmp_path / "state").write_text("gone")
        assert 7 == run_.guardian.wait(PATIENCE_S)
    stray.wait(PATIENCE_S)
    assert () == find(Env.RUN, str(run_.run_dir))
