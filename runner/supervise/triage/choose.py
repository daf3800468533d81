"""
Which suspect is the first real error, what it is called, and what follows from it.

The order: what the machine says, what a rank says and we know, what a rank says and we do not
know, who died without a word, warnings, and only then those who waited.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from runner.facts import Diagnosis
from runner.supervise.triage import silence
from runner.supervise.triage.evidence import Evidence, Suspect
from runner.supervise.triage.meanings import MEANINGS
from runner.supervise.triage.refine import Chosen, refine
from runner.supervise.triage.table import SHELL, Kind

_NEAR_S: Final = 120.0  # between a kernel line and the error that follows from it
_STAMP: Final = (
    re.compile(r"\b[EWIF](?P<month>[01]?\d)(?P<day>[0-3]\d) (?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)"),
    re.compile(r"\d{4}-(?P<month>\d\d)-(?P<day>\d\d)[ T_](?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)"),
    re.compile(r"^\[\w{3} (?P<name>\w{3}) +(?P<day>\d+) (?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)"),
)
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

_NOBODY_S: Final = frozenset({"container", "launcher", "setup", "signal", "stall"})
_OF_A_CARD: Final = frozenset({
    "gpu_ecc",
    "gpu_hbm_failing",
    "nvlink5_fault",
    "xid119_gsp",
    "xid74_nvlink",
    "xid79_fallen_off_bus",
})  # fmt: skip


def choose(seen: Evidence) -> Chosen:
    """Return what went wrong first; `unknown` if only those spoke who noticed."""
    suspects = [s for s in seen.suspects if not _is_stale(s, seen)]
    best = _best(suspects)
    if killed := silence.out_of_memory(best, seen):
        return killed
    if best is not None and best.kind < Kind.DEATH:
        return _named(best, suspects, seen)
    if best is not None and best.kind is Kind.DEATH:
        return silence.died(best, seen)
    if best is not None and best.kind is Kind.CALLED:
        return _named(best, suspects, seen)
    return (
        silence.not_run(seen, suspects)
        or silence.stalled(seen, suspects)
        or silence.waited(seen)
        or silence.silent(seen, suspects)
        or (_named(best, suspects, seen) if best else None)
        or silence.last_resort(seen, suspects)
    )


def diagnose(chosen: Chosen) -> Diagnosis:
    """The fact, without its line for a human."""
    meaning = MEANINGS[chosen.label]
    return Diagnosis(
        label=chosen.label,
        category=meaning.category,
        rank=chosen.rank,
        primary_line=chosen.line.raw if chosen.line else "",
        primary_line_no=chosen.line.number if chosen.line else None,
        cause=meaning.cause,
        remedy=meaning.remedy,
        decision=chosen.decision or meaning.decision,
        env=meaning.env if chosen.env is None else chosen.env,
        confidence=chosen.confidence,
    )


def words_about(chosen: Chosen, seen: Evidence) -> str:
    """The error, the rest of its message, the statement that raised it; of a hub's answer also what came of it."""
    known = seen.suspect(chosen.line)
    if known is None:
        return chosen.text
    more = " ".join(s.line.text for s in seen.suspects) if chosen.label.startswith("hf_") else ""
    return f"{known.line.text} {known.detail} {known.statement} {more}"


def _best(suspects: Sequence[Suspect]) -> Suspect | None:
    """Nearest to the cause, then the most exact, then the earliest."""
    families = _families(suspects)
    real = [s for s in suspects if s.kind is not Kind.ECHO and not _is_superseded(s, families)]
    if any(s.kind is Kind.DEATH for s in real):
        real = [s for s in real if s.kind is not Kind.ERROR or not s.in_collective]
    if not real:
        return None
    first = min((s.kind, -s.weight) for s in real)
    best = _earliest([s for s in real if (s.kind, -s.weight) == first])
    if best.kind is Kind.CAUSE and best.weight == 1:
        return _earlier_error(best, real) or best
    return _last_of_rank(best, real) if best.kind is Kind.ERROR else best


def _earlier_error(best: Suspect, real: Sequence[Suspect]) -> Suspect | None:
    """A vague cause that comes after an error may follow from it."""
    errors = (s for s in real if s.kind is Kind.ERROR and s.ended and s.chain != best.chain)
    return next((s for s in errors if s.line.place < best.line.place), None)


def _last_of_rank(best: Suspect, real: Sequence[Suspect]) -> Suspect:
    """What a rank says last is what ended it, where its lines can be told from others'; not what follows from a thread's end."""
    if best.in_thread:
        return best
    mine = [s for s in real if s.kind is Kind.ERROR and s.ended and s.line.prefix == best.line.prefix]
    return mine[-1] if mine and best.line.prefix else best


