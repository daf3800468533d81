"""Whether cards may read each other's memory: `nvidia-smi topo -p2p`, and NVIDIA's p2pBandwidthLatencyTest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from runner.facts import Broken, Pair, PeerAccess, ReadingKind
from runner.probes.readings import matrix as table
from runner.probes.readings.matrix import Matrix

_WORDS: Final = ("NS", "CNS", "GNS", "TNS", "DR", "U", "OK")  # of two that differ the one that is not OK counts
_STATUS: Final = re.compile("CNS|GNS|TNS|NS|DR|OK|U")
_WEAKER: Final = {word: at for at, word in enumerate(_WORDS)}
_LEGEND: Final = re.compile(r"\s*OK\s+=|.*topo\s+-p2p\b")
_SAID: Final = re.compile(
    r"Device\s?=?\s?(\d{1,3})\s+(CAN|CANNOT)\s+Access Peer Device\s?=?\s?(\d{1,3})", re.IGNORECASE
)
_TITLE: Final = re.compile(r"\s*P2P Connectivity Matrix")
_DIGITS: Final = re.compile(r"\s*\d{1,3}(?:\s+[01])+\s*")


def recognise(lines: Sequence[str]) -> bool:
    if any(_SAID.search(line) or _TITLE.match(line) for line in lines):
        return True
    found = table.find_matrix(lines, _STATUS)
    if found is None:
        return False
    return bool(found.vocabulary()) or any(_LEGEND.match(line) for line in lines) or _is_bare(found)


def parse(lines: Sequence[str]) -> PeerAccess | Broken:
    said = _said(lines) or _connectivity(lines)
    if said:
        return _from_pairs(said)
    found = table.find_matrix(lines, _STATUS) or Matrix()
    pairs, _ = table.pair_up(found, _WEAKER)
    if complaint := table.complaint(found, len(pairs)):
        hint = "save the whole output of `nvidia-smi topo -p2p r`"
        return Broken(kind=ReadingKind.P2P, message=complaint, hint=hint, gpus=found.gpus, pairs=tuple(pairs))
    return PeerAccess(gpus=found.gpus, pairs=tuple(pairs))


def _is_bare(found: Matrix) -> bool:
    """One card and nothing else: `topo -m` would have had its affinity."""
    return bool(found.rows) and not found.has_affinity


def _said(lines: Iterable[str]) -> list[tuple[int, int, bool]]:
    matches = (_SAID.search(line) for line in lines)
    return [(int(m[1]), int(m[3]), m[2].upper() == "CAN") for m in matches if m]


def _connectivity(lines: Sequence[str]) -> list[tuple[int, int, bool]]:
    """Rows of ones and zeros under the title, numbered from the head's first."""
    start = next((at for at, line in enumerate(lines) if _TITLE.match(line)), len(lines))
    numbers = [n for line in lines[start + 1 : start + 2] for n in line.split()[1:] if n.isdecimal()]
    rows = []
    for line in lines[start + 2 : start + 2 + table.MAX_GPUS]:
        if not _DIGITS.fullmatch(line):
            break
        rows.append(line.split())
    return [
        (int(row[0]), int(other), cell == "1")
        for row in rows
        for other, cell in zip(numbers, row[1:], strict=False)
        if row[0] != other
    ]


def _from_pairs(said: Iterable[tuple[int, int, bool]]) -> PeerAccess | Broken:
    told: dict[tuple[int, int], bool] = {}
    for one, other, can in said:
        key = (min(one, other), max(one, other))
        told[key] = told.get(key, True) and can
    numbers = sorted({n for key in told for n in key})
    pairs: tuple[Pair, ...] = tuple((*key, "OK" if can else "NS") for key, can in sorted(told.items()))
    gpus = tuple(f"GPU{n}" for n in numbers)
    expected = len(numbers) * (len(numbers) - 1) // 2
    if len(pairs) < expected:
        message = f"the list is cut: {len(pairs)} of {expected} pairs of {len(numbers)} cards can be read"
        return Broken(kind=ReadingKind.P2P, message=message, hint="save the whole output", gpus=gpus, pairs=pairs)
    return PeerAccess(gpus=gpus, pairs=pairs)
