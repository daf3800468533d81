"""Which machines hold a job: one bigger card first, then the cheapest strategy that fits."""

from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.policy.fleet import CARDS, advise, find_card, holders, link_gb_per_s, usual_offers
from runner.policy.money import VRAMFARM, billed
from runner.policy.planning import GB, Strategy, Workload, fits

S = Strategy
FULL = Workload(parameters=8 * GB, strategy=S.FULL_SHARD)
OFFERS = usual_offers()


def advice(work, cards, card):
    return list(advise(work, cards, find_card(card), OFFERS))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h100", "h100"),
        ("H100 SXM", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("", None),
    ],
)
def test_a_card_is_known_by_its_names(text, expected):
    """
    As the catalogue writes it, and as the driver does.
    """
    card = find_card(text)

    assert expected == (card and card.slug)


def test_the_link_is_that_of_the_wires_table():
    """
    A healthy NVSwitch; a card that goes through system memory; none alone, nor between machines.
    """
    assert [(440, 440), (9, 16)] == [tuple(map(int, link_gb_per_s(name, 8))) for name in ("H100 SXM", "RTX 4090")]
    assert [None, None] == [link_gb_per_s("H100 SXM", n) for n in (1, 16)]


def test_every_kind_of_card_has_a_link():
    """
    A row that the table of wires does not know would have no seconds.
    """
    assert [] == [card.name for card in CARDS for n in (2, 4, 8) if not link_gb_per_s(card.name, n)]


@pytest.mark.parametrize(("minutes", "expected"), [(1, "7.80"), (15, "7.80"), (20.01, "10.92"), (61, "31.72")])
def test_whole_minutes_are_billed_at_least_fifteen(minutes, expected):
    """
    8 x H100 at 31.20 an hour.
    """
    assert Decimal(expected) == billed(Decimal("31.20"), minutes * 60, VRAMFARM)


def test_one_bigger_card_comes_first():
    """
    8B with AdamW on four H100: an H200 holds it alone.
    """
    first, second, third = advice(FULL, 4, "h100")

    assert first.startswith("one card does it: H200 SXM (141 GB, 4.50 EUR/h); one bigger card is simpler than several")
    assert "FSDP FULL_SHARD fits on 4 x H100 SXM (80 GB); ZeRO-1 fits too and sends less" == second
    assert third.startswith("begin with two cards and a short run")


def test_an_8_bit_optimizer_is_thought_of_before_more_cards():
    """
    13B: no card holds 208 GB.
    """
    work = replace(FULL, parameters=13 * GB)

    assert advice(work, 4, "h100")[0].startswith("no single card holds it as it is; with an 8-bit optimizer one ")


def test_a_model_that_no_card_holds_wants_several():
    """
    70B, all of it trained.
    """
    work = replace(FULL, parameters=70 * GB)

    assert "no single card holds it: several cards make sense" == advice(work, 8, "b200")[0]
    assert advice(work, 4, "h100")[1].startswith("nothing fits on 4 x H100 SXM (80 GB): more or bigger cards")


def test_sharded_weights_without_nvlink_are_warned_of():
    """
    Eight 4090 hold 8B; the cards wait for the weights.
    """
    assert "without NVLink the cards wait" in advice(FULL, 8, "rtx-4090")[-2]
    assert [] == [line for line in advice(FULL, 8, "h100") if "NVLink" in line]


def test_the_cheapest_machine_that_holds_it_comes_first():
    """
    And one that lacks RAM or disk comes after all that do not.
    """
    poor = replace(OFFERS[0], id="poor", cards=8, ram_bytes=GB, disk_bytes=GB, price_per_hour=Decimal("0.01"))
    found = holders(FULL, (*OFFERS, poor))
    whole = [one for one in found if not one.lacks]

    order = [(one.work.offload, one.offer.price_per_hour) for one in whole]

    assert sorted(order) == order
    assert [("RAM: 1 of 192 GB", "disk: 1 of 448 GB")] == [one.lacks for one in found if one.offer.id == "poor"]
    assert [one.lacks for one in found[len(whole) :]] == [one.lacks for one in found if one.lacks]


def test_a_strategy_that_was_wished_is_kept_where_it_fits():
    """
    Elsewhere the cheapest that does takes its place.
    """
    ways = {one.offer.id: one.work.strategy for one in holders(replace(FULL, strategy=S.ZERO2), OFFERS)}

    assert (S.ZERO2, S.FULL_SHARD) == (ways["4 x H100 SXM"], ways["8 x RTX 4090"])


@given(st.integers(10**6, 10**12), st.sampled_from(S), st.integers(1, 64), st.integers(16, 100_000))
def test_what_is_said_to_hold_it_does(parameters, strategy, per_card, sequence):
    """
    Whatever the model.
    """
    work = Workload(parameters=parameters, strategy=strategy, per_card=per_card, sequence=sequence)

    assert all(fits(one.work, one.offer.cards, one.offer.card_bytes) for one in holders(work, OFFERS))
    assert all(list(advise(work, cards, CARDS[-1], OFFERS)) for cards in (1, 2, 8))
