"""
The runner's end of the wire to the guardian: it tells the deadline and the last word, and
when the guardian is gone the runner is gone too. Its lines are in ARCHITECTURE.md.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

from runner.errors import LeftError
from runner.facts import Server

ALIVE: Final = b'{"alive": true}'
_ALIVE_S: Final = 5.0


class Lifeline:
    """`fd` None: there is no guardian (a runner started by hand); then all of this does nothing."""

    def __init__(self, fd: int | None) -> None:
        self._next_alive = 0.0
        self._socket = socket.socket(fileno=fd) if fd is not None else None
        if self._socket is not None:
            self._socket.set_inheritable(False)
            threading.Thread(target=self._watch, args=(self._socket,), daemon=True).start()

    def deadline(self, at: datetime, *, run: str, keep: str | None, stop_anyway: bool) -> None:
        """`run` is the mark (`Env.RUN`) of all that must end at the deadline."""
        self._send({"deadline": at.isoformat(), "run": run, "keep": keep, "stop_anyway": stop_anyway})

    def server(self, server: Server | None) -> None:
        """What is stopped at the deadline and at the end, as job.yaml names it; None: nothing."""
        self._send({"server": None if server is None else asdict(server)})

    def listeners(self, urls: Sequence[str]) -> None:
        """Whom the guardian tells when the stop does not come about. Addresses are secrets: kept in memory only."""
        self._send({"notify": list(urls)})

    def alive(self) -> None:
        """A turn of the loop was made. Said now and then, and never waited for."""
        if self._socket is not None and time.monotonic() >= self._next_alive:
            self._next_alive = time.monotonic() + _ALIVE_S
            with suppress(OSError):
                self._socket.send(ALIVE + b"\n", socket.MSG_DONTWAIT)

    def end(self, *, code: int, stop: bool, keep: str | None, hold_s: float | None, reason: str) -> None:
        """The last word. After it the guardian does what is left to do."""
        self._send({"end": {"code": code, "stop": stop, "keep": keep, "hold_s": hold_s, "reason": reason}})

    def _send(self, line: Mapping[str, Any]) -> None:
        if self._socket is not None:
            with suppress(OSError):  # the guardian is gone, and this process in a moment, too
                self._socket.sendall(json.dumps(line).encode() + b"\n")

    @staticmethod
    def _watch(wire: socket.socket) -> None:
        """Training goes on, and the next runner finds it: nothing is cleaned up here."""
        with suppress(OSError):
            while wire.recv(4096):
                pass
        os._exit(LeftError.exit_code)
