"""A runner is killed while training lives, and job.yaml is of no use by then: real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TRAINER = Path(__file__).parents[1] / "fake_trainer.py"
ROOT = Path(__file__).parents[2]
JOB = f"""
name: tiny
command: {sys.executable} {TRAINER} --steps 60 --step-time 0.1 --bytes 1000
launcher: command
cpu_processes: 1
checkpoint: {{save_interval: 1s}}
restart: {{initial_delay: 0s}}
preflight: {{comm_test: false}}
secrets: [TOKEN_OF_TINY]
"""


class Box:
    """A run on a machine of one's own, its guardian and whatever is behind it."""

    def __init__(self, folder):
        self.folder, self.job, self.run = folder, folder / "job.yaml", folder / "workspace" / "tiny"
        self.job.write_text(JOB)
        self.begun = []

    def start(self, **more):
        env = {**os.environ, "VRAMFARM_WORKSPACE": str(self.folder / "workspace"), "TOKEN_OF_TINY": "t", **more}
        argv = [sys.executable, "-m", "runner", "run", "--config", str(self.job)]
        with (self.folder / "log").open("ab") as log:
            self.begun.append(subprocess.Popen(argv, env=env, stderr=log, stdout=log, cwd=ROOT))
        return self.begun[-1]

    def log(self):
        return (self.folder / "log").read_text()

    def until_it_trains(self):
        deadline = time.monotonic() + 60
        while not list(self.run.glob("checkpoints/step-*")):
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.1)

    def kill_runner(self):
        pid = int((self.run / "lock").read_text().split()[1])
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def box(tmp_path):
    box = Box(tmp_path)
    yield box
    for process in box.begun:
        process.send_signal(signal.SIGTERM)
    for process in box.begun:
        process.wait(60)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("name: [", "job.yaml:1", id="no YAML"),
        pytest.param(None, "cannot be read: no such file or directory", id="gone"),
        pytest.param(JOB.replace("name: tiny", "name: other"), "expected the job of ", id="another job's name"),
    ],
)
def test_a_broken_job_yaml_ends_no_training_when_the_runner_is_killed(box, text, why):
    """
    The next runner goes on with the job as it was accepted, and says so in one line; training is one attempt, to its end.
    """
    guardian = box.start()
    box.until_it_trains()
    box.job.unlink() if text is None else box.job.write_text(text)

    box.kill_runner()

    assert 0 == guardian.wait(120), box.log()
    said = [line for line in box.log().splitlines() if "goes on with the job as it was accepted" in line]
    assert [True] == [why in line and str(box.run / "job.json") in line for line in said], box.log()
    events = [json.loads(line)["event"] for line in (box.run / "journal.jsonl").read_text().splitlines()]
    assert [1, 1] == [events.count("launched"), events.count("exited")]


def test_a_person_who_starts_it_anew_is_refused(box):
    """
    Whoever types the command can mend job.yaml.
    """
    guardian = box.start()
    box.until_it_trains()
    guardian.send_signal(signal.SIGTERM)
    assert 75 == guardian.wait(60), box.log()
    box.job.write_text("name: [")

    assert 2 == box.start().wait(60), box.log()
    assert "goes on with the job as it was accepted" not in box.log()
