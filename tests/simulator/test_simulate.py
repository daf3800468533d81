"""`simulate` as a process: one job on a simulated server, through every kind of death."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from runner.supervise.process import find
from tests.farmhouse import Farmhouse, wait_until

JOB = """
import os, signal, sys, time, pathlib, urllib.request, json
here = pathlib.Path(os.environ["VRAMFARM_WORKSPACE"])
def leave(*_):
    print("saved and left", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, leave)
(here / "lives").open("a").write("x")
print("life", (here / "lives").stat().st_size, os.getpid(), flush=True)
steps = pathlib.Path(sys.argv[sys.argv.index("--config") + 1]).read_text().split()
while "done" not in steps:
    time.sleep(0.05)
    steps = pathlib.Path(sys.argv[-1]).read_text().split()
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
request = urllib.request.Request(
    f"{os.environ['VRAMFARM_API_URL']}/servers/{os.environ['VRAMFARM_SERVER_ID']}/stop",
    data=json.dumps({"save": None, "reason": "job_succeeded"}).encode(),
    headers={"Authorization": f"Bearer {os.environ['VRAMFARM_API_KEY']}", "Content-Type": "application/json"},
)
while True:
    try:
        urllib.request.urlopen(request, timeout=5).read()
    except OSError:
        pass
    time.sleep(0.2)
"""


class Simulate:
    """The command, started as often as a test likes, on one state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = folder / "job.yaml"
        self.job.write_text("going\n")
        (folder / "job.py").write_text(JOB)
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *more: str) -> subprocess.Popen[str]:
        # no shell, one process: a signal reaches the simulator itself
        program = "import sys; from runner.simulator.main import main; sys.exit(main(sys.argv[1:]))"
        log = (self.folder / f"out-{len(self.started)}").open("w")
        with log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", program, "--state", str(self.folder / "state"), *more],
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.started.append(process)
        return process

    def run(self) -> subprocess.Popen[str]:
        runner = (sys.executable, str(self.folder / "job.py"))
        return self.start("--run", str(self.job), "--restart-delay", "0.1", "--runner-argv", *runner)

    def out(self, number: int = -1) -> str:
        number %= len(self.started)
        return (self.folder / f"out-{number}").read_text()

    def wait_for(self, pattern: str) -> re.Match[str]:
        return wait_until(lambda: re.search(pattern, self.out()))

    def done(self) -> None:
        self.job.write_text("going done\n")


@pytest.fixture
def simulate(tmp_path: Path):
    simulate = Simulate(tmp_path)
    yield simulate
    for process in simulate.started:
        process.kill()
        process.wait(10)
    for folder in (tmp_path / "state" / "servers").glob("srv_*"):
        spec = folder / "pid.json"
        if spec.exists():
            pid = json.loads(spec.read_text())["pid"]
            if any(process.pid == pid for process in find("VRAMFARM_SERVER_ID", folder.name)):
                os.kill(pid, signal.SIGKILL)
        for process in find("VRAMFARM_SERVER_ID", folder.name):
            os.kill(process.pid, signal.SIGKILL)


def test_a_job_runs_on_a_server_that_is_rented_and_stopped(simulate):
    """
    Its output is shown, then one closing block with the bill.
    """
    simulate.done()

    process = simulate.run()

    assert 0 == process.wait(30), simulate.out()
    out = simulate.out()
    assert re.search(r"rented srv_\w+: RTX 4090, 0.59 EUR/h", out)
    assert "life 1" in out
    assert "stopped (job_succeeded)" in out
    assert "15 min at 0.59 EUR/h: 0.1475 EUR" in out


def test_a_finished_job_gets_a_new_server_with_an_empty_disk(simulate):
    """
    A server that was stopped is never started again.
    """
    simulate.done()
    simulate.run().wait(30)
    first = simulate.wait_for(r"rented (srv_\w+)")[1]

    assert 0 == simulate.run().wait(30)

    assert first != simulate.wait_for(r"rented (srv_\w+)")[1]
    assert "life 1" in simulate.out()


def test_the_simulator_killed_and_started_again_takes_its_server_back(simulate):
    """
    The job went on meanwhile: it is not started a second time, and reaches the API where it was.
    """
    killed = simulate.run()
    server = simulate.wait_for(r"rented (srv_\w+)")[1]
    pid = simulate.wait_for(r"life 1 (\d+)")[1]

    killed.kill()
    killed.wait(10)
    process = simulate.run()
    simulate.wait_for(f"going on with {server}")
    assert Path(f"/proc/{pid}").exists()
    simulate.done()

    assert 0 == process.wait(30), simulate.out()
    assert "life 2" not in simulate.out()


def test_a_job_that_ended_while_no_simulator_ran_is_started_again(simulate):
    """
    As restart policy always wants, on the same disk.
    """
    killed = simulate.run()
    pid = int(simulate.wait_for(r"life 1 (\d+)")[1])
    killed.kill()
    killed.wait(10)
    os.kill(pid, signal.SIGKILL)

    process = simulate.run()
    simulate.wait_for("life 2")
    simulate.done()

    assert 0 == process.wait(30), simulate.out()


