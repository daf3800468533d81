"""Whether processes of an attempt have a file open that they could still write to."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def are_written(pids: Iterable[int], files: Iterable[Path]) -> bool:
    """Whether one of the processes has one of the files open for writing."""
    wanted = {os.path.realpath(file) for file in files}
    return any(_opens_for_writing(pid, wanted) for pid in pids)


def _opens_for_writing(pid: int, wanted: set[str]) -> bool:
    with suppress(OSError):  # it has just ended
        for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208  # names only
            if _target(pid, fd) in wanted and _is_writable(pid, fd):
                return True
    return False


def _target(pid: int, fd: str) -> str:
    try:
        return str(Path(f"/proc/{pid}/fd/{fd}").readlink())
    except OSError:
        return ""


def _is_writable(pid: int, fd: str) -> bool:
    try:
        lines = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().splitlines()
    except OSError:
        return False
    flags = next((int(line.split()[1], 8) for line in lines if line.startswith("flags:")), 0)
    return flags & os.O_ACCMODE != os.O_RDONLY
