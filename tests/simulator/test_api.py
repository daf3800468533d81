"""The assumed API: who may ask for what, what is refused, and how."""

from __future__ import annotations

import json
import time
from contextlib import closing
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from tests.farmhouse import WISH, Farmhouse, open_farm, python

SLEEP = python("import time; time.sleep(600)")


def _fields(reply):
    return json.loads(reply.body)


def test_a_repeated_launch_is_one_server(house: Farmhouse):
    """
    The same key with the same body returns the first answer again.
    """
    wish = {**WISH, "args": SLEEP, "label": "repeated"}

    first = house.call("POST", "/servers", wish, Idempotency_Key="repeat-0001")
    again = house.call("POST", "/servers", wish, Idempotency_Key="repeat-0001")

    assert (201, "true", _fields(first)["id"]) == (
        again.status,
        again.headers.get("idempotency-replayed"),
        _fields(again)["id"],
    )
    assert 1 == len(_fields(house.call("GET", "/servers?label=repeated"))["servers"])
    assert 200 <= house.stop(_fields(first)["id"]).status < 300


def test_a_key_that_comes_with_another_body_is_refused(house: Farmhouse):
    """
    A client's mistake must not rent a second machine.
    """
    wish = {**WISH, "args": ["true"]}
    house.call("POST", "/servers", wish, Idempotency_Key="reused-0001")

    reply = house.call("POST", "/servers", {**wish, "label": "other"}, Idempotency_Key="reused-0001")

    assert (422, "idempotency_key_reused") == (reply.status, _fields(reply)["code"])


def test_a_launch_whose_answer_was_lost_is_found_by_its_key(house: Farmhouse):
    """
    The work was done before the connection broke; asking again returns it.
    """
    house.fail({"operation": "createServer", "kind": "drop_after_commit"})
    wish = {**WISH, "args": ["true"], "label": "lost"}

    lost = house.call("POST", "/servers", wish, Idempotency_Key="lost-answer-1")
    found = house.call("POST", "/servers", wish, Idempotency_Key="lost-answer-1")

    assert (0, 201, "true") == (lost.status, found.status, found.headers.get("idempotency-replayed"))


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        pytest.param({"count": 3}, 422, "validation_error", id="three cards"),
        pytest.param({"unknown": 1}, 422, "validation_error", id="an unknown field"),
        pytest.param({"image": None}, 422, "validation_error", id="no image"),
        pytest.param({"max_price": 0.5}, 422, "validation_error", id="money that is no text"),
        pytest.param({"env": {"VRAMFARM_X": "1"}}, 422, "reserved_env_name", id="a reserved name"),
        pytest.param({"idle_detection": {"enabled": True}}, 422, "idle_stop_unavailable", id="idle stop of an image"),
        pytest.param({"max_price": "0.10"}, 409, "no_capacity", id="too dear"),
        pytest.param({"gpu": None, "machine_id": "m_none0"}, 404, "not_found", id="no such machine"),
        pytest.param({"restore_save_id": "sav_none00"}, 404, "not_found", id="no such save"),
    ],
)
def test_a_launch_that_cannot_be_is_refused_with_a_code(house: Farmhouse, change, status, code):
    """
    Clients branch on the code.
    """
    key = f"refused-{abs(hash(str(change)))}"

    wish = {name: value for name, value in {**WISH, "args": ["true"], **change}.items() if value is not None}
    reply = house.call("POST", "/servers", wish, Idempotency_Key=key)

    assert (status, code) == (reply.status, _fields(reply)["code"]), reply.body
    assert "application/problem+json" == reply.headers["content-type"]


@pytest.mark.parametrize("part", [{"label": None}, {"deadline_save": {"path": "/workspace", "name": None}}], ids=str)
def test_null_is_not_the_same_as_left_out(house: Farmhouse, part):
    """
    Only where the contract makes a value of it.
    """
    reply = house.call("POST", "/servers", {**WISH, **part}, Idempotency_Key=f"null-{len(str(part))}-0001")

    assert (422, "validation_error") == (reply.status, _fields(reply)["code"])
    assert "is never null" in _fields(reply)["detail"]


def test_a_request_that_is_no_json_or_has_no_key_is_malformed(house: Farmhouse):
    """
    400 says: the request itself, not what it asks for.
    """
    broken = house.call("POST", "/servers", b"{", Idempotency_Key="malformed-1")
    keyless = house.call("POST", "/servers", {**WISH, "args": ["true"]})

    assert [(400, "malformed_request")] * 2 == [(r.status, _fields(r)["code"]) for r in (broken, keyless)]


def test_a_balance_below_one_hour_launches_nothing(tmp_path):
    """
    A check, not a charge: nothing is reserved.
    """
    with open_farm(tmp_path / "farm", balance=12) as house:
        wish = {**WISH, "gpu": "h100", "count": 8, "args": ["true"]}

        reply = house.call("POST", "/servers", wish, Idempotency_Key="too-dear-1")

        fields = _fields(reply)
        assert (402, "31.20", "12") == (reply.status, fields["required"], fields["available"])
        assert "12" == _fields(house.call("GET", "/balance"))["balance"]


def test_a_servers_key_reaches_only_its_own_server(house: Farmhouse):
    """
    Its server and itself; not the account, not another server, not a launch.
    """
    mine, other = house.rent(SLEEP), house.rent(SLEEP)
    key = house.farm.find(mine).key

    own = [house.call("GET", path, key=key).status for path in ("/self", f"/servers/{mine}", f"/servers/{mine}/logs")]
    foreign = [
        house.call("GET", f"/servers/{other}", key=key),
        house.call("GET", "/balance", key=key),
        house.call("GET", "/servers", key=key),
        house.call("POST", f"/servers/{other}/stop", {"save": None}, key=key),
    ]

    assert [200] * 3 == own
    assert [(403, "key_scope")] * 4 == [(r.status, _fields(r)["code"]) for r in foreign]
    house.stop(mine)
    house.stop(other)


