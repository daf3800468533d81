"""The catalogue: every page of it, and nothing that is not understood."""

import json
from decimal import Decimal

from runner.adapters.providers import Reply, vramfarm
from runner.adapters.providers.http import make_send

MACHINE = {
    "id": "m_1",
    "gpu": "h100",
    "gpu_name": "H100 SXM",
    "count": 8,
    "vram_gb_per_card": 80,
    "cpu_cores": 192,
    "ram_gb": 1024,
    "disk_gb": 4000,
    "max_rental_days": 30,
    "price_per_hour": "31.20",
    "currency": "EUR",
    "available": True,
}
ENV = {"VRAMFARM_API_URL": "http://farm", "VRAMFARM_API_KEY": "k"}


def read(*pages):
    """Read a catalogue of these answers; return what came of it and the addresses that were asked."""
    asked, left = [], list(pages)

    def send(method, url, *, headers, body=None):
        asked.append(url)
        return Reply(200, json.dumps(left.pop(0)).encode())

    return vramfarm.read_offers(ENV, send), asked


def test_a_real_catalogue_is_read(house):
    """
    The simulator's, over HTTP.
    """
    env = {"VRAMFARM_API_URL": house.url, "VRAMFARM_API_KEY": house.farm.account_key}
    offers = vramfarm.read_offers(env, make_send(5.0))

    assert {"m_4090x4": (4, 24 * 10**9, Decimal("2.36")), "m_h100x8": (8, 80 * 10**9, Decimal("31.20"))} == {
        one.id: (one.cards, one.card_bytes, one.price_per_hour) for one in offers if one.id in {"m_4090x4", "m_h100x8"}
    }


def test_every_page_is_asked_for():
    """
    The cursor is the provider's: it is escaped.
    """
    first = {"machines": [MACHINE], "next_cursor": "a&b"}
    second = {"machines": [{**MACHINE, "id": "m_2"}], "next_cursor": None}
    offers, asked = read(first, second)

    assert (["m_1", "m_2"], "cursor=a%26b") == ([one.id for one in offers], asked[1].rpartition("&")[2])


def test_a_machine_that_is_not_understood_is_not_offered():
    """
    A price that is no number, a machine without cards, a text in its place.
    """
    broken = [{**MACHINE, "price_per_hour": "NaN"}, {**MACHINE, "count": 0}, {**MACHINE, "ram_gb": None}, "m_1", {}]
    offers, _ = read({"machines": [*broken, MACHINE], "next_cursor": None})

    assert ["m_1"] == [one.id for one in offers]


def test_a_catalogue_without_an_end_is_left():
    """
    A cursor that never ends costs no night.
    """
    offers, asked = read(*[{"machines": [MACHINE], "next_cursor": "x"}] * 60)

    assert (50, 50) == (len(offers), len(asked))


def test_a_refusal_says_why():
    """
    The key is for one server, or wrong.
    """
    found = vramfarm.read_offers(ENV, lambda *_, **__: Reply(403, b'{"detail": "not yours"}'))

    assert "HTTP 403: not yours (the key may not do this; check VRAMFARM_API_KEY)" == found
