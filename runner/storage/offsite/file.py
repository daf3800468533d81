"""
A folder as a store: a network disk, a second disk, a test.

A file is written beside its place, under a name that no object has, synced, renamed, and its
folder synced. The folder keeps no checksums, so `head` has none, and whoever wants to be sure
reads the bytes back. No link is followed, whoever laid it there.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Final

from runner.storage.disk import Disk, expect_no_link, is_own_name, lstat_inside, own_path, pages
from runner.storage.offsite.contract import (
    BLOCK_BYTES,
    MAX_SMALL_BYTES,
    PROBE,
    PROBED,
    Abilities,
    Block,
    Checksums,
    Entry,
    Head,
    LeftOut,
    OffsiteError,
    Sent,
    Version,
    is_key,
    read_chunk,
    replaced,
    too_large,
)
from runner.storage.offsite.disks import refused
from runner.storage.offsite.pace import Pace
from vramfarm.protocol import CHUNK_BYTES, Shard

_UNFINISHED: Final = "unfinished"
_GUARD: Final = "guard"  # a lock file beside what `put_if` replaces
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})  # some network disks
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS})  # FUSE, SMB and exFAT have none


class FileStore:
    def __init__(self, root: Path, disk: Disk, pace: Pace | None = None) -> None:
        self.address = f"file://{root}"
        self._root = root
        self._disk = disk
        self._pace = pace or Pace(None)
        with self._plain_words(""):
            is_mounted = root.parent.is_dir()
        if not is_mounted:  # made by us it would be on this machine's own disk
            raise OffsiteError(
                f"{self.address}: expected the folder {root.parent}, found none",
                hint="is the disk mounted? make the folder, or correct offload.to",
                final=True,
                curable=True,
            )

    def probe(self) -> Abilities:
        key, before = f"{PROBE}{secrets.token_hex(8)}", datetime.now(UTC) - PROBED
        with self._place(key) as (_, target):
            try:
                with self._guarded(target):
                    is_guarded = True
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                is_guarded = False
            finally:
                self._disk.remove(own_path(target, _GUARD))
            for left in target.parent.iterdir():
                if is_own_name(left.name) and _is_left(left, before):
                    self._disk.remove(left)
        return Abilities(checksums=Checksums.NONE, conditional=is_guarded)

    def put_file(self, key: str, path: Path, shard: Shard, sent: Sent) -> None:
        with self._place(key) as (temporary, target):
            self._disk.write(temporary, b"")
            for index in range(len(shard.checksums)):
                at = index * CHUNK_BYTES
                for block in self._pace.cut(read_chunk(path, shard, index)):
                    self._disk.write_at(temporary, at, block)
                    at += len(block)
                    sent(len(block))
            self._commit(temporary, target)

    def put(self, key: str, content: bytes) -> None:
        self._pace.take(len(content))
        with self._place(key) as (_, target):
            temporary = _unfinished(target)
            self._disk.write(temporary, content)
            self._commit(temporary, target)

    def put_new(self, key: str, content: bytes) -> bool:
        self._pace.take(len(content))
        with self._place(key) as (_, target):
            temporary = _unfinished(target)
            self._disk.write(temporary, content)
            self._disk.sync(temporary)
            try:
                self._name(temporary, target)
            except FileExistsError:
                return False
            finally:
                self._disk.remove(temporary)
            self._disk.sync(target.parent)
            return True

    def _name(self, temporary: Path, target: Path) -> None:
        try:
            self._disk.link(temporary, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if target.exists():
                raise FileExistsError(errno.EEXIST, "there is one", str(target)) from error
            self._disk.rename(temporary, target)  # the run's lock is what then keeps a second writer away

    def put_if(self, key: str, content: bytes, tag: str | None) -> str | None:
        self._pace.take(len(content))
        with self._place(key) as (_, target), self._guarded(target):
            there = self.get_version(key)
            if tag != (there.tag if there else None):
                return None
            temporary = _unfinished(target)
            self._disk.write(temporary, content)
            self._commit(temporary, target)
            return _tag(content)

    @contextmanager
    def _guarded(self, target: Path) -> Iterator[None]:
        """Nobody else replaces it meanwhile; the lock goes with its process. A disk without locks is an error: `probe` tells."""
        with own_path(target, _GUARD).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def get_version(self, key: str, limit_bytes: int = MAX_SMALL_BYTES) -> Version | None:
        content = self.get(key, limit_bytes)
        return None if content is None else Version(content=content, tag=_tag(content))

    def copy(self, source: str, key: str, _shard: Shard) -> bool:
        """A second name for the same bytes: objects are never written to, only replaced."""
        with self._place(key) as (temporary, target):
            try:
                self._disk.link(self._path(source), temporary)
            except OSError as error:
                if error.errno in _NO_LINKS:
                    return False
                raise
            self._commit(temporary, target)
            return True

    def get(self, key: str, limit_bytes: int = MAX_SMALL_BYTES) -> bytes | None:
        head = self.head(key)
        if head is None:
            return None
        if head.size_bytes > limit_bytes:
            raise too_large(f"{self.address}/{key}", limit_bytes, head.size_bytes)
        return self.read(key, 0, head.size_bytes)

    def read(self, key: str, offset: int, num_bytes: int, tag: str = "") -> bytes:
        with self._open(key, tag) as raw, BufferedReader(raw) as file:
            file.seek(offset)
            content = file.read(num_bytes)
            self._expect_same(key, raw, tag)
            return content

    def stream(self, key: str, offset: int, num_bytes: int, tag: str = "") -> Iterator[Block]:
        with self._open(key, tag) as file:
            file.seek(offset)
            memory = pages(BLOCK_BYTES)
            for at in range(0, num_bytes, BLOCK_BYTES):
                yield memory[: file.readinto(memory[: num_bytes - at])]
            self._expect_same(key, file, tag)

    @contextmanager
    def _open(self, key: str, tag: str) -> Iterator[FileIO]:
        with (
            self._plain_words(key),
            FileIO(os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as file,
        ):
            self._expect_same(key, file, tag)
            yield file

    def _expect_same(self, key: str, file: FileIO, tag: str) -> None:
        """Others may write into it, where a store would replace it."""
        if tag and tag != _tag_of(os.fstat(file.fileno())):
            raise replaced(f"{self.address}/{key}")

    def list(self, prefix: str, left_out: LeftOut = lambda _: None) -> Iterator[Entry]:
        with self._plain_words(prefix):
            expect_no_link(self._root, prefix)
            for folder, folders, names in os.walk(self._root / prefix.rpartition("/")[0], onerror=_refuse):
                place = Path(folder).relative_to(self._root)
                links = [name for name in folders if Path(folder, name).is_symlink()]
                for name in (*names, *links):
                    key = (place / name).as_posix()
                    if key.startswith(prefix) and not is_own_name(key):
                        yield from self._entry(key, left_out)

    def _entry(self, key: str, left_out: LeftOut) -> Iterator[Entry]:
        with suppress(FileNotFoundError):  # deleted while we listed
            found = (self._root / key).lstat()
            if stat.S_ISREG(found.st_mode):
                modified_at = datetime.fromtimestamp(found.st_mtime, UTC)
                yield Entry(key=key, size_bytes=found.st_size, modified_at=modified_at)
            else:
                left_out(f"{key} (a link)" if stat.S_ISLNK(found.st_mode) else f"{key} (no plain file)")

    def head(self, key: str) -> Head | None:
        with self._plain_words(key):
            path = self._path(key)
            try:
                found = lstat_inside(self._root, key)
            except FileNotFoundError:
                return None
            if not stat.S_ISREG(found.st_mode):
                hint = "remove what is there: nothing is stored or read through a folder or a pipe of this name"
                raise OffsiteError(f"{path}: expected a plain file, found something else", hint=hint, final=True)
            return Head(size_bytes=found.st_size, crc32=None, tag=_tag_of(found))

    def delete(self, key: str) -> None:
        with self._plain_words(key):
            path = self._path(key)
            self._disk.remove(path)
            self._disk.remove(own_path(path, _GUARD))
            self._prune(path)

    def _prune(self, path: Path) -> None:
        for parent in path.parents:
            if parent == self._root or not _remove_if_empty(parent):
                break

    def abort(self, prefix: str, before: datetime) -> None:
        """Whoever was killed in the middle of a copy leaves an unfinished file, the guard of none, or an empty folder."""
        with self._plain_words(prefix):
            expect_no_link(self._root, prefix)
            folder = self._root / prefix.rpartition("/")[0]
            own = [folder] if prefix.endswith("/") and folder.is_dir() else []
            for path in [*sorted(folder.rglob("*"), reverse=True), *own]:  # folders come last
                key = path.relative_to(self._root).as_posix()
                if f"{key}/".startswith(prefix) and _is_left(path, before):
                    _remove_if_empty(path) if path.is_dir() else self._disk.remove(path)
                    self._prune(path)

    def find_missing_rights(self, _folder: str) -> tuple[str, ...]:
        return ()

    @contextmanager
    def _place(self, key: str) -> Iterator[tuple[Path, Path]]:
        """A temporary name and the real one, in a folder that is there."""
        with self._plain_words(key):
            target = self._path(key)
            for folder in reversed(target.parents):
                if folder.is_relative_to(self._root) and not folder.is_dir():
                    self._disk.make_folder(folder)
                    self._disk.sync(folder.parent)
            temporary = own_path(target, _UNFINISHED)
            self._disk.remove(temporary)  # of a killed copy it may be a second name of another object's bytes
            yield temporary, target

    def _commit(self, temporary: Path, target: Path) -> None:
        self._disk.sync(temporary)
        self._disk.rename(temporary, target)
        self._disk.sync(target.parent)

    def _path(self, key: str) -> Path:
        if not is_key(key) or is_own_name(key):
            what = f"{self.address}: expected a plain relative path for a key, got {key!r}"
            raise OffsiteError(what, final=True, of_object=True)
        expect_no_link(self._root, key)
        return self._root / key

    @contextmanager
    def _plain_words(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise refused(f"{self.address}/{key}".rstrip("/"), error, "offload.to") from error


def _unfinished(target: Path) -> Path:
    """Of its own: others may write a small object, too. A large one has one writer, who goes on under the name it had."""
    return own_path(target, f"{secrets.token_hex(8)}.{_UNFINISHED}")


def _tag_of(found: os.stat_result) -> str:
    return f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"


def _tag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _is_left(path: Path, before: datetime) -> bool:
    with suppress(FileNotFoundError):  # pruned, or gone by itself
        found = path.lstat()
        if datetime.fromtimestamp(found.st_mtime, UTC) >= before:
            return False
        if stat.S_ISDIR(found.st_mode):
            return not any(path.iterdir())
        if is_own_name(path.name) and path.name.endswith(_GUARD):
            return all(own_path(other, _GUARD) != path for other in path.parent.iterdir())
        return is_own_name(path.name) and path.name.endswith(_UNFINISHED)
    return False


def _remove_if_empty(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _refuse(error: OSError) -> None:
    """A folder that cannot be read must not look like one that is empty."""
    if not isinstance(error, FileNotFoundError):
        raise error
