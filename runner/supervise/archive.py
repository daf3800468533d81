"""
Archives of code: packed for `submit`, the same bytes for the same content, and unpacked where it is to run.

Packed is what git does not ignore, where there is a repository; else all but what is never code. An archive that
is unpacked comes from somewhere: its paths, links and sizes are not trusted, and nothing lands outside its folder.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import stat
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from runner.errors import JobError
from vramfarm.protocol import is_inside

MAX_BYTES: Final = 50 * 10**9
MAX_FILES: Final = 1_000_000
_HINT: Final = "make the archive of the code alone, with relative paths: tar czf code.tar.gz -C project ."
_MOST_SENT: Final = 200 * 10**6  # bytes
_NEVER: Final = frozenset({".git", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".ruff_cache"})
_GIT_LIMIT_S: Final = 60


def unpack(archive: Path, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
    """Unpack into a folder that exists; `JobError` if the archive is damaged, too large, or reaches outside."""
    count = _Count(archive, max_bytes)
    try:
        with archive.open("rb") as file:
            _kind_of(file.read(6), archive)(archive, folder, count)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError) as error:
        raise JobError(f"source: {archive}: cannot be unpacked: {error}", hint=_HINT) from error


class _Count:
    """How much was unpacked so far; a small archive may hold a huge file."""

    def __init__(self, archive: Path, max_bytes: int) -> None:
        self._archive, self._max_bytes = archive, max_bytes
        self._bytes = self._files = 0

    def add(self, size_bytes: int) -> None:
        self._bytes += size_bytes
        self._files += 1
        if self._bytes > self._max_bytes or self._files > MAX_FILES:
            limit = f"{self._max_bytes / 1e9:.0f} GB and {MAX_FILES} files"
            hint = "bring data with `data`, not with the code"
            raise JobError(f"source: {self._archive}: unpacks to more than {limit}", hint=hint)


def _kind_of(head: bytes, archive: Path) -> Callable[[Path, Path, _Count], None]:
    if head.startswith(b"PK"):
        return _unpack_zip
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return _unpack_zstd
    if not tarfile.is_tarfile(archive):
        raise JobError(f"source: {archive}: expected .tar, .tar.gz, .tar.zst or .zip, got something else", hint=_HINT)
    return _unpack_tar


def _unpack_tar(archive: Path, folder: Path, count: _Count) -> None:
    with tarfile.open(archive) as tar:
        _extract(tar, folder, count)


def _unpack_zstd(archive: Path, folder: Path, count: _Count) -> None:
    program = shutil.which("zstd")
    if program is None:
        raise JobError(f"source: {archive}: needs the program zstd, found none", hint="use .tar.gz, or install zstd")
    with subprocess.Popen((program, "-dcq", "--", str(archive)), stdout=subprocess.PIPE) as process:
        with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
            _extract(tar, folder, count)
        while process.stdout and process.stdout.read(1 << 20):
            pass  # what pads the end: zstd must not die of a closed pipe
    if process.returncode != 0:
        raise JobError(f"source: {archive}: cannot be unpacked: zstd exited {process.returncode}", hint=_HINT)


def _extract(tar: tarfile.TarFile, folder: Path, count: _Count) -> None:
    def check(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        count.add(member.size)
        return tarfile.data_filter(member, path)  # no absolute path, no .., no link outside, no device

    tar.extractall(folder, filter=check)  # noqa: S202  # the filter is what makes it safe


def _unpack_zip(archive: Path, folder: Path, count: _Count) -> None:
    with zipfile.ZipFile(archive) as zipped:
        for info in zipped.infolist():
            count.add(info.file_size)
            mode = info.external_attr >> 16
            if not is_inside(info.filename.rstrip("/")) or stat.S_ISLNK(mode):
                raise JobError(f"source: {archive}: {info.filename!r} is a link or reaches outside", hint=_HINT)
            path = Path(zipped.extract(info, folder))
            if not info.is_dir() and mode & stat.S_IXUSR:
                path.chmod(0o755)


def pack(folder: Path) -> tuple[str, bytes]:
    """The archive and its name, which is that of its content; `JobError` if it is no folder, or too large."""
    if not folder.is_dir():
        raise JobError(f"source.path: expected a folder, found none at {folder}", hint="it is relative to job.yaml")
    files = sorted(list_files(folder))
    total = sum((folder / name).lstat().st_size for name in files)
    if total > _MOST_SENT:
        largest = max(files, key=lambda name: (folder / name).lstat().st_size)
        raise JobError(
            f"source.path: {folder} has {total / 1e6:.0f} MB, more than {_MOST_SENT / 1e6:.0f} MB; the largest file is {largest}",
            hint="let git ignore what is no code, and bring data with `data`",
        )
    raw = _tar(folder, files)
    return f"{hashlib.sha256(raw).hexdigest()[:32]}.tar.gz", raw


def list_files(folder: Path) -> list[str]:
    """Names of what is packed."""
    listed = _by_git(folder)
    if listed is not None:
        return [name for name in listed if (folder / name).is_symlink() or (folder / name).is_file()]
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return [path.as_posix() for path in found if _NEVER.isdisjoint(path.parts)]


def _by_git(folder: Path) -> list[str] | None:
    command = ("git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (
        [name for name in done.stdout.decode(errors="surrogateescape").split("\0") if name]
        if done.returncode == 0
        else None
    )


def _tar(folder: Path, names: Iterable[str]) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in names:
            archive.add(folder / name, arcname=name, recursive=False, filter=_without_circumstances)
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as file:
        file.write(plain.getvalue())
    return packed.getvalue()


def _without_circumstances(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Who packed it, and when, is no content."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    return entry
