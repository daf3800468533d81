"""
Notes of what a store has of files here, so that what has not changed is neither read nor asked for again.

A line each, the newest of a key counts: there may be a hundred thousand, and each copy adds what is new. The first line
names the store.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final

from runner.storage.disk import Disk
from runner.storage.offsite.contract import Store

Signature = tuple[int, ...]

_SAVE_EVERY_S: Final = 5.0
_MAX_LINE: Final = 1 << 16
_PIECE: Final = 1000  # lines that are written at once
_MAX_OLD: Final = 10_000  # lines that do not count any more, beyond as many as do


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

    def __init__(self, path: Path, store: Store, max_old: int = _MAX_OLD) -> None:
        self._path, self._address, self._disk = path, store.address, Disk()
        self._lock = threading.Lock()
        self._notes: dict[str, str] = {}  # as text, which is smaller than numbers
        num_lines = self._read()
        self._new: list[str] = []
        self._is_anew = not num_lines or num_lines > 2 * len(self._notes) + max_old
        self._save_at = time.monotonic() + _SAVE_EVERY_S

    def is_empty(self) -> bool:
        return not self._notes

    def of(self, key: str) -> Signature:
        return tuple(map(int, self._notes.get(key, "").split()))

    def note(self, key: str, stored: Signature) -> None:
        """From any thread."""
        with self._lock:
            self._notes[key] = " ".join(map(str, stored))
            self._new.append(key)
            if time.monotonic() > self._save_at:
                self._save()

    def compare(self, listed: Iterable[tuple[str, int]]) -> dict[str, int]:
        """
        Forget what a store's list has no more, or with another size; sizes, by key, of what it has and is not known.

        So that a list of very many is not kept beside as many notes.
        """
        there, others = dict[str, str](), dict[str, int]()
        for key, size_bytes in listed:
            note = self._notes.get(key, "")
            if note.partition(" ")[0] == str(size_bytes):
                there[key] = self._notes.pop(key)
            else:
                others[key] = size_bytes
        self._is_anew = self._is_anew or bool(self._notes)
        self._notes = there
        return others

    def save(self) -> None:
        with self._lock:
            self._save()

    def _save(self) -> None:
        with suppress(OSError):
            if self._is_anew:
                self._write_anew()
            elif self._new:
                self._disk.append(self._path, self._dump(self._new))
            self._is_anew, self._new = False, []
        self._save_at = time.monotonic() + _SAVE_EVERY_S

    def _write_anew(self) -> None:
        fresh = self._path.with_name(f"{self._path.name}.new")
        self._disk.write(fresh, json.dumps({"store": self._address}).encode() + b"\n")
        keys = iter(self._notes)
        while piece := [*islice(keys, _PIECE)]:
            self._disk.append(fresh, self._dump(piece))
        self._disk.rename(fresh, self._path)

    def _dump(self, keys: Iterable[str]) -> bytes:
        """A key may be in it twice. Each line begins on one of its own: a kill may have torn the last one."""
        lines = (json.dumps([key, self._notes[key]]) for key in keys if key in self._notes)
        return "".join(f"\n{line}" for line in lines).encode()

    def _read(self) -> int:
        """How many lines there are; 0: none that are of use here."""
        num_lines = 0
        with suppress(OSError, ValueError, RecursionError, AttributeError), self._path.open("rb") as file:
            if json.loads(file.readline(_MAX_LINE)).get("store") != self._address:
                return 0
            while line := file.readline(_MAX_LINE):
                num_lines += 1
                with suppress(ValueError, RecursionError, TypeError):  # torn, or nothing of ours
                    key, note = json.loads(line)
                    if isinstance(key, str) and all(map(str.isdecimal, note.split())):
                        self._notes[key] = note
            return num_lines + 1
        return 0