def test_a_key_that_is_missing_wrong_or_over_is_told_apart(house: Farmhouse):
    """
    A server's key ends with the server.
    """
    server = house.rent(SLEEP)
    key = house.farm.find(server).key
    house.wait_started(server)
    house.stop(server)
    house.wait_stopped(server)

    codes = [_fields(house.call("GET", f"/servers/{server}", key=k))["code"] for k in ("", "vfa_wrong", key)]

    assert ["missing_key", "invalid_key", "key_revoked"] == codes


def test_too_many_requests_are_told_when_to_come_back(tmp_path):
    """
    429 with Retry-After, and the quota in the headers of every answer.
    """
    with open_farm(tmp_path / "farm", per_minute=2) as house:
        replies = [house.call("GET", "/balance") for _ in range(3)]

        assert [200, 200, 429] == [reply.status for reply in replies]
        assert '"minute";q=2;w=60' == replies[0].headers["ratelimit-policy"]
        assert 0 < int(replies[2].headers["retry-after"]) <= 61


def test_machines_are_filtered_and_sorted(house: Farmhouse):
    """
    Versions are compared number by number, prices as decimals.
    """
    path = "/machines?gpu=h100&gpu=rtx-4090&min_vram_gb=90&min_cuda=12.4&min_driver=570.20&max_price=20&sort=-price"

    machines = _fields(house.call("GET", path))["machines"]

    assert [("h100", 4, "15.60"), ("rtx-4090", 4, "2.36")] == [
        (m["gpu"], m["count"], m["price_per_hour"]) for m in machines
    ]


def test_long_lists_come_in_pages(house: Farmhouse):
    """
    The cursor of a page leads to the next; the last has none.
    """
    first = _fields(house.call("GET", "/machines?limit=4"))
    last = _fields(house.call("GET", f"/machines?limit=4&cursor={first['next_cursor']}"))

    assert 7 == len({m["id"] for m in first["machines"] + last["machines"]})
    assert last["next_cursor"] is None


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        pytest.param({"kind": "status", "status": 503, "retry_after": 2}, 503, id="status"),
        pytest.param({"kind": "html_body"}, 403, id="a proxy's page"),
        pytest.param({"kind": "reset"}, 0, id="reset"),
        pytest.param({"kind": "timeout", "delay_ms": 100}, 0, id="no answer"),
        pytest.param({"kind": "slow", "delay_ms": 100}, 200, id="slow"),
    ],
)
def test_an_injected_fault_happens_as_often_as_asked(house: Farmhouse, fault, status):
    """
    Then the operation works again.
    """
    house.fail({"operation": "getBalance", "times": 2, **fault})

    assert [status, status, 200] == [house.call("GET", "/balance").status for _ in range(3)]


def test_the_bill_follows_the_clock(house: Farmhouse):
    """
    Fifteen minutes at once, then by the minute, and no longer than the server lives.
    """
    server = house.rent(SLEEP, gpu="h100", count=8)
    house.wait_started(server)
    early = house.server(server)["billing"]
    house.call("POST", "/_sim/clock", {"advance_seconds": 20 * 60})
    time.sleep(0.01)
    house.stop(server)
    house.wait_stopped(server)
    house.call("POST", "/_sim/clock", {"advance_seconds": 3600})

    usage = _fields(house.call("GET", f"/usage?server_id={server}"))["usage"]

    assert (15, "7.8000") == (early["billed_minutes"], early["cost"])
    assert [(21, "10.9200")] == [(u["billing"]["billed_minutes"], u["billing"]["cost"]) for u in usage]


def test_secrets_are_given_to_the_process_and_to_nobody_else(house: Farmhouse):
    """
    Not in the answer about the server, masked in its log.
    """
    server = house.rent(python("import os; print('token', os.environ['TOKEN'])"), secrets={"TOKEN": "hush-hush"})
    house.wait_exited(server)

    log = house.call("GET", f"/servers/{server}/logs").body.decode()

    assert "token ***\n" == log
    assert "hush" not in json.dumps(house.server(server))
    house.stop(server)


def test_a_method_that_is_not_allowed_is_told_all_that_are(house: Farmhouse):
    """
    Of the path, not of its first route.
    """
    reply = house.call("PUT", "/servers", {})

    assert 405 == reply.status
    assert {"GET", "POST"} == {method.strip() for method in dict(reply.headers)["allow"].split(",")}


def test_a_label_longer_than_any_server_has_is_refused(house: Farmhouse):
    """
    As the contract says.
    """
    assert 422 == house.call("GET", f"/servers?label={'0' * 65}").status


def test_an_answer_is_not_held_back(house: Farmhouse):
    """
    On a connection that is used again its body would wait for the kernel's delayed acknowledgement: 40 ms each.
    """
    place = urlsplit(house.url)
    headers, seconds = {"Authorization": f"Bearer {house.farm.account_key}"}, []
    with closing(HTTPConnection(place.hostname, place.port)) as connection:
        for _ in range(40):
            began = time.perf_counter()
            connection.request("GET", f"{place.path}/servers", headers=headers)
            assert b"servers" in connection.getresponse().read()
            seconds.append(time.perf_counter() - began)

    assert min(seconds[5:]) < 0.03
