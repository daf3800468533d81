"""
Processes of this machine, found by what stands in their environment. Standard library only.

A pid alone is never trusted: it may have been given to somebody else. Zombies count as gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from runner.errors import one_line
from runner.supervise import memory
from runner.supervise.memory import read
from vramfarm.protocol import Env

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_GONE_STATES: Final = frozenset("ZXx")
_OURS: Final = b"VRAMFARM_"
_EXEC_LOOKS: Final = 40
_NAMED_WORDS: Final = 3  # of a command line: what comes later may be a secret
_NAMED_CHARACTERS: Final = 60


@dataclass(frozen=True, slots=True)
class Process:
    """One process, for ever: a pid is used again, a pid with a start time is not."""

    pid: int
    started: int  # clock ticks after boot, field 22 of /proc/<pid>/stat
    role: str = field(default="", compare=False)  # `Env.ROLE`; empty for trainers


@dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    parent: int
    started: int
    memory: int  # 0: a kernel thread, or a process that is about to end
    image: tuple[int, int]  # where its stack and environment begin: changes with every exec


_environs: dict[tuple[int, int, tuple[int, int]], Mapping[str, str]] = {}
_spawned: list[subprocess.Popen[bytes]] = []


def current() -> Process:
    """Return this process."""
    return identify(os.getpid())


def identify(pid: int) -> Process:
    """Return the process that has this pid now; `ProcessLookupError` if there is none."""
    stat = _read_stat(pid)
    if stat is None:
        raise ProcessLookupError(pid)
    return Process(pid, stat.started)


def is_alive(process: Process) -> bool:
    """Whether it runs, or could: a zombie does not."""
    stat = _read_stat(process.pid)
    return stat is not None and stat.started == process.started and stat.state not in _GONE_STATES


def find(name: str, value: str) -> tuple[Process, ...]:
    """
    Return the living processes whose environment has NAME=VALUE, and their descendants.

    `name` is one of `Env`. A descendant without the name is taken with the role of its
    ancestor: workers that overwrite their title wipe their environment, and that of one who hangs
    in a page fault cannot be read. Cost, measured with
    250 processes on a virtual machine: 15 us a process, 70 us the first time it is seen.
    """
    stats = _read_all()
    _forget_all_but(stats)
    environs = {pid: _environ(pid, stat) for pid, stat in stats.items()}
    roles = {pid: env.get(Env.ROLE, "") for pid, env in environs.items() if env.get(name) == value}
    for pid in stats:
        _adopt(pid, stats, environs, roles, name)
    return tuple(Process(pid, stats[pid].started, role) for pid, role in sorted(roles.items()))


def with_descendants(processes: Iterable[Process]) -> tuple[Process, ...]:
    """Those that still are who they were, and all that they started since."""
    stats = _read_all()
    found = {p.pid for p in processes if p.pid in stats and stats[p.pid].started == p.started}
    for pid in stats:
        line, at = [], pid
        while at in stats and at not in found:
            line.append(at)
            at = stats[at].parent
        found.update(line if at in found else ())
    return tuple(Process(pid, stats[pid].started) for pid in sorted(found))


def name(pid: int) -> str:
    """`4711 python3 logger.py`: the pid and the first words of its command line; nothing where it is gone."""
    try:
        line = ask(pid, "cmdline")
        words = [f"({read(f'/proc/{pid}/comm').decode(errors='replace').strip()})"] if line is None else _words(line)
    except OSError:
        return ""
    shown = one_line(" ".join(words).strip())
    return f"{pid} {shown if len(shown) <= _NAMED_CHARACTERS else shown[: _NAMED_CHARACTERS - 1] + '…'}"


def _words(line: bytes) -> list[str]:
    return os.fsdecode(line).split("\0")[:_NAMED_WORDS]


def ask(pid: int, name: str) -> bytes | None:
    """Its `environ` or `cmdline`; None: it hangs so that nobody can read them now. `OSError` if it is gone, or somebody else's."""
    return memory.ask(f"/proc/{pid}/{name}", identify(pid).started)


def kill(processes: Iterable[Process], number: signal.Signals) -> None:
    """Send the signal to those that still are who they were; not to somebody else's, which a `sudo` of the script is."""
    for process in processes:
        if is_alive(process):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, number)


def end_all(
    look: Callable[[], Sequence[Process]], *, grace_s: float = 0.0, timeout_s: float = 30.0, spare: str | None = None
) -> tuple[Process, ...]:
    """
    End whatever `look` returns, again and again until it returns nothing; return what is left.

    With a grace they get SIGTERM and that much time first. Then SIGKILL: a process that is
    left after `timeout_s` hangs in the kernel. Those with the role `spare` get no signal:
    they are expected to end when the others are gone.
    """
    if grace_s > 0:
        kill(_without(spare, look()), signal.SIGTERM)
        _wait_until_none(look, grace_s)
    return _wait_until_none(look, timeout_s, each_time=lambda left: kill(_without(spare, left), signal.SIGKILL))


