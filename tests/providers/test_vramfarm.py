"""What is VRAMfarm's alone: its words, its bodies, its bill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.adapters.providers import PROVIDERS, Keep, Reply, find_server, vramfarm, with_secrets
from runner.adapters.providers.http import make_send
from runner.facts import Server, ServerState
from tests.farmhouse import Farmhouse, python

SLEEP = python("import time; time.sleep(600)")
SERVER = Server(provider="vramfarm", id="srv_4f2a9c")
ENV = {"VRAMFARM_API_URL": "http://127.0.0.1:9/v1", "VRAMFARM_API_KEY": "vfs_secret-key"}
NOTHING = Keep(None)


class Canned:
    """A `Send` that answers what it was told to and keeps what was sent."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.sent = []

    def __call__(self, method, url, *, headers, body=None):
        self.sent.append((method, url, dict(headers), body))
        return self.reply


def _env(house: Farmhouse, server: str) -> dict[str, str]:
    return {
        "VRAMFARM_SERVER_ID": server,
        "VRAMFARM_API_URL": house.url,
        "VRAMFARM_API_KEY": house.farm.find(server).key,
        "VRAMFARM_PRICE_PER_HOUR": "0.59",
    }


def test_a_server_is_read_stopped_stopped_again_and_gone(house: Farmhouse):
    """
    The whole life over HTTP, with the server's own key.
    """
    server_id = house.rent(SLEEP)
    house.wait_started(server_id)
    env, send = _env(house, server_id), make_send(5.0)
    server = find_server(env)
    provider = PROVIDERS[server.provider]

    states = [provider.read(server, env, send).state]
    states += [provider.stop(server, Keep("/workspace"), 0, env, send).state for _ in range(2)]
    house.wait_stopped(server_id)
    states.append(provider.read(server, env, send).state)

    running, stopping, gone = ServerState.RUNNING, ServerState.STOPPING, ServerState.GONE
    assert [running, stopping, stopping, gone] == states
    assert "complete" == house.server(server_id)["save"]["state"]


def test_the_cost_so_far_is_told(house: Farmhouse):
    """
    In decimals, as the provider has it.
    """
    server_id = house.rent(SLEEP)
    house.wait_started(server_id)
    env = _env(house, server_id)

    answer = vramfarm.read(find_server(env), env, make_send(5.0))

    assert "0.1475" == answer.cost
    house.stop(server_id)


def _json(status, fields, **headers):
    return Reply(status, json.dumps(fields).encode(), headers)


UNKNOWN_REPLIES = [
    pytest.param(Reply(0, b"no answer"), id="no answer"),
    pytest.param(Reply(200, b""), id="200 with nothing"),
    pytest.param(Reply(200, b"<html>login</html>"), id="200 of a proxy"),
    pytest.param(_json(200, []), id="200 with a list"),
    pytest.param(_json(200, {"state": "hibernating"}), id="a state we do not know"),
    pytest.param(_json(200, {"state": None}), id="no state"),
    pytest.param(Reply(302, b"", {"location": "http://elsewhere"}), id="a redirect"),
    pytest.param(_json(401, {"code": "invalid_key"}), id="401"),
    pytest.param(Reply(403, b"<html>Forbidden</html>"), id="403 of a proxy"),
    pytest.param(Reply(404, b"<html>not found</html>"), id="404 of a proxy"),
    pytest.param(_json(409, {"code": "invalid_state"}), id="409"),
    pytest.param(_json(422, {"code": "validation_error"}), id="422"),
    pytest.param(_json(429, {"code": "rate_limited"}), id="429"),
    pytest.param(_json(500, {"state": "stopped"}), id="500 that looks like gone"),
    pytest.param(Reply(200, b"[" * 100_000), id="deep JSON"),
]


@pytest.mark.parametrize("reply", UNKNOWN_REPLIES)
def test_what_is_not_understood_is_unknown_and_never_gone(reply):
    """
    With something for a person to read, and without the key in it.
    """
    answers = [
        vramfarm.read(SERVER, ENV, Canned(reply)),
        vramfarm.stop(SERVER, NOTHING, 0, ENV, Canned(reply)),
    ]

    assert [ServerState.UNKNOWN] * 2 == [answer.state for answer in answers]
    assert all(answer.detail and "secret" not in answer.detail for answer in answers)