def _families(suspects: Sequence[Suspect]) -> dict[tuple[int, int], list[Suspect]]:
    """Errors that were raised out of each other."""
    families: dict[tuple[int, int], list[Suspect]] = {}
    for suspect in suspects:
        if suspect.chain and suspect.kind <= Kind.ERROR:
            families.setdefault((suspect.line.source, suspect.chain), []).append(suspect)
    return families


def _is_superseded(suspect: Suspect, families: Mapping[tuple[int, int], Sequence[Suspect]]) -> bool:
    """Of a family one is told: the cause that is named, or the last that was raised."""
    if not suspect.chain or suspect.kind is not Kind.ERROR:
        return False
    family = families[suspect.line.source, suspect.chain]
    if any(s.during for s in family if s.line.place > suspect.line.place):
        return True
    return not suspect.during and family[0].line.place < suspect.line.place


def _earliest(suspects: Sequence[Suspect]) -> Suspect:
    """By time stamp where several files are compared and all have one; else by their order."""
    if len({s.line.source for s in suspects}) > 1:
        stamps = [_stamp(s.line.raw) for s in suspects]
        if None not in stamps:
            return min(zip(stamps, suspects, strict=True), key=lambda pair: (pair[0], pair[1].line.place))[1]
    return min(suspects, key=lambda s: s.line.place)


def _is_stale(suspect: Suspect, seen: Evidence) -> bool:
    """A kernel line from long before the last step and the first error has nothing to do with them."""
    if suspect.kind is not Kind.HOST or not suspect.line.raw.startswith("["):
        return False
    at = _stamp(suspect.line.raw)
    errors = [_stamp(s.line.raw) for s in seen.suspects if s.line.rank is not None]
    waits = [_stamp(w.line.raw) for w in seen.waits]
    steps = [_stamp(line.raw) for line in seen.progress[-1:]]
    known = [found for found in (*errors, *waits, *steps) if found is not None]
    return at is not None and bool(known) and at < min(known) - _NEAR_S


def _named(best: Suspect, suspects: Sequence[Suspect], seen: Evidence) -> Chosen:
    """The earliest line of those that say the same."""
    nearest = max(best.kind, Kind.CAUSE)
    alike = [s for s in suspects if s.label == best.label and s.kind <= nearest]
    first = best if best.kind is Kind.ERROR else _earliest(alike)
    chosen = Chosen(
        label=best.label,
        line=first.line,
        rank=_rank(best, alike, seen),
        confidence=_confidence(best, seen),
    )
    return refine(chosen, seen)


def _confidence(best: Suspect, seen: Evidence) -> str:
    """A shell goes on after a command that it could not run; where nothing else is said, that ended it."""
    if best.kind is Kind.HINT:
        return "medium" if seen.launcher_code and not seen.progress and SHELL.search(best.line.text) else "low"
    return "high" if best.weight > 1 else "medium"


def _rank(best: Suspect, alike: Sequence[Suspect], seen: Evidence) -> int | None:
    """Whose error it is. What all ranks say, and what is nobody's, is no rank's."""
    category = MEANINGS[best.label].category
    if category in _NOBODY_S or (category == "machine" and best.label not in _OF_A_CARD):
        return None
    ranks = list(dict.fromkeys(s.line.rank for s in alike if s.line.rank is not None))
    if best.kind is Kind.ERROR:
        ranks = ranks if _is_said_by_all(best, alike) else [r for r in (best.line.rank,) if r is not None]
    if len(ranks) > 1 and 2 * len(ranks) > len(seen.ranks):
        return None
    if ranks:
        return ranks[0]
    if sum(s.ended and s.line.text == best.line.text for s in alike) >= max(2, len(seen.ranks)):
        return None  # every rank, and none said who it is
    return _rank_of_others(best, seen)


def _is_said_by_all(best: Suspect, alike: Sequence[Suspect]) -> bool:
    same = {s.line.rank for s in alike if s.line.text == best.line.text}
    return len(same) > 1


def _rank_of_others(best: Suspect, seen: Evidence) -> int | None:
    """What others say about a rank that did not name itself."""
    if best.label in _OF_A_CARD:
        loud = (s.line.rank for s in seen.suspects if "CUDA error" in s.line.text and s.line.rank is not None)
        return next(loud, seen.first_failed)
    if any("store->get(" in s.line.text and s.line.rank for s in seen.suspects):
        return 0  # it keeps the store that the others lost
    return seen.first_failed


def _stamp(text: str) -> float | None:
    """Seconds since the beginning of the year, if the line says when it was written."""
    for pattern in _STAMP:
        if match := pattern.search(text):
            told = match.groupdict()
            name = told.get("name")
            month = _MONTHS.index(name) + 1 if name in _MONTHS else int(told.get("month") or 0)
            return ((month * 31 + int(told["day"])) * 24 + int(told["h"])) * 3600 + int(told["m"]) * 60 + int(told["s"])
    return None
