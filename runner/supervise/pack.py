"""
A folder of code as an archive, the same bytes for the same content: what `submit` sends ahead.

What git does not ignore, where there is a repository; else all but what is never code.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from runner.errors import JobError

MAX_BYTES: Final = 200 * 10**6
_NEVER: Final = frozenset({".git", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".ruff_cache"})
_GIT_LIMIT_S: Final = 60


def pack(folder: Path) -> tuple[str, bytes]:
    """The archive and its name, which is that of its content; `JobError` if it is no folder, or too large."""
    if not folder.is_dir():
        raise JobError(f"source.path: expected a folder, found none at {folder}", hint="it is relative to job.yaml")
    files = sorted(list_files(folder))
    total = sum((folder / name).lstat().st_size for name in files)
    if total > MAX_BYTES:
        largest = max(files, key=lambda name: (folder / name).lstat().st_size)
        raise JobError(
            f"source.path: {folder} has {total / 1e6:.0f} MB, more than {MAX_BYTES / 1e6:.0f} MB; the largest file is {largest}",
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
