"""
Whom the kernel killed in this container for want of memory: it counts them, and names nobody. Standard library only.

The shim has a copy of its own of this; it imports nothing of ours.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from runner.facts import Kills

_CGROUPS: Final = (  # of this container, by version 2 and 1: what counts, and the limit
    ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory.max"),
    ("/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_NO_LIMIT: Final = 1 << 60  # cgroup 1 has a number for it, near 2^63


def count_kills() -> Kills:
    """Since the container began; none where nobody counts."""
    for counter, limit in _CGROUPS:
        with suppress(OSError, ValueError):
            lines = Path(counter).read_text().splitlines()
            count = next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
            text = Path(limit).read_text().strip()
            return as_kills(count, int(text) if text.isdecimal() else 0)
    return Kills()


def as_kills(count: int, limit_bytes: int) -> Kills:
    """What was counted, and the limit as the kernel writes it."""
    return Kills(count=count, limit_bytes=limit_bytes if limit_bytes < _NO_LIMIT else 0)