def boot_time_s() -> float:
    """A clock that no setting changes and no sleep of the machine stops; the same for all its processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def spawn(  # noqa: PLR0913  # the names are Popen's
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | os.PathLike[str],
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int | IO[bytes] = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own. It need not be waited for: `reap` does that."""
    process = subprocess.Popen(
        argv, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
    )
    _spawned.append(process)
    return process


def reap() -> None:
    """
    Collect children that ended: those of `spawn`, whose codes stay readable, and adopted ones.

    A plain `Popen` elsewhere would lose its code to this; use `spawn`, or wait in place.
    """
    _spawned[:] = [process for process in _spawned if process.poll() is None]
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if any(process.pid == ended.si_pid for process in _spawned):
                _spawned[:] = [process for process in _spawned if process.poll() is None]
                continue
            os.waitpid(ended.si_pid, os.WNOHANG)


def be_subreaper() -> None:
    """Become the parent of descendants that lose theirs, so that no stray escapes to PID 1."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_with_parent(number: signal.Signals) -> None:
    """Get this signal when the process that started us dies, however; whatever we become by exec keeps it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _wait_until_none(
    look: Callable[[], Sequence[Process]],
    timeout_s: float,
    each_time: Callable[[Sequence[Process]], None] = lambda _: None,
) -> tuple[Process, ...]:
    deadline = time.monotonic() + timeout_s
    pause_s = 0.005
    while left := tuple(look()):
        each_time(left)
        if time.monotonic() >= deadline:
            return left
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.2)
    return ()


def _without(role: str | None, processes: Iterable[Process]) -> Iterable[Process]:
    return (process for process in processes if process.role != role)


def _read_all() -> dict[int, _Stat]:
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208  # names only
    stats = ((pid, _read_stat(pid)) for pid in pids)
    return {pid: stat for pid, stat in stats if stat is not None and stat.memory and stat.state not in _GONE_STATES}


def stat_fields(pid: int) -> list[bytes]:
    """Of /proc/PID/stat, those after the name, which may hold anything; proc(5) counts from 3 here. None are left of who is gone."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            raw = os.read(fd, 1 << 12)  # one line, shorter than that: the kernel gives it at once
        finally:
            os.close(fd)
    except OSError:
        return []
    return raw[raw.rindex(b")") + 2 :].split()


def _read_stat(pid: int) -> _Stat | None:
    fields = stat_fields(pid)
    if not fields:
        return None
    return _Stat(
        state=fields[0].decode(),
        parent=int(fields[1]),
        started=int(fields[19]),
        memory=int(fields[20]),
        image=(int(fields[25]), int(fields[47])),
    )


def _environ(pid: int, stat: _Stat) -> Mapping[str, str]:
    # Between fork and exec a child shows its parent's environment: `image` keeps that out of later answers.
    known = _environs.get((pid, stat.started, stat.image))
    if known is not None:
        return known
    for _ in range(_EXEC_LOOKS):
        try:
            raw = memory.ask(f"/proc/{pid}/environ", stat.started)
        except OSError:  # somebody else's, or gone
            return {}
        if raw is None:
            return {}
        after = _read_stat(pid)
        if after is None:
            return {}
        if after.image == stat.image and (raw or stat.image[1]):
            environ = _parse(raw)
            if stat.image[1]:  # 0 where the kernel does not tell
                _environs[pid, stat.started, stat.image] = environ
            return environ
        stat = after  # it is in the middle of an exec and has no environment for a moment
        time.sleep(0.0005)
    return {}


def _parse(environ: bytes) -> Mapping[str, str]:
    entries = (entry.partition(b"=") for entry in environ.split(b"\0") if entry.startswith(_OURS))
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in entries}


def _forget_all_but(stats: Mapping[int, _Stat]) -> None:
    keep = {(pid, stat.started, stat.image) for pid, stat in stats.items()}
    for key in _environs.keys() - keep:
        del _environs[key]


def _adopt(
    pid: int,
    stats: Mapping[int, _Stat],
    environs: Mapping[int, Mapping[str, str]],
    roles: dict[int, str],
    name: str,
) -> None:
    """Give the process the role of its nearest ancestor that has one, unless it names another value."""
    line: list[int] = []
    while pid in stats and pid not in roles and name not in environs[pid]:
        line.append(pid)
        pid = stats[pid].parent
    if pid in roles:
        roles.update(dict.fromkeys(line, roles[pid]))


def signal_name(number: int) -> str:
    """As the system has it, or its number."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def environ() -> dict[str, str]:
    """This process's environment without the marks of a run: for a program that belongs to none."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OURS.decode())}


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
