"""`run` itself on a rented server: every early end stops that server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from runner import guardian
from runner.supervise.process import find
from tests.farmhouse import Farmhouse, wait_until
from tests.providers.clouds import RunPod, serving

RUN = (sys.executable, "-I", guardian.__file__)
JOB = "name: small\ncommand: python3 train.py\nlauncher: command\n"
CPU = JOB + "cpu_processes: 1\nrestart: {initial_delay: 0s}\n"


@pytest.fixture
def run(house: Farmhouse, tmp_path: Path):
    """Rent a server that runs this job; returns its id."""

    def run(job: str, *, hold: str = "0") -> str:
        house.fail()
        (tmp_path / "job.yaml").write_text(job)
        (tmp_path / "train.py").write_text("import time; time.sleep(600)")
        return house.rent([*RUN, "--config", str(tmp_path / "job.yaml")], env={"RUNNER_HOLD_S": hold})

    return run


@pytest.mark.parametrize(
    ("job", "code", "said"),
    [
        pytest.param(JOB + "limts: {}\n", 2, "limts", id="a typo in job.yaml"),
        pytest.param(JOB, 3, "no card found", id="a refused machine"),
        pytest.param(JOB + "provider: {kind: runpod}\n", 2, "provider.kind", id="another provider's server"),
    ],
)
def test_every_early_end_stops_the_server(house: Farmhouse, run, job, code, said):
    """
    With its exit code; why is in the log. Nobody is billed for a typo.
    """
    server = run(job)

    now = house.wait_stopped(server, 120)

    assert code == now["container"]["exit_code"], house.log(server)
    assert said in house.log(server)


@pytest.mark.parametrize(
    ("job", "code", "said"),
    [
        pytest.param(JOB, 3, "no card found", id="no card"),
        pytest.param(CPU + "secrets: [NOT_THERE]\n", 2, "secrets: no value for NOT_THERE", id="no secret"),
        pytest.param(CPU + "python: /nowhere\n", 2, "found none at /nowhere", id="no interpreter"),
    ],
)
def test_a_start_that_came_to_nothing_is_in_the_ledger(house: Farmhouse, run, tmp_path: Path, *, job, code, said):
    """
    Its minutes are paid: the report and the budget of the next machine have them.
    """
    (tmp_path / "store").mkdir()

    server = run(f"{job}offload: {{to: 'file://{tmp_path}/store'}}\n")

    now = house.wait_stopped(server, 120)
    told = json.loads((tmp_path / "store" / "small" / "ledger.json").read_bytes())["machines"]
    assert (code, [server]) == (now["container"]["exit_code"], [machine["server"] for machine in told]), house.log(
        server
    )
    assert said in house.log(server)
    assert Decimal(told[0]["cost"]) > 0


def test_a_server_whose_run_another_one_has_stops_only_itself(house: Farmhouse, run, tmp_path: Path):
    """
    The lease is the other's, which goes on training; nobody pays for two.
    """
    (tmp_path / "store").mkdir()
    job = f"{CPU}offload: {{to: 'file://{tmp_path}/store'}}\n"
    first = run(job)
    wait_until(lambda: "launch attempt 1" in house.log(first), 60)

    second = run(job)

    now = house.wait_stopped(second, 180)
    assert 5 == now["container"]["exit_code"], house.log(second)
    assert f"another runner has this run: server {first}" in house.log(second)
    assert "running" == house.server(first)["state"]
    house.stop(first)


def test_an_early_end_is_held_for_the_minutes_that_are_paid_anyway(house: Farmhouse, run):
    """
    By default; the reason and the way out of it are said.
    """
    server = run(JOB + "limts: {}\n", hold="")
    wait_until(lambda: "min left" in house.log(server), 60)

    assert "the server is held for a look" in house.log(server)
    assert "running" == house.server(server)["state"]
    house.stop(server)


@pytest.mark.parametrize("job", ["setup: [sleep 600]\n", ""], ids=["during the set-up", "while it trains"])
def test_a_runner_that_is_killed_whenever_leaves_no_server_on(tmp_path: Path, job: str):
    """
    SIGKILL to the runner: at the deadline the server goes, and with it all that the run had started.
    """
    (tmp_path / "job.yaml").write_text(f"{JOB}cpu_processes: 1\nlimits: {{max_duration: 20s}}\n{job}")
    (tmp_path / "train.py").write_text("import time; time.sleep(600)")
    log = tmp_path / "log"
    with serving(RunPod(), tmp_path) as cloud, log.open("w") as file:
        env = {**os.environ, **cloud.env, "VRAMFARM_WORKSPACE": str(tmp_path), "VRAMFARM_TEST": str(tmp_path)}
        run = subprocess.Popen([*RUN, "--config", str(tmp_path / "job.yaml")], env=env, stderr=file)
        wait_until(lambda: ("run the set-up" if job else "launch attempt 1") in log.read_text(), 60)

        runners = [p for p in find("VRAMFARM_TEST", str(tmp_path)) if b"loop" in _words(p.pid)]
        for process in runners:
            os.kill(process.pid, signal.SIGKILL)

        assert 7 == run.wait(120), log.read_text()
        assert runners
        assert "stopped" == cloud.now()
    wait_until(lambda: not find("VRAMFARM_TEST", str(tmp_path)))


def test_what_a_pod_costs_after_an_early_end_is_told(tmp_path: Path):
    """
    There are files in its workspace, so it is stopped and not terminated: its disk is billed until somebody knows.
    """
    (tmp_path / "store").mkdir()
    job = f"{CPU}secrets: [NOT_THERE]\noffload: {{to: 'file://{tmp_path}/store'}}\n"
    (tmp_path / "job.yaml").write_text(job)
    log = tmp_path / "run.log"
    with serving(RunPod(), tmp_path) as cloud, log.open("w") as file:
        env = {**os.environ, **cloud.env, "VRAMFARM_WORKSPACE": str(tmp_path), "RUNNER_HOLD_S": "0"}
        run = subprocess.Popen([*RUN, "--config", str(tmp_path / "job.yaml")], env=env, stderr=file)

        assert 2 == run.wait(120), log.read_text()
        assert "stopped" == cloud.now()

    reason = json.loads((tmp_path / "store" / "small" / "refusal.json").read_bytes())["reason"]
    assert "the pod is stopped; its volume disk stays and costs 0.20 USD per GB and month until you terminate" in reason


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
