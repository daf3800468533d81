"""
When to save, and what becomes of a save. Pure: frozen values in, one value out.

All ranks must save at the same step, and none may wait for another. So the saver proposes a
step that nobody has reached, looks again, and only then calls it agreed; a rank that finishes
the proposed step waits for the saver's word, a millisecond or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from vramfarm.protocol import Arena, Phase, Reason

AHEAD = 2  # steps from the fastest rank to a proposal, where steps take long
MOST_AHEAD = 64


@dataclass(frozen=True)
class Rank:
    """What one rank says on the control page, and whether its process is there."""

    attached: bool
    alive: bool
    step: int
    phase: Phase
    arena: Arena = Arena.NONE
    arena_step: int = 0
    void_step: int = 0
    warming: bool = False

    def is_ready(self, step: int) -> bool:
        return self.arena is Arena.READY and self.arena_step == step

    def is_lost(self, step: int) -> bool:
        """Whether this rank can no longer stage `step`. It may train on while its copy is on the way."""
        is_copying = self.arena is Arena.FILLING and self.arena_step == step
        passed = not is_copying and (self.step > step or self.phase in {Phase.DONE, Phase.LEFT})
        return not self.alive or passed or self.void_step == step


class Fate(Enum):
    """Of a save that was agreed."""

    WAIT = "some rank has yet to stage it"
    WRITE = "all ranks staged it"
    VOID = "some rank never will"


@dataclass(frozen=True)
class Wishes:
    """What asks for a save now. `due`: the clock. `cold`: some rank prepares its staging memory, so only leaving counts."""

    leave: bool = False
    asked: bool = False
    due: bool = False
    cold: bool = False


def decide_reason(ranks: Sequence[Rank], wishes: Wishes) -> Reason | None:
    """Return why to save now, or None. Being done comes before being asked to leave."""
    if not all(rank.attached and rank.alive for rank in ranks):
        return None  # such a save could never be complete
    if all(rank.phase is Phase.DONE for rank in ranks):
        return Reason.FINAL
    if not all(rank.phase in {Phase.TRAINING, Phase.SAVING} for rank in ranks):
        return None
    if wishes.leave:
        return Reason.LEAVE
    if wishes.asked and not wishes.cold:
        return Reason.ASKED
    return Reason.INTERVAL if wishes.due and not wishes.cold else None


def propose_step(ranks: Sequence[Rank], ahead: int = AHEAD) -> int:
    return max(rank.step for rank in ranks) + ahead


def next_ahead(ahead: int, *, agreed: bool) -> int:
    """Ranks that were quicker than a proposal get the next one earlier."""
    return max(AHEAD, ahead // 2) if agreed else min(2 * ahead, MOST_AHEAD)


def is_agreed(step: int, ranks: Sequence[Rank]) -> bool:
    """Whether nobody reached the proposed step before every rank could see it."""
    return all(rank.step < step for rank in ranks)


def missing_at_the_end(ranks: Sequence[Rank]) -> int | None:
    """Return which rank those that are done wait for: one that is dead before one that is late; None if there is none."""
    if not any(rank.phase is Phase.DONE for rank in ranks):
        return None
    dead = (number for number, rank in enumerate(ranks) if rank.attached and not rank.alive)
    late = (number for number, rank in enumerate(ranks) if rank.phase is not Phase.DONE)
    return next(dead, next(late, None))


def decide_fate(step: int, ranks: Sequence[Rank], *, final: bool) -> Fate:
    """What becomes of the save at `step`. In a final save ranks stage while they are DONE."""
    waited_for = [rank for rank in ranks if not rank.is_ready(step)]
    if any(rank.void_step == step for rank in ranks):
        return Fate.VOID
    if not waited_for:
        return Fate.WRITE
    lost = (not rank.alive if final else rank.is_lost(step) for rank in waited_for)
    return Fate.VOID if any(lost) else Fate.WAIT
