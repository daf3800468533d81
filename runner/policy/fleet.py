"""
Which cards and machines hold a job, and what that costs. One bigger card first, then the
cheapest strategy that fits.

The table of card kinds is for where no provider can be asked: memory and bf16 rates (dense) are
the makers' figures, prices a rough range per card and hour in EUR.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Final

from runner.facts import Offer
from runner.policy.planning import (
    GB,
    SHARDED,
    Optimizer,
    Strategy,
    Workload,
    cheapest,
    disk_bytes,
    fits,
    host_bytes,
    is_one_machine,
)
from runner.policy.wires import floor, possible_wires

_OF_HEALTHY: Final = 0.75  # a floor is about three quarters of what healthy machines reach


@dataclass(frozen=True, slots=True)
class CardKind:
    """A model of card; `price` is (low, high)."""

    slug: str
    name: str
    memory_gb: int
    teraflops: float
    price: tuple[str, str]

    @property
    def memory_bytes(self) -> int:
        return self.memory_gb * GB


CARDS: Final = (
    CardKind("rtx-3090", "RTX 3090", 24, 71, ("0.20", "0.45")),
    CardKind("rtx-4090", "RTX 4090", 24, 165, ("0.35", "0.75")),
    CardKind("rtx-5090", "RTX 5090", 32, 210, ("0.60", "1.10")),
    CardKind("a6000", "RTX A6000", 48, 155, ("0.45", "0.85")),
    CardKind("l40s", "L40S", 48, 362, ("0.80", "1.30")),
    CardKind("a100", "A100 SXM", 80, 312, ("1.20", "2.20")),
    CardKind("h100", "H100 SXM", 80, 989, ("2.20", "3.90")),
    CardKind("rtx-pro-6000", "RTX PRO 6000", 96, 500, ("1.40", "2.30")),
    CardKind("h200", "H200 SXM", 141, 989, ("3.00", "4.50")),
    CardKind("b200", "B200 SXM", 192, 2250, ("4.80", "7.50")),
)


def find_card(text: str) -> CardKind | None:
    """The kind that a slug, a name, or a line of nvidia-smi means: h100, RTX 4090, NVIDIA H200."""
    plain = _plain(text)
    exact = next((card for card in CARDS if plain in _names(card)), None)
    inside = (card for card in CARDS if _plain(card.slug) in plain)
    return exact or max(inside, key=lambda card: len(card.slug), default=None)


def _names(card: CardKind) -> set[str]:
    return {_plain(card.slug), _plain(card.name), _plain(card.slug).removeprefix("rtx")}


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower().replace("nvidia", "").replace("geforce", ""))


def link_gb_per_s(name: str, cards: int) -> tuple[float, float] | None:
    """
    What a ring of these cards moves, GB/s a card, on the slowest and the fastest link that such a machine may have.

    None for one card, and for more than one machine: the network between them is not known.
    """
    if cards == 1 or not is_one_machine(cards):
        return None
    as_the_driver_says = name.replace(" SXM", "-SXM")
    likely = possible_wires((as_the_driver_says,), num_cards=cards)
    speeds = [lowest.gb_per_s / _OF_HEALTHY for wire in likely if (lowest := floor((wire,), cards)) is not None]
    return (min(speeds), max(speeds)) if speeds else None


# ---------------------------------------------------------------------------------- machines


@dataclass(frozen=True, slots=True)
class Holder:
    """A machine that holds the job, and how; `lacks` says what else is short there."""

    offer: Offer
    work: Workload
    lacks: tuple[str, ...] = ()


def holders(work: Workload, offers: Iterable[Offer], *, keep_last: int = 2) -> tuple[Holder, ...]:
    """Machines whose cards hold it with some strategy, the cheapest first; offloading, and what lacks something, last."""
    found = [
        Holder(offer, how, tuple(_lacks(how, offer, keep_last)))
        for offer in offers
        if (how := _how(work, offer)) is not None
    ]
    return tuple(
        sorted(found, key=lambda one: (bool(one.lacks), one.work.offload, one.offer.price_per_hour, one.offer.id))
    )


def _how(work: Workload, offer: Offer) -> Workload | None:
    """The strategy that was wished where it fits, else the cheapest that does."""
    if fits(work, offer.cards, offer.card_bytes):
        return work if offer.cards > 1 or work.strategy not in SHARDED else replace(work, strategy=Strategy.DDP)
    return cheapest(work, offer.cards, offer.card_bytes)


def _lacks(work: Workload, offer: Offer, keep_last: int) -> Iterator[str]:
    memory_gb = -(-host_bytes(work, offer.cards, offer.card_bytes) // GB)
    disk_gb = -(-disk_bytes(work, keep_last=keep_last) // GB)
    if offer.ram_bytes < memory_gb * GB:
        yield f"RAM: {offer.ram_bytes // GB} of {memory_gb} GB"
    if offer.disk_bytes < disk_gb * GB:
        yield f"disk: {offer.disk_bytes // GB} of {disk_gb} GB"


def usual_offers() -> tuple[Offer, ...]:
    """Machines of the table, at the upper end of its prices: what is asked where no provider can be."""
    return tuple(
        Offer(
            id=f"{count} x {card.name}",
            card=card.slug,
            name=card.name,
            cards=count,
            card_bytes=card.memory_bytes,
            cpu_cores=8 * count,
            ram_bytes=2 * card.memory_bytes * count,
            disk_bytes=500 * GB * count,
            price_per_hour=Decimal(card.price[1]) * count,
        )
        for card in CARDS
        for count in (1, 2, 4, 8)
    )


# ------------------------------------------------------------------------------------ advice


def advise(work: Workload, cards: int, card: CardKind | None, offers: Sequence[Offer]) -> Iterator[str]:
    """What to take, in the order in which to think about it."""
    if (first := _alone(work, offers)) is not None:
        yield (
            f"one card does it: {first.name} ({first.card_bytes // GB} GB, {first.price_per_hour} {first.currency}/h); "
            "one bigger card is simpler than several: no launcher, nothing sent between cards, no NCCL errors"
        )
    else:
        yield _none_alone(work, offers)
    if card is not None:
        yield _strategy(work, cards, card) if cards > 1 else _on_one(work, card)
    if cards > 1 and work.strategy in SHARDED:
        yield from _over_pcie(cards, card)
    if cards > 2 and work.strategy is not Strategy.INFERENCE:  # noqa: PLR2004  # a pair
        yield "begin with two cards and a short run: where they are not close to twice as fast as one, look at the link between them before taking more"


def _alone(work: Workload, offers: Sequence[Offer]) -> Offer | None:
    """The cheapest machine of one card that holds everything on that card."""
    found = holders(work, [offer for offer in offers if offer.cards == 1 and offer.available])
    return next((one.offer for one in found if work.offload or not one.work.offload), None)


def _none_alone(work: Workload, offers: Sequence[Offer]) -> str:
    offer = _alone(replace(work, optimizer=Optimizer.ADAMW_8BIT), offers)
    trains = work.strategy not in {Strategy.INFERENCE, Strategy.LORA, Strategy.QLORA}
    if trains and offer is not None:
        return f"no single card holds it as it is; with an 8-bit optimizer one {offer.name} ({offer.card_bytes // GB} GB) does"
    return "no single card holds it: several cards make sense"


def _on_one(work: Workload, card: CardKind) -> str:
    if fits(work, 1, card.memory_bytes):
        return f"it fits on one {card.name} ({card.memory_gb} GB)"
    offloaded = fits(replace(work, offload=True), 1, card.memory_bytes)
    cure = ", unless the optimizer goes into system memory (slow)" if offloaded else ""
    return f"it does not fit on one {card.name} ({card.memory_gb} GB){cure}"


def _strategy(work: Workload, cards: int, card: CardKind) -> str:
    found = cheapest(work, cards, card.memory_bytes)
    where = f"{cards} x {card.name} ({card.memory_gb} GB)"
    if found is None:
        return f"nothing fits on {where}: more or bigger cards, a smaller batch or shorter sequences, or LoRA"
    told = f"{strategy_name(found.strategy)}{' and the optimizer in system memory (slow)' if found.offload else ''}"
    if (found.strategy, found.offload) == (work.strategy, work.offload):
        return f"{told} is the cheapest strategy that fits on {where}"
    if fits(work, cards, card.memory_bytes):
        return f"{strategy_name(work.strategy)} fits on {where}; {told} fits too and sends less"
    return f"{strategy_name(work.strategy)} does not fit on {where}; the cheapest strategy that does: {told}"


def _over_pcie(cards: int, card: CardKind | None) -> Iterator[str]:
    speed = None if card is None else link_gb_per_s(card.name, cards)
    if speed is not None and speed[0] < 60:  # noqa: PLR2004  # GB/s: faster is NVLink
        yield (
            "the weights travel between the cards with every micro-batch, and without NVLink the cards wait for them: "
            "take SXM cards, or a strategy that keeps the weights on each card"
        )


def strategy_name(strategy: Strategy) -> str:
    """As its authors write it."""
    return _NAMES[strategy]


_NAMES: Final = {
    Strategy.DDP: "DDP",
    Strategy.ZERO1: "ZeRO-1",
    Strategy.ZERO2: "ZeRO-2",
    Strategy.ZERO3: "ZeRO-3",
    Strategy.SHARD_GRAD_OP: "FSDP SHARD_GRAD_OP",
    Strategy.FULL_SHARD: "FSDP FULL_SHARD",
    Strategy.LORA: "LoRA",
    Strategy.QLORA: "QLoRA",
    Strategy.INFERENCE: "inference",
}
