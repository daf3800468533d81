"""Where the next attempt begins, and in which lineage its checkpoints stand."""

from collections.abc import Collection
from dataclasses import dataclass

from runner.facts import History
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
    local: Collection[Ref], offsite: Collection[Ref], *, floor: int | None, unusable: Collection[str]
) -> From | Fetch:
    """
    Take the newest checkpoint there is, wherever it is, of lineage `floor` or later.

    `floor` None starts over now, in a new lineage. `unusable` names offsite checkpoints that
    failed to restore.
    """
    everything = {*local, *offsite}
    newest_lineage = max((ref.lineage for ref in everything), default=0)
    if floor is None:
        return From(None, newest_lineage + 1)
    usable = {ref for ref in everything if ref.lineage >= floor and (ref in local or ref.name not in unusable)}
    if not usable:
        return From(None, max(floor, newest_lineage, 1))
    best = max(usable)
    if best not in local:
        return Fetch(best)
    rolled_back = best < max(everything)
    return From(best, newest_lineage + 1 if rolled_back else best.lineage)


def resume_floor(history: History, *, never: bool) -> int | None:
    """
    The oldest lineage this run may resume from; None: start over now.

    `resume: never` and `--start-over` hold for the first launch only: a restart in the night
    must not start over again.
    """
    first = history.fresh_from or int(never)
    if not first:
        return 0
    return next((a.lineage for a in history.attempts if a.number >= first), None)
