"""Notes of what a store has of files here, so that what has not changed is neither read nor asked for again."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from runner.storage.disk import Disk
from runner.storage.offsite.contract import Store

Signature = tuple[int, ...]

_SAVE_EVERY_S: Final = 5.0
_SAVE_SHARE: Final = 20  # more of them take longer to save: no more than this part of the time goes there


def signature(path: Path) -> Signature:
    """Of a file as it is now: other bytes have another one. Empty: there is none."""
    with suppress(OSError):
        return sign(path.lstat())
    return ()


def sign(found: os.stat_result) -> Signature:
    return found.st_size, found.st_mtime_ns, found.st_ino


class Known:
    """
    By key in the store, with which signature its file was stored and confirmed.

    Lost, or of another store, the notes cost a question a file, no more: so they are not made durable, but
    written again and again, since whoever notes may be killed at any moment.
    """

    def __init__(self, path: Path, store: Store) -> None:
        self._path, self._address = path, store.address
        self._lock = threading.Lock()
        self._notes = _read(path, store.address)
        self._save_at = time.monotonic() + _SAVE_EVERY_S

    def is_empty(self) -> bool:
        return not self._notes

    def of(self, key: str) -> Signature:
        return tuple(self._notes.get(key, ()))

    def note(self, key: str, stored: Signature) -> None:
        """From any thread."""
        with self._lock:
            self._notes[key] = [*stored]
            if time.monotonic() > self._save_at:
                self._save()

    def save(self) -> None:
        with self._lock:
            self._save()

    def _save(self) -> None:
        began = time.monotonic()
        fresh = self._path.with_name(f"{self._path.name}.new")
        with suppress(OSError):
            Disk().write(fresh, json.dumps({"store": self._address, "files": self._notes}).encode())
            Disk().rename(fresh, self._path)
        done = time.monotonic()
        self._save_at = done + max(_SAVE_EVERY_S, _SAVE_SHARE * (done - began))


def _read(path: Path, address: str) -> dict[str, list[int]]:
    with suppress(OSError, ValueError, RecursionError, AttributeError):
        known = json.loads(path.read_bytes())
        files = known.get("files", {}) if known.get("store") == address else {}
        return {key: found for key, found in files.items() if isinstance(found, list)}
    return {}