@pytest.mark.parametrize(
    ("reply", "read", "stop"),
    [
        pytest.param(_json(404, {"code": "not_found"}), ServerState.GONE, ServerState.GONE, id="404 of the API"),
        pytest.param(_json(401, {"code": "key_revoked"}), ServerState.GONE, ServerState.UNKNOWN, id="its key is over"),
        pytest.param(_json(202, {"state": "saving"}), ServerState.STOPPING, ServerState.STOPPING, id="saving"),
        pytest.param(_json(200, {"state": "stopped"}), ServerState.GONE, ServerState.GONE, id="stopped"),
        pytest.param(_json(200, {"state": "failed"}), ServerState.GONE, ServerState.GONE, id="failed"),
        pytest.param(
            _json(409, {"code": "stop_in_progress"}), ServerState.UNKNOWN, ServerState.STOPPING, id="another stop"
        ),
    ],
)
def test_words_of_the_provider_become_ours(reply, read, stop):
    """
    The key of a server is over only when the server is.
    """
    assert (read, stop) == (
        vramfarm.read(SERVER, ENV, Canned(reply)).state,
        vramfarm.stop(SERVER, NOTHING, 0, ENV, Canned(reply)).state,
    )


def test_an_accounts_key_that_was_revoked_says_nothing_of_the_server():
    """
    A person took the key away; the server may well be there.
    """
    env = {**ENV, "VRAMFARM_API_KEY": "vfa_account"}

    assert ServerState.UNKNOWN is vramfarm.read(SERVER, env, Canned(_json(401, {"code": "key_revoked"}))).state


@pytest.mark.parametrize(
    ("keep", "code", "body"),
    [
        (Keep(None), 0, {"save": None, "on_save_failure": "keep_running", "reason": "job_succeeded"}),
        (
            Keep("/workspace"),
            6,
            {"save": {"path": "/workspace"}, "on_save_failure": "keep_running", "reason": "job_failed"},
        ),
        (
            Keep("/workspace", stop_anyway=True),
            7,
            {"save": {"path": "/workspace"}, "on_save_failure": "stop_anyway", "reason": "self_request"},
        ),
    ],
    ids=["discard", "keep", "at the deadline"],
)
def test_a_stop_says_what_becomes_of_the_disk(keep, code, body):
    """
    There is no default: nobody deletes data by leaving a field out.
    """
    send = Canned(_json(202, {"state": "stopping"}))

    vramfarm.stop(SERVER, keep, code, ENV, send)

    method, url, headers, sent = send.sent[0]
    assert ("POST", "http://127.0.0.1:9/v1/servers/srv_4f2a9c/stop") == (method, url)
    assert "Bearer vfs_secret-key" == headers["Authorization"]
    assert body == json.loads(sent)


@pytest.mark.parametrize("missing", ["VRAMFARM_API_URL", "VRAMFARM_API_KEY"])
def test_a_missing_address_or_key_is_named(missing):
    """
    Nothing is sent.
    """
    send = Canned(Reply(200, b""))

    answer = vramfarm.read(SERVER, {k: v for k, v in ENV.items() if k != missing}, send)

    assert (ServerState.UNKNOWN, []) == (answer.state, send.sent)
    assert missing in answer.detail


def test_the_time_a_provider_asks_for_is_passed_on():
    """
    Retry-After in seconds; a date or nonsense is none.
    """
    times = [
        vramfarm.read(SERVER, ENV, Canned(_json(429, {}, **{"retry-after": text}))).retry_after_s
        for text in ("17", "soon", "-3", "")
    ]

    assert [17.0, 0.0, 0.0, 0.0] == times


def test_a_key_may_come_as_a_file(tmp_path: Path):
    """
    The environment wins; what is not there is left out.
    """
    (tmp_path / "VRAMFARM_API_KEY").write_text("from-a-file\n")

    assert "from-a-file" == with_secrets({}, tmp_path)["VRAMFARM_API_KEY"]
    assert "from-env" == with_secrets({"VRAMFARM_API_KEY": "from-env"}, tmp_path)["VRAMFARM_API_KEY"]
    assert {} == with_secrets({}, tmp_path / "none")
