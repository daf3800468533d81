"""What `plan` answers, as data: pure sums of `policy.planning` and `policy.fleet`, and what a catalogue or a run folder says."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from runner.adapters.frameworks import get_framework
from runner.adapters.providers import vramfarm, with_secrets
from runner.adapters.providers.http import make_send
from runner.cli.load import LoadedJob
from runner.cli.runs import STATUS
from runner.cli.status import read_status
from runner.errors import JobError
from runner.facts import Offer
from runner.job import Batch, format_duration
from runner.policy.batch import Split, Uneven, split_batch
from runner.policy.cadence import MEAN_TIME, Rental, decide_cadence
from runner.policy.fleet import CardKind, advise, find_card, holders, link_gb_per_s, usual_offers
from runner.policy.limits import save_s_of, time_for_end
from runner.policy.money import VRAMFARM, billed
from runner.policy.planning import (
    CONTEXT_BYTES,
    GB,
    Strategy,
    Workload,
    activations,
    checkpoint_bytes,
    compute_s,
    disk_bytes,
    fits,
    host_bytes,
    memory,
    shape,
    speed_up,
    traffic_bytes,
)

_COLUMNS: Final = (1, 2, 4, 8)
_TRAINING: Final = (
    Strategy.DDP,
    Strategy.ZERO1,
    Strategy.ZERO2,
    Strategy.SHARD_GRAD_OP,
    Strategy.ZERO3,
    Strategy.FULL_SHARD,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the plan is for. `work`, `cards` and `card` of None, and zeros: neither told nor found here."""

    work: Workload | None
    cards: int | None
    card: CardKind | None
    batch: Batch | None = None
    keep_last: int = 2
    tokens: int = 0  # of the whole run
    duration: timedelta | None = None
    rental: Rental = Rental.ON_DEMAND
    between_failures: timedelta | None = None
    save_s: float = 0.0
    upload_s: float = 0.0
    loaded: LoadedJob | None = None
    offline: bool = False


def estimate(asked: Asked) -> dict[str, Any]:
    """All of it but what `run` would do."""
    status = _status(asked.loaded)
    answer = {**_of_model(asked), **_of_batch(asked), "cadence": _cadence(asked, status)}
    answer["end"] = _end(asked, status, answer.get("checkpoint_bytes", 0))
    return answer | {"measured": _measured(status, answer.get("cost_per_hour"))}


def _measured(status: Mapping[str, Any], price: list[str] | None) -> dict[str, Any] | None:
    """The step of a run that has been going, and what all of its steps come to."""
    rate, steps = _number(status.get("steps_per_s")), _number(status.get("max_steps"))
    if not rate:
        return None
    seconds = steps / rate if steps else None
    cost = [str(billed(Decimal(amount), seconds, VRAMFARM)) for amount in price] if price and seconds else None
    return {"step_s": 1 / rate, "max_steps": int(steps) or None, "seconds": seconds, "cost": cost}


def _of_model(asked: Asked) -> dict[str, Any]:
    if asked.work is None:
        advice = ["model.parameters is not set in job.yaml (or --parameters): memory and cost cannot be told"]
        return {"model": None, "cards": asked.cards, "advice": advice}
    work, cards, card = asked.work, asked.cards, asked.card
    offers, catalogue = _offers(offline=asked.offline)
    found = holders(
        work, [one for one in offers if one.available and cards in {None, one.cards}], keep_last=asked.keep_last
    )
    layers, hidden = shape(work)
    return {
        "model": {
            **asdict(work),
            "layers": layers,
            "hidden": hidden,
            "estimated_shape": not (work.layers and work.hidden),
        },
        "cards": cards,
        "gpu": None if card is None else {"slug": card.slug, "name": card.name, "memory_gb": card.memory_gb},
        "strategies": _strategies(work, cards, card),
        "memory": _memory(work, cards or 1, card),
        "checkpoint_bytes": checkpoint_bytes(work),
        "disk_bytes": disk_bytes(work, keep_last=asked.keep_last),
        **_of_cards(asked, work, offers),
        "catalogue": catalogue,
        "machines": [
            {
                "id": one.offer.id,
                "name": one.offer.name,
                "cards": one.offer.cards,
                "price_per_hour": str(one.offer.price_per_hour),
                "currency": one.offer.currency,
                "strategy": one.work.strategy,
                "offload": one.work.offload,
                "lacks": list(one.lacks),
            }
            for one in found
        ],
        "advice": list(advise(work, cards or 1, card, offers)),
    }


def _offers(*, offline: bool) -> tuple[tuple[Offer, ...], str]:
    """What can be rented, and where that was read."""
    env = with_secrets(os.environ)
    if offline or not env.get(vramfarm.KEY):
        return usual_offers(), "the built-in table (rough prices)"
    offers = vramfarm.read_offers(env, make_send())
    if isinstance(offers, str):
        return usual_offers(), f"the built-in table (rough prices; the catalogue cannot be read: {offers})"
    return offers, "VRAMfarm's catalogue"


def _strategies(work: Workload, cards: int | None, card: CardKind | None) -> list[dict[str, Any]]:
    shown = _TRAINING if work.strategy in _TRAINING else (work.strategy,)
    return [
        {
            "strategy": strategy,
            "cards": count,
            "states_bytes": memory(one, count).states,
            "total_bytes": memory(one, count).total + CONTEXT_BYTES,
            "fits": None if card is None else fits(one, count, card.memory_bytes),
        }
        for strategy in shown
        for one in [replace(work, strategy=strategy)]
        for count in sorted({*_COLUMNS, cards or 1})
    ]


