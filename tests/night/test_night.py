"""Whole nights that a cron line starts: real servers of the simulator, a real S3 server, a job that takes a while."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from runner.facts import Conclusion, Machine, Outcome
from runner.policy.ledger import dump
from runner.results import dump_conclusion
from runner.simulator.model import State
from tests.container.engine import build, build_base, build_product, why_no_engine
from tests.farmhouse import Farmhouse, open_farm, wait_until
from tests.s3server import BUCKET, S3Server, find_server

HERE = Path(__file__).parent
RUNNER = (sys.executable, "-I", "-m", "runner")
TRAINER = HERE.parent / "fake_trainer.py"
LAUNCHER = HERE.parent / "chaos" / "launch_ranks.py"

pytestmark = [
    pytest.mark.skipif(find_server() is None, reason="SeaweedFS is not installed: pip install '.[dev]'"),
    pytest.mark.timeout(
        1200
    ),  # a lease of a machine that vanished is watched for a minute; the image may have to be built
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def image() -> str:
    """The product's. Skips, and says why, where there is no engine."""
    if reason := why_no_engine():
        pytest.skip(f"{reason}: scripts/docker-engine.sh up brings one up on Debian")
    return build("--build-arg", f"IMAGE={build_product(build_base())}", str(HERE))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[Farmhouse]:
    """Servers are processes."""
    entrypoint = (sys.executable, "-I", str(HERE / "entrypoint.py"))
    with open_farm(tmp_path / "farm", entrypoint=entrypoint, balance=1000) as house:
        yield house


@pytest.fixture(params=["process", "docker"])
def any_house(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Farmhouse]:
    """Servers are processes, or containers of the product's image."""
    if request.param == "process":
        yield request.getfixturevalue("house")
        return
    with open_farm(tmp_path / "farm", image=request.getfixturevalue("image"), balance=1000) as house:
        yield house


class Host:
    """A cron host: a job.yaml, an environment, and the command line."""

    def __init__(self, folder: Path, house: Farmhouse, store: S3Server) -> None:
        self.house = house
        self._folder = folder
        self._store = store
        (folder / "code").mkdir()
        shutil.copy(TRAINER, folder / "code")
        shutil.copy(LAUNCHER, folder / "code")
        self.env = {
            **os.environ,
            **store.env,
            "AWS_ENDPOINT_URL": store.endpoint,
            "VRAMFARM_API_URL": house.url,
            "VRAMFARM_API_KEY": house.farm.account_key,
            "VRAMFARM_SUBMIT_STATE": str(folder / "state"),
        }

    def job(self, name: str, *, steps: int, **more: Any) -> None:
        in_image = self.house.image != Farmhouse.image
        python = "python3" if in_image else sys.executable
        job = {
            "name": name,
            "launcher": "command",
            "command": f"{python} {LAUNCHER.name} 2 {TRAINER.name} --steps {steps} --step-time 0.02 --bytes 20000",
            "provider": {"image": self.house.image} if in_image else {},
            "source": {"path": "code"},
            "cpu_processes": 2,
            "preflight": {"comm_test": False},
            "checkpoint": {"save_interval": "1s"},
            "offload": {"to": self.store},
            "restart": {"initial_delay": "1s"},
            "limits": {"max_duration": "1h"},
            **more,
        }
        (self._folder / "job.yaml").write_text(json.dumps(job))

    @property
    def store(self) -> str:
        return f"s3://{BUCKET}/{self._folder.name}"

    def forget_first(self) -> None:
        """No machine is unfit."""
        self.put("first-server", b"none")

    def put(self, key: str, body: bytes) -> None:
        """Into the store."""
        self._store.client().put_object(Bucket=BUCKET, Key=f"{self._folder.name}/{key}", Body=body)

    def leave(self, name: str, outcome: Outcome, spent: timedelta) -> None:
        """As a machine leaves the store on which the run ended yesterday."""
        begun = datetime.now(UTC) - timedelta(days=1)
        deadline = begun + spent
        end = deadline - timedelta(seconds=30)
        times = {"opened_at": begun, "paid_from": begun, "seen_at": deadline, "concluded_at": end}
        machine = Machine(id="vramfarm:srv_old", provider="vramfarm", server="srv_old", outcome=outcome, **times)
        told = {"server": "srv_old", "phase": "FINISHED", "deadline_at": deadline.isoformat()}
        conclusion = Conclusion(outcome=outcome, reason="as it was", at=end)
        self.put(f"{name}/ledger.json", json.dumps(dump((machine,))).encode())
        self.put(f"{name}/status.json", json.dumps(told).encode())
        self.put(f"{name}/outcome.json", json.dumps(dump_conclusion(conclusion, attempt=0)).encode())

    def submit(self, *arguments: str, seconds: float = 600.0) -> tuple[int, dict[str, Any], str]:
        """Exit code, the last word, the log."""
        command = (*RUNNER, "submit", "--config", str(self._folder / "job.yaml"), "--json", "--look-every", "0.3")
        done = subprocess.run(
            (*command, *arguments), env=self.env, capture_output=True, text=True, timeout=seconds, check=False
        )
        return done.returncode, json.loads(done.stdout or "{}"), done.stderr

    def stored(self) -> bytes:
        """All that the store has of these nights."""
        client = self._store.client()
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{self._folder.name}/")
        keys = [one["Key"] for page in pages for one in page.get("Contents", [])]
        return b"\n".join(client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys)

    def servers(self) -> list[Any]:
        """Oldest first."""
        return [rented.server for rented in reversed(self.house.farm.servers())]

    def status(self, name: str) -> dict[str, Any]:
        return self._ask("status", name)

    def report(self, name: str) -> dict[str, Any]:
        return self._ask("report", name)

    def _ask(self, command: str, name: str) -> dict[str, Any]:
        argv = (*RUNNER, command, f"{self.store}/{name}", "--json")
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=120, check=False)
        return dict(json.loads(done.stdout or "{}"))


