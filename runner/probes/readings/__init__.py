"""
Readings of a machine that were saved as text: which kind it is, and what it says.

A module here is one kind: `recognise` claims a text by its structure, `parse` returns its facts
or says what is broken. Neither runs anything, and none raises. `refusals` comes last: it knows
what is printed instead of a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from runner.facts import Broken, Reading, ReadingKind
from runner.probes.readings import busbw, fabric, limits, p2p, query, refusals, shm, topo
from runner.probes.readings.text import MAX_BYTES, is_binary, plain_lines

__all__ = ["MAX_BYTES", "READERS", "read"]


class Reader(Protocol):
    def recognise(self, lines: Sequence[str]) -> bool: ...
    def parse(self, lines: Sequence[str]) -> Reading: ...


READERS: Final[Mapping[str, Reader]] = {
    "topo": topo,
    "p2p": p2p,
    "busbw": busbw,
    "shm": shm,
    "limits": limits,
    "fabric": fabric,
    "query": query,
    "refusals": refusals,
}


def read(raw: bytes | str) -> Reading:
    """Return what a reading says. Any text and any bytes will do: what cannot be read is `Broken`."""
    if is_binary(raw):
        return Broken(kind=ReadingKind.UNKNOWN, message="this is no text", hint=_HINT)
    lines = plain_lines(raw)
    if not any(line.strip() for line in lines):
        return Broken(kind=ReadingKind.UNKNOWN, message="the text is empty", hint=_HINT)
    reader = next((reader for reader in READERS.values() if reader.recognise(lines)), None)
    if reader is None:
        return Broken(kind=ReadingKind.UNKNOWN, message="expected a reading of a known kind, found none", hint=_HINT)
    return reader.parse(lines)


_HINT: Final = (
    "known are nvidia-smi topo -m, nvidia-smi topo -p2p r, nvidia-smi -q, nvidia-smi --query-gpu=… --format=csv, "
    "df -h /dev/shm, the control group's memory.max, and all_reduce_perf"
)
