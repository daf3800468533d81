"""
Whether more cards bring what they should. Said only when it is sure: measured on this machine,
with the same global batch, for some minutes each; or where what must be sent takes most of a
step even on the fastest link that these cards may have.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from runner.facts import Attempt, History, Observed
from runner.job import Job
from runner.policy.batch import accumulation, tell_cards
from runner.policy.fleet import link_gb_per_s, strategy_name
from runner.policy.planning import GB, traffic_bytes, workload

_LONG_ENOUGH: Final = timedelta(minutes=3)
_ENOUGH_STEPS: Final = 20
_MOST: Final = 0.7  # of a step
_POOR: Final = 0.75  # of what the number of cards promises: two cards usually reach 0.85 to 0.95, four 0.75 to 0.93


def tell_scaling(job: Job, history: History, seen: Observed) -> str:
    """One line where the cards of this attempt, or of the one before, bring less than they should; else empty."""
    rate, now = seen.progress.steps_per_s, history.running
    if not rate or seen.progress.from_log or now is None or not _is_measured(now, seen):
        return ""
    earlier = (a for a in reversed(history.attempts[:-1]) if _is_comparable(a, now))
    before = next(earlier, None)
    if before is not None:
        return judge(*sorted([(now.world_size, rate), (before.world_size, before.steps_per_s)]))
    return _judge_by_plan(job, seen, 1 / rate)


def judge(few: tuple[int, float], many: tuple[int, float]) -> str:
    """Compare (cards, optimizer steps a second) at one global batch."""
    gain, promise = many[1] / few[1], many[0] / few[0]
    if gain >= _POOR * promise:
        return ""
    return (
        f"{tell_cards(many[0])} {'is' if many[0] == 1 else 'are'} {gain:.1f} times {tell_cards(few[0])}, {promise:.3g} would be perfect: "
        "look at the link between the cards first (nvidia-smi topo -m); still more cards will not mend it"
    )


def _judge_by_plan(job: Job, seen: Observed, step_s: float) -> str:
    speeds = link_gb_per_s(seen.card, seen.num_procs) if seen.card and seen.num_procs else None
    if job.model is None or speeds is None:
        return ""
    work = workload(job.model, accumulation=accumulation(job, seen.num_procs))
    sent = traffic_bytes(work, seen.num_procs)
    sending_s = sent / (speeds[1] * GB)
    if sending_s < _MOST * step_s:
        return ""
    return (
        f"a step takes {step_s:.1f} s, and {sending_s:.1f} s of that is what each card must send ({sent / GB:.0f} GB with "
        f"{strategy_name(work.strategy)}): the cards wait for the link between them; a strategy that sends less, or cards on NVLink, would not"
    )


def _is_measured(now: Attempt, seen: Observed) -> bool:
    steps = seen.progress.step - (now.resume.step if now.resume else 0)
    return seen.now - now.launched_at >= _LONG_ENOUGH and steps >= _ENOUGH_STEPS


def _is_comparable(before: Attempt, now: Attempt) -> bool:
    """Another machine may have other cards: only this one's boot counts."""
    if before.ended_at is None or before.steps_per_s <= 0 or before.world_size in {0, now.world_size}:
        return False
    if not (now.world_size and now.global_batch):
        return False
    long_enough = before.ended_at - before.launched_at >= _LONG_ENOUGH
    return long_enough and (before.boot_id, before.global_batch) == (now.boot_id, now.global_batch)
