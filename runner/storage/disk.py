"""
All that the supervisor does to a disk: eleven operations and one recipe.

A change is durable when these have finished it; tests replace `Disk` to lose power between
any two operations, so nobody in this room writes a byte to a file but here.
"""

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

_NOT_DIRECT: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_FICLONE: Final = 0x40049409  # linux/fs.h
_NOT_RESERVED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_OWN: Final = re.compile(r"\.vramfarm-[0-9a-f]{32}\.[a-z0-9.]+")
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate  # os.posix_fallocate would write, where it cannot be had


class Disk:
    """The real disk. Nothing is durable until `sync` says so: a file's bytes, a folder's names."""

    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def append(self, path: Path, data: bytes) -> None:
        with path.open("ab") as file:
            file.write(data)

    def write_at(self, path: Path, offset: int, data: bytes | memoryview) -> None:
        """Put bytes into the middle of a file, which is made if need be; safe from several threads."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            _put(fd, offset, data)
        finally:
            os.close(fd)

    def write_blocks(self, path: Path, offset: int, blocks: Iterable[bytes | memoryview]) -> None:
        """
        The same, block after block, past the page cache where the file system can: more than some gigabytes
        at once would go at the speed at which the kernel finds memory. For that blocks must lie in whole pages (`pages`).
        """
        fd = _open_direct(path)
        try:
            for block in blocks:
                offset = _put_direct(fd, offset, block)
        finally:
            os.close(fd)

    def reserve(self, path: Path, size_bytes: int) -> None:
        """
        Take the space for a file, which is made if need be; what is in it stays. Where the file system cannot, writes will say
        what is wrong. Several threads can then write to one file at once past the page cache: not while it grows.
        """
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            if size_bytes and _fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes)) != 0:
                code = ctypes.get_errno()
                if code not in _NOT_RESERVED:
                    raise OSError(code, os.strerror(code), str(path))
        finally:
            os.close(fd)

    def make_folder(self, path: Path) -> None:
        """Make one folder; no error if it is there."""
        path.mkdir(exist_ok=True)

    def sync(self, path: Path) -> None:
        """Make a file's bytes, or a folder's names, survive a power loss."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def link(self, source: Path, target: Path) -> None:
        """A second name for a file; unlike `rename`, fails if the name is taken."""
        target.hardlink_to(source)

    def clone(self, source: Path, target: Path) -> bool:
        """A new file with the same bytes, which both share until one changes; False where no disk of ours can."""
        with source.open("rb") as old, target.open("xb") as new:
            try:
                fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
            except OSError:
                target.unlink()
                return False
        return True

    def remove(self, path: Path) -> None:
        """Remove a file, a link, or a folder and all in it; no error if there is none. Never follows a link."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _put(fd: int, offset: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _open_direct(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno not in _NOT_DIRECT:
            raise
        return os.open(path, flags, 0o644)


def _put_direct(fd: int, offset: int, block: bytes | memoryview) -> int:
    """Write a block, and return where it ends."""
    end, written = offset + len(block), 0
    if (offset | len(block)) % mmap.PAGESIZE == 0:
        with suppress(OSError):  # what is wrong is said again below
            written = os.pwrite(fd, block, offset)
    if written < len(block):  # the end of a file; or memory, or a file system, with which it cannot be done
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        _put(fd, offset + written, memoryview(block)[written:])
    return end


def has_bytes(path: Path) -> bool:
    """Whether anything was written to a file: one that is only reserved has none."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            os.lseek(file.fileno(), 0, os.SEEK_DATA)
        except OSError as error:
            return error.errno != errno.ENXIO
        return True
    return False


def pages(num_bytes: int) -> memoryview:
    """Memory that `write_blocks` need not copy; it goes when nothing refers to it any more."""
    return memoryview(mmap.mmap(-1, num_bytes))


def write_durable(disk: Disk, path: Path, data: bytes) -> None:
    """All of `data` is at `path` after a power loss, or what was there before; never a mixture."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two may write it at once
    disk.write(temporary, data)
    disk.sync(temporary)
    disk.rename(temporary, path)
    disk.sync(path.parent)


def try_lock(file: IO[Any] | int, *, shared: bool = False) -> bool:
    """Have the lock of a file, as long as that is open. False: somebody else has it, and is not waited for."""
    try:
        fcntl.flock(file, fcntl.LOCK_NB | (fcntl.LOCK_SH if shared else fcntl.LOCK_EX))
    except BlockingIOError:
        return False
    return True


@contextmanager
def alone_in(folder: Path, *, wait: bool) -> Iterator[bool]:
    """
    Of all who ask so, nobody else is at work in this folder meanwhile. False: somebody is, and is not waited for.

    It ends with the process. A disk without locks keeps nobody away.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _lock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)


def _lock(fd: int, operation: int) -> bool:
    with suppress(OSError):
        try:
            fcntl.flock(fd, operation)
        except BlockingIOError:
            return False
    return True


def own_path(path: Path, ending: str) -> Path:
    """
    A place beside a file for what we need there meanwhile: never that of another file, whatever that is called
    (`is_own_name`), and never too long, where a name with something added may be.
    """
    return path.with_name(f".vramfarm-{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:32]}.{ending}")


def is_own_name(name: str) -> bool:
    """
    Whether `own_path` may have given this name to a file, or, of a path, one to a part of it. What is under such a one
    is what a copy left unfinished: nobody's data, and no output.
    """
    return ".vramfarm-" in name and any(_OWN.fullmatch(part) for part in name.split("/"))


LINK: Final = "expected a folder, got a link"


def lstat_inside(folder: Path, path: str) -> os.stat_result:
    """As `lstat`, but no folder on the way may be a link: it would lead out of `folder`."""
    expect_no_link(folder, path)
    return (folder / path).lstat()


def expect_no_link(folder: Path, path: str) -> None:
    """`NotADirectoryError` if a folder on the way to `path` is a link."""
    between = folder
    for part in path.split("/")[:-1]:
        between /= part
        if between.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, LINK, str(between))
