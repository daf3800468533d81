"""
Which files tell of an attempt, and whose they are: kernel, ranks, launcher, elastic error files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runner.facts import Kills
from runner.supervise.kills import as_kills
from runner.supervise.triage.lines import LogLine, parse_line, read_lines

_MAX_FILES: Final = 1_024
_MAX_ERROR_FILE: Final = 1 << 20
_LOGS: Final = frozenset({".log", ".txt", ".out", ".err"})
_ATTEMPT: Final = re.compile(r"attempt_(\d+)")
_RANK: Final = re.compile(r"rank[_-]?(\d+)")
_KERNEL: Final = re.compile(r"dmesg|kern|journal")
_LAUNCHER: Final = re.compile(r"launcher|torchrun|main")


@dataclass(frozen=True, slots=True)
class Source:
    path: Path
    rank: int | None
    order: tuple[int, int, int, str]  # the kernel first, then who stopped first, then the launcher


def find_sources(path: Path) -> tuple[Source, ...]:
    """Return the files to read, in the order of evidence; of torchrun's own restarts only the first attempt."""
    if not path.is_dir():
        return (Source(path, None, (0, 0, 0, "")),)
    files = _newest_attempt(path)
    first = min((int(m[1]) for file in files if (m := _attempt(file))), default=0)
    kept = [file for file in files if not (m := _attempt(file)) or int(m[1]) == first]
    return tuple(sorted((_source(file) for file in kept), key=lambda source: source.order))


def read_source(source: Source, index: int) -> list[LogLine]:
    """Return what is kept of a file, its lines marked with `index`."""
    if source.path.suffix == ".json":
        return list(_error_file(source, index))
    return read_lines(source.path, index, source.rank)


def read_kills(folder: Path) -> Kills | None:
    """What the shim asked the kernel, which counts whom it killed; None: nobody, or nobody counted."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads((folder / "exit.json").read_bytes())
        return as_kills(int(record["oom_kills"]), int(record["memory_limit"]))
    return None


def attempt_folder(folder: Path) -> Path:
    """The folder itself; of a run's folder, or of its logs, that of its last attempt."""
    attempts = sorted((*folder.glob("attempt-*"), *folder.glob("logs/attempt-*")))
    return attempts[-1] if attempts else folder


def _newest_attempt(folder: Path) -> list[Path]:
    """Files of a folder of logs; of a run's folder, those of its last attempt."""
    found = (file for file in attempt_folder(folder).rglob("*") if _is_log(file) and file.is_file())
    return [file for _, file in zip(range(_MAX_FILES), found, strict=False)]


def _is_log(file: Path) -> bool:
    return file.suffix in _LOGS or file.name == "error.json" or (not file.suffix and bool(_KERNEL.search(file.name)))


def _attempt(file: Path) -> re.Match[str] | None:
    return _ATTEMPT.fullmatch(file.parent.parent.name)


def _source(file: Path) -> Source:
    rank = _rank(file)
    group = 3 if file.suffix == ".json" else 0 if _KERNEL.search(file.name) else 2 if _LAUNCHER.search(file.name) else 1
    try:
        written_ns = file.stat().st_mtime_ns
    except OSError:
        written_ns = 0
    return Source(file, rank, (group, written_ns, -1 if rank is None else rank, str(file)))


def _rank(file: Path) -> int | None:
    if _attempt(file) and file.parent.name.isdecimal():
        return int(file.parent.name)
    match = _RANK.search(file.name) or _RANK.fullmatch(file.parent.name)
    return int(match[1]) if match else None


def _error_file(source: Source, index: int) -> Iterator[LogLine]:
    """What `@record` wrote about an exception; torchrun makes it, the script fills it: nothing of it is trusted."""
    try:
        with source.path.open("rb") as file:
            told = json.loads(file.read(_MAX_ERROR_FILE))["message"]
        text = str(told["extraInfo"]["py_callstack"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    for number, line in enumerate(text.encode(errors="replace").split(b"\n"), 1):
        yield parse_line(line, index, number, source.rank)
