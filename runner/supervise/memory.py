"""
What lies in another process's memory: its environment and its command line. Standard library only.

The kernel takes the lock of that memory to read them (/proc/PID/environ, cmdline; maps and smaps as well). Who faults in a
page of a disk that does not answer may hold it, and whoever asks then waits as long as the disk does. So it is a
thread that asks, and that is left behind. All else that is asked of others takes no such lock: stat, status, comm,
io, wchan, stack, exe, fd, cgroup.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Final

_PATIENCE_S: Final = 2.0
_IMPATIENCE_S: Final = 0.2  # where others hang already: the ranks of an attempt hang together
_MAX_HELD: Final = 64  # threads that hang; beyond that nobody is asked

Asked = tuple[str, int]  # the file, and the start time of the process: a pid is used again


def ask(path: str, started: int) -> bytes | None:
    """All of a file of /proc; None: nobody answers now, and a later call may have what comes then. Raises as `read` does."""
    return _desk.ask((path, started))


def read(path: str) -> bytes:
    """Return the whole of a small file of /proc."""
    # os.open and os.read: half the cost of a file object, and this is read for every process
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


class _Question:
    def __init__(self, path: str) -> None:
        self.path = path
        self.done = threading.Event()
        self._found: bytes | OSError = b""

    def answer(self) -> None:
        try:
            self._found = read(self.path)
        except OSError as error:
            self._found = error
        self.done.set()

    def result(self) -> bytes:
        if isinstance(self._found, OSError):
            raise self._found
        return self._found


class _Reader:
    """A thread that answers one question after the other. As a daemon it holds up nobody's end."""

    def __init__(self) -> None:
        self._questions: SimpleQueue[_Question | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            question.answer()

    def ask(self, question: _Question, patience_s: float) -> bool:
        """Whether it is answered. A machine that is busy, or was asleep, is no reason to give up: the thread runs then."""
        self._questions.put(question)
        while not question.done.wait(patience_s):
            if not self._is_running():
                return question.done.is_set()
        return True

    def dismiss(self) -> None:
        self._questions.put(None)

    def _is_running(self) -> bool:
        raw = Path(f"/proc/self/task/{self._thread.native_id}/stat").read_bytes()
        return raw[raw.rindex(b")") + 2 :][:1] == b"R"


class _Desk:
    def __init__(self, max_held: int = _MAX_HELD) -> None:
        self._max_held = max_held
        self._lock = threading.Lock()
        self._reader: _Reader | None = None
        self._held: dict[Asked, _Question] = {}

    def ask(self, asked: Asked) -> bytes | None:
        with self._lock:
            question = self._held.pop(asked, None)
            if question is None:
                question = self._put(asked)
            if question is None:
                return None
            if not question.done.is_set():
                self._held[asked] = question
                return None
        return question.result()

    def _put(self, asked: Asked) -> _Question | None:
        self._held = {who: question for who, question in self._held.items() if not question.done.is_set()}
        if len(self._held) >= self._max_held:
            return None
        reader, question = self._reader or _Reader(), _Question(asked[0])
        is_free = reader.ask(question, _IMPATIENCE_S if self._held else _PATIENCE_S)
        self._reader = reader if is_free else None
        if not is_free:
            reader.dismiss()  # when it comes back
        return question


_desk = _Desk()


def _begin_anew() -> None:
    """In a child of ours: it has none of our threads."""
    global _desk  # noqa: PLW0603  # of this process
    _desk = _Desk()


os.register_at_fork(after_in_child=_begin_anew)
