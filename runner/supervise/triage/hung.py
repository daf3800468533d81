"""
An attempt that the supervisor ended because it hung: who the others waited for, and where it was.

The stacks come from the killing signal (every thread's, in the rank's own log) or from py-spy (in
the evidence). A rank that sits in a collective waits; the one that does not is waited for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from runner.supervise.triage.evidence import Evidence, Suspect
from runner.supervise.triage.lines import LogLine, read_lines
from runner.supervise.triage.refine import Chosen
from runner.supervise.triage.table import Kind

HANG_FILE: Final = "hang.json"
_MAX_BYTES: Final = 1 << 20
_ABORTED: Final = re.compile(r"^Fatal Python error: Aborted")
_THREAD: Final = re.compile(r"^(?P<current>Current thread|Thread) 0x[0-9a-f]+")
_FRAME: Final = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')
_SPY_THREAD: Final = re.compile(r'^Thread (?:0x)?\w+ \([^)]*\): "(?P<name>[^"]*)"')
_SPY_FRAME: Final = re.compile(r"^    (?P<name>.+?) \((?P<file>.+):(?P<line>\d+)\)$")
_SPY_FILE: Final = re.compile(r"stack-(?P<rank>\d+)-(?P<pid>\d+)\.txt")
_LIBRARY: Final = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<|/vramfarm/|^torch/")
_COLLECTIVE: Final = re.compile(r"torch/distributed/|torch/nn/parallel/distributed|deepspeed/comm")
_BACKWARD: Final = re.compile(r"torch/autograd/|torch/_tensor\.py")
_LOADER: Final = re.compile(r"torch/utils/data/")
_P2P: Final = re.compile(r"^(?:send|recv|batch_isend)")
_OPERATION: Final = re.compile(r"^(?:all_|broadcast|barrier|reduce|gather|scatter|send|recv|batch_isend|monitored)")


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    name: str
    told: LogLine | None = None  # where a log has it


@dataclass(frozen=True, slots=True)
class Place:
    """Where the main thread of a rank was, innermost frame first."""

    rank: int
    frames: tuple[Frame, ...]

    @property
    def own(self) -> Frame | None:
        """The innermost line that is the user's."""
        return next((f for f in self.frames if not _LIBRARY.search(f.file)), self.frames[0] if self.frames else None)

    @property
    def waits(self) -> bool:
        return any(_COLLECTIVE.search(f.file) or _BACKWARD.search(f.file) for f in self.frames)

    @property
    def loads(self) -> bool:
        return any(_LOADER.search(f.file) for f in self.frames)

    @property
    def operation(self) -> str:
        """The collective it is in, as the script calls it."""
        return next(
            (f.name for f in reversed(self.frames) if _COLLECTIVE.search(f.file) and _OPERATION.match(f.name)), ""
        )


def read_hang(folder: Path) -> Mapping[str, Any] | None:
    """What the supervisor wrote down before it ended a hang; None: it did not hang."""
    try:
        with (folder / HANG_FILE).open("rb") as file:
            fields = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def explain(hang: Mapping[str, Any], seen: Evidence, sources: Sequence[Sequence[LogLine]]) -> tuple[Chosen, str]:
    """Return what it was, and a line about it for a human."""
    # reversed: of a log, the first dump counts; what a rank prints between it and those of its workers comes of our kill
    cut = {line.source: line.number for lines in sources for line in reversed(lines) if _ABORTED.match(line.text)}
    if error := _earlier(seen.suspects, cut):
        return error, ""
    places = {place.rank: place for place in _places(hang, sources)}
    rank, why = _who(hang, places)
    chosen = Chosen(label="rank_stuck", rank=rank, confidence="high" if rank is not None else "medium")
    if differ := _differ(hang):
        chosen = replace(chosen, label="collective_mismatch", rank=None, confidence="high")
        why = "; ".join(f"rank {rank} is in {told}" for rank, told in differ.items())
        places = {}  # since then they went on, and wait for their cards somewhere else
    elif rank is None and _are_apart(places.values()):
        chosen = replace(chosen, label="collective_mismatch", confidence="high")
        why = "; ".join(
            f"rank {r} waits in {p.operation or 'another place'}{_at(p)}" for r, p in sorted(places.items())
        )
        first = places[min(places)].own
        return replace(chosen, line=first.told if first else None), _tell(hang, why)
    elif "wandb" in str(hang.get("question", "")):
        chosen = replace(chosen, label="wandb_prompt")
    place = places.get(rank if rank is not None else min(places, default=-1))
    own = place.own if place else None
    return replace(chosen, line=own.told if own else None), _tell(hang, why, _at(place))


