"""
The lease of a run: one runner a run, across machines.

`lease.json` in the store names who has the run. It changes only by a conditional write, so of
two who want it one wins. Clocks of machines are never compared: a holder writes another beat
every few seconds, and whoever waits asks only whether it did while he watched. A holder that
could not renew for a while stops writing to the store before anybody may take over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from runner.facts import Vacancy


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds. `valid_s` is shorter than `watch_s`: a holder stops writing before another one begins."""

    renew_s: float = 15.0
    valid_s: float = 45.0  # after the begin of the last renewal that the store confirmed
    watch_s: float = 60.0
    look_s: float = 5.0
    again_s: float = 3.0  # after an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What `lease.json` says. `fence` counts takings, `beat` renewals; `who` and `until` are for people."""

    holder: str  # the run folder on its machine
    life: str  # of the keeper that took it
    fence: int
    beat: int = 0
    who: str = ""
    until: str = ""  # by the holder's clock: nobody compares it
    released: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeper:
    """
    What a keeper knows. Times are seconds of its own clock, which runs while the machine sleeps.

    `tag` None: not known, look first. `mine` is the last claim that the store confirmed.
    """

    holder: str
    life: str
    who: str = ""
    pace: Pace = Pace()
    looked: bool = False
    there: Claim | None = None  # as last seen; None: nothing, or nothing that can be read
    tag: str | None = None
    watched_s: float | None = None  # another's claim is the same since
    mine: Claim | None = None
    renewed_s: float | None = None  # begin of the last write that was confirmed
    next_s: float = 0.0
    lost_to: Claim | None = None
    vacancy: Vacancy = Vacancy.SILENT  # of what `mine` took over


@dataclass(frozen=True, slots=True)
class Look:
    """Read `lease.json`."""


@dataclass(frozen=True, slots=True)
class Put:
    """Write this claim if the object still has this tag."""

    claim: Claim
    tag: str | None


@dataclass(frozen=True, slots=True)
class Idle:
    until_s: float


@dataclass(frozen=True, slots=True)
class Lost:
    """Another runner has the run."""

    to: Claim


def decide_move(keeper: Keeper, now_s: float) -> Look | Put | Idle | Lost:
    """What to do next. The state after it is in `looked`, `put` and `failed`."""
    if keeper.lost_to is not None:
        return Lost(keeper.lost_to)
    if now_s < keeper.next_s:
        return Idle(keeper.next_s)
    if not keeper.looked:
        return Look()
    if keeper.mine is not None:
        return Put(replace(keeper.mine, beat=keeper.mine.beat + 1), keeper.tag)
    if keeper.watched_s is not None and now_s < keeper.watched_s + keeper.pace.watch_s:
        return Look()
    fence = keeper.there.fence + 1 if keeper.there else 1
    return Put(Claim(holder=keeper.holder, life=keeper.life, fence=fence, who=keeper.who), keeper.tag)


def looked(keeper: Keeper, there: Claim | None, tag: str | None, now_s: float) -> Keeper:
    """After a look that ended at `now_s`."""
    known = there or keeper.mine or keeper.there  # fences go on although somebody removed the object
    seen = replace(keeper, looked=True, there=known, tag=tag, next_s=now_s)
    if there is not None and there.life == keeper.life:
        return replace(seen, mine=there)  # a write whose answer was lost
    if keeper.mine is not None and tag is not None:
        return replace(seen, lost_to=there or _NOBODY)
    if tag is None or (there is not None and (there.released or there.holder == keeper.holder)):
        vacancy = Vacancy.GONE if tag is None else Vacancy.GIVEN_BACK
        return replace(seen, mine=None, watched_s=None, vacancy=vacancy)  # free, or ours from an earlier life: take it
    if keeper.watched_s is None:
        seen = replace(seen, watched_s=now_s)
    elif tag != keeper.tag:
        return replace(seen, lost_to=there or _NOBODY)  # it was renewed, or another one was faster
    since_s = now_s if keeper.watched_s is None else keeper.watched_s
    return replace(seen, vacancy=Vacancy.SILENT, next_s=min(now_s + keeper.pace.look_s, since_s + keeper.pace.watch_s))


_NOBODY = Claim(holder="", life="", fence=0, who="somebody whose lease cannot be read")


def put(keeper: Keeper, claim: Claim, tag: str | None, began_s: float) -> Keeper:
    """After a write that began at `began_s`; `tag` None: it was refused, so look who was there."""
    if tag is None:
        return replace(keeper, looked=False, next_s=began_s)
    return replace(
        keeper,
        there=claim,
        mine=claim,
        tag=tag,
        watched_s=None,
        renewed_s=began_s,
        next_s=began_s + keeper.pace.renew_s,
    )


def failed(keeper: Keeper, now_s: float) -> Keeper:
    """After an error: what was written may have arrived or not."""
    return replace(keeper, looked=False, next_s=now_s + keeper.pace.again_s)


def may_write(renewed_s: float | None, now_s: float, pace: Pace) -> bool:
    """Whether a holder may still write to the store."""
    return renewed_s is not None and now_s < renewed_s + pace.valid_s
