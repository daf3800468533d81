"""
Slow work, each piece a process of its own: started, then observed. One at a time per kind.

A task reads its arguments as JSON from standard input and writes JSON lines to standard
output; the last one says how it ended. It may be killed at any moment. One that must begin at
once is started ahead: it waits for its arguments, and ends when they cannot come any more. What it
prints goes through memory, and from there into its log: a full disk must not keep a copy from leaving it.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, BinaryIO, Final

from runner.facts import Failed, Finished, Running, TaskKind, TaskState
from runner.supervise import process
from vramfarm.protocol import Env

_ROLE: Final = "task"
_NICENESS: Final = 10  # training goes first; the kernel derives the priority on the disk from it, too: 6 of 0 to 7
_LOG_BYTES: Final = 1 << 20
_TAIL_BYTES: Final = 4096
_KILLED_S: Final = 5.0
_FINISH_S: Final = 10.0
FINISH: Final = signal.SIGUSR1  # a task that listens to it ends by itself


class TaskBoard:
    """Tasks of one run, by kind: what runs, and how the last one ended."""

    def __init__(self, folder: Path, run_marker: str) -> None:
        """`folder` takes the tasks' logs; every task carries `run_marker` as `Env.RUN`."""
        self._folder = folder
        self._marker = run_marker
        self._tasks: dict[TaskKind, _Task] = {}
        self._ready: dict[TaskKind, _Ready] = {}
        self._states: dict[TaskKind, TaskState] = {}
        self._failures: dict[tuple[TaskKind, str], Failed] = {}

    def start(
        self,
        kind: TaskKind,
        subject: str,
        argv: Sequence[str],
        arguments: Mapping[str, Any],
        now: datetime,
    ) -> None:
        """Start a task, with the supervisor's environment. None of its kind may be running."""
        assert kind not in self._tasks, f"a {kind} task is running"
        raw, ready = json.dumps(arguments).encode(), self._ready.pop(kind, None)
        if ready is not None and ready.begin(raw):
            task = ready.task
        else:
            with _in_memory() as stdin:
                stdin.write(raw)
                stdin.seek(0)
                task = self._spawn(kind, argv, stdin)
        self._tasks[kind] = task
        after = self.failure(kind, subject)
        self._states[kind] = Running(subject=subject, started_at=now, has_spoken=False, after=after)

    def prepare(self, kind: TaskKind, argv: Sequence[str]) -> None:
        """
        Have the next task of this kind started already, so that it only needs its arguments; nothing happens if it is, or
        while one runs. One that dies ahead of its time is not started again: `start` does without.
        """
        if kind in self._tasks or kind in self._ready:
            return
        reader, writer = os.pipe2(os.O_CLOEXEC)
        with os.fdopen(reader, "rb") as stdin:
            try:
                task = self._spawn(kind, argv, stdin)
            except BaseException:
                os.close(writer)
                raise
        self._ready[kind] = _Ready(task, writer)

    def _spawn(self, kind: TaskKind, argv: Sequence[str], stdin: IO[bytes]) -> _Task:
        out, err = _Stream(self._folder / f"{kind}.jsonl"), _Stream(self._folder / f"{kind}.err")
        env = {**os.environ, Env.RUN: self._marker, Env.ROLE: _ROLE}
        popen = process.spawn(argv, env=env, cwd="/", stdin=stdin, stdout=out.memory, stderr=err.memory)
        with suppress(
            OSError
        ):  # gone already; or no such file: only some kernels share out processors among sessions, too
            os.setpriority(os.PRIO_PROCESS, popen.pid, _NICENESS)
            Path(f"/proc/{popen.pid}/autogroup").write_text(str(_NICENESS))
        return _Task(popen, out, err)

    def states(self, now: datetime) -> Mapping[TaskKind, TaskState]:
        """Look at every task; return what runs and how the last of each kind ended."""
        for kind in tuple(self._tasks):
            self._look(kind, now)
        return MappingProxyType(dict(self._states))

    def failure(self, kind: TaskKind, subject: str) -> Failed | None:
        """How this very work failed when it was last tried, if it did."""
        return self._failures.get((kind, subject))

    def is_running(self, kind: TaskKind) -> bool:
        return kind in self._tasks

    def pids(self) -> tuple[int, ...]:
        """Of what runs, or has ended and was not looked at since."""
        return tuple(task.popen.pid for task in self._tasks.values())

    def end(self, kind: TaskKind) -> None:
        """End a running task and forget it, and one that is ready for its turn; nothing happens if there is none."""
        if ready := self._ready.pop(kind, None):
            ready.dismiss()
        task = self._tasks.pop(kind, None)
        if task is None:
            return
        self._states.pop(kind, None)
        task.end()

    def wait(self, kind: TaskKind, *, timeout_s: float) -> None:
        """Wait for a running task, but not longer."""
        if task := self._tasks.get(kind):
            with suppress(subprocess.TimeoutExpired):
                task.popen.wait(timeout_s)

    def finish(self, kind: TaskKind) -> None:
        """Ask a running task to end by itself (`FINISH`), and end it if it does not."""
        if task := self._tasks.get(kind):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                task.popen.send_signal(FINISH)
                task.popen.wait(_FINISH_S)
        self.end(kind)

    def kill_leftovers(self) -> tuple[int, ...]:
        """End tasks of this run that an earlier runner started; return the pids that would not go."""
        known = (*self._tasks.values(), *(ready.task for ready in self._ready.values()))
        mine = {task.popen.pid for task in known}

        def look() -> tuple[process.Process, ...]:
            found = process.find(Env.RUN, self._marker)
            return tuple(p for p in found if p.role == _ROLE and not _in_session(p.pid, mine))

        return tuple(p.pid for p in process.end_all(look, timeout_s=_FINISH_S))

    def _look(self, kind: TaskKind, now: datetime) -> None:
        task, state = self._tasks[kind], self._states[kind]
        assert isinstance(state, Running)
        code = task.popen.poll()  # before its lines are read: what it wrote last is there then
        task.err.copy()
        for line in _objects(task.out.copy()):
            task.last = line if {"result", "error"} & line.keys() else task.last
            state = _progressed(state, line, now)
            state = replace(state, has_spoken=True)
            if "told" in line:
                self._failures.pop((kind, state.subject), None)  # it works; a failure to come is the first one
                state = replace(state, after=None)
        if _is_stopped(task.popen.pid) != bool(state.stopped_at):
            state = replace(state, stopped_at=None if state.stopped_at else now)
        self._states[kind] = state
        if code is None:
            return
        task.kill()  # what it started goes with it
        del self._tasks[kind]
        self._states[kind] = self._conclude(kind, task, state.subject, code, now)
        task.close()

    def _conclude(self, kind: TaskKind, task: _Task, subject: str, code: int, now: datetime) -> TaskState:
        if "result" in task.last:
            self._failures.pop((kind, subject), None)
            return Finished(subject=subject, at=now, result=_as_mapping(task.last["result"]))
        before, is_final = self._failures.get((kind, subject)), bool(task.last.get("final", False))
        is_same = before is not None and before.final == is_final  # a refusal after an outage is the first one
        failed = Failed(
            subject=subject,
            at=now,
            error=str(task.last["error"]) if task.last else _died(kind, code, task.error_tail()),
            final=is_final,
            hint=str(task.last.get("hint", "")),
            curable=bool(task.last.get("curable", False)),
            damaged=bool(task.last.get("damaged", False)),
            unreadable=bool(task.last.get("unreadable", False)),
            exit_code=int(task.last.get("exit_code", 1)),
            failures=1 + (before.failures if before and is_same else 0),
            since=before.since if before else now,
        )
        self._failures[kind, subject] = failed
        return failed


