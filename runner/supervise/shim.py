"""
Starts the launcher of one attempt, waits for it and writes down how it ended.

    python -I shim.py ATTEMPT_FOLDER PROGRAM [ARGUMENT ...]

Standard library only and no import of ours, so that nothing in the user's folder or
environment can break it. It outlives the runner: the launcher's exit is never lost.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

_RECORD_BYTES = 512
_OPEN_FILES = 65_535
_MAX_LEFT = 12  # fit into a record
_PATIENCE_S = 1.0  # with each process that hangs
_PR_SET_CHILD_SUBREAPER = 36
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_PIECE_BYTES = 8 << 20
_READERS = 4  # more in flight do not make a disk faster
_POLITE = 10  # niceness: imports of torch come first
_WINDOW_BYTES = 2 << 20  # what the kernel fetches at a time when it is told what will be needed
_CGROUPS = (  # of this container, by version 2 and 1: what counts, and the limit
    ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory.max"),
    ("/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def main(folder: Path, argv: list[str]) -> int:
    me = {"pid": os.getpid(), "started": _start_time("self")}
    _write_durably(folder / "shim.json", me)
    _reserve(folder / "exit.json.tmp")
    _prepare()
    killed_before, _ = _oom_kills()
    launcher = _start(argv, folder / "launcher.log")
    if isinstance(launcher, int):
        code = launcher
    else:
        watched = {"pid": launcher.pid, "started": _start_time(launcher.pid)}
        with suppress(OSError):  # a full disk must not end the one who waits
            _write_durably(folder / "shim.json", me | {"launcher": watched})
        threading.Thread(target=_read_ahead, args=(os.environ.get("VRAMFARM_RESUME", "none"),), daemon=True).start()
        code = _wait(launcher)
    record: dict[str, object] = {"code": code, "at": datetime.now(UTC).isoformat()}
    with suppress(OSError):
        record |= {"left": left} if (left := _left_behind()) else {}
    killed, limit = _oom_kills()
    if killed > killed_before:
        record |= {"oom_kills": killed - killed_before, "memory_limit": limit}
    _write_durably(folder / "exit.json", record)
    return code


def _prepare() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # not SIG_IGN: that the launcher would inherit
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # eight ranks that abort would fill the disk
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = _OPEN_FILES if most == resource.RLIM_INFINITY else min(most, _OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (enough, most))
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.environ.pop("VRAMFARM_ROLE", None)  # it is ours, not the launcher's


def _start(argv: list[str], log: Path) -> subprocess.Popen[bytes] | int:
    """The launcher, or the exit code of one that could not be started."""
    with log.open("ab") as out:
        try:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        except OSError as error:
            out.write(f"vramfarm-runner: cannot start {argv[0]}: {error.strerror}\n".encode())
            return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE


def _wait(launcher: subprocess.Popen[bytes]) -> int:
    while True:
        pid, status = os.waitpid(-1, 0)  # strays too: we are their parent now
        if pid == launcher.pid:
            launcher.returncode = os.waitstatus_to_exitcode(status)
            return launcher.returncode


def _left_behind() -> list[tuple[int, int]]:
    """
    Pid and start time of what the script started and did not end: those without the attempt's environment first.

    We are the parent of such strays, and nobody can tell whose they are once we are gone.
    """
    found: dict[int, tuple[int, int]] = {}  # by pid: parent, start time
    for name in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208  # names only
        with suppress(OSError):
            raw = Path(f"/proc/{name}/stat").read_bytes()
            state, parent, *fields = raw[raw.rindex(b")") + 2 :].split()
            if state not in {b"Z", b"X"}:
                found[int(name)] = int(parent), int(fields[17])
    left = {pid: _is_marked(pid) for pid in found if _is_below_us(pid, found)}
    ours = sorted((is_marked, pid) for pid, is_marked in left.items() if is_marked is not None)
    return [(pid, found[pid][1]) for _, pid in ours[:_MAX_LEFT]]


def _is_below_us(pid: int, found: Mapping[int, tuple[int, int]]) -> bool:
    while pid in found:
        pid = found[pid][0]
        if pid == os.getpid():
            return True
    return False


def _is_marked(pid: int) -> bool | None:
    """
    Whether it has the attempt's environment. None: it is gone, somebody else's, whom we cannot end, or a saver, which outlives us.

    Or it hangs in a page fault of a disk that does not answer, and so would whoever reads its memory: in a thread, which
    is left behind, so that the exit is written down. It has its mark when it comes back.
    """
    mark = f"VRAMFARM_ATTEMPT_ID={os.environ.get('VRAMFARM_ATTEMPT_ID')}".encode()
    found: list[bytes] = []
    reader = threading.Thread(target=_read_environ, args=(pid, found), daemon=True)
    reader.start()
    reader.join(_PATIENCE_S)
    entries = found[0].split(b"\0") if found else []
    return None if not found or b"VRAMFARM_ROLE=saver" in entries else mark in entries


def _read_environ(pid: int, found: list[bytes]) -> None:
    with suppress(OSError):
        found.append(Path(f"/proc/{pid}/environ").read_bytes())


def _read_ahead(checkpoint: str) -> None:
    """
    Bring a checkpoint into the page cache while launcher, torch and cards come up, when the disk has nothing else to do.

    At most half of the memory. The first rank that opens the shards locks them, and reads the rest itself, past the cache.
    With less than two cores a rank it is left to them: what the disk gives earlier, importing torch loses.
    """
    if len(os.sched_getaffinity(0)) < 2 * int(os.environ.get("VRAMFARM_WORLD_SIZE") or "1"):
        return
    pieces: deque[tuple[int, int]] = deque()
    fds: list[int] = []
    with suppress(OSError):
        fds += [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in sorted(Path(checkpoint).glob("*.safetensors"))]
        sizes = [os.fstat(fd).st_size for fd in fds]
        starts = range(0, max(sizes, default=0), _PIECE_BYTES)
        pieces += [(fd, at) for at in starts for fd, size in zip(fds, sizes, strict=True) if at < size]
        most = _memory() // 2 // _PIECE_BYTES
        while len(pieces) > most:
            pieces.pop()
        readers = [threading.Thread(target=_read, args=(pieces,), daemon=True) for _ in range(_READERS)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    for fd in fds:
        os.close(fd)  # what is removed meanwhile must give its space back


def _read(pieces: deque[tuple[int, int]]) -> None:
    """The kernel fetches, we only wait for it: copying the bytes costs imports of torch up to a second of a core a GB."""
    with suppress(OSError, IndexError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _POLITE)
        while True:
            fd, at = pieces.popleft()
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pieces.clear()  # a rank is there
                return
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.posix_fadvise(fd, at, _PIECE_BYTES, os.POSIX_FADV_WILLNEED)
            for end in range(at + _WINDOW_BYTES, at + _PIECE_BYTES + 1, _WINDOW_BYTES):
                os.pread(fd, 1, end - 1)


def _memory() -> int:
    """Memory that is free, or the container's limit where that is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min(free, _oom_kills()[1] or free)


def _oom_kills() -> tuple[int, int]:
    """Processes of this container that the kernel killed for want of memory, and the limit; zeros where nobody counts."""
    for counter, limit in _CGROUPS:
        with suppress(OSError, ValueError):
            lines = Path(counter).read_text().splitlines()
            killed = next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
            text = Path(limit).read_text().strip()
            return killed, int(text) if text.isdecimal() else 0
    return 0, 0


def _reserve(path: Path) -> None:
    """Take the bytes of the last record now: a full disk is a common reason for the end."""
    with path.open("wb") as file:
        file.write(b" " * _RECORD_BYTES)
        os.fsync(file.fileno())


def _write_durably(path: Path, record: Mapping[str, object]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, json.dumps(record).encode().ljust(_RECORD_BYTES))
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.rename(path)
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _start_time(pid: int | str) -> int:
    raw = Path(f"/proc/{pid}/stat").read_bytes()
    return int(raw[raw.rindex(b")") + 2 :].split()[19])


if __name__ == "__main__":
    ended = main(Path(sys.argv[1]), sys.argv[2:])
    sys.exit(ended if ended >= 0 else 128 - ended)
