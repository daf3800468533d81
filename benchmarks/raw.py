"""Bytes to a disk and back with nothing between: what engines are measured against. No torch."""

import os
from pathlib import Path

PIECE = 8 << 20


def direct(folder):
    """O_DIRECT where the filesystem has it, else 0."""
    probe = Path(folder) / f"probe-{os.getpid()}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return 0
    finally:
        probe.unlink(missing_ok=True)
    return os.O_DIRECT


def put(fd, view, at):
    while view:
        count = os.pwrite(fd, view, at)
        view, at = view[count:], at + count


def get(fd, view, at):
    while view:
        count = os.preadv(fd, [view], at)
        view, at = view[count:], at + count
