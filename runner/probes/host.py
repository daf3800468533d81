"""Processors, memory, limits, disks, ports: what a run needs besides its cards."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from runner.facts import DiskRate, Host, MemoryLimit, SharedMemory
from runner.probes.readings import read

_GROUP: Final = Path("/sys/fs/cgroup")
_LIMITS: Final = ("memory.max", "memory/memory.limit_in_bytes")
PROBE: Final = ".probe"  # one name: what a killed probe left is written over, and removed
_PIECE: Final = 4 << 20
_ENOUGH_BYTES: Final = 256 << 20
_ENOUGH_S: Final = 0.5
_LAYERS: Final = frozenset({"overlay", "aufs", "tmpfs"})


def read_host() -> Host:
    """What this machine, or container, may use."""
    return Host(
        cores=count_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_limit_bytes=_memory_limit(),
        shared_memory=_shared_memory(),
        memlock_bytes=_hard(resource.RLIMIT_MEMLOCK),
        open_files=_hard(resource.RLIMIT_NOFILE),
        num_nodes=max(len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))), 1),
    )


def count_cores() -> int:
    """As many as we may run on, and no more than the container's share of time."""
    allowed = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = (_GROUP / "cpu.max").read_text().split()
        return max(min(allowed, round(int(quota) / int(period))), 1)
    return allowed


def _memory_limit() -> int | None:
    for name in _LIMITS:
        with suppress(OSError):
            reading = read((_GROUP / name).read_text())
            return reading.limit_bytes if isinstance(reading, MemoryLimit) else None
    return None


def _shared_memory() -> SharedMemory:
    try:
        usage = shutil.disk_usage("/dev/shm")  # noqa: S108  # it is what we look at
    except OSError:
        return SharedMemory(size_bytes=0, free_bytes=0)
    return SharedMemory(size_bytes=usage.total, used_bytes=usage.used, free_bytes=usage.free)


def _hard(limit: int) -> int | None:
    """What a process may raise its own limit to."""
    value = resource.getrlimit(limit)[1]
    return None if value == resource.RLIM_INFINITY else value


def measure_disk(folder: Path) -> DiskRate:
    """Write and sync for half a second where the folder is, or will be, and remove it. `OSError` if that cannot be."""
    folder = next(place for place in (folder, *folder.parents) if place.exists())
    path, piece = folder / PROBE, os.urandom(_PIECE)
    written, started = 0, time.monotonic()
    usage = shutil.disk_usage(folder)
    try:
        with path.open("wb", buffering=0) as file:
            while written < min(_ENOUGH_BYTES, usage.free // 4) and time.monotonic() - started < _ENOUGH_S:
                file.write(piece)
                os.fsync(file.fileno())
                written += _PIECE
        took = time.monotonic() - started
    finally:
        path.unlink(missing_ok=True)
    kind = _file_system(folder.resolve())
    is_volume = not (kind in _LAYERS and is_container())
    return DiskRate(folder=str(folder), free_bytes=usage.free, rate=written / took, kind=kind, is_volume=is_volume)


def _file_system(folder: Path) -> str:
    """Of the mount that is nearest above the folder."""
    nearest, kind = "", ""
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, place, name, *_ = line.split(" ")
            if folder.is_relative_to(place) and len(place) >= len(nearest):
                nearest, kind = place, name
    return kind


def is_container() -> bool:
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()


def is_free(port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def who_is_first() -> str:
    """The program of PID 1: in our image the entrypoint, under others what the provider put there."""
    with suppress(OSError):
        return Path("/proc/1/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""
