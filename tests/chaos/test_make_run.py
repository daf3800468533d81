"""What a person does first: `make run`, `kill -9` on everything in the middle, `make run` again, and once more."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.supervise.process import Process, end_all, find, identify, kill
from tests.farmhouse import wait_until
from vramfarm.protocol import Env

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart" / "train.py"
JOB = """
name: again
command: {script} --steps 60 --layers 1 --dim 64 --batch 4 --context 64 --pause 0.1
cpu_processes: 2
python: {python}
env: {{OMP_NUM_THREADS: "1"}}
checkpoint: {{save_interval: 500ms}}
offload: {{to: "file://{folder}/store"}}
restart: {{initial_delay: 0s}}
finish: {{hold: 0s}}
"""


class MakeRun:
    """The command of `make run`, started again and again on one state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = folder / "job.yaml"
        self.job.write_text(JOB.format(script=QUICKSTART, python=sys.executable, folder=folder))
        self.output = folder / "output"
        self.simulators: list[Process] = []

    def start(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-I", "-m", "runner", "simulate", "--state", str(self.folder / "farm")]
        with self.output.open("wb") as out:
            started = subprocess.Popen([*argv, "--run", str(self.job)], stdout=out, stderr=out)
        self.simulators.append(identify(started.pid))
        return started

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def tree(self) -> tuple[Process, ...]:
        """Everything that the command has started and that is alive."""
        servers = list((self.folder / "farm" / "servers").glob("srv_*"))
        marked = [find("VRAMFARM_SERVER_ID", folder.name) for folder in servers]
        runs = [find(Env.RUN, str(folder / "disk" / "again")) for folder in servers]
        return tuple({process for found in (*marked, *runs) for process in found})


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    make_run = MakeRun(tmp_path.resolve())
    yield make_run
    kill(make_run.simulators, signal.SIGKILL)
    end_all(make_run.tree)


@pytest.mark.storm
@pytest.mark.timeout(240)
def test_make_run_goes_on_after_everything_was_killed_and_knows_when_it_is_done(make_run):
    """
    The second start resumes and ends well; the third says that the job is done and trains nothing.
    """
    killed = make_run.start()
    wait_until(lambda: any((make_run.folder / "farm").glob("servers/*/disk/again/checkpoints/step-*")), 60)
    kill([*make_run.simulators, *make_run.tree()], signal.SIGKILL)
    killed.wait(10)
    end_all(make_run.tree)

    again = make_run.start()

    assert 0 == again.wait(120), make_run.said()
    assert "going on with srv_" in make_run.said()
    assert re.search(r"launch attempt 2 from step \d+", make_run.said()), make_run.said()
    assert "stopped (job_succeeded)" in make_run.said()
    assert () == make_run.tree()

    journal = (make_run.folder / "store" / "again" / "machines" / "0001" / "journal.jsonl").read_text()
    third = make_run.start()

    assert 0 == third.wait(60), make_run.said()
    assert "training is done (on an earlier machine)" in make_run.said()
    assert "launch attempt" not in make_run.said()
    assert journal == (make_run.folder / "store" / "again" / "machines" / "0001" / "journal.jsonl").read_text()
    assert "stopped (job_succeeded)" in make_run.said()
