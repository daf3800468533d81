"""
A folder of checkpoints: what is committed, and how one gets in and out.

Standard library and protocol only. The rule: a folder named like a checkpoint is complete,
durably, or it is not there. Whatever a crash leaves has one of the prefixes of `protocol`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

from vramfarm import metadata, protocol
from vramfarm.protocol import Manifest

_LOOKS = 10  # at a folder that somebody else prunes meanwhile
_MAX_MANIFEST_BYTES = 4 * protocol.MAX_MANIFEST_BYTES  # what was written before there was a limit is read


@dataclass(frozen=True)
class Stored:
    """A committed checkpoint and where it is: every shard it names has the size it says."""

    path: Path
    manifest: Manifest


class UnsyncedError(OSError):
    """A rename was done, and everybody sees it, but the disk did not confirm it: a power loss may undo it."""


def committed(directory: Path) -> list[Stored]:
    """Return the committed checkpoints, the newest first. What was removed while we looked has newer ones, so we look again."""
    found: list[Stored] = []
    for _ in range(_LOOKS):
        read_ones = [(path, read(path)) for path in _named(directory)]
        found = [one for _, one in read_ones if isinstance(one, Stored)]
        if all(isinstance(one, Stored) or os.path.lexists(path) for path, one in read_ones):
            break
    return sorted(found, key=lambda s: s.manifest.ref, reverse=True)


def broken(directory: Path) -> list[str]:
    """Say what looks like a checkpoint and cannot be used, each with its reason."""
    found = [read(path) for path in _named(directory)]
    aside = [f"{p.name}: set aside" for p in _children(directory) if p.name.startswith(protocol.DAMAGED)]
    return [reason for reason in found if isinstance(reason, str)] + aside


def read(path: Path) -> Stored | str:
    """Return the checkpoint in a folder, or why it is none. Sizes are compared, checksums are not."""
    try:
        manifest = protocol.parse_manifest(_read_file(path / protocol.MANIFEST))
        if manifest.ref.name != path.name:
            return f"{path.name}: its manifest is that of {manifest.ref.name}"
        for shard in manifest.shards:
            size = _size_of_file(path / shard.path)
            if size != shard.size_bytes:
                return f"{path.name}: {shard.path}: expected {shard.size_bytes} bytes, got {size}"
    except (OSError, protocol.ProtocolError) as error:
        return f"{path.name}: {error}"
    return Stored(path, manifest)


def _read_file(path: Path) -> bytes:
    """A plain file of sane size only: a pipe would never end, a link may lead anywhere."""
    if _size_of_file(path) > _MAX_MANIFEST_BYTES:
        raise protocol.ProtocolError(f"{path.name}: expected at most {_MAX_MANIFEST_BYTES} bytes")
    return path.read_bytes()


def _size_of_file(path: Path) -> int:
    entry = path.lstat()
    if not stat.S_ISREG(entry.st_mode):
        raise protocol.ProtocolError(f"{path.name}: expected a plain file")
    return entry.st_size


def _named(directory: Path) -> Iterator[Path]:
    for path in _children(directory):
        try:
            protocol.parse_name(path.name)
        except protocol.ProtocolError:
            continue
        yield path


def _children(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []


def commit(temporary: Path, manifest: Manifest) -> Path:
    """
    Make the shards in `temporary` a checkpoint: all of it is durable, or nothing is there.

    `UnsyncedError`: it is there, and all but its name is durable. It stays, since any start goes on from it.
    `ValueError`: no reader would take its manifest.
    """
    raw = protocol.dump_manifest(manifest)
    if len(raw) > protocol.MAX_MANIFEST_BYTES:  # of more than 4 TB: no reader needs the second list
        raw = protocol.dump_manifest(replace(manifest, shards=tuple(replace(s, crc64nvme=()) for s in manifest.shards)))
    if len(raw) > protocol.MAX_MANIFEST_BYTES:
        raise ValueError(_too_large(manifest, len(raw)))
    try:
        protocol.parse_manifest(raw)  # as every reader does: what is committed can be resumed from
    except protocol.ProtocolError as error:
        raise ValueError(f"no start could go on from it: {error}") from error
    _write(temporary / protocol.MANIFEST, raw)
    sync_folder(temporary)
    final = temporary.with_name(manifest.ref.name)
    _rename(temporary, final)  # the commit
    return final


def _too_large(manifest: Manifest, num_bytes: int) -> str:
    sizes = {name: len(json.dumps(value)) for name, value in metadata.parts(manifest.state)}
    name = max(sizes, key=lambda name: sizes[name], default="")
    largest = f", {_size(sizes[name])} of it the state of {name}" if name else ""
    return (
        f"{protocol.MANIFEST} would have {_size(num_bytes)}{largest}; expected at most {_size(protocol.MAX_MANIFEST_BYTES)}: "
        "keep large values as tensors or numpy arrays of numbers, which go to the shards"
    )


def remove(path: Path) -> None:
    """Remove a checkpoint. Out of sight durably before the first byte goes, so it never looks complete."""
    discard(_put_aside(path, protocol.REMOVED))


def set_aside(path: Path) -> None:
    """Keep a damaged checkpoint for a human, under a name that nobody resumes from."""
    _put_aside(path, protocol.DAMAGED)


def _put_aside(path: Path, prefix: str) -> Path:
    target = path.with_name(prefix + path.name)
    discard(target)  # of a checkpoint that went before and was restored since
    _rename(path, target)
    return target


def _rename(source: Path, target: Path) -> None:
    source.rename(target)
    sync_name(target)


def sync_name(path: Path) -> None:
    """Make it durable that something is there: what was renamed, and is seen by everybody already."""
    try:
        sync_folder(path.parent)
    except OSError as error:
        raise UnsyncedError(error.errno, error.strerror, str(path)) from error


def discard(path: Path) -> None:
    """Remove a folder that is no checkpoint. What cannot be removed stays, harmlessly."""
    with contextlib.suppress(OSError):  # even so: where closing a folder fails
        shutil.rmtree(path, ignore_errors=True)


def discard_leftovers(directory: Path, prefix: str = protocol.TEMPORARY) -> None:
    left = [path for path in _children(directory) if path.name.startswith((prefix, protocol.REMOVED))]
    if left:
        sync_folder(directory)  # the rename of a removed one may not be durable yet
    for path in left:
        discard(path)


def prune(directory: Path, keep_last: int) -> None:
    """Keep the newest `keep_last`, and one whatever that says."""
    for stored in committed(directory)[max(keep_last, 1) :]:
        remove(stored.path)


def want_of_room(directory: Path, size_bytes: int, *, keep_last: int | None = None) -> str:
    """Why one more checkpoint of this size does not fit, with a twentieth to spare; empty if it does, or if it will when only `keep_last` are kept."""
    space = os.statvfs(directory)
    old = [] if keep_last is None else committed(directory)[keep_last:]
    files = [stored.path / shard.path for stored in old for shard in stored.manifest.shards]
    spare = sum(
        entry.st_size for entry in map(os.lstat, files) if entry.st_nlink == 1
    )  # frozen weights have several names
    free, needed = space.f_bavail * space.f_frsize, size_bytes + size_bytes // 20
    if free + spare >= needed:
        return ""
    return (
        f"{directory}: one more checkpoint needs {_size(needed)}, {_size(free)} are free; "
        "free some space there, or put the checkpoints on a larger disk"
    )


def _size(num_bytes: float) -> str:
    """Never `0 MB` of something: `12.4 kB`, `1.2 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:  # noqa: PLR2004  # the base of the units
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def describe_error(directory: Path, error: OSError) -> str:
    """What went wrong with the folder of checkpoints, and what to do about it."""
    advice = _ADVICE.get(error.errno or 0)
    if error.errno == errno.ENOSPC and _lacks_names(directory):
        advice = _FEWER
    return f"{directory}: {error.strerror or error}" + (f"; {advice}" if advice else "")


def _lacks_names(directory: Path) -> bool:
    """Whether it is no bytes that are wanting there. Some filesystems have no such number."""
    try:
        space = os.statvfs(directory)
    except OSError:
        return False
    return space.f_files > 0 and space.f_favail == 0 < space.f_bavail


_FEWER = "there is space, and no file more may be made (df -i): remove some files there, or take another filesystem"
_FREE = "free some space there, or put the checkpoints on a larger disk"
_BROKEN = "the disk, or the server behind it, fails: look at dmesg; what is committed stays, the next save tries again"
_ADVICE = {
    errno.ENOSPC: _FREE,
    errno.EDQUOT: _FREE,
    errno.EFBIG: "a file there may not grow so large: ulimit -f, or another filesystem",
    errno.ENOENT: "the folder, or one above it, was removed or renamed; the next save makes it again",
    errno.EROFS: "it has been mounted read-only, which a kernel does after an error: look at dmesg",
    errno.EIO: _BROKEN,
    errno.ESTALE: _BROKEN,
    errno.ETIMEDOUT: _BROKEN,
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
}


def write_durably(path: Path, raw: bytes) -> None:
    """Write a file so that after a power loss it is there whole, or not at all. `UnsyncedError`: it is there, and may be lost then."""
    partial = path.with_name(path.name + ".partial")
    _write(partial, raw)
    _rename(partial, path)


def open_at_once(path: Path, mode: Literal["rb", "wb", "ab"]) -> BinaryIO:
    """Open what somebody else may have put there: a pipe would be waited for until it has another end."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK, 0o666)

    return open(path, mode, opener=opener)  # a path's own has no opener


def _write(path: Path, raw: bytes) -> None:
    with open_at_once(path, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in it durable; where a filesystem cannot, it is taken at its word."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        with contextlib.suppress(OSError):  # nothing was written through it
            os.close(fd)
