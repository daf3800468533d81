"""
Archives of code, unpacked so that nothing lands outside their folder.

An archive comes from somewhere: its paths, links and sizes are not trusted.
"""

from __future__ import annotations

import shutil
import stat
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from runner.errors import JobError
from vramfarm.protocol import is_inside

MAX_BYTES: Final = 50 * 10**9
MAX_FILES: Final = 1_000_000
_HINT: Final = "make the archive of the code alone, with relative paths: tar czf code.tar.gz -C project ."


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
