"""
What an attempt that hangs looked like, written down before it is killed: `evidence/attempt-0003/`.

Everything is bounded in time and size, nothing is needed: what cannot be had is left out. What
the processes wrote themselves (dumps of NCCL's flight recorder are pickles) is never trusted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from runner.supervise import memory, process
from runner.supervise.logs import find_streams, read_tail
from runner.supervise.pulse import rank_of
from runner.supervise.recorder import Recorded, compare, missing, read_dumps, tell, tell_last
from vramfarm.protocol import Env

HANG_FILE: Final = "hang.json"  # who kills the attempt copies it to the logs, where triage reads it
ABORTED: Final = b"Fatal Python error: Aborted"
_TOOL_S: Final = 10.0
_DUMP_WAIT_S: Final = 20.0  # measured with NCCL: three to six seconds, most of it for the names in stacks
_MAX_PROCESSES: Final = 128
_MAX_BYTES: Final = 16 << 20
_OF_PROC: Final = ("status", "wchan", "stack", "syscall", "limits")
_OF_THREAD: Final = ("comm", "wchan", "stack")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Where to look and where to write."""

    attempt_id: str
    logs: Path  # of the attempt
    folder: Path  # of the evidence
    pipes: str  # path of the flight recorder's pipes, without rank and ending
    python: str  # the training interpreter: py-spy may be beside it
    hang: Mapping[str, Any]


def collect(scene: Scene) -> str:
    """Write down what can be seen; return it in a few words. What hangs is named in `hang.json`."""
    scene.folder.mkdir(parents=True, exist_ok=True)
    found = process.find(Env.ATTEMPT_ID, scene.attempt_id)[:_MAX_PROCESSES]
    pipes, asked_s = _pipes(scene), time.monotonic()
    asked = _ask_for_dumps(pipes, found)  # they come while the rest is looked at
    had = ["processes"] if _write(scene.folder / "processes.txt", "\n".join(_tree(found))) else []
    for one in found:
        _write(scene.folder / f"proc-{one.pid}.txt", _of_proc(one.pid))
    had += _stacks(scene, [one.pid for one in found if not one.role])
    if text := _run("nvidia-smi", "-q"):
        had += ["nvidia-smi"] if _write(scene.folder / "nvidia-smi.txt", text) else []
    recorded, told = _flight_recorder(scene.logs, set(pipes), asked, asked_s + _DUMP_WAIT_S)
    if told:
        had += ["flight recorder"] if _write(scene.folder / "flight-recorder.txt", told) else []
    hang = _with(recorded, scene.hang)
    raw = json.dumps(hang | {"evidence": str(scene.folder)}).encode()
    (scene.folder / HANG_FILE).write_bytes(raw)
    return ", ".join(had) or "nothing"


def _with(recorded: Recorded, hang: Mapping[str, Any]) -> dict[str, Any]:
    """Ranks in different collectives wait for each other, whoever seems to be behind; else who did not come is the one."""
    if recorded.differ:
        return {**hang, "rank": None, "differ": {str(rank): told for rank, told in recorded.differ.items()}}
    if hang.get("rank") is not None or recorded.behind is None:
        return dict(hang)
    reason = f"{hang.get('reason', '')}; rank {recorded.behind} did not come to the last collective"
    return {**hang, "rank": recorded.behind, "reason": reason}


# --------------------------------------------------------------------------------- processes


def _tree(found: Sequence[process.Process]) -> Iterator[str]:
    yield "pid ppid state threads cpu_ticks rss_pages wchan rank role command"
    for one in found:
        with suppress(OSError, IndexError):
            f = [field.decode() for field in process.stat_fields(one.pid)]
            cpu = int(f[11]) + int(f[12])
            words = process.ask(one.pid, "cmdline")
            told = (
                f"({_proc(one.pid, 'comm')}) hangs in a page fault, or behind one".encode() if words is None else words
            )
            command = told.replace(b"\0", b" ").decode(errors="replace")[:300]
            rank = rank_of(one.pid)
            yield (
                f"{one.pid} {f[1]} {f[0]} {f[17]} {cpu} {f[21]} {_proc(one.pid, 'wchan') or '-'} "
                f"{'-' if rank is None else rank} {one.role or '-'} {command}"
            )


