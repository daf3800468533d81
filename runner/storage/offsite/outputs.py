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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from runner.errors import one_line
from runner.job import Job
from runner.storage.checksums import describe_file
from runner.storage.disk import is_own_name
from runner.storage.offsite.comparing import differs
from runner.storage.offsite.contract import Checksums, OffsiteError, Store, for_each
from runner.storage.offsite.known import Known, Signature, sign, signature
from runner.storage.offsite.links import Links, Places
from runner.storage.offsite.meter import Meter, Progress

INDEX: Final = ".outputs.json"  # in the run folder: what the store has confirmed; without it everything is compared
_NUM_THREADS: Final = 24  # of small files most of the time is the store's
_MAX_FILES: Final = 200_000
_NAMED: Final = 1000  # of what is left
WRITTEN: Final = "somebody writes to it; the next copy has it when that is over"
_LAST_TRIES: Final = 3  # of what is being written, though nobody should write any more
_PAUSE_S: Final = 1.0
_TICK_NS: Final = 50_000_000  # more than the step of any file system's clock that we know


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    num_files: int  # that were found
    num_stored: int
    sent_bytes: int
    left_out: tuple[
        tuple[str, str], ...
    ]  # what is not there, and why: files, and folders that cannot be read; some of them
    num_left_out: int
    missing: tuple[str, ...]  # folders that do not exist
    followed: tuple[str, ...] = ()  # places beside these folders that were copied because links lead there


@dataclass(frozen=True, slots=True)
class _File:
    key: str
    path: str
    was: Signature  # when it was found


def copy_outputs(  # noqa: PLR0913  # called once
    store: Store, job: str, folders: Sequence[Path], places: Places, progress: Progress, *, believe: bool = False
) -> Copied:
    """
    Copy what the store does not have; may be killed at any moment and called again.

    `believe`: what was confirmed is there still, and what is being written is for the next time. Else it is the last
    copy: the store is asked for a list, which of many files takes minutes, and a moment is waited for what is written.
    """
    copying = _Copying(store, job, places.run_dir / INDEX, believe=believe)
    look = partial(_Walk, job, folders, places, copying.is_there)
    walk = look()
    meter = Meter(sum(file.was[0] for file in walk.changed()), progress)
    if (
        walk.num_changed
    ):  # the first walk was for their bytes; to be copied they are found once more, since so many are not kept
        walk = look()

        def copy(file: _File) -> None:
            copying.copy(file)
            meter.add(os.path.basename(file.path), file.was[0])  # noqa: PTH119  # one of many

        try:
            for_each(copy, walk.changed(), _NUM_THREADS)
            for _ in range(0 if believe else _LAST_TRIES):
                copying.copy_written(_PAUSE_S)
        finally:
            copying.known.save()
    for file in copying.written:
        copying.left_out.add(Path(file.path), WRITTEN)
    num_files = walk.num_files - copying.num_gone
    return Copied(
        num_files=num_files,
        num_stored=num_files - copying.left_out.number,
        sent_bytes=copying.sent_bytes,
        left_out=(*walk.left_out.some, *copying.left_out.some)[:_NAMED],
        num_left_out=walk.left_out.number + copying.left_out.number,
        missing=tuple(one_line(str(folder)) for folder in folders if not os.path.exists(folder)),  # noqa: PTH110  # Path.exists raises where it may not look
        followed=tuple(walk.followed),
    )


def tell_left(job: Job) -> str:
    """What is in `outputs` now and no copy would have, as the last copy tells it; empty: nothing."""
    walk = _Walk("", [Path(folder) for folder in job.outputs], Places.of(job), lambda _: True)
    try:
        for _ in walk.changed():
            pass  # nothing is changed where all is there
    except OffsiteError as error:
        return str(error)
    if not walk.left_out.number:
        return ""
    more = f" (and {walk.left_out.number - 1} more)" if walk.left_out.number > 1 else ""
    return f"{': '.join(walk.left_out.some[0])}{more}"