@dataclass(slots=True)
class _Task:
    popen: subprocess.Popen[bytes]
    out: _Stream
    err: _Stream
    last: Mapping[str, Any] = field(default_factory=dict)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(_KILLED_S)
        self.close()

    def close(self) -> None:
        for stream in (self.out, self.err):
            stream.copy()
            stream.memory.close()

    def error_tail(self) -> str:
        return self.err.tail(_TAIL_BYTES).decode(errors="replace").strip()


@dataclass(frozen=True, slots=True)
class _Ready:
    """A task that waits for its arguments. When the last writer of its pipe is gone, as it is when we die, it ends."""

    task: _Task
    writer: int

    def begin(self, arguments: bytes) -> bool:
        """False: it died, is stuck, or they are too much for a pipe that nobody may be reading; it is gone then."""
        try:
            fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, max(len(arguments), mmap.PAGESIZE))
            os.set_blocking(self.writer, False)
            is_told = self._is_awake() and os.write(self.writer, arguments) == len(arguments)
        except OSError:
            is_told = False
        if not is_told:
            self.task.end()  # before it reads the end of what came
        os.close(self.writer)
        return is_told

    def _is_awake(self) -> bool:
        """Not one that was stopped, or hangs in the kernel: it has nothing to do but to wait."""
        return self.task.popen.poll() is None and process.stat_fields(self.task.popen.pid)[:1] in ([b"S"], [b"R"])

    def dismiss(self) -> None:
        os.close(self.writer)
        self.task.end()