def _memory(work: Workload, cards: int, card: CardKind | None) -> dict[str, Any]:
    held = memory(work, cards)
    return {
        **asdict(held),
        "context": CONTEXT_BYTES,
        "states": held.states,
        "total": held.total + CONTEXT_BYTES,
        "fits": None if card is None else fits(work, cards, card.memory_bytes),
        "activations_without_checkpointing": activations(replace(work, recompute=False)),
    }


def _of_cards(asked: Asked, work: Workload, offers: Sequence[Offer]) -> dict[str, Any]:
    """What depends on how many cards there are, and of which kind."""
    cards, card = asked.cards, asked.card
    if cards is None:
        return {}
    traffic = traffic_bytes(work, cards)
    answer: dict[str, Any] = {"traffic_bytes": traffic}
    if card is None:
        return answer
    answer["ram_bytes"] = host_bytes(work, cards, card.memory_bytes)
    speeds, computing_s = link_gb_per_s(card.name, cards), compute_s(work, card.teraflops)
    speed = speeds[0] if speeds else None
    sending_s = traffic / (speed * GB) if speed else None
    price = _price(card, cards, offers)
    answer |= {"link_gb_per_s": speed, "traffic_s": sending_s, "compute_s": computing_s, "cost_per_hour": price}
    if sending_s is None and cards > 1:
        return answer
    low, high = speed_up(cards, computing_s=computing_s, sending_s=sending_s or 0.0)
    answer["speed_up"] = [round(low, 2), round(high, 2)]
    return answer | _of_whole_run(asked, work, price, (low, high))


def _price(card: CardKind, cards: int, offers: Sequence[Offer]) -> list[str]:
    """(low, high) an hour for the machine; the same twice where the catalogue has it."""
    known = [
        one.price_per_hour for one in offers if find_card(one.card) == card and one.cards == cards and one.available
    ]
    if known and offers[0] != usual_offers()[0]:
        return [str(min(known)), str(min(known))]
    return [str(Decimal(amount) * cards) for amount in card.price]


def _of_whole_run(asked: Asked, work: Workload, price: list[str], gain: tuple[float, float]) -> dict[str, Any]:
    cheap, dear = map(Decimal, price)
    if asked.tokens and asked.card:
        alone_s = (
            compute_s(work, asked.card.teraflops) * asked.tokens / (work.per_card * work.accumulation * work.sequence)
        )
        times = [alone_s / gain[1], alone_s / gain[0]]
        cost = [str(billed(cheap, times[0], VRAMFARM)), str(billed(dear, times[1], VRAMFARM))]
        return {"run": {"tokens": asked.tokens, "seconds": times, "cost": cost}}
    if asked.duration:
        seconds = asked.duration.total_seconds()
        return {
            "run": {
                "at_most": format_duration(asked.duration),
                "cost": [str(billed(cheap, seconds, VRAMFARM)), str(billed(dear, seconds, VRAMFARM))],
            }
        }
    return {}


def _of_batch(asked: Asked) -> dict[str, Any]:
    if asked.batch is None:
        return {"batch": None}
    counts = [asked.cards] if asked.cards else list(_COLUMNS)
    splits = [split_batch(asked.batch, count) for count in counts]
    wrong = [split.reason for split in splits if isinstance(split, Uneven)]
    if wrong and asked.cards:
        raise JobError(wrong[0])
    return {"batch": [asdict(split) for split in splits if isinstance(split, Split)]}


def _cadence(asked: Asked, status: Mapping[str, Any]) -> dict[str, Any] | None:
    """None before a save was measured, or told."""
    save_s = asked.save_s or _save_s(status)
    upload_s = asked.upload_s or _number(status.get("last_upload_s"))
    governs = asked.loaded is None or get_framework(asked.loaded.job).uses_library
    every_s = 0.0 if governs else _number(status.get("saves_every_s"))
    if not save_s or not (governs or every_s):
        return None
    between = asked.between_failures or MEAN_TIME[asked.rental]
    now = asked.loaded.job.checkpoint.save_interval if asked.loaded else timedelta(minutes=30)
    now = timedelta(seconds=round(every_s)) if every_s else now
    found = decide_cadence(now, save_s, upload_s, between)
    return {
        "save_interval": format_duration(found.interval),
        "now": format_duration(now),
        "why": found.why,
        "matters": found.matters,
        "by_script": not governs,
        "save_s": save_s,
        "upload_s": upload_s or None,
        "between_failures_s": between.total_seconds(),
        "assumed": asked.between_failures is None,
    }


def _save_s(status: Mapping[str, Any]) -> float:
    return _number(status.get("last_save_s")) or _number(status.get("save_took_s"))


def _end(asked: Asked, status: Mapping[str, Any], checkpoint_bytes: int) -> dict[str, Any] | None:
    """How long before a limit it is asked to save and leave; None where there is no job, or nothing to go by."""
    timed_s, upload_s = asked.save_s or _save_s(status), asked.upload_s or _number(status.get("last_upload_s"))
    save_s = timed_s or save_s_of(checkpoint_bytes)
    if asked.loaded is None or not save_s:
        return None
    kept, whole = time_for_end(save_s, upload_s), asked.loaded.job.limits.max_duration
    return {
        "kept_s": min(kept, whole / 4 if whole else kept).total_seconds(),
        "save_s": save_s,
        "upload_s": upload_s or None,
        "assumed": not timed_s,
        "by_script": not get_framework(asked.loaded.job).uses_library,
    }


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < float("inf") else 0.0


def _status(loaded: LoadedJob | None) -> Mapping[str, Any]:
    """What the run last said of itself; empty before it did."""
    if loaded is None or not Path(loaded.job.run_dir, STATUS).is_file():
        return {}
    try:
        return read_status(str(loaded.job.run_dir))[0]
    except JobError:
        return {}
