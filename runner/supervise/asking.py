"""
Whom SIGTERM asks to save and leave: those of an attempt that save on it, and nobody that they need for that.

A launcher that is asked kills its ranks soon after; a rank whose data workers are gone fails before it has
saved, and one whose output nobody reads any more does, too. A plain shell would die of it, and leave alone
what it waits for.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runner.supervise import memory
from runner.supervise.pulse import rank_of

_SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "busybox", "ksh", "mksh", "zsh", "fish"})
_BIT: Final = 1 << (signal.SIGTERM - 1)


@dataclass(frozen=True, slots=True)
class _One:
    parent: int
    program: str  # the file that it runs, without its folder
    takes: bool  # it catches SIGTERM, or waits for it

    @property
    def is_shell(self) -> bool:
        return self.program in _SHELLS


def whom(pids: Iterable[int], launcher: int | None) -> tuple[int, ...]:
    """
    The ranks, where processes say that they are some; else whatever takes SIGTERM, from the launcher down.

    Where nothing takes it, it goes to the launcher, and ends that. A shell is asked if it has a trap, and what it
    started as well: whether a trap passes the signal on cannot be seen.
    """
    ones = {pid: one for pid in pids if (one := _look(pid)) is not None}
    ranks = {pid for pid in ones if rank_of(pid) is not None}
    if own := [pid for pid in ranks if ones[pid].parent not in ranks]:  # their workers say so, too
        return tuple(sorted(asked for pid in own for asked in _below(pid, ones, is_rank=True) or [pid]))
    tops = [launcher] if launcher in ones else [pid for pid, one in ones.items() if one.parent not in ones]
    takers = [asked for pid in tops for asked in _below(pid, ones, is_rank=False)]
    return tuple(sorted(takers or tops))


def _below(pid: int, ones: Mapping[int, _One], *, is_rank: bool) -> list[int]:
    """Whoever takes it first on the way down, and on the way through shells all."""
    one = ones[pid]
    if not one.is_shell and (one.takes or is_rank):
        return [pid]
    children = [child for child, other in ones.items() if other.parent == pid and _may_train(one, other)]
    return [pid] * one.takes + [asked for child in children for asked in _below(child, ones, is_rank=is_rank)]


def _may_train(parent: _One, child: _One) -> bool:
    """What a program starts beside itself, a logger for one, has nothing to save: trainers are its own kind."""
    return parent.is_shell or child.is_shell or child.program == parent.program


def _look(pid: int) -> _One | None:
    """None: it is gone."""
    try:
        fields = dict(line.split(":", 1) for line in memory.read(f"/proc/{pid}/status").decode().splitlines())
        if fields["State"].split()[0] in "ZX":
            return None
        masks = [int(fields[name], 16) for name in ("SigCgt", "SigBlk") if name in fields]
        takes = any(mask & _BIT for mask in masks) or not masks  # a kernel that does not tell: it may
        return _One(int(fields["PPid"]), _program(pid), takes)
    except (OSError, ValueError, KeyError):
        return None


def _program(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/exe").readlink().name
    return ""
