"""What is special about servers that are containers: their engine, their network, and what a farm leaves behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.simulator.engine import FARM, DockerHost
from runner.simulator.host import Boot
from runner.simulator.model import Policy
from tests.container.engine import engine
from tests.farmhouse import Farmhouse, open_farm, wait_until

SLEEP = ["python3", "-c", "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); time.sleep(600)"]


@pytest.fixture(scope="module")
def house(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farmhouse]:
    with open_farm(tmp_path_factory.mktemp("farm"), image=image) as house:
        yield house


@pytest.fixture
def client(image: str) -> Iterator[Any]:
    with engine() as client:
        yield client


def _of(client: Any, server: str) -> list[Any]:
    return client.containers.list(all=True, filters={"label": f"vramfarm.server={server}"})


def test_a_container_reaches_its_provider_on_loopback(house: Farmhouse):
    """
    By the address that holds outside, with its own key.
    """
    program = (
        "import os, urllib.request as u\n"
        "key = {'Authorization': 'Bearer ' + os.environ['VRAMFARM_API_KEY']}\n"
        "print(u.urlopen(u.Request(os.environ['VRAMFARM_API_URL'] + '/self', headers=key)).read().decode())"
    )
    server = house.rent(["python3", "-c", program])

    house.wait_exited(server)

    assert server == json.loads(house.log(server))["id"]
    house.stop(server)


def test_a_host_that_vanishes_leaves_no_container_and_no_disk(house: Farmhouse, client: Any):
    """
    As one that lost its power for good; the bill ends.
    """
    server = house.rent(SLEEP, restart_policy="always")
    house.wait_started(server)
    assert house.has_disk(server)

    house.call("POST", f"/_sim/servers/{server}/vanish")

    now = house.server(server)
    assert ("failed", "host_lost") == (now["state"], now["state_reason"])
    assert now["billing"]["ended_at"] is not None
    assert ([], False) == (_of(client, server), house.has_disk(server))


def test_an_image_that_the_engine_has_not_is_a_server_that_failed(house: Farmhouse):
    """
    Nothing is billed.
    """
    server = house.rent(SLEEP, image="nobody/has-this:1")

    now = house.wait(server, lambda now: now["state"] == "failed")

    assert ("image_pull_failed", "0.0000") == (now["state_reason"], now["billing"]["cost"])


def test_lives_that_nobody_watched_are_counted_with_their_exits(house: Farmhouse, client: Any):
    """
    The engine's own restarts, while the farm was busy: each exit with its code, as the engine remembers it.
    """
    program = "import os; n = len(open('lives', 'a+').write('x') and open('lives').read()); os._exit(n)"
    server = house.rent(["python3", "-c", program], restart_policy="always")
    house.wait_started(server)
    with house.farm.store.transaction():  # its ticks wait
        wait_until(lambda: _of(client, server)[0].attrs["RestartCount"] >= 3)

    house.wait(server, lambda now: now["container"]["restart_count"] >= 3)

    events = json.loads(house.call("GET", f"/servers/{server}/events?limit=200").body)["events"]
    codes = [event["data"]["exit_code"] for event in events if event["type"] == "container.exited"]
    assert [1, 2, 3] == codes[:3]
    house.stop(server)


class Late:
    """The engine, on a machine so busy that a further life has ended before it is asked for events."""

    def __init__(self, client: Any) -> None:
        self._client, self._is_late = client, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def events(self, **wish: Any) -> Any:
        if self._is_late:
            self._is_late = False
            _wait_for_lives(self._client, wish["filters"]["container"], 1)
        return self._client.events(**{**wish, "until": f"{time.time():.6f}"})


def _wait_for_lives(client: Any, container: str, number: int) -> None:
    before = client.containers.get(container).attrs["RestartCount"]
    wait_until(lambda: client.containers.get(container).attrs["RestartCount"] >= before + number, 60)


def test_an_exit_is_not_taken_for_that_of_a_life_that_ends_meanwhile(tmp_path: Path, image: str, client: Any):
    """
    A container that ends again and again, and an engine that answers late.
    """
    program = "import os; n = len(open('/n', 'a+').write('x') and open('/n').read()); os._exit(n)"
    host = DockerHost(tmp_path, Late(client), farm_id="late", image=image)
    try:
        host.start("srv", Boot(image=image, args=("python3", "-c", program), env={}, policy=Policy.ALWAYS, number=0))
        _wait_for_lives(client, "vramfarm-late-srv", 2)

        assert [1, 2] == [host.exit_code("srv", 0), host.exit_code("srv", 1)]
    finally:
        host.delete_disk("srv")


def test_leftovers_of_a_farm_are_removed_at_its_next_start_and_nobody_elses(tmp_path: Path, image: str, client: Any):
    """
    A container that is ours by its label and has no server; one of another farm stays.
    """
    with open_farm(tmp_path / "farm", image=image) as house:
        mine = house.farm.host._farm_id
    made = [
        client.containers.create(image, SLEEP, labels={FARM: farm, "vramfarm.server": "srv_gone0000"})
        for farm in (mine, "another")
    ]
    try:
        with open_farm(tmp_path / "farm", image=image):
            left = {container.id for container in client.containers.list(all=True)}

        assert [False, True] == [container.id in left for container in made]
    finally:
        for container in made:
            if container.id in {one.id for one in client.containers.list(all=True)}:
                container.remove(force=True)


class Simulate:
    """The command, as a process."""

    def __init__(self, state: Path, *arguments: str) -> None:
        self._log = state.with_suffix(f".{len(list(state.parent.glob('*.log')))}.log")
        with self._log.open("w") as log:
            argv = [sys.executable, "-I", "-m", "runner", "simulate", "--state", str(state), *arguments]
            self.process = subprocess.Popen(argv, stdout=log, stderr=log)

    def wait_for(self, pattern: str) -> re.Match[str]:
        return wait_until(lambda: re.search(pattern, self._log.read_text()), 60)

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


def test_a_simulator_that_is_killed_finds_its_containers_again(tmp_path: Path, image: str, client: Any):
    """
    Where an engine has the image servers are containers, and stay so; each line names the container.
    """
    first = Simulate(tmp_path / "farm", "--image", image)
    second, server = None, "none"
    try:
        url, key = (first.wait_for(pattern)[1] for pattern in (r"listens on (\S+)", r"account key: (\S+)"))
        server = Farmhouse(url, _Account(key), image).rent(SLEEP, restart_policy="always")
        container = first.wait_for(rf"{server} .* running: .*, container (\w+)")[1]
        first.end(signal.SIGKILL)
        second = Simulate(tmp_path / "farm", "--servers", "process")
        assert 3 == second.process.wait(60)
        second.wait_for("are of the kind docker, got --servers process")
        assert "running" == client.containers.get(container).status

        second = Simulate(tmp_path / "farm", "--image", "nobody/has-this:1")

        assert container == second.wait_for(rf"{server} .* running: .*, container (\w+)")[1]
        house = Farmhouse(url, _Account(key), image)
        house.stop(server)
        second.wait_for(rf"{server} .* stopped \(user_request\)")
        assert [] == _of(client, server)
    finally:
        for simulate in filter(None, (first, second)):
            if simulate.process.poll() is None:
                simulate.end(signal.SIGKILL)
        for left in _of(client, server):
            left.remove(force=True)
            client.volumes.get(left.name).remove(force=True)


class _Account:
    """All that is used of a farm that runs elsewhere."""

    def __init__(self, key: str) -> None:
        self.account_key = key