def test_ctrl_c_lets_the_job_save_and_leave(simulate):
    """
    The server stays; the same command goes on with it.
    """
    process = simulate.run()
    server = simulate.wait_for(r"rented (srv_\w+)")[1]
    simulate.wait_for("life 1")

    process.send_signal(signal.SIGINT)

    assert 75 == process.wait(30)
    assert "saved and left" in simulate.out()
    assert f"{server} stays rented" in simulate.out()
    simulate.done()
    assert 0 == simulate.run().wait(30)
    assert f"going on with {server}" in simulate.out()
    assert "life 2" in simulate.out()


def test_a_second_simulator_on_one_state_is_refused(simulate):
    """
    It says who has it.
    """
    first = simulate.run()
    simulate.wait_for("life 1")

    second = simulate.run()

    assert 5 == second.wait(30)
    assert f"pid {first.pid}" in simulate.out()


def test_a_state_folder_that_is_removed_ends_what_ran_in_it(simulate):
    """
    Nobody would ever find those processes again.
    """
    process = simulate.run()
    pid = simulate.wait_for(r"life 1 (\d+)")[1]

    shutil.rmtree(simulate.folder / "state")

    assert 1 == process.wait(30)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_without_a_job_it_serves_and_tells_what_happens(simulate):
    """
    Address and key once, then a line for each change.
    """
    process = simulate.start()

    address = simulate.wait_for(r"listens on (http://127\.0\.0\.1:\d+/v1)")[1]
    key = simulate.wait_for(r"account key: (vfa_\w+)")[1]
    process.send_signal(signal.SIGINT)

    assert 0 == process.wait(30)
    again = simulate.start()
    assert address == simulate.wait_for(r"listens on (http://\S+)")[1]
    assert key == simulate.wait_for(r"account key: (vfa_\w+)")[1]
    again.send_signal(signal.SIGINT)


def test_on_a_terminal_it_is_a_table(simulate):
    """
    Drawn anew as things change: a server, its bill, what is left of the balance.
    """
    theirs, ours = pty.openpty()
    program = "import sys; from runner.simulator.main import main; sys.exit(main(sys.argv[1:]))"
    state = simulate.folder / "state"
    argv = [sys.executable, "-I", "-c", program, "--state", str(state), "--servers", "process"]
    process = subprocess.Popen(argv, stdout=ours)
    simulate.started.append(process)
    shown = _read_terminal(theirs, r"(http://\S+)[\s\S]*account key: (vfa_\w+)")
    house = Farmhouse(shown[1], SimpleNamespace(account_key=shown[2]))

    server = house.rent(["sleep", "600"])

    _read_terminal(theirs, rf"{server}\s+1 x RTX 4090\s+running\s+1\s+15\s+0.1475\s+pid \d+")
    house.stop(server)
    _read_terminal(theirs, rf"{server}\s+1 x RTX 4090\s+stopped \(user_request\)\s+1\s+15\s+0.1475\s")
    _read_terminal(theirs, r"billed 0.1475 EUR, balance 99.8525 EUR")


def _read_terminal(terminal: int, pattern: str) -> re.Match[str]:
    text = ""
    ends = time.monotonic() + 30
    while (match := re.search(pattern, text)) is None:
        assert time.monotonic() < ends, text
        text += os.read(terminal, 65536).decode()
    return match


def test_a_port_that_somebody_took_meanwhile_is_replaced_if_no_server_needs_it(simulate):
    """
    And kept, in so many words, if one does.
    """
    simulate.done()
    simulate.run().wait(30)
    port = int((simulate.folder / "state" / "port").read_text())
    with socket.create_server(("127.0.0.1", port)):
        assert 0 == simulate.run().wait(30), simulate.out()

    simulate.job.write_text("going")
    killed = simulate.run()
    simulate.wait_for("life 1")
    killed.kill()
    killed.wait(10)
    port = int((simulate.folder / "state" / "port").read_text())
    with socket.create_server(("127.0.0.1", port)):
        assert 5 == simulate.run().wait(30)
    assert f"port {port}" in simulate.out()


def test_a_job_file_that_is_not_there_is_said(simulate):
    """
    Nothing is rented.
    """
    process = simulate.start("--run", "/nowhere/job.yaml")

    assert 2 == process.wait(30)
    assert "/nowhere/job.yaml: expected a job.yaml, found no such file\n" == simulate.out()


@pytest.mark.storm
def test_a_job_is_done_whatever_is_killed_and_when(simulate):
    """
    Simulator, PID 1 of the server, the job: SIGKILL at random, then the same command again.
    """
    seed = int(os.environ.get("STORM_SEED", time.time_ns() % 1_000_000))
    print(f"STORM_SEED={seed}")
    dice = random.Random(seed)
    process = simulate.run()
    for _ in range(8):
        time.sleep(dice.uniform(0.0, 1.5))
        _kill_one(dice, simulate, process)
        if process.poll() is not None:
            process = simulate.run()
    simulate.done()

    assert 0 == process.wait(60), simulate.out()
    assert 1 == len(list((simulate.folder / "state" / "servers").iterdir()))


def _kill_one(dice: random.Random, simulate: Simulate, process: subprocess.Popen[str]) -> None:
    folders = sorted((simulate.folder / "state" / "servers").glob("srv_*"))
    victims = [process.pid]
    for folder in folders:
        victims += [member.pid for member in find("VRAMFARM_SERVER_ID", folder.name)]
    with suppress(ProcessLookupError):
        os.kill(dice.choice(victims), signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.2)