class _Stream:
    """What a task prints: in memory, and copied into its log as far as the disk takes it. A torn last line waits."""

    def __init__(self, log: Path) -> None:
        self.memory = _in_memory()
        self._log = log
        self._copied = 0

    def copy(self) -> bytes:
        """Return the whole lines that are new."""
        raw = self._read(self._copied)
        whole = raw[: raw.rfind(b"\n") + 1]
        self._copied += len(whole)
        if whole:
            with suppress(OSError), _appending(self._log) as log:
                log.write(whole)
        return whole

    def tail(self, num_bytes: int) -> bytes:
        return self._read(max(0, os.fstat(self.memory.fileno()).st_size - num_bytes))

    def _read(self, begin: int) -> bytes:
        """The task writes where the shared position is, so that is not moved."""
        fd = self.memory.fileno()
        return os.pread(fd, os.fstat(fd).st_size - begin, begin)


def _objects(lines: bytes) -> Iterator[Mapping[str, Any]]:
    for line in lines.splitlines():
        with suppress(ValueError):  # something that a library printed
            fields = json.loads(line)
            if isinstance(fields, dict):
                yield fields


def _in_memory() -> BinaryIO:
    return os.fdopen(os.memfd_create("task"), "w+b", buffering=0)


def _is_stopped(pid: int) -> bool:
    """By SIGSTOP: it does nothing until it is let go. A debugger that holds it (t) is somebody's who knows what he does."""
    return process.stat_fields(pid)[:1] == [b"T"]


def _progressed(state: Running, line: Mapping[str, Any], now: datetime) -> Running:
    progress = line.get("progress")
    if not isinstance(progress, int | float):
        return state
    told = line.get("told", state.told)
    note = str(line.get("note", state.note))
    return replace(state, progress=float(progress), note=note, moved_at=now, told=told)


def _died(kind: TaskKind, code: int, tail: str) -> str:
    how = f"was ended by {process.signal_name(-code)}" if code < 0 else f"exited {code} without a last word"
    last = tail.splitlines()[-1] if tail else ""
    return f"task {kind} {how}" + (f": {last}" if last else "")


def _as_mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {"value": value}


def _in_session(pid: int, leaders: set[int]) -> bool:
    with suppress(ProcessLookupError):
        return os.getsid(pid) in leaders
    return False


def _appending(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        if path.stat().st_size > _LOG_BYTES:
            path.replace(path.with_name(f"{path.name}.1"))
    return path.open("ab", buffering=0)
