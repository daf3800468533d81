"""
The saver's process, as local rank 0 looks after it: started, and started again when it is dead, or silent.

Standard library and protocol only. The rule: there is one saver. One that lives and says nothing is killed before it gets a successor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from vramfarm import folder, protocol
from vramfarm.protocol import ControlPage, Env, Told, Word

SILENCE_S: Final = 30.0  # of a saver that lives; it beats a hundred times a second
_SILENT_LOOKS: Final = 5  # and so many looks at it: after a pause of everything it has a moment to beat again
_TEND_NS: Final = 1_000_000_000
_SLOW_NS: Final = 60_000_000_000
_SEE_OFF_S: Final = 10.0
_LAST_WORDS_BYTES: Final = 300


class SaverProcess:
    """The saver of this machine, started by local rank 0, and started again when it is found dead, or silent."""

    def __init__(self, page: ControlPage, env: Mapping[str, str], log: Path, *, silence_s: float = SILENCE_S) -> None:
        self._page = page
        self._env = dict(env) | {Env.CONTROL: str(page.path), Env.ROLE: "saver"}
        self._log = log
        self._child: subprocess.Popen[bytes] | None = None
        self._next_ns = 0
        self._wait_ns = _TEND_NS
        self._silence_ns = int(silence_s * 1e9)
        self._beat = self._heard_ns = self._silent_looks = 0
        self._has_killed = False
        self._log_from = 0  # of the saver that runs now

    def tend(self) -> None:
        """
        Look after the saver, once a second at most, and only while it is silent. Its deaths in a row are answered ever more slowly.
        """
        now = time.monotonic_ns()
        if now < self._next_ns:
            return
        if now > self._next_ns + _SLOW_NS:  # it was not silent for so long
            self._wait_ns = _TEND_NS
        self._next_ns = now + _TEND_NS
        if pid := self._pid():
            self._wait_ns = _TEND_NS
            self._listen(pid, now)
            return
        self._tell_death()
        self._start()
        self._heard_ns, self._silent_looks = now, 0
        self._next_ns, self._wait_ns = now + self._wait_ns, min(2 * self._wait_ns, _SLOW_NS)

    def see_off(self) -> None:
        """Wait until the saver has ended; it does once the end is recorded."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._child is not None:
                self._child.wait(_SEE_OFF_S)

    def _pid(self) -> int:
        """The process that is to save; 0 if there is none."""
        if self._child is not None and self._child.poll() is None:
            return self._child.pid
        pid = self._page[Word.SAVER_PID]
        return pid if pid and protocol.process_started(pid) == self._page[Word.SAVER_STARTED] else 0

    def _tell_death(self) -> None:
        """Of one that could not say why itself. What it had staged is not lost: its successor writes it."""
        code = self._child.returncode if self._child is not None else 0
        was_ours, self._has_killed = self._has_killed, False
        if code == 0 or was_ours or self._page[Word.ENDED] or (code > 0 and self._page[Word.TOLD] == Told.DEATH):
            return
        oom = " (out of memory? the kernel does that)" if code == -signal.SIGKILL else ""
        how = f"was killed by signal {-code}{oom}" if code < 0 else f"ended with exit code {code}{self._last_words()}"
        self._page.set_error(f"the saver {how}; it is started again", Told.NEWS)
        self._page[Word.NUM_FAILED] += 1

    def _last_words(self) -> str:
        try:
            with folder.open_at_once(self._log, "rb") as log:
                raw = log.read()
            lines = raw[self._log_from :][-_LAST_WORDS_BYTES:].decode(errors="replace").split("\n")
        except OSError:
            return ""
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f" ({last}; see {self._log})" if last else ""

    def _listen(self, pid: int, now: int) -> None:
        """
        Kill a saver that has long been silent: one that was stopped must not wake up beside its successor.

        One that waits in the kernel ends when that answers; until then it has the lock, and nobody writes.
        """
        beat = self._page[Word.SAVER_BEAT_NS]
        if beat != self._beat:
            self._beat, self._heard_ns, self._silent_looks = beat, now, 0
            return
        self._silent_looks += 1
        if self._silent_looks < _SILENT_LOOKS or now - self._heard_ns < self._silence_ns:
            return
        doing = protocol.process_state(pid) or "stuck"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self._has_killed = True
        self._heard_ns, self._silent_looks = now, 0
        self._page.set_error(
            f"the saver said nothing for {self._silence_ns / 1e9:.0f} s ({doing}): it is killed, and started again",
            Told.NEWS,
        )
        self._page[Word.NUM_FAILED] += 1

    def _start(self) -> None:
        script = Path(__file__).absolute().with_name("saver.py")
        with self._open_log() as log:
            self._log_from = log.tell()
            self._child = subprocess.Popen(
                (self._env.get(Env.SAVER_PYTHON) or sys.executable, "-I", str(script)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )

    def _open_log(self) -> BinaryIO:
        """A disk without room for its log is no reason to train without a saver, nor to end training."""
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            return folder.open_at_once(self._log, "ab")
        except OSError:
            return Path(os.devnull).open("ab")


def log_path(env: Mapping[str, Any]) -> Path:
    """Where the saver's words go: beside the end record, else beside the folder of checkpoints."""
    end_file = env.get(Env.END_FILE)
    return Path(end_file or env[Env.CHECKPOINT_DIR]).absolute().parent / "saver.log"
