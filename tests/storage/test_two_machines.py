"""One run, several machines (workspaces), one store: real runners. What they tell each other is in the store alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.supervise.process import end_all, find

TRAINER = Path(__file__).parents[1] / "fake_trainer.py"
JOB = """
name: tiny
command: {python} {trainer} --steps {steps} --step-time 0.05 --bytes 1000
launcher: command
cpu_processes: 1
checkpoint: {{save_interval: 1s}}
offload: {{to: "file://{store}"}}
restart: {{initial_delay: 0s}}
"""


class Machines:
    def __init__(self, folder):
        self.folder, self.begun = folder, []

    def start(self, name, *options, steps):
        """A runner in a workspace of its own."""
        job = self.folder / f"job-{steps}.yaml"
        job.write_text(JOB.format(python=sys.executable, trainer=TRAINER, steps=steps, store=self.folder / "store"))
        env = {**os.environ, "VRAMFARM_WORKSPACE": str(self.folder / name)}
        argv = [sys.executable, "-m", "runner", "run", "--config", str(job), "--accept-change", *options]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.begun.append(subprocess.Popen(argv, env=env, stderr=log, stdout=log, cwd=Path(__file__).parents[2]))
        return self.begun[-1]

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def until(self, name, text):
        deadline = time.monotonic() + 60
        while text not in self.log(name):
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(0.1)


@pytest.fixture
def machines(tmp_path):
    machines = Machines(tmp_path)
    yield machines
    for process in machines.begun:
        process.send_signal(signal.SIGTERM)
    for process in machines.begun:
        process.wait(60)


def test_a_second_machine_is_told_who_has_the_run_and_a_third_goes_on_with_it(machines):
    """
    While one trains another one ends with 5; after it left, the next needs not wait.
    """
    first = machines.start("first", steps=5000)
    machines.until("first", "is in the store")
    expect_report_of_what_runs(machines.folder)

    assert 5 == machines.start("second", steps=5000).wait(90), machines.log("second")
    assert f"another runner has this run: {os.uname().nodename}:{machines.folder / 'first'}" in machines.log("second")
    first.send_signal(signal.SIGTERM)
    assert 75 == first.wait(60), machines.log("first")

    third = machines.start("third", steps=1)  # the checkpoint is beyond it: done at once

    assert 0 == third.wait(90), machines.log("third")
    assert "watching" not in machines.log("third")
    check_history(machines.folder)


def expect_report_of_what_runs(folder):
    """A machine may vanish: its page does not wait for the end of the attempt."""
    page, deadline = folder / "store" / "tiny" / "report.html", time.monotonic() + 60
    while not (page.is_file() and "attempt 1" in page.read_text()):
        assert time.monotonic() < deadline, "no report while it trains"
        time.sleep(0.1)


def check_history(folder):
    """What the two that trained did stands side by side in the store, and nothing of the one that was locked out."""
    address = f"file://{folder}/store/tiny"
    store = folder / "store" / "tiny"
    first, third = json.loads((store / "ledger.json").read_bytes())["machines"]
    journals = [(store / "machines" / n / "journal.jsonl").read_text() for n in ("0001", "0002")]

    assert [1, 2] == [attempt["number"] for attempt in first["attempts"] + third["attempts"]]
    assert ["interrupted", "succeeded"] == [a["ending"] for a in first["attempts"] + third["attempts"]]
    assert [f"{os.uname().nodename}:{folder / name / 'tiny'}" for name in ("first", "third")] == [
        first["where"],
        third["where"],
    ]
    assert ["", "succeeded"] == [first["outcome"], third["outcome"]]
    assert [True, False] == ["SIGTERM" in journal for journal in journals]
    for number in (1, 2):
        assert "training from step" in command("logs", address, "--attempt", str(number)).stdout
    assert "expected logs of attempt 3, found 1, 2" in command("logs", address, "--attempt", "3").stderr
    assert "tiny  succeeded (exit code 0)" in command("status", address).stdout
    report = command("report", address).stdout
    assert [True] * 4 == [
        text in report for text in ("machine 1", "attempt 1  interrupted", "machine 2", "attempt 2  succ")
    ]
    page = (store / "report.html").read_text()
    assert ["/first/tiny", "/third/tiny", "polyline"] == [
        w for w in ("/first/tiny", "/third/tiny", "polyline") if w in page
    ]


def command(*args):
    argv = [sys.executable, "-m", "runner", *args]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, cwd=Path(__file__).parents[2])


def test_a_run_that_is_trained_anew_is_not_over_when_its_machine_vanishes(machines):
    """
    Done, started over, killed, the folder gone: the next machine goes on with the new attempt's checkpoint.
    """
    assert 0 == machines.start("first", steps=2).wait(90), machines.log("first")
    again = machines.start("first", "--start-over", steps=5000)
    machines.until("first", "is in the store")
    end_all(lambda: find("VRAMFARM_WORKSPACE", str(machines.folder / "first")), timeout_s=30)
    again.wait(60)
    (machines.folder / "first").rename(machines.folder / "gone")
    (machines.folder / "store" / "tiny" / "lease.json").unlink()  # else it is watched for a minute

    next_ = machines.start("next", steps=5001)
    machines.until("next", "launch attempt 3 from step")

    assert '"outcome": ""' in (machines.folder / "store" / "tiny" / "outcome.json").read_text()
    assert "conclude" not in machines.log("next")
    next_.send_signal(signal.SIGTERM)
    assert 75 == next_.wait(60), machines.log("next")
