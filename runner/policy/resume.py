"""Where the next attempt begins, and in which lineage its checkpoints stand."""

from collections.abc import Collection
from dataclasses import dataclass

from vramfarm.protocol import Ref

NEVER = "never"


@dataclass(frozen=True, slots=True)
class From:
    """Begin here: `ref` is on this disk, or None for step 0."""

    ref: Ref | None
    lineage: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """The newest is only in the store: bring it here first."""

    ref: Ref


def plan_resume(
    local: Collection[Ref],
    offsite: Collection[Ref],
    *,
    resume: str,
    unusable: Collection[str],
    started_lineage: int | None,
) -> From | Fetch:
    """
    Take the newest checkpoint there is, wherever it is.

    `resume: never` starts a new lineage on the first launch, and sees only that lineage
    afterwards: a restart in the night must not start over again. `unusable` names offsite
    checkpoints that failed to restore. `started_lineage` is the first attempt's, None before it.
    """
    everything = {*local, *offsite}
    newest_lineage = max((ref.lineage for ref in everything), default=0)
    if resume == NEVER and started_lineage is None:
        return From(None, newest_lineage + 1)
    floor = started_lineage if resume == NEVER and started_lineage is not None else 0
    usable = {ref for ref in everything if ref.lineage >= floor and (ref in local or ref.name not in unusable)}
    if not usable:
        return From(None, max(started_lineage or 1, newest_lineage, 1))
    best = max(usable)
    if best not in local:
        return Fetch(best)
    rolled_back = best < max(everything)
    return From(best, newest_lineage + 1 if rolled_back else best.lineage)
