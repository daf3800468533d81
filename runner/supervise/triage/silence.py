"""
When nobody says the cause: who died without a word, who hung, who waited for whom.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from runner.supervise.triage.evidence import Evidence, Suspect, Waited
from runner.supervise.triage.lines import LogLine
from runner.supervise.triage.refine import Chosen, refine
from runner.supervise.triage.table import CALLED, SHELL, Kind

_FIRST_COLLECTIVES: Final = 16  # a transfer that never worked fails among these
_CLOCK_FACTOR: Final = 3  # a time-out that ran so much longer than its limit saw a clock jump
_CRASHES: Final = frozenset({-int(signal.SIGSEGV), -int(signal.SIGILL)})
_ASKED: Final = frozenset({-int(signal.SIGINT), -int(signal.SIGHUP)})  # to end, by somebody
_TERMINATED: Final = -int(signal.SIGTERM)  # in torchrun's table: it ended that rank itself
_OWN_END: Final = re.compile(r"terminate called|^\s+what\(\):|Fatal Python error: Aborted")
_WHAT: Final = "what():"
_ALL_END_TOGETHER: Final = {
    "ALLREDUCE",
    "ALLGATHER",
    "_ALLGATHER_BASE",
    "REDUCE_SCATTER",
    "_REDUCE_SCATTER_BASE",
    "BARRIER",
}
_NOT_RUN: Final = frozenset({126, 127})  # by a shell: found and may not be run, not found
_GRADIENTS: Final = {"ALLREDUCE", "REDUCE_SCATTER", "_REDUCE_SCATTER_BASE"}


def died(best: Suspect, seen: Evidence) -> Chosen:
    """A signal that its rank could not say a word about."""
    alike = [rank for rank, code in seen.exits.items() if code == best.code]
    everyone = len(alike) > 1 and 2 * len(alike) > len(seen.ranks)
    dead = Chosen(
        label="sigkill_unknown", line=best.line, rank=None if everyone else best.line.rank, confidence="medium"
    )
    if best.code in _CRASHES:
        return refine(replace(dead, label="segfault"), seen)
    if best.code == -signal.SIGBUS:
        return replace(dead, label="shm_too_small")
    if {"host_memory", "kernel_oom"} & set(seen.signs):
        return refine(replace(dead, label="host_oom"), seen)
    return dead


def out_of_memory(best: Suspect | None, seen: Evidence) -> Chosen | None:
    """The kernel counted a kill, and a kill is what is seen, or nothing else is."""
    killed = next((rank for rank, code in seen.exits.items() if code == -signal.SIGKILL), None)
    is_explained = best is not None and best.kind < Kind.DEATH
    if seen.kills is None or (is_explained and killed is None and seen.launcher_code != -signal.SIGKILL):
        return None
    line = seen.exit_lines[killed] if killed is not None else None
    return refine(Chosen(label="host_oom", line=line, rank=killed), seen)


def not_run(seen: Evidence, suspects: Sequence[Suspect]) -> Chosen | None:
    """A shell whose last command could not be run: its code says so, and its last line why."""
    if seen.launcher_code not in _NOT_RUN:
        return None
    told = [s for s in suspects if s.kind is Kind.HINT and SHELL.search(s.line.text)]
    return Chosen(label=told[-1].label, line=told[-1].line) if told else None


def stalled(seen: Evidence, suspects: Sequence[Suspect]) -> Chosen | None:
    """Nothing ended by itself: the supervisor saw that nothing moved."""
    sign = seen.signs.get("stall")
    if sign is None or seen.waits or seen.exits:
        return None
    prompts = [s.line for s in suspects if s.label == "wandb_prompt"]
    if prompts:
        return Chosen(label="wandb_prompt", line=prompts[-1])
    forked = [s.line for s in suspects if s.label == "tokenizers_fork_deadlock"]
    if forked:
        return Chosen(label="tokenizers_fork_deadlock", line=forked[0], confidence="medium")
    if "busy_cards" in seen.signs and not seen.progress:
        return Chosen(label="p2p_hang_acs" if "acs" in seen.signs else "p2p_hang", line=sign, confidence="medium")
    return Chosen(label="rank_stuck", line=sign, confidence="low")


def waited(seen: Evidence) -> Chosen | None:
    """Who waited for whom, and for what; the watchdog of NCCL knows most."""
    by_kind = {how: [w for w in seen.waits if w.how == how] for how in ("watchdog", "gloo", "store", "heartbeat")}
    if waits := by_kind["watchdog"]:
        return _in_collective(waits, seen)
    if (waits := by_kind["gloo"]) and _are_apart(waits, seen):
        return Chosen(label="collective_mismatch", line=waits[0].line, confidence="medium")
    if waits:
        return Chosen(label="rank_stuck", line=waits[0].line, rank=_missing(waits, seen), confidence="medium")
    if waits := by_kind["store"]:
        return _for_store(waits, seen)
    if waits := by_kind["heartbeat"]:
        return Chosen(label="nccl_hang_heartbeat", line=waits[0].line, confidence="medium")
    return None


def silent(seen: Evidence, suspects: Sequence[Suspect]) -> Chosen | None:
    """A rank that ended by itself and said nothing, while others only noticed."""
    if any(s.ended and s.line.rank is None for s in suspects):
        return None  # somebody said something without saying who it is
    rank = next((rank for rank, code in seen.exits.items() if code > 0 and rank not in seen.talked), None)
    if rank is not None:
        return Chosen(label="user_exception", line=seen.exit_lines[rank], rank=rank, confidence="medium")
    return _left_early(seen, suspects)


def _left_early(seen: Evidence, suspects: Sequence[Suspect]) -> Chosen | None:
    """Who is not in the table, and was not ended by the launcher, exited with 0. A newer table lists those that were ended, too."""
    if not suspects or not seen.exits or (seen.num_closed and _TERMINATED not in seen.exits.values()):
        return None
    left = sorted((seen.ranks | set(range(max(seen.exits)))) - set(seen.exits))
    if not left:
        return None
    who = f"rank {left[0]}" if len(left) == 1 else f"ranks {', '.join(map(str, left))}"
    return Chosen(
        label="uneven_data",
        line=suspects[0].line,
        rank=left[0] if len(left) == 1 else None,
        confidence="low",
        said=f"{who} left with exit code 0 while others went on; {_by(suspects[0].line)}",
    )


def _by(line: LogLine) -> str:
    return "the first to notice" if line.rank is None else f"the first to notice, rank {line.rank}"


def last_resort(seen: Evidence, suspects: Sequence[Suspect]) -> Chosen:
    """Only those speak who noticed. What one of them repeats may still name the cause."""
    if repeated := next((s for s in suspects if s.kind is Kind.ECHO and s.label), None):
        chosen = Chosen(label=repeated.label, line=repeated.line, rank=repeated.line.rank, confidence="low")
        return refine(chosen, seen)
    for rank, code in seen.exits.items():
        if code < 0 and code != _TERMINATED:
            killed = Chosen(label="sigkill_unknown", line=seen.exit_lines[rank], rank=rank, confidence="low")
            if code in _ASKED:
                return replace(killed, label="sigterm_external")
            return _aborted(killed, seen, suspects) if code == -signal.SIGABRT else killed
    if by_code := _by_code(seen, suspects):
        return by_code
    if called := next((s for s in suspects if CALLED.search(s.line.text)), None):
        return Chosen(label="user_exception", line=called.line, rank=called.line.rank, confidence="medium")
    noticed = next((s.line for s in suspects if s.line.rank is not None), suspects[0].line if suspects else None)
    return Chosen(label="unknown", line=noticed, rank=noticed.rank if noticed else None, confidence="low")


def _aborted(dead: Chosen, seen: Evidence, suspects: Sequence[Suspect]) -> Chosen:
    """Native code that ends itself says why, if anybody does."""
    own = [s.line for s in suspects if s.line.rank == dead.rank and _OWN_END.search(s.line.text)]
    best = next((line for line in own if _WHAT in line.text), own[0] if own else dead.line)
    confidence = "medium" if own else dead.confidence
    return refine(replace(dead, label="segfault", line=best, confidence=confidence), seen)


def _by_code(seen: Evidence, suspects: Sequence[Suspect]) -> Chosen | None:
    """Without a launcher of ranks, the program itself ended so; a shell adds 128."""
    code = seen.launcher_code or 0
    ended = 128 - code if 128 < code < 160 else code  # noqa: PLR2004  # signals
    dead = Chosen(label="sigkill_unknown", confidence="medium")
    if ended == -signal.SIGABRT:
        return _aborted(dead, seen, suspects)
    if not suspects and 0 < code < min(_NOT_RUN) and seen.words and not seen.progress:
        return Chosen(label="user_exception", confidence="low")  # `sys.exit("why")` has no sign of an error
    if suspects or ended >= 0:
        return None
    return (
        refine(replace(dead, label="segfault"), seen)
        if ended in _CRASHES
        else dead
        if ended == -signal.SIGKILL
        else None
    )


def _in_collective(waits: Sequence[Waited], seen: Evidence) -> Chosen:
    first = waits[0]
    timeout = Chosen(label="nccl_timeout", line=first.line, confidence="medium")
    if "clock" in seen.signs or any(w.ran_ms > _CLOCK_FACTOR * w.limit_ms > 0 for w in waits):
        return replace(timeout, label="nccl_timeout_clock_jump")
    if line := _skipped(seen):
        return replace(timeout, label="nan_one_rank_skips_collective", line=line, rank=line.rank)
    if odd := _odd_one(waits):
        return replace(timeout, label="uneven_data", line=odd.line, rank=odd.line.rank)
    if seen.recorded.differ or _are_apart(waits, seen) or _went_on(waits):
        return replace(timeout, label="collective_mismatch")
    missing = next((r for r in (_missing(waits, seen), seen.recorded.behind) if r is not None), None)
    if missing is not None:
        label = "timeout_preprocessing" if _prepares(seen) else "nccl_timeout_missing_rank"
        return replace(timeout, label=label, rank=missing)
    return replace(timeout, label=_never_worked(first, seen) or "nccl_timeout")


def _never_worked(first: Waited, seen: Evidence) -> str:
    """The first transfers between cards hung, with nothing else to blame."""
    if "nvlink" in seen.signs:
        return ""  # there a hang is a fault of the machine, which going through the host would hide
    early = first.seq.isdecimal() and int(first.seq) <= _FIRST_COLLECTIVES and not seen.progress
    if early and "acs" in seen.signs:
        return "p2p_hang_acs"
    return "p2p_hang" if early and ("p2p" in seen.signs or int(first.seq) == 1) else ""


def _skipped(seen: Evidence) -> LogLine | None:
    """A rank that saw NaN just before the others began to wait."""
    line = next((s.line for s in seen.suspects if s.label == "nan_one_rank_skips_collective"), None)
    sign = seen.signs.get("nan")
    return line or (sign if sign and sign.rank is not None else None)


def _odd_one(waits: Sequence[Waited]) -> Waited | None:
    """Ranks wait in different collectives of one number: the one with few others, or that left the gradients."""
    by_seq: dict[str, list[Waited]] = {}
    for wait in waits:
        by_seq.setdefault(wait.seq, []).append(wait)
    for group in by_seq.values():
        counts = Counter((w.operation, w.size) for w in group)
        if len(counts) > 1:
            return min(group, key=lambda w: (counts[w.operation, w.size], w.operation in _GRADIENTS))
    return None


def _missing(waits: Sequence[Waited], seen: Evidence) -> int | None:
    """The only rank that did not wait, if the others are known to have."""
    arrived = {w.line.rank for w in waits if w.line.rank is not None}
    missing = seen.ranks - arrived
    return next(iter(missing)) if arrived and len(missing) == 1 else None


def _are_apart(waits: Sequence[Waited], seen: Evidence) -> bool:
    """Every rank says that it waited for another, and not all did at the same place: they took different paths."""
    others = ((s.line.rank, s.place) for s in seen.suspects if s.kind is Kind.ECHO and s.place)
    places = {rank: place for rank, place in (*((w.line.rank, w.place) for w in waits), *others) if rank is not None}
    return len(places) > 1 and set(places) == seen.ranks and "" not in places.values() and len(set(places.values())) > 1


def _went_on(waits: Sequence[Waited]) -> bool:
    """One waits in a later collective than another, which no rank can end before all have come: it ended something else."""
    numbered = [
        (int(wait.seq), wait.operation) for wait in waits if wait.seq.isdecimal() and wait.line.rank is not None
    ]
    first = min(numbered, default=(0, ""))
    return first[1] in _ALL_END_TOGETHER and any(number > first[0] for number, _ in numbered)


def _for_store(waits: Sequence[Waited], seen: Evidence) -> Chosen:
    """Rank 0 keeps the store: who waits for it waits for rank 0."""
    return Chosen(
        label="timeout_preprocessing",
        line=waits[0].line,
        rank=None if any(w.line.rank == 0 for w in waits) else 0,
        confidence="high" if _prepares(seen) else "medium",
    )


def _prepares(seen: Evidence) -> bool:
    return "preparing" in seen.signs and not seen.progress
