"""What a machine outside asks VRAMfarm for: a server and only one, those that are ours, the balance."""

from __future__ import annotations

from decimal import Decimal

import pytest

from runner.adapters.providers import Keep, Reply, vramfarm
from runner.adapters.providers.http import make_send
from runner.adapters.providers.vramfarm import Trouble
from runner.facts import Server, ServerState
from tests.farmhouse import WISH, Farmhouse, python

SEND = make_send(5.0)


def _env(house: Farmhouse) -> dict[str, str]:
    return {"VRAMFARM_API_URL": house.url, "VRAMFARM_API_KEY": house.farm.account_key}


def test_a_wish_that_is_repeated_rents_once(house: Farmhouse):
    """
    Even when the first answer was lost: the same key finds it again, and so does its label.
    """
    wish = {**WISH, "args": python("import time; time.sleep(600)"), "label": "night-1"}
    house.fail({"operation": "createServer", "kind": "drop_after_commit"})

    lost = vramfarm.rent(wish, "night-1:machine-1", _env(house), SEND)
    found = vramfarm.rent(wish, "night-1:machine-1", _env(house), SEND)
    ours = vramfarm.list_rentals("night-1", _env(house), SEND)

    assert (True, False) == (isinstance(lost, Trouble), lost.is_certain)
    assert [found.id] == [rental.id for rental in ours]
    assert ("night-1", Decimal("0.59"), ServerState.RUNNING) == (found.label, found.price_per_hour, found.state)
    server = Server(provider="vramfarm", id=found.id)
    assert ServerState.STOPPING is vramfarm.stop(server, Keep(None), 8, _env(house), SEND).state
    house.wait_stopped(found.id)
    assert [ServerState.GONE] == [r.state for r in vramfarm.list_rentals("night-1", _env(house), SEND)]


def test_more_servers_than_a_page_has_are_all_listed(house: Farmhouse):
    """
    The pages are followed to their end.
    """
    ids = {house.rent(python("pass"), label="many") for _ in range(5)}
    pages = []

    def small_pages(method, url, *, headers, body=None):
        pages.append(url)
        return SEND(method, url.replace("limit=100", "limit=2"), headers=headers, body=body)

    listed = vramfarm.list_rentals("many", _env(house), small_pages)

    assert (ids, 3) == ({rental.id for rental in listed}, len(pages))
    for server in ids:
        house.stop(server)


@pytest.mark.parametrize(
    ("wish", "code", "certain"),
    [
        ({"gpu": "abacus"}, "no_capacity", True),
        ({"count": 3}, "validation_error", True),
        ({"max_price": "0.01"}, "no_capacity", True),
    ],
)
def test_a_refusal_says_whether_anything_was_done(house: Farmhouse, wish, code, certain):
    """
    So that the next machine may be tried, or the same key again.
    """
    trouble = vramfarm.rent({**WISH, **wish}, f"key-{code}-{len(wish)}-{next(iter(wish))}", _env(house), SEND)

    assert (code, certain) == (trouble.code, trouble.is_certain)


def test_the_balance_is_exact(house: Farmhouse):
    """
    A decimal, as bills are.
    """
    assert isinstance(vramfarm.read_balance(_env(house), SEND), Decimal)


@pytest.mark.parametrize(
    "reply",
    [
        Reply(200, b"{}"),
        Reply(200, b"<html>"),
        Reply(0, b"no answer"),
        Reply(200, b'{"servers": [{}]}'),
        Reply(503, b""),
    ],
)
def test_what_is_not_understood_is_trouble_and_no_exception(reply):
    """
    And nobody may think that nothing was rented.
    """
    env = {"VRAMFARM_API_URL": "http://127.0.0.1:9", "VRAMFARM_API_KEY": "vfa_x"}

    def send(method, url, *, headers, body=None):
        return reply

    answers = [
        vramfarm.list_rentals("night-1", env, send),
        vramfarm.rent({}, "key-12345678", env, send),
        vramfarm.read_balance(env, send),
    ]

    assert [False] * 3 == [answer.is_certain for answer in answers]
