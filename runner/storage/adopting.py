"""
A checkpoint that a framework wrote becomes one of ours: copied, checksummed on the way, committed.

Copied, not linked: a script that saves the same step again writes into the same file, and a
second name for it would change with it. Where the file system can, the copy shares its blocks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from runner.errors import StoreError
from runner.facts import Checkpoint
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk
from vramfarm.checksum import crc32
from vramfarm.protocol import CHUNK_BYTES, TEMPORARY, Manifest, Ref, Shard

SOURCE: Final = "source"  # in the state of a manifest: which save it was made of
_PREFIX: Final = f"{TEMPORARY}adopt-"
_SPARE: Final = 1.02  # of its size: manifests, folders

Progress = Callable[[float, str], None]


class NotAdoptedError(StoreError):
    """It cannot be committed as it is now; looking again may help."""

    final = False


def find_adopted(directory: CheckpointDir, source: str) -> Ref | None:
    """The checkpoint that was made of this very save, if there is one."""
    refs = (checkpoint.ref for checkpoint in reversed(directory.committed()))
    return next((ref for ref in refs if directory.manifest(ref).state.get(SOURCE) == source), None)


def next_step(directory: CheckpointDir, lineage: int) -> int:
    """For a save that does not say its step: later than all of its lineage."""
    return max((c.ref.step for c in directory.committed() if c.ref.lineage == lineage), default=0) + 1


def adopt(  # noqa: PLR0913  # what, from where, and two callbacks
    directory: CheckpointDir,
    draft: Manifest,
    root: Path,
    files: Mapping[str, int],
    *,
    is_unchanged: Callable[[], bool],
    progress: Progress,
) -> Checkpoint:
    """
    Commit a copy of `files` (names below `root`, sizes in bytes) as `draft` says, whose shards are made here.

    `NotAdoptedError` if there is no room, or if somebody wrote to them meanwhile.
    """
    directory.root.mkdir(parents=True, exist_ok=True)
    for name in directory.leftovers():
        if name.startswith(_PREFIX):  # of a copy that was killed; only one is made at a time
            directory.discard(name)
    _expect_room(directory.root, sum(files.values()))
    temporary = directory.root / f"{_PREFIX}{draft.id}"
    directory.disk.make_folder(temporary)
    copier = _Copier(directory.disk, root, temporary, sum(files.values()), progress)
    shards = tuple(copier.copy(name, size) for name, size in files.items())
    if not is_unchanged():
        directory.discard(temporary.name)
        raise NotAdoptedError(f"{root}: it was written to while it was copied")
    return directory.adopt(temporary, replace(draft, shards=shards))


def _expect_room(root: Path, total: int) -> None:
    free = shutil.disk_usage(root).free
    if free < total * _SPARE:
        raise NotAdoptedError(
            f"{root}: a copy of the checkpoint takes {total / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free",
            hint="a larger disk, a smaller save_total_limit of the framework, or checkpoint.keep_last: 2",
        )


class _Copier:
    """Copies file after file, checksums on the way, and says how far it is."""

    def __init__(self, disk: Disk, root: Path, temporary: Path, total: int, progress: Progress) -> None:
        self._disk, self._root, self._temporary = disk, root, temporary
        self._total, self._done, self._progress = max(total, 1), 0, progress

    def copy(self, name: str, size: int) -> Shard:
        source, target = self._root / name, self._temporary / name
        for parent in reversed(Path(name).parents[:-1]):
            self._disk.make_folder(self._temporary / parent)
        is_clone = self._disk.clone(source, target)
        if not is_clone:
            self._disk.write(target, b"")
        checksums, offset = [], 0
        with (target if is_clone else source).open("rb") as file:
            while piece := file.read(min(CHUNK_BYTES, size - offset)):
                if not is_clone:
                    self._disk.write_at(target, offset, piece)
                checksums.append(crc32(piece))
                offset += len(piece)
                self._say(len(piece))
        if offset != size:
            raise NotAdoptedError(f"{source}: expected {size} bytes, got {offset}: it was written to meanwhile")
        return Shard(path=name, size_bytes=size, checksums=tuple(checksums))

    def _say(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._progress(self._done / self._total, "copying")
