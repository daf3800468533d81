"""Where the next attempt begins, and in which lineage its checkpoints stand."""

from collections.abc import Collection
from dataclasses import dataclass

from runner.facts import Checkpoint, History
from vramfarm.protocol import Ref

AUTO = "auto"
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


@dataclass(frozen=True, slots=True)
class Fork:
    """This run has none: bring in that of another run first, as the beginning of `lineage`."""

    place: str
    lineage: int


def is_elsewhere(resume: str) -> bool:
    """Whether job.yaml names a checkpoint of another run to begin from."""
    return resume not in {AUTO, NEVER}


def stale_copies(checkpoints: Collection[Checkpoint], resume: str) -> set[str]:
    """Names of copies of another run's checkpoint that job.yaml does not name any more, but names another in its place."""
    if not is_elsewhere(resume):
        return set()
    return {c.ref.name for c in checkpoints if c.origin and not _is_of(c.origin, resume)}


def _is_of(origin: str, place: str) -> bool:
    return origin == place or origin.startswith(f"{place}/")


def plan_fork(resume: str, local: Collection[Checkpoint], everything: Collection[Ref], plan: From) -> From | Fork:
    """
    Where a run begins that has nothing to go on from (`plan`).

    One that starts over begins with a copy in a lineage of its own. It is the newest there is then, and not made again.
    """
    if not is_elsewhere(resume):
        return plan
    newest = max(everything, default=None)
    if newest is None:
        return Fork(resume, plan.lineage)
    copy = next((c for c in local if c.ref == newest and c.origin and _is_of(c.origin, resume)), None)
    return From(copy.ref, copy.ref.lineage) if copy else Fork(resume, max(newest.lineage + 1, plan.lineage))


def plan_resume(
    local: Collection[Ref],
    offsite: Collection[Ref],
    *,
    floor: int | None,
    unusable: Collection[str],
    last_resort: Collection[str] = (),
) -> From | Fetch:
    """
    Take the newest checkpoint there is, wherever it is, of lineage `floor` or later.

    `floor` None starts over now, in a new lineage. `unusable` names offsite checkpoints that are
    damaged there; those of them that an earlier life found so (`last_resort`) are tried again before
    there is none: the fault may have been its own.
    """
    everything = {*local, *offsite}
    newest_lineage = max((ref.lineage for ref in everything), default=0)
    if floor is None:
        return From(None, newest_lineage + 1)
    usable = {ref for ref in everything if ref.lineage >= floor and (ref in local or ref.name not in unusable)}
    usable = usable or {ref for ref in everything if ref.lineage >= floor and ref.name in last_resort}
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
