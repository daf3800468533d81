"""
One label made more exact by what else is in the logs: numbers in the line, the phase, the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from runner.facts import FULL_BYTES, Decision
from runner.supervise.triage.evidence import Evidence
from runner.supervise.triage.lines import LogLine
from runner.supervise.triage.table import Kind

_LEAK_FACTOR: Final = 1.3  # memory grew by so much with the steps
_UNITS: Final = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_OTHERS: Final = re.compile(r"Process \d+ has ([\d.]+) ([KMG])iB memory in use")
_OLD_TOTAL: Final = re.compile(r"\(GPU \d+; ([\d.]+) ([KMG])iB total capacity; ([\d.]+) ([KMG])iB already allocated")
_IMPOSSIBLE: Final = 1 << 43  # bytes: no machine that anybody rents has so much
_ASKED: Final = re.compile(r"tried to allocate (\d+) bytes")
_ASKED_NUMPY: Final = re.compile(r"Unable to allocate ([\d.]+) [PEZY]iB|Tried to allocate more than 1EB")
_XID: Final = re.compile(r"Xid \(PCI:[^)]*\): (\d+),")
_BROKEN_COMMANDS: Final = re.compile(r"Xid \(PCI:[^)]*\): (?:32|11|25|69|80),")
_UNCONTAINED: Final = {"48", "95", "140", "171", "172"}
_LINKS: Final = {"74", *map(str, range(144, 151)), "155", "157"}
_OF_PROGRAMS: Final = {"13", "31", "137"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The first real error. `rank` is None if it was none or all of them."""

    label: str
    line: LogLine | None = None
    rank: int | None = None
    confidence: str = "high"
    decision: Decision | None = None  # where it is not the label's usual one
    env: Mapping[str, str] | None = None  # the same
    said: str = ""  # by us, before the line: it was not the rank's own

    @property
    def text(self) -> str:
        return self.line.text if self.line else ""


# a disk that is full keeps its own cause out of the logs: what it has left is measured instead
DISK_FULL: Final = Chosen(label="disk_full", line=None, confidence="high", decision=Decision.RESUME)


def refine(chosen: Chosen, seen: Evidence) -> Chosen:
    """Return the same line under its most exact label, with the decision of this phase."""
    by_label = _BY_LABEL.get(chosen.label)
    return by_label(chosen, seen) if by_label else chosen


def _card_memory(chosen: Chosen, _seen: Evidence) -> Chosen:
    """Fragments: what lies unused is more than was asked for. Occupied: others hold most of the card."""
    asked = _mib_after("Tried to allocate", chosen.text)
    unused = _mib_after("allocated by PyTorch, and", chosen.text)
    mine = _mib_after("Of the allocated memory", chosen.text)
    total = _mib_after("total capacity of", chosen.text)
    others = sum(_mib(*match.groups()) for match in _OTHERS.finditer(chosen.text))
    if old := _OLD_TOTAL.search(chosen.text):
        total, mine = _mib(old[1], old[2]), _mib(old[3], old[4])
        others = (
            total - mine - _mib_after("already allocated;", chosen.text) - (_mib_after("free;", chosen.text) or mine)
        )
    if asked and unused >= asked:
        return replace(chosen, label="cuda_oom_fragmentation")
    if total and others > total / 2 and mine < total / 4:
        return replace(chosen, label="gpu_occupied")
    return chosen


def _mib_after(words: str, text: str) -> float:
    match = re.search(re.escape(words) + r" ([\d.]+) ([KMG])i?B", text)
    return _mib(match[1], match[2]) if match else 0.0


def _mib(number: str, unit: str) -> float:
    return float(re.match(r"\d*(?:\.\d+)?", number)[0] or 0) * _UNITS[unit]  # type: ignore[index]  # it matches anything


def _space(chosen: Chosen, seen: Evidence) -> Chosen:
    if "/dev/shm" in chosen.text:  # noqa: S108  # in a text
        return _shared_memory(replace(chosen, label="shm_too_small"), seen)
    return chosen


def _shared_memory(chosen: Chosen, seen: Evidence) -> Chosen:
    if "shm_leftovers" in seen.signs:
        return replace(chosen, label="shm_leaked_segments")
    return replace(chosen, env={"NCCL_SHM_DISABLE": "1"}) if "NCCL" in chosen.text else chosen


def _model(chosen: Chosen, _seen: Evidence) -> Chosen:
    """A rank that counts nothing at all received zeros: nobody builds a model without parameters."""
    return replace(chosen, label="p2p_broken_zero_params") if re.search(r"\b0 params", chosen.text) else chosen


def _port(chosen: Chosen, seen: Evidence) -> Chosen:
    """A launcher listens once; where a rank that is not the first does, the script is wrong."""
    ranks = {s.line.rank for s in seen.suspects if s.label == "port_in_use" and s.line.rank is not None}
    return replace(chosen, label="port_in_use_rank_bug") if ranks - {0} else chosen


