"""
Signs of life of an attempt, looked at from outside: what the ranks say through the control page,
what they print, and what the kernel counts for them. Nothing here asks them anything.

Cost of one look, measured with 8 ranks of 4 workers each on a virtual machine: 4 ms.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runner.facts import Live, Pulse, RankPulse, Stage
from runner.supervise import memory, process
from runner.supervise.cards import Cards
from runner.supervise.logs import Stream, clean, find_streams
from runner.supervise.triage.evidence import PROGRESS
from vramfarm.protocol import ControlPage, Phase, Slot

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_TAIL_BYTES: Final = 4096
_EVALUATION: Final = re.compile(r"(?i)\b(?:eval(?:uat\w+)?|valid(?:at\w+)?|testing|benchmark\w*)\b")
_QUESTION: Final = re.compile(r"(?:\?|\[[yYnN]/[yYnN]\]|\([yYnN]/[yYnN]\)|:|>>?)\s*$")
_MAX_QUESTION: Final = 200


class PulseReader:
    """Looks at one attempt again and again; remembers who is which rank."""

    def __init__(self, folder: Path, cards: Cards) -> None:
        self._folder, self._cards = folder, cards
        self._ranks: dict[int, int] = {}  # by pid; who is none yet may still be on its way to become one
        self._sizes: dict[Path, int] = {}
        self._told: dict[Path, str] = {}  # the last line of each file
        self._progress, self._question, self._evaluates = "", "", False

    def read(self, live: Live, page: ControlPage | None, *, cards_every_s: float) -> Pulse:
        """Return the signs of now; the cards are asked at most so often."""
        now = time.monotonic()
        stats = {pid: stat for pid in live.trainers if (stat := _stat(pid))}
        own = self._who(stats, page)
        streams = find_streams(self._folder)
        self._read_logs(streams)
        return Pulse(
            at_s=now,
            stage=self._stage(page),
            ranks=tuple(_rank_pulse(rank, pid, stats, own, page) for pid, rank in sorted(own.items(), key=_by_rank)),
            cards=self._cards.look(now, every_s=cards_every_s),
            log_bytes=sum(self._sizes.values()),
            progress=self._progress,
            question=self._question,
            received_bytes=_received_bytes(),
            dirty_bytes=_dirty_bytes(),
            saver_bytes=sum(_io_bytes(pid) for pid in live.savers),
        )

    def _who(self, stats: Mapping[int, _Stat], page: ControlPage | None) -> dict[int, int]:
        """Which processes are ranks: they say so, or the launcher does; else the launcher's child is the one."""
        if page is not None:
            told = {page.get(rank, Slot.PID): rank for rank in range(page.num_ranks)}
            if told := {pid: rank for pid, rank in told.items() if pid in stats}:
                return told
        self._ranks = {pid: rank for pid, rank in self._ranks.items() if pid in stats}
        for pid in stats:
            if pid not in self._ranks and (rank := rank_of(pid)) is not None:
                self._ranks[pid] = rank
        found = self._ranks
        own = {pid: rank for pid, rank in found.items() if stats[pid].parent not in found}  # workers have it, too
        launchers = [pid for pid, stat in stats.items() if stat.parent not in stats]
        children = [pid for pid, stat in stats.items() if stat.parent in launchers]
        return own or dict.fromkeys(children[:1], 0)

    def _stage(self, page: ControlPage | None) -> Stage:
        phases = _phases(page)
        if Phase.SAVING in phases:
            return Stage.SAVING
        if phases and phases <= {Phase.DONE, Phase.LEFT}:
            return Stage.ENDING
        if phases & {Phase.STARTING, Phase.LOADING}:
            return Stage.STARTING
        return Stage.EVALUATING if self._evaluates else Stage.TRAINING

    def _read_logs(self, streams: Sequence[Stream]) -> None:
        grown = [s for s in streams if self._grew(s.path)]
        for stream in grown:
            raw = _tail(stream.path)
            *whole, last = re.split(rb"[\r\n]", raw)
            lines = [clean(line) for line in whole if line.strip()]
            self._told[stream.path] = "" if b"\r" in raw else clean(last)
            if progress := next((line for line in reversed(lines) if PROGRESS.search(line)), ""):
                self._progress = progress
            if lines and stream.rank <= 0:
                self._evaluates = bool(_EVALUATION.search(lines[-1]))
        asked = (told for told in self._told.values() if _QUESTION.search(told))
        self._question = "" if grown else next(asked, "")[-_MAX_QUESTION:].strip()

    def _grew(self, path: Path) -> bool:
        try:
            size = path.stat().st_size
        except OSError:
            return False
        before = self._sizes.get(path)
        self._sizes[path] = size
        return size != before


@dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    parent: int
    cpu_s: float  # of it and of its children that ended


def _rank_pulse(
    rank: int, pid: int, stats: Mapping[int, _Stat], own: Mapping[int, int], page: ControlPage | None
) -> RankPulse:
    family = [p for p in stats if _ancestor(p, stats, own) == pid]
    told = page is not None and page.get(rank, Slot.PID) == pid
    return RankPulse(
        rank=rank,
        pid=pid,
        state=stats[pid].state,
        step=page.get(rank, Slot.STEP) if told and page else 0,
        beat_s=page.get(rank, Slot.BEAT_NS) * 1e-9 if told and page else 0.0,
        cpu_s=sum(stats[p].cpu_s for p in family),
        io_bytes=sum(_io_bytes(p) for p in family),
    )


def _ancestor(pid: int, stats: Mapping[int, _Stat], own: Mapping[int, int]) -> int | None:
    while pid in stats and pid not in own:
        pid = stats[pid].parent
    return pid if pid in own else None


def _by_rank(item: tuple[int, int]) -> int:
    return item[1]


def _phases(page: ControlPage | None) -> set[int]:
    if page is None:
        return set()
    return {page.get(rank, Slot.PHASE) for rank in range(page.num_ranks) if page.get(rank, Slot.PID)}


def _stat(pid: int) -> _Stat | None:
    fields = process.stat_fields(pid)
    return _Stat(fields[0].decode(), int(fields[1]), sum(map(int, fields[11:15])) / _TICKS) if fields else None


def rank_of(pid: int) -> int | None:
    """The local rank that a process was started as, or a process above it; None: none."""
    with suppress(OSError, ValueError):
        for entry in (process.ask(pid, "environ") or b"").split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == b"LOCAL_RANK":
                return int(value)
    return None


def _io_bytes(pid: int) -> int:
    """Bytes through read and write, from whatever they came: a cache, a disk, a pipe."""
    with suppress(OSError, ValueError, IndexError):
        lines = memory.read(f"/proc/{pid}/io").splitlines()
        return sum(int(line.split()[1]) for line in lines[:2])
    return 0


def _dirty_bytes() -> int:
    with suppress(OSError, ValueError, IndexError):
        lines = memory.read("/proc/meminfo").splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith((b"Dirty:", b"Writeback:")))
    return 0


def _received_bytes() -> int:
    with suppress(OSError, ValueError, IndexError):
        lines = memory.read("/proc/net/dev").decode().splitlines()[2:]
        return sum(int(line.partition(":")[2].split()[0]) for line in lines if not line.strip().startswith("lo:"))
    return 0


def _tail(path: Path) -> bytes:
    with suppress(OSError), path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        return file.read(_TAIL_BYTES)
    return b""
