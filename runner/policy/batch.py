"""
The global batch: samples per optimizer step = per card x cards x accumulation.

It decides what is learned, so it is kept whatever the number of cards: the accumulation is
computed for the cards there are. Where that cannot be done the machine is refused; where the
global batch does change, the learning rate has to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from runner.facts import Attempt, History, Observed
from runner.job import Batch, Job
from runner.policy.actions import Launch
from vramfarm.protocol import Ref

_MOST_CARDS: Final = 16  # as many as a machine has


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """`samples` = per_card x cards x accumulation."""

    samples: int
    per_card: int
    cards: int
    accumulation: int


@dataclass(frozen=True, slots=True)
class Uneven:
    """The batch cannot be split over these cards; `reason` says what would work."""

    reason: str


def split_batch(batch: Batch, cards: int) -> Split | Uneven:
    """Return how many micro-batches make one step on this number of cards."""
    accumulation, rest = divmod(batch.global_, batch.per_card * cards)
    if rest or not accumulation:
        return Uneven(_what_would_work(batch, cards))
    return Split(samples=batch.global_, per_card=batch.per_card, cards=cards, accumulation=accumulation)


def accumulation(job: Job, cards: int) -> int:
    """Micro-batches per step; 1 where job.yaml leaves the batch to the script, or it cannot be split."""
    split = None if job.batch is None else split_batch(job.batch, cards)
    return split.accumulation if isinstance(split, Split) else 1


def tell_cards(count: int) -> str:
    """So many of them, for people."""
    return "1 card" if count == 1 else f"{count} cards"


def _what_would_work(batch: Batch, cards: int) -> str:
    samples, unit = batch.global_, batch.per_card * cards
    found = f"batch: global {samples} is not a multiple of per_card {batch.per_card} x {tell_cards(cards)} = {unit}"
    return f"{found}; {', or '.join(_cures(batch, cards))}"


def _cures(batch: Batch, cards: int) -> Iterator[str]:
    samples, unit = batch.global_, batch.per_card * cards
    if smaller := batch.largest_per_card(cards):
        yield f"per_card {smaller} keeps it on {tell_cards(cards)}"
    working = [n for n in range(1, _MOST_CARDS + 1) if samples % (batch.per_card * n) == 0]
    if working:
        yield f"{_listed(working)} cards do it with per_card {batch.per_card}"
    below, above = samples // unit * unit, -(-samples // unit) * unit
    yield f"another batch: global {f'{below} or {above}' if below else above} (--accept-change)"


# ----------------------------------------------------------------------------- what is said


def tell_batch(job: Job, launch: Launch, history: History, seen: Observed) -> Iterator[str]:
    """What a launch makes of the batch, and what that means where it is not what it was."""
    before = _before(launch, history, seen)
    split = None if job.batch is None else split_batch(job.batch, seen.num_procs)
    if isinstance(split, Split):
        kept = before is not None and before.global_batch == split.samples and before.cards != split.cards
        yield (
            f"global batch {split.samples}{' is kept' if kept else ''}: {split.per_card} a card x {tell_cards(split.cards)} "
            f"x {split.accumulation} (VRAMFARM_GRAD_ACCUM){f'; before: {tell_cards(before.cards)}' if kept and before else ''}"
        )
    if before is None:
        return
    if split is None and before.global_batch == 0 and before.cards not in {0, seen.num_procs}:
        yield (
            f"{tell_cards(before.cards)} before, {seen.num_procs} now: with the same batch a card the global batch changes; "
            f"`batch` in job.yaml keeps it, or {learning_rate_advice(before.cards, seen.num_procs)}"
        )
    if isinstance(split, Split) and before.global_batch not in {0, split.samples}:
        advice = learning_rate_advice(before.global_batch, split.samples)
        yield f"the global batch changes, {before.global_batch} before, {split.samples} now: {advice}"


def learning_rate_advice(before: int, now: int) -> str:
    """By which factor the learning rate follows the batch: linearly for SGD, by the square root for Adam."""
    factor = now / before
    return f"learning rate x {factor:.3g} for SGD, x {math.sqrt(factor):.3g} for Adam, with a warm-up"


@dataclass(frozen=True, slots=True)
class _Before:
    cards: int
    global_batch: int  # 0: not known


def _before(launch: Launch, history: History, seen: Observed) -> _Before | None:
    """What the checkpoint that is resumed was trained with; None at step 0 and for another run's. On another machine the store says it."""
    if launch.resume is None or launch.origin:
        return None
    last = next((a for a in reversed(history.attempts) if _made(a, launch.resume)), None)
    if last is not None and last.world_size:
        return _Before(last.world_size, last.global_batch)
    known = (c for c in (*seen.local, *(seen.offsite or ())) if c.ref == launch.resume)
    return next((_Before(c.world_size, seen.stored_batch) for c in known), None)


def _made(attempt: Attempt, ref: Ref) -> bool:
    return (attempt.number, attempt.lineage) == (ref.attempt, ref.lineage)


def _listed(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
