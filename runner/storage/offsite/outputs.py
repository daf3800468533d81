"""
Folders that a job writes beside its checkpoints, copied to `<job>/outputs/<folder>/…`.

Only what changed is sent. What is in the store is never removed there. A file that is written
to meanwhile is left for the next time, and so is one that the store does not take, or a folder
that cannot be read: all others go. What was left is told, and does not count as safe.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runner.errors import one_line
from runner.storage.checksums import describe_file
from runner.storage.disk import is_own_name
from runner.storage.offsite.contract import Checksums, OffsiteError, Store, in_parallel, is_key
from runner.storage.offsite.known import Known, Signature, signature
from runner.storage.offsite.transfer import Meter, Progress, differs

INDEX: Final = ".outputs.json"  # in the run folder: what the store has confirmed; without it everything is compared
_NUM_THREADS: Final = 8
_MAX_FILES: Final = 200_000
_TICK_NS: Final = 50_000_000  # more than the step of any file system's clock that we know


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    num_files: int  # that were found
    num_stored: int
    sent_bytes: int
    left: tuple[tuple[str, str], ...]  # what is not there, and why: files, and folders that cannot be read
    missing: tuple[str, ...]  # folders that do not exist


def copy_outputs(store: Store, job: str, folders: Sequence[Path], run_dir: Path, progress: Progress) -> Copied:
    """Copy what the store does not have; may be killed at any moment and called again."""
    copying = _Copying(store, job, run_dir / INDEX)
    files = [(folder, path) for folder in folders for path in _files(folder, copying.leave)]
    num_unread = len(copying.left)
    changed = [pair for pair in files if not copying.is_there(*pair)]
    meter = Meter(sum(_size(path) for _, path in changed), progress)

    def copy(pair: tuple[Path, Path]) -> None:
        copying.copy(*pair)
        meter.add(pair[1].name, _size(pair[1]))

    try:
        in_parallel(copy, changed, _NUM_THREADS)
    finally:
        copying.known.save()
    return Copied(
        num_files=len(files),
        num_stored=len(files) - (len(copying.left) - num_unread),
        sent_bytes=copying.sent_bytes,
        left=tuple(copying.left),
        missing=tuple(one_line(str(folder)) for folder in folders if not os.path.exists(folder)),  # noqa: PTH110  # the same
    )


Leave = Callable[[Path, str], None]


def _files(folder: Path, leave: Leave) -> Iterator[Path]:
    """Plain files; a link leads who knows where. A folder that cannot be read is left: it may be full."""
    if os.path.isfile(folder):  # noqa: PTH113  # Path.is_file raises where it may not look
        yield folder
        return
    number = 0
    for parent, _, names in os.walk(folder, onerror=lambda error: _leave_unread(error, leave)):
        for name in sorted(names):
            path = Path(parent, name)
            if _is_plain(path, leave):
                number += 1
                yield path
            if number > _MAX_FILES:
                raise OffsiteError(
                    f"outputs: {folder}: expected at most {_MAX_FILES} files",
                    hint="name a smaller folder in outputs",
                    final=True,
                )


def _is_plain(path: Path, leave: Leave) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError as error:
        _leave_unread(error, leave)
        return False


def _leave_unread(error: OSError, leave: Leave) -> None:
    if not isinstance(error, FileNotFoundError):  # what is gone is nobody's any more
        leave(Path(error.filename), error.strerror or "cannot be read")


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_size
    return 0


class _Copying:
    def __init__(self, store: Store, job: str, index: Path) -> None:
        self._store, self._prefix = store, f"{job}/outputs/"
        self._listed = {entry.key: entry.size_bytes for entry in store.list(self._prefix)}
        self.known = Known(index, store)
        self._is_compared = store.probe().checksums is not Checksums.NONE
        self._lock = threading.Lock()
        self.sent_bytes = 0
        self.left: list[tuple[str, str]] = []

    def is_there(self, folder: Path, path: Path) -> bool:
        key, now = self._key(folder, path), signature(path)
        return bool(now) and self.known.of(key) == now and self._listed.get(key) == now[0]

    def copy(self, folder: Path, path: Path) -> None:
        key, before = self._key(folder, path), signature(path)
        if not is_key(key) or is_own_name(path.name):
            self.leave(path, "a name that cannot be a key")
            return
        try:
            self._bring(key, path)
        except OSError as error:
            self.leave(path, error.strerror or "cannot be read")
        except OffsiteError as error:
            if error.of_object:
                self.leave(path, f"the store refuses it: {error}")
            elif error.damaged or before != signature(path):
                self.leave(path, "it is being written")
            else:
                raise
        else:
            self._note(key, path, before)

    def _key(self, folder: Path, path: Path) -> str:
        return f"{self._prefix}{path.relative_to(folder.parent).as_posix()}"

    def _bring(self, key: str, path: Path) -> None:
        shard = describe_file(path, "output")
        if self._listed.get(key) == shard.size_bytes and not differs(self._store, key, shard):
            return
        self._store.put_file(key, path, shard, lambda _: None)
        # of one piece the answer is the store's word for its bytes: to ask again would double the time of small files
        is_confirmed = self._is_compared and len(shard.checksums) <= 1
        problem = "" if is_confirmed else differs(self._store, key, shard)
        if problem:
            raise OffsiteError(f"{self._store.address}/{key}: stored, but {problem}", final=False)
        with self._lock:
            self.sent_bytes += shard.size_bytes

    def _note(self, key: str, path: Path, before: Signature) -> None:
        if before != signature(path):
            self.leave(path, "it is being written")
        elif before[1] < time.time_ns() - _TICK_NS:  # a younger one may change and keep its time: ask next time
            self.known.note(key, before)

    def leave(self, path: Path, why: str) -> None:
        with self._lock:
            self.left.append((one_line(str(path)), one_line(why)))