def _of_proc(pid: int) -> str:
    parts = [f"== {name}\n{text}" for name in _OF_PROC if (text := _proc(pid, name))]
    with suppress(OSError):
        for thread in sorted(os.listdir(f"/proc/{pid}/task"), key=int)[:64]:  # noqa: PTH208  # names only
            told = [_proc(pid, f"task/{thread}/{name}") for name in _OF_THREAD]
            parts.append(f"== thread {thread}: " + " ".join(text.strip() for text in told if text))
    return "\n".join(parts)


def _proc(pid: int, name: str) -> str:
    with suppress(OSError):  # gone, or not for us to see
        return memory.read(f"/proc/{pid}/{name}").decode(errors="replace").strip()
    return ""


def _stacks(scene: Scene, pids: Sequence[int]) -> list[str]:
    """By py-spy, where it is and the kernel lets it; else the killing signal prints them. The ranks come first."""
    beside = [Path(python).with_name("py-spy") for python in (scene.python, sys.executable) if python]
    program = next((str(path) for path in beside if path.exists()), shutil.which("py-spy"))
    if program is None:
        return []
    deadline = time.monotonic() + 2 * _TOOL_S
    had = False
    ranks = {pid: rank_of(pid) for pid in pids}  # their workers have them, too
    parents = {pid: int(fields[1]) for pid in pids if (fields := process.stat_fields(pid))}
    for pid in sorted(pids, key=lambda pid: (ranks[pid] is None, ranks.get(parents.get(pid, 0)) is not None)):
        if time.monotonic() > deadline:
            break
        if text := _run(program, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)):
            rank = ranks[pid]
            had |= _write(scene.folder / f"stack-{'x' if rank is None else rank}-{pid}.txt", text)
    return ["stacks"] if had else []


def keep_stacks(logs: Path, folder: Path) -> None:
    """What the killing signal made every process print, without what a log has before it."""
    for stream in find_streams(logs):
        raw = b"\n".join(line.encode() for line in read_tail(stream.path))
        at = raw.find(ABORTED)
        if at >= 0:
            _write(folder / f"stack-{'x' if stream.rank < 0 else stream.rank}.txt", raw[at:].decode(errors="replace"))


def _run(*argv: str) -> str:
    """What a program prints, if it ends well and soon; a driver that hangs is not waited for."""
    with suppress(OSError):
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=process.environ()
        )
        try:
            out, _ = child.communicate(timeout=_TOOL_S)
        except subprocess.TimeoutExpired:
            child.kill()
            return ""
        return out[:_MAX_BYTES].decode(errors="replace") if child.returncode == 0 else ""
    return ""


def _write(path: Path, text: str) -> bool:
    try:
        path.write_text(text, errors="replace")
    except OSError:
        return False
    return True


# --------------------------------------------------------------------- NCCL's flight recorder


def _pipes(scene: Scene) -> dict[int, Path]:
    """By rank: what is written into makes that rank dump."""
    if not scene.pipes:
        return {}
    stem = Path(scene.pipes)
    found = {path.stem.removeprefix(stem.name): path for path in stem.parent.glob(f"{stem.name}*.pipe")}
    return {int(rank): path for rank, path in sorted(found.items()) if rank.isdecimal()}


def _ask_for_dumps(pipes: Mapping[int, Path], found: Sequence[process.Process]) -> int:
    """How many ranks were asked; one that is stopped would not answer."""
    stopped = {rank_of(one.pid) for one in found if process.stat_fields(one.pid)[:1] == [b"T"]}
    return sum(_ask(pipe) for rank, pipe in pipes.items() if rank not in stopped)


def _flight_recorder(logs: Path, ranks: Collection[int], asked: int, until_s: float) -> tuple[Recorded, str]:
    """What the dumps say of who waits for whom, and their last collectives; those who were asked are waited for."""
    told = read_dumps(logs)
    while len(told) < asked and time.monotonic() < until_s:
        time.sleep(0.1)
        told |= {rank: entries for rank, entries in read_dumps(logs).items() if rank not in told}
    recorded, silent = compare(told), set(ranks) - set(told)
    if recorded == Recorded():
        recorded = Recorded(behind=missing(told, ranks))
    lines = [f"rank {rank}: {tell_last(entries)}" for rank, entries in sorted(told.items())]
    return recorded, "\n".join([*filter(None, [tell(recorded, told, silent)]), *lines])


def _ask(pipe: Path) -> bool:
    with suppress(OSError):  # nobody reads it any more
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return os.write(fd, b"1\n") > 0
        finally:
            os.close(fd)
    return False