class _LeftOut:
    """What is not in the store, and why: of very many some are named, all are counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.some: list[tuple[str, str]] = []
        self.number = 0

    def add(self, path: Path, why: str) -> None:
        with self._lock:
            self.number += 1
            if len(self.some) < _NAMED:
                self.some.append((one_line(str(path)), one_line(why)))


LeaveOut = Callable[[Path, str], None]


class _Walk:
    """Once through all that job.yaml names. What is found is handed on, and not kept: there may be very much."""

    def __init__(self, job: str, folders: Sequence[Path], places: Places, is_there: Callable[[_File], bool]) -> None:
        self._job, self._folders, self._links, self._is_there = job, folders, Links(folders, places), is_there
        self.num_files = self.num_changed = 0
        self.left_out = _LeftOut()

    @property
    def followed(self) -> Sequence[str]:
        return self._links.followed

    def changed(self) -> Iterator[_File]:
        for folder in self._folders:
            for file in _files(folder, f"{self._job}/outputs/{folder.name}", self._links, self.left_out.add):
                self.num_files += 1
                if not self._is_there(file):
                    self.num_changed += 1
                    yield file


def _files(folder: Path, prefix: str, links: Links, leave_out: LeaveOut) -> Iterator[_File]:
    """Plain files, each looked at once, and what links stand for. A folder that cannot be read is left: it may be full."""
    if why := links.why_not_outputs(folder):
        leave_out(folder, why)
        return
    if os.path.isfile(folder):  # noqa: PTH113  # the same
        real = os.path.realpath(folder)
        yield _File(prefix, real, signature(Path(real)))
        return
    number, below = 0, [(str(folder), prefix)]
    while below:
        place, key = below.pop()
        for name in _names(place, leave_out):
            if is_own_name(name):
                continue
            path, found = _lead(f"{place.rstrip('/')}/{name}", links, leave_out)
            if found is not None and stat.S_ISDIR(found.st_mode):
                below.append((path, f"{key}/{name}"))
            elif found is not None and stat.S_ISREG(found.st_mode):
                number += 1
                yield _File(f"{key}/{name}", path, sign(found))
        if number > _MAX_FILES:
            raise OffsiteError(
                f"outputs: {folder}: expected at most {_MAX_FILES} files",
                hint="name a smaller folder in outputs",
                final=True,
            )


def _names(folder: str, leave_out: LeaveOut) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  # names only
    except OSError as error:
        _leave_out_unread(error, leave_out)
        return []


def _lead(path: str, links: Links, leave_out: LeaveOut) -> tuple[str, os.stat_result | None]:
    """What is copied for it, and what that is; None: nothing."""
    try:
        found = os.lstat(path)
        if not stat.S_ISLNK(found.st_mode):
            return path, found
        place, why = links.follow(path)
        if why:
            leave_out(Path(place), why)
        return place, os.lstat(place) if place and not why else None
    except OSError as error:
        _leave_out_unread(error, leave_out)
        return path, None


def _leave_out_unread(error: OSError, leave_out: LeaveOut) -> None:
    if not isinstance(error, FileNotFoundError):  # what is gone is nobody's any more
        leave_out(Path(error.filename), _unreadable(error))


def _unreadable(error: OSError) -> str:
    return f"it cannot be read: {error.strerror or 'no reason is told'}; mend that, or take it out of outputs"


class _Copying:
    def __init__(self, store: Store, job: str, index: Path, *, believe: bool) -> None:
        self._store, self.known = store, Known(index, store)
        self._is_believed = believe and not self.known.is_empty()
        listed = () if self._is_believed else ((e.key, e.size_bytes) for e in store.list(f"{job}/outputs/"))
        self._others = {} if self._is_believed else self.known.compare(listed)  # sizes of what is there, and not noted
        self._is_compared = store.probe().checksums is not Checksums.NONE
        self._lock = threading.Lock()
        self.sent_bytes = self.num_gone = 0
        self.written: list[_File] = []  # to meanwhile
        self.left_out = _LeftOut()

    def is_there(self, file: _File) -> bool:
        return self.known.of(file.key) == file.was

    def copy(self, file: _File) -> None:
        path = Path(file.path)
        before = signature(path)
        try:
            self._bring(file.key, path)
        except FileNotFoundError:
            self._wait_for(file)
        except OSError as error:
            self.left_out.add(path, _unreadable(error))
        except OffsiteError as error:
            if error.of_object:
                self.left_out.add(path, f"the store refuses it: {error}")
            elif error.damaged or before != signature(path):
                self._wait_for(file)
            else:
                raise
        else:
            self._note(file, path, before)

    def copy_written(self, pause_s: float) -> None:
        """Once more what was being written."""
        written, self.written = self.written, []
        if written:
            time.sleep(pause_s)
            for_each(self.copy, written, _NUM_THREADS)

    def _wait_for(self, file: _File) -> None:
        with self._lock:
            if signature(Path(file.path)):
                self.written.append(file)
            else:  # what is gone is nobody's any more
                self.num_gone += 1

    def _bring(self, key: str, path: Path) -> None:
        shard = describe_file(path, "output")
        is_large = len(shard.checksums) > 1  # a small one is sent as soon as asked for
        may_be_there = is_large if self._is_believed else self._others.get(key) == shard.size_bytes
        if may_be_there and not differs(self._store, key, shard):
            return
        self._store.put_file(key, path, shard, lambda _: None)
        # of one piece the answer is the store's word for its bytes: to ask again would double the time of small files
        is_confirmed = self._is_compared and not is_large
        problem = "" if is_confirmed else differs(self._store, key, shard)
        if problem:
            raise OffsiteError(f"{self._store.address}/{key}: stored, but {problem}", final=False)
        with self._lock:
            self.sent_bytes += shard.size_bytes

    def _note(self, file: _File, path: Path, before: Signature) -> None:
        if before != signature(path):
            self._wait_for(file)
        elif before[1] < time.time_ns() - _TICK_NS:  # a younger one may change and keep its time: ask next time
            self.known.note(file.key, before)
