"""What a process of a run is: guardian, runner, shim, launcher, rank, saver, task."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from runner.supervise.process import Process

PARTS: Final = ("guardian", "runner", "shim", "launcher", "rank", "ranks", "saver", "tasks")
_OTHERS: Final = ("box", "other")
_LOOKS: Final = {
    "other": {"container.py"},
    "box": {"box.py"},
    "guardian": {"guard.py", "guardian.py", "run"},
    "runner": {"loop"},
    "launcher": {"launch_ranks.py", "torch.distributed.run"},
}


def sort_parts(processes: Iterable[Process]) -> dict[str, list[Process]]:
    """The processes by what they are; "rank" stays empty: it stands for one of "ranks"."""
    sorted_: dict[str, list[Process]] = {name: [] for name in (*PARTS, *_OTHERS)}
    for process in processes:
        sorted_[name_part(process)].append(process)
    return sorted_


def name_part(process: Process) -> str:
    if process.role in {"shim", "saver"}:
        return process.role
    if process.role == "task":
        return "tasks"
    names = {Path(word).name for word in command_line(process)}
    for part, words in _LOOKS.items():
        if words & names:
            return part
    return "ranks" if b"RANK" in _environment(process) else "other"


def command_line(process: Process) -> list[str]:
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _environment(process: Process) -> set[bytes]:
    try:
        entries = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return set()
    return {entry.partition(b"=")[0] for entry in entries}
