"""What every provider module must do, shown on its API as its reference documents it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.adapters.providers import PROVIDERS, Answer, Keep, find_server, keyrings, with_each, with_secrets
from runner.adapters.providers.http import make_send
from runner.facts import ServerState
from tests.farmhouse import Farmhouse, python
from tests.providers.clouds import KEY, Cloud, Docker, Fault, RunPod, Vast, programmed, serving

RUNNING, STOPPING, GONE, UNKNOWN = (ServerState(word) for word in ("running", "stopping", "gone", "unknown"))
DISCARD, KEEP = Keep(None), Keep("/workspace")
HTTP = ("runpod", "vast", "docker")
WITH_KEY = ("runpod", "vast")
SEND = make_send(5.0)


class VRAMfarm(Cloud):
    """The simulator."""

    name = "vramfarm"

    def __init__(self, house: Farmhouse) -> None:
        self.house = house
        self.id = house.rent(python("import time; time.sleep(600)"))
        house.wait_started(self.id)
        self.server_key = house.farm.find(self.id).key

    @property
    def env(self) -> dict[str, str]:
        return {
            "VRAMFARM_SERVER_ID": self.id,
            "VRAMFARM_API_URL": self.house.url,
            "VRAMFARM_API_KEY": self.server_key,
        }

    def now(self) -> str:
        now = self.house.wait_stopped(self.id)
        return "stopped" if now["save"] else "deleted"


@pytest.fixture
def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cloud]:
    """The provider that the test is given by name, with a machine that runs."""
    match request.param:
        case "vramfarm":
            yield VRAMfarm(request.getfixturevalue("house"))
        case "command":
            with programmed(tmp_path) as made:
                yield made
        case name:
            made = {"runpod": RunPod, "vast": Vast, "docker": Docker}[name]()
            with serving(made, tmp_path) as served:
                yield served


def each(*names: str) -> Any:
    return pytest.mark.parametrize("cloud", names or tuple(PROVIDERS), indirect=True)


def read(cloud: Cloud, **env: str) -> Answer:
    told = {**os.environ, **cloud.env, **env}
    return PROVIDERS[cloud.name].read(find_server(told), told, SEND)


def stop(cloud: Cloud, keep: Keep, **env: str) -> Answer:
    told = {**os.environ, **cloud.env, **env}
    return PROVIDERS[cloud.name].stop(find_server(told), keep, 0, told, SEND)


def test_every_provider_is_in_the_suite():
    """
    One that is added comes under these rules.
    """
    assert {*HTTP, "vramfarm", "command"} == set(PROVIDERS)


@pytest.mark.parametrize("name", PROVIDERS)
def test_an_empty_environment_is_no_rented_server(name):
    """
    On a machine of one's own there is nothing to stop.
    """
    assert PROVIDERS[name].identify({}) is None


@each()
def test_a_server_knows_itself_by_its_environment_and_only_by_its_own(cloud):
    """
    Whoever rents it out, `auto` finds it; a kind that is named finds no other's.
    """
    assert cloud.name == find_server(cloud.env).provider
    assert cloud.name == find_server(cloud.env, cloud.name).provider
    assert {None} == {find_server(cloud.env, name) for name in (*PROVIDERS, "none") if name != cloud.name}


@each()
@pytest.mark.parametrize(("keep", "becomes"), [(DISCARD, "deleted"), (KEEP, "stopped")], ids=["discard", "keep"])
def test_the_intent_decides_the_verb(cloud, keep, becomes):
    """
    Read, stop, stop again, gone: what need not be kept is deleted and costs nothing, what must be is not.
    """
    states = [read(cloud).state, stop(cloud, keep).state]
    again = stop(cloud, keep).state
    now = cloud.now()

    assert [RUNNING, STOPPING] == states
    assert ("stopped" if cloud.name == "docker" else becomes) == now
    assert again in {STOPPING, GONE}
    assert GONE == read(cloud).state


@each()
def test_a_stop_is_explained_in_money(cloud):
    """
    What becomes of the disk, and what is billed after it.
    """
    seen = read(cloud)

    texts = [PROVIDERS[cloud.name].explain(keep, seen) for keep in (DISCARD, KEEP)]

    assert all("bill" in text or "cost" in text for text in texts)
    assert (cloud.name == "docker") == (texts[0] == texts[1])


@pytest.mark.parametrize(
    ("cloud", "price", "ends", "keeping"),
    [
        ("runpod", "0.69", "", "4.00 USD a month (20 GB)"),
        ("vast", "2.4", "2027-01-01T00:00:00+00:00", "15.00 USD a month (100 GB)"),
    ],
    indirect=["cloud"],
)
def test_price_deadline_and_the_cost_of_keeping_are_read(cloud, price, ends, keeping):
    """
    Where the environment does not have them, the provider's answer does.
    """
    answer = read(cloud)

    assert (price, ends, keeping) == (answer.price_per_hour, answer.ends_at, answer.keeping)
    assert keeping in PROVIDERS[cloud.name].explain(KEEP, answer)


FAULTS = [
    pytest.param(Fault(401, b'{"error": "Unauthorized."}'), True, id="401"),
    pytest.param(Fault(403, b"<html>Forbidden</html>"), True, id="403 of a proxy"),
    pytest.param(Fault(404, b"<html>not found: pod</html>"), False, id="404 of a proxy"),
    pytest.param(Fault(404, b""), False, id="404 with nothing"),
    pytest.param(Fault(429, b"{}", (("Retry-After", "17"),)), False, id="429"),
    pytest.param(Fault(500, b'{"desiredStatus": "EXITED", "success": true}'), False, id="500 that looks like gone"),
    pytest.param(Fault(302, b"", (("Location", "http://127.0.0.1:9/"),)), False, id="a redirect"),
    pytest.param(Fault(drops=True), False, id="the answer is lost"),
]


@each(*HTTP)
@pytest.mark.parametrize(("fault", "refused"), FAULTS)
def test_what_is_not_understood_is_unknown_and_never_gone(cloud, fault, refused):
    """
    With something for a person to read, without the key in it, and a word on whether the key was refused.
    """
    cloud.fault = fault

    answers = [read(cloud), stop(cloud, KEEP)]

    assert [UNKNOWN] * 2 == [answer.state for answer in answers]
    assert [refused] * 2 == [answer.refused for answer in answers]
    assert [17.0 if fault.status == 429 else 0.0] * 2 == [answer.retry_after_s for answer in answers]
    assert all(answer.detail and KEY not in answer.detail for answer in answers)


@each(*HTTP)
@pytest.mark.parametrize("body", [b"", b"<html>login</html>", b"[]", b"{}", b"[" * 100_000, b'{"state": "sleeping"}'])
def test_a_state_that_is_not_understood_is_unknown(cloud, body):
    """
    200 alone says nothing.
    """
    cloud.fault = Fault(200, body)

    assert UNKNOWN is read(cloud).state


@each(*HTTP)
def test_a_stop_whose_answer_was_lost_is_done(cloud):
    """
    It is asked for again, and then it is seen.
    """
    cloud.fault = Fault(drops=True)
    stop(cloud, DISCARD)
    cloud.fault = None

    assert GONE is read(cloud).state


@each(*WITH_KEY)
def test_the_key_travels_in_a_header_only(cloud):
    """
    Addresses are written into logs, of proxies, too.
    """
    read(cloud)
    stop(cloud, KEEP)

    assert {KEY} == {request.key for request in cloud.requests}
    assert not any(KEY in request.path for request in cloud.requests)


@each(*WITH_KEY)
def test_without_a_key_nothing_is_sent(cloud):
    """
    And the name of the missing variable is said.
    """
    env = {name: value for name, value in cloud.env.items() if value != KEY} | {"VAST_CONTAINERLABEL": "C.312"}
    name = next(name for name, value in cloud.env.items() if value == KEY)

    answer = PROVIDERS[cloud.name].read(find_server(cloud.env), env, SEND)

    assert (UNKNOWN, []) == (answer.state, cloud.requests)
    assert name in answer.detail


@each(*WITH_KEY)
def test_a_key_that_hides_the_right_one_does_not_save_the_server(cloud, tmp_path):
    """
    A template set another one of the same name: the one that PID 1 was given, or a file has, is tried, too.
    """
    name = next(name for name, value in cloud.env.items() if value == KEY)
    shadowed = {**cloud.env, name: "key-of-somebody-else"}
    (tmp_path / "environ").write_text(f"HOME=/root\0{name}={KEY}\0")
    (tmp_path / name).write_text(f"{KEY}\n")
    provider, server = PROVIDERS[cloud.name], find_server(cloud.env)

    def ask(rings):
        return with_each(rings, lambda ring: provider.read(server, ring, SEND)).state

    none = tmp_path / "none"
    assert UNKNOWN is ask(keyrings(shadowed, none, none))
    assert RUNNING is ask(keyrings(shadowed, none, tmp_path / "environ"))
    assert RUNNING is ask(keyrings(shadowed, tmp_path, none))


@each(*HTTP)
def test_a_session_that_was_told_nothing_asks_pid_1(cloud, tmp_path):
    """
    Over SSH the provider's variables are missing; those of others are not taken over.
    """
    entries = {**cloud.env, "HOME": "/root", "LD_PRELOAD": "x"}
    (tmp_path / "environ").write_text("".join(f"{name}={value}\0" for name, value in entries.items()))

    env = with_secrets({"PATH": "/bin"}, tmp_path / "none", tmp_path / "environ")

    assert cloud.name == find_server(env).provider
    assert not {"HOME", "LD_PRELOAD"} & env.keys()


@pytest.mark.parametrize(("keep", "becomes"), [(DISCARD, "deleted"), (KEEP, "stopped")], ids=["discard", "keep"])
def test_a_pods_own_key_works_over_graphql_where_rest_refuses_it(tmp_path, keep, becomes):
    """
    RunPod documents that a pod has a key, and not where it is good for anything.
    """
    with serving(RunPod(pod_key_is_for_graphql_only=True), tmp_path) as cloud:
        states = [read(cloud).state, stop(cloud, keep).state, read(cloud).state]

        assert ([RUNNING, STOPPING, GONE], becomes) == (states, cloud.now())
        assert not any(KEY in request.path for request in cloud.requests)


def test_an_instance_that_is_still_stopping_is_not_gone():
    """
    Vast: wished stopped, still running.
    """
    from runner.adapters.providers.vast import _judge  # noqa: PLC0415

    assert (STOPPING, GONE, GONE, RUNNING) == (
        _judge("running", "running", "stopped"),
        _judge("exited", "stopped", "stopped"),
        _judge("running", "unloaded", "running"),
        _judge("exited", "running", "running"),
    )


@pytest.mark.parametrize(
    ("command", "state", "said"),
    [
        ("true", STOPPING, "exit 0"),
        ("false", UNKNOWN, "got 1"),
        ("sh -c 'echo no power; exit 3'", UNKNOWN, "got 3: no power"),
        ("/no/such/program", UNKNOWN, "no start"),
        ("'unbalanced", UNKNOWN, "no start"),
    ],
)
def test_exit_0_of_the_stop_command_means_asked_for(command, state, said):
    """
    Anything else is asked for again, and said.
    """
    env = {**os.environ, "RUNNER_STOP_COMMAND": command}

    answer = PROVIDERS["command"].stop(find_server(env), KEEP, 0, env, SEND)

    assert state is answer.state
    assert said in answer.detail


@pytest.mark.parametrize(
    ("command", "state"),
    [
        ("echo running", RUNNING),
        ("echo GONE", GONE),
        ("sh -c 'echo gone; exit 1'", UNKNOWN),
        ("echo maybe", UNKNOWN),
        ("", UNKNOWN),
    ],
)
def test_only_the_status_command_says_gone(command, state):
    """
    Exit 0 and a word that is known; without the command nothing is known.
    """
    env = {**os.environ, "RUNNER_STOP_COMMAND": "false", "RUNNER_STATUS_COMMAND": command}

    assert state is PROVIDERS["command"].read(find_server(env), env, SEND).state


def test_the_stop_command_is_told_what_to_keep(tmp_path):
    """
    By its environment: folder, exit code, and whether the time comes before the data.
    """
    told = "echo $RUNNER_KEEP $RUNNER_EXIT_CODE ${RUNNER_STOP_ANYWAY:-no}"
    env = {**os.environ, "RUNNER_STOP_COMMAND": f"sh -c '{told} >{tmp_path}/told'"}

    PROVIDERS["command"].stop(find_server(env), Keep("/workspace", stop_anyway=True), 7, env, SEND)

    assert "/workspace 7 1\n" == (tmp_path / "told").read_text()