def _tell(hang: Mapping[str, Any], why: str, where: str = "") -> str:
    told = f"{why}{where}".removeprefix(", ")
    return f"hang: {f'{told}; ' if told else ''}{hang.get('reason', '')}; see {hang.get('evidence', 'the logs')}"


def _at(place: Place | None) -> str:
    own = place.own if place else None
    return f", in {own.name} ({Path(own.file).name}:{own.line})" if own else ""


def _are_apart(places: Collection[Place]) -> bool:
    """All wait for others, and not at the same place of the script; those that send to each other may."""
    if any(not place.waits or _P2P.match(place.operation) for place in places):
        return False
    known = {place.operation for place in places if place.operation}
    return len(known) > 1 or (bool(known) and len({_at(place) for place in places}) > 1)


def _differ(hang: Mapping[str, Any]) -> dict[str, str]:
    """The collective of each rank, where NCCL's flight recorder has different ones under one number."""
    told = hang.get("differ")
    return {str(rank): str(what) for rank, what in told.items()} if isinstance(told, dict) else {}


def _earlier(suspects: Sequence[Suspect], cut: Mapping[int, int]) -> Chosen | None:
    """An error that a rank, or the kernel, named before all this: the rank's process just did not end."""
    for suspect in sorted(suspects, key=lambda s: (s.kind, -s.weight, s.line.place)):
        before = suspect.line.number < cut.get(suspect.line.source, 0)
        of_rank = suspect.kind in {Kind.CAUSE, Kind.ERROR} and suspect.ended and not suspect.in_collective and before
        if suspect.kind is Kind.HOST or of_rank:
            return Chosen(label=suspect.label, line=suspect.line, rank=suspect.line.rank, confidence="medium")
    return None


def _who(hang: Mapping[str, Any], places: Mapping[int, Place]) -> tuple[int | None, str]:
    """Who is stuck: as seen from outside, else the one that is not in a collective as all others are."""
    known = hang.get("rank")
    if isinstance(known, int):
        place = places.get(known)
        return known, f"rank {known} waits for its data" if place and place.loads else f"rank {known} is stuck"
    loading = [r for r, p in places.items() if p.loads]
    outside = [r for r, p in places.items() if not p.waits]
    if len(loading) == 1:
        return loading[0], f"rank {loading[0]} waits for its data"
    if len(outside) == 1 and len(places) > 1:
        return outside[0], f"rank {outside[0]} is stuck"
    if loading and len(loading) == len(places):
        return None, "every rank waits for its data"
    return None, ""


# ------------------------------------------------------------------------------------ stacks


def _places(hang: Mapping[str, Any], sources: Sequence[Sequence[LogLine]]) -> Iterator[Place]:
    """Of each rank one stack: the first its log has, else py-spy's."""
    seen: set[int] = set()
    for lines in sources:
        start = next((at for at, line in enumerate(lines) if _ABORTED.match(line.text)), None)
        if start is None or (rank := lines[start].rank) is None or rank in seen:
            continue
        seen.add(rank)
        yield Place(rank, _main_thread(lines[start + 1 :]))
    folder = Path(str(hang.get("evidence") or "/nowhere"))
    for path in sorted(folder.glob("stack-*.txt")):
        match = _SPY_FILE.fullmatch(path.name)
        if match and int(match["rank"]) not in seen:
            seen.add(int(match["rank"]))
            yield Place(int(match["rank"]), _spied(read_lines(path)))


def _main_thread(lines: Sequence[LogLine]) -> tuple[Frame, ...]:
    """The last thread that one dump tells of is the first that was made; it ends with another dump, or with other words."""
    threads: list[list[Frame]] = []
    for line in lines:
        if _THREAD.match(line.text):
            threads.append([])
        elif threads and (match := _FRAME.match(line.text)):
            threads[-1].append(Frame(match["file"], int(match["line"]), match["name"], line))
        elif line.text.strip() and threads:
            break
    return tuple(next((frames for frames in reversed(threads) if frames), []))


def _spied(lines: Sequence[LogLine]) -> tuple[Frame, ...]:
    threads: dict[str, list[Frame]] = {}
    frames: list[Frame] = []
    for line in lines:
        if match := _SPY_THREAD.match(line.text):
            frames = threads.setdefault(match["name"], [])
        elif match := _SPY_FRAME.match(line.text):
            frames.append(Frame(match["file"], int(match["line"]), match["name"]))
    return tuple(threads.get("MainThread") or frames)
