"""
NCCL's flight recorder: what each rank wrote down about its last collectives, and what that says when they are compared.

A dump is a pickle that somebody else's process wrote: nothing in it is ever imported, so nothing in it can run.
"""

from __future__ import annotations

import io
import pickle
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

DUMP: Final = "flight_recorder_rank_"  # in the logs of an attempt: where torch is told to write
_MAX_DUMP: Final = 16 << 20  # of 2000 collectives it is some 300 kB
_LIBRARY: Final = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<")
_MAX_NAME: Final = 80
_ENTRIES: Final = 5
_SAID: Final = reprlib.Repr()  # of lists of sizes; few bytes of a pickle can name a list that is longer than any memory
_SAID.maxlevel, _SAID.maxlist, _SAID.maxtuple, _SAID.maxother = 2, 20, 20, _MAX_NAME
_KEPT: Final = ("process_group", "collective_seq_id", "seq_id", "profiling_name", "state", "input_sizes", "is_p2p")


def read_dumps(logs: Path) -> dict[int, list[Mapping[str, Any]]]:
    """By rank. One that is still being written says nothing yet."""
    found = {path.name.removeprefix(DUMP): path for path in logs.glob(f"{DUMP}*")}
    told = {int(rank): parse_dump(path) for rank, path in found.items() if rank.isdecimal()}
    return {rank: entries for rank, entries in told.items() if entries}


class _Plain(pickle.Unpickler):
    """Numbers, texts and containers of them: nothing is imported, so nothing can run."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"a dump names {module}.{name}")


def parse_dump(path: Path) -> list[Mapping[str, Any]]:
    """The collectives in a dump, oldest first; none if it is not what torch writes."""
    try:
        if path.is_symlink() or path.stat().st_size > _MAX_DUMP:
            return []
        dump = _Plain(io.BytesIO(path.read_bytes())).load()
        entries = dump.get("entries", []) if isinstance(dump, dict) else []
        found = entries if isinstance(entries, list) else []
        return [_kept(entry) for entry in found if isinstance(entry, dict)]
    except Exception:  # noqa: BLE001  # a pickle from elsewhere may fail in any way; it is evidence, and not needed
        return []


def _kept(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _short(entry.get(name)) for name in _KEPT} | {"place": _short(_place(entry.get("frames") or ()))}


def _place(frames: Iterable[Mapping[str, Any]]) -> str:
    """The line of the script that called it: frames come from the innermost on."""
    own = next((frame for frame in frames if not _LIBRARY.search(str(frame["filename"]))), None)
    return f"{own['name']} ({Path(str(own['filename'])).name}:{own['line']})" if own else ""


def _short(value: Any) -> Any:  # noqa: ANN401  # whatever is in a dump
    """A dump of thousands of entries has their stacks, too; and what is in it may be nested without end."""
    if value is None or isinstance(value, int):
        return value
    return (value if isinstance(value, str) else _SAID.repr(value))[:_MAX_NAME]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What dumps say: the one rank that came to fewer collectives, or what each is in where that differs."""

    behind: int | None = None
    differ: Mapping[int, str] = field(default_factory=dict)


def compare(told: Mapping[int, Sequence[Mapping[str, Any]]]) -> Recorded:
    """Ranks of one group count its collectives alike: under one number all must be in the same."""
    groups: dict[str, dict[int, dict[int, Mapping[str, Any]]]] = {}
    for rank, entries in told.items():
        for entry in entries:
            if not entry.get("is_p2p"):
                groups.setdefault(_group(entry), {}).setdefault(rank, {})[_sequence(entry)] = entry
    shared = [by_rank for by_rank in groups.values() if len(by_rank) > 1]
    for by_rank in shared:
        if differ := _differ(by_rank):
            return Recorded(differ=differ)
    late = (_behind(by_rank) for by_rank in shared)
    return Recorded(behind=next((rank for rank in late if rank is not None), None))


def missing(told: Mapping[int, Sequence[Mapping[str, Any]]], ranks: Collection[int]) -> int | None:
    """The one rank that wrote nothing, where all others wait in their last collective: torch writes without Python."""
    silent = sorted(set(ranks) - set(told))
    wait = all(entries[-1].get("state") != "completed" for entries in told.values())
    return silent[0] if len(silent) == 1 and told and wait else None


def tell(recorded: Recorded, told: Mapping[int, Sequence[Mapping[str, Any]]], silent: Collection[int] = ()) -> str:
    """Who did not come, and to what, in a line; empty where dumps say nothing of it."""
    if recorded.differ:
        return "; ".join(f"rank {rank} is in {what}" for rank, what in recorded.differ.items())
    if recorded.behind is None:
        return ""
    others = [entries[-1] for rank, entries in told.items() if rank != recorded.behind]
    last = max(others, key=_sequence)
    place = f", in {last['place']}" if last.get("place") else ""
    none = ", and wrote no dump" if recorded.behind in silent else ""
    return f"rank {recorded.behind} did not come to collective {_sequence(last)}, {_operation(last)}{place}{none}"


def _differ(by_rank: Mapping[int, Mapping[int, Mapping[str, Any]]]) -> dict[int, str]:
    known = set.intersection(*(set(entries) for entries in by_rank.values()))
    for sequence in sorted(known):
        told = {rank: entries[sequence] for rank, entries in sorted(by_rank.items())}
        if len({_operation(entry) for entry in told.values()}) > 1:
            return {rank: ", in ".join(filter(None, (_operation(e), e.get("place")))) for rank, e in told.items()}
    return {}


def _behind(by_rank: Mapping[int, Mapping[int, Mapping[str, Any]]]) -> int | None:
    reached = {rank: max(entries) for rank, entries in by_rank.items()}
    behind = [rank for rank, sequence in reached.items() if sequence == min(reached.values())]
    return behind[0] if len(behind) == 1 else None


def _group(entry: Mapping[str, Any]) -> str:
    return str(entry.get("process_group"))[:_MAX_NAME]


def _sequence(entry: Mapping[str, Any]) -> int:
    told = (entry.get("collective_seq_id"), entry.get("seq_id"))
    return next((value for value in told if isinstance(value, int)), 0)


def _operation(entry: Mapping[str, Any]) -> str:
    """What must be the same on all ranks: the collective, and of one that adds up also the sizes."""
    name = str(entry.get("profiling_name", "")).partition(":")[2][:_MAX_NAME]
    return f"{name} of {str(entry.get('input_sizes'))[:_MAX_NAME]}" if name == "all_reduce" else name


def tell_last(entries: Sequence[Mapping[str, Any]]) -> str:
    names = ("collective_seq_id", "profiling_name", "state", "input_sizes", "place")
    return " | ".join(
        " ".join(f"{name}={str(entry.get(name))[:120]}" for name in names) for entry in entries[-_ENTRIES:]
    )