def _host_memory(chosen: Chosen, seen: Evidence) -> Chosen:
    """Before the first step a second try would end in the same way; later it starts with less."""
    if is_impossible(chosen.text):
        return replace(chosen, label="user_exception")
    if worker := next((s.line for s in seen.suspects if s.label == "host_oom_worker"), None):
        return replace(chosen, label="host_oom_worker", line=worker, rank=worker.rank or chosen.rank)
    if _grew(seen.memory_gb):
        return replace(chosen, label="host_oom_leak")
    return chosen if seen.progress else replace(chosen, decision=Decision.GIVE_UP_USER)


def is_impossible(text: str) -> bool:
    """A size that nobody has memory for was computed wrong."""
    asked = _ASKED.search(text)
    return _ASKED_NUMPY.search(text) is not None or (asked is not None and int(asked[1]) > _IMPOSSIBLE)


def _grew(amounts: Sequence[float]) -> bool:
    return len(amounts) > 1 and amounts[-1] > _LEAK_FACTOR * amounts[0] and list(amounts) == sorted(amounts)


def _link(chosen: Chosen, seen: Evidence) -> Chosen:
    """The kernel has the last word about the hardware."""
    numbers = _xids(seen)
    blames_program = numbers & _OF_PROGRAMS or "no_xid" in seen.signs
    return replace(chosen, label="nvlink_false_alarm") if blames_program and not numbers & _LINKS else chosen


def _crash(chosen: Chosen, seen: Evidence) -> Chosen:
    return chosen if seen.progress else replace(chosen, label="segfault_startup")


def _network(chosen: Chosen, seen: Evidence) -> Chosen:
    return chosen if seen.progress else replace(chosen, decision=Decision.RETRY_AS_IS)


def _nan(chosen: Chosen, seen: Evidence) -> Chosen:
    return replace(chosen, label="nan_from_bad_gpu") if "bad_card" in seen.signs else chosen


def _memory_error(chosen: Chosen, seen: Evidence) -> Chosen:
    """A contained error (94) ends one program; only the second is the machine's end."""
    numbers = _xids(seen)
    if any(s.label == "gpu_hbm_failing" for s in seen.suspects):
        return replace(chosen, label="gpu_hbm_failing")
    return replace(chosen, decision=Decision.RESUME) if "94" in numbers and not numbers & _UNCONTAINED else chosen


def _fault(chosen: Chosen, seen: Evidence) -> Chosen:
    """The first transfer of all blames the path between cards; a broken command buffer perhaps the card."""
    in_transfer = any(s.in_collective or s.kind is Kind.ECHO for s in seen.suspects if s.line is chosen.line)
    if in_transfer and not seen.progress:
        return replace(chosen, label="cuda_illegal_access_nccl")
    return replace(chosen, decision=Decision.RESUME) if _BROKEN_COMMANDS.search(chosen.text) else chosen


def _of_the_script(chosen: Chosen, seen: Evidence) -> Chosen:
    """NCCL finds any error of the card when it cleans up. After good steps the script's own error is the first."""
    own = (s for s in seen.suspects if s.label == "cuda_illegal_access" and s.ended and not s.in_collective)
    mine = next((s for s in own if s.line.rank in {chosen.rank, None}), None)
    return replace(chosen, label="cuda_illegal_access", line=mine.line) if mine and seen.progress else chosen


def _xids(seen: Evidence) -> set[str]:
    return {match[1] for s in seen.suspects for match in _XID.finditer(s.line.text)}


_BY_LABEL: Final[Mapping[str, Callable[[Chosen, Evidence], Chosen]]] = {
    "cuda_oom": _card_memory,
    "disk_full": _space,
    "shm_too_small": _shared_memory,
    "ddp_model_mismatch": _model,
    "port_in_use": _port,
    "host_oom": _host_memory,
    "xid74_nvlink": _link,
    "segfault": _crash,
    "network_reset": _network,
    "nan_loss": _nan,
    "gpu_ecc": _memory_error,
    "cuda_illegal_access": _fault,
    "cuda_illegal_access_nccl": _of_the_script,
}


def weigh_disk(chosen: Chosen, free_bytes: int | None) -> Chosen:
    """What only follows from a full disk is certain where the disk is full."""
    if chosen.label != DISK_FULL.label or chosen.confidence != "medium" or free_bytes is None:
        return chosen
    return replace(chosen, confidence="high" if is_full(free_bytes) else "low")


def is_full(free_bytes: int) -> bool:
    return free_bytes < FULL_BYTES


def tell_full(folder: Path, free_bytes: int) -> str:
    """Return the line for a human. No log is named: it has no word of this."""
    return f"the disk of {folder} is full: {free_bytes // 1000} kB are free, and no log could be written"
