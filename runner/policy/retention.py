"""Which checkpoints stay on this disk."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vramfarm.protocol import Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to keep, each with the reason a human will ask for, and what to remove, oldest first."""

    keep: tuple[tuple[Ref, str], ...]
    remove: tuple[Ref, ...]


def plan_retention(local: Sequence[Ref], *, keep_last: int, in_use: Collection[Ref]) -> Plan:
    """
    Keep the newest `keep_last`, and what is being uploaded or resumed from.

    An outage of the store must not fill the disk: an older one goes even if it never got off
    the machine, since the newer ones that stay are worth more.
    """
    order = sorted(local, reverse=True)
    reasons = {ref: reason for age, ref in enumerate(order) if (reason := _reason(ref, age, keep_last, in_use))}
    return Plan(keep=tuple(reasons.items()), remove=tuple(ref for ref in reversed(order) if ref not in reasons))


def _reason(ref: Ref, age: int, keep_last: int, in_use: Collection[Ref]) -> str | None:
    if age < keep_last:
        return f"among the newest {keep_last}"
    if ref in in_use:
        return "in use"
    return None
