"""Whom SIGTERM asks: real shells and programs, in the trees in which people start their training."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from runner.supervise import process
from runner.supervise.asking import whom
from tests.supervise.conftest import until
from vramfarm.protocol import Env

TAKES = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: None)
if {workers}:
    os.fork()
    os.fork()
open(f"ready-{{os.getpid()}}", "x")
time.sleep(60)
"""
IGNORES_IT_NOT = 'import os, sys, time; open(f"ready-{os.getpid()}", "x"); time.sleep(60)'
SPAWNS = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "saves.py"])
subprocess.Popen(["timeout", "60", "sleep", "60"])
subprocess.run([sys.executable, "saves.py"])
"""


@dataclass
class Tree:
    """What a command became."""

    launcher: int
    pids: tuple[int, ...]

    def words(self, pid: int) -> list[str]:
        return [Path(word).name for word in Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]]

    def asked(self) -> list[str]:
        """The last word of who is asked."""
        return sorted(self.words(pid)[-1] for pid in whom(self.pids, self.launcher))


@pytest.fixture
def start(marker, tmp_path):
    """Start a command line; it is there when so many programs said that they are ready."""
    (tmp_path / "saves.py").write_text(TAKES.format(workers=False))
    (tmp_path / "family.py").write_text(TAKES.format(workers=True))
    (tmp_path / "never.py").write_text(IGNORES_IT_NOT)
    (tmp_path / "spawns.py").write_text(SPAWNS)

    def run(*argv: str, ready: int = 1, **env: str) -> Tree:
        argv = tuple(word.replace("PYTHON", sys.executable) for word in argv)
        launcher = process.spawn(argv, env={**os.environ, Env.ATTEMPT_ID: marker, **env}, cwd=tmp_path)
        until(lambda: len(list(tmp_path.glob("ready-*"))) == ready, 30)
        time.sleep(0.05)  # a shell that has just started it may be about to wait
        return Tree(launcher.pid, tuple(p.pid for p in process.find(Env.ATTEMPT_ID, marker)))

    return run


@pytest.mark.parametrize(
    ("argv", "ready", "expected"),
    [
        pytest.param(["PYTHON", "saves.py"], 1, ["saves.py"], id="a program"),
        pytest.param(["bash", "-c", "PYTHON saves.py; :"], 1, ["saves.py"], id="below a shell that would die of it"),
        pytest.param(["sh", "-c", "bash -c 'PYTHON saves.py; :'; :"], 1, ["saves.py"], id="below two shells"),
        pytest.param(["bash", "-c", "setsid -w PYTHON saves.py; :"], 1, ["saves.py"], id="in a session of its own"),
        pytest.param(["bash", "-c", "PYTHON saves.py | cat; :"], 1, ["saves.py"], id="who reads its output is left to"),
        pytest.param(
            ["bash", "-c", "trap : TERM; PYTHON saves.py; :", "trap"], 1, ["saves.py", "trap"], id="a shell that waits with its trap"
        ),
        pytest.param(["timeout", "99", "PYTHON", "saves.py"], 1, ["saves.py"], id="one that passes it on"),
        pytest.param(["PYTHON", "family.py"], 4, ["family.py"], id="not its workers"),
        pytest.param(["PYTHON", "spawns.py"], 2, ["saves.py", "saves.py"], id="processes of its own kind, not a logger"),
        pytest.param(["PYTHON", "never.py"], 1, ["never.py"], id="nobody takes it: the program"),
        pytest.param(["bash", "-c", "PYTHON never.py; :", "shell"], 1, ["shell"], id="nobody takes it: the shell"),
    ],
)  # fmt: skip
def test_who_saves_on_it_is_asked(start, argv, ready, expected):
    """
    And nobody that it needs for that; where nobody would, the command as a whole.
    """
    assert expected == start(*argv, ready=ready).asked()


@pytest.mark.parametrize(
    ("argv", "ready", "expected"),
    [
        pytest.param(["PYTHON", "family.py"], 4, ["family.py"], id="not its workers, which say the same rank"),
        pytest.param(["PYTHON", "never.py"], 1, ["never.py"], id="whether it takes it or not"),
        pytest.param(["bash", "-c", "PYTHON saves.py; :"], 1, ["saves.py"], id="a rank that is a shell script"),
    ],
)
def test_where_there_are_ranks_they_are_asked(start, argv, ready, expected):
    """
    Not what launched them: it would end them soon after.
    """
    words = " ".join(f"'{word}'" for word in argv)
    tree = start("bash", "-c", f"trap : TERM; LOCAL_RANK=0 {words}; :", "launcher", ready=ready)

    assert expected == tree.asked()


def test_what_a_dead_shell_left_is_asked(start):
    """
    A trainer that goes on without the shell that started it.
    """
    tree = start("bash", "-c", "PYTHON saves.py & PYTHON never.py & wait", ready=2)
    launcher = process.identify(tree.launcher)
    os.kill(tree.launcher, 9)
    until(lambda: not process.is_alive(launcher))

    assert ["saves.py"] == tree.asked()