@pytest.fixture
def any_host(tmp_path: Path, any_house: Farmhouse, store: S3Server) -> Host:
    return Host(tmp_path, any_house, store)


@pytest.fixture
def host(tmp_path: Path, house: Farmhouse, store: S3Server) -> Host:
    return Host(tmp_path, house, store)


def test_a_night_over_three_machines(any_host: Host):
    """
    The first machine is unfit and given back, the second vanishes in the middle with its disk, the third goes on
    from the store and finishes; bill and report are right to the cent, nothing is trained twice from zero, and the
    same cron line afterwards rents nothing.
    """
    host = any_host
    host.job("night", steps=700)

    code, told, log = host.submit()
    assert 2 == len(host.servers()), log
    bad, good = host.servers()
    assert (0, good.id) == (code, told["server"]), log
    assert "a broken row of its memory" in log
    wait_until(lambda: any(c["offsite"] for c in host.status("night").get("checkpoints", [])), 120)
    host.house.farm.vanish(good.id)
    assert not host.house.has_disk(good.id)
    code, told, log = host.submit("--wait")

    _, _, last = host.servers()
    assert (0, "succeeded") == (code, told["outcome"]), log
    wait_until(lambda: host.house.server(last.id)["state"] == "stopped", 60)
    assert [False] * 3 == [host.house.has_disk(one.id) for one in (bad, good, last)]
    assert [State.STOPPED, State.FAILED] == [host.house.farm.find(one.id).server.state for one in (bad, good)]
    assert 700 == host.status("night")["step"]
    bills = {one.id: host.house.farm.bill(one).cost for one in (bad, good, last)}
    assert [one.machine.price_per_hour * 15 / 60 for one in (bad, good, last)] == list(bills.values())  # the minimum
    machines = host.report("night")["machines"]
    assert {server: str(round(bill, 2)) for server, bill in bills.items()} == {m["server"]: m["cost"] for m in machines}
    attempts = [attempt for machine in machines for attempt in machine["attempts"]]
    assert [1, 2] == [attempt["number"] for attempt in attempts]
    assert [None, True] == [attempt["resume"] and attempt["resume"]["step"] > 0 for attempt in attempts]
    stored = host.stored()
    assert good.id.encode() in stored
    keys = [host.house.farm.account_key, *(rented.key for rented in host.house.farm.servers())]
    assert [] == [key for key in keys if key.encode() in stored]
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


@pytest.mark.parametrize(
    ("outcome", "code", "order", "limit", "args"),
    [
        (Outcome.LIMIT, 7, [], "1h", []),
        (Outcome.STOPPED, 8, ["--go-on"], "10m", ["--go-on"]),
    ],
)
def test_after_an_end_one_machine_is_rented_and_trains(host: Host, outcome, code, order, limit, args):  # noqa: PLR0917
    """
    `--go-on`: the machine is told, and has the limit anew; a raised limit is enough. With neither nothing is rented.
    """
    host.forget_first()
    host.job("more", steps=50, limits={"max_duration": "10m"})
    host.leave("more", outcome, timedelta(minutes=10))

    found, told, log = host.submit()
    assert (code, outcome, []) == (found, told.get("outcome"), host.servers()), log
    host.job("more", steps=50, limits={"max_duration": limit})
    found, told, log = host.submit("--wait", *order)

    assert (0, "succeeded") == (found, told.get("outcome")), log
    assert [args] == [server.args for server in host.servers()]
    assert [False, bool(order)] == [machine["is_anew"] for machine in host.report("more")["machines"]]
