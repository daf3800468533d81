"""
Checkpoints on a disk.

    step-00000500-0123abcd/          committed: the rename of the folder was the commit
      shard-00000-of-00008.safetensors ...
      MANIFEST.json                  written last, inside the temporary folder
    .tmp-...                         being written; never looked at
    .tmp-restore-...                 coming back from the store; a killed restore goes on with it
    .removed-...                     out of sight, bytes follow
    .damaged-...                     failed its checksums; kept for a human

Order, at any time:
  - a manifest MUST name only shards that are durable;
  - a checkpoint MUST leave its name, durably, before its first shard goes.

Nothing in the folder is trusted: what is broken or hostile is reported and passed over.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from runner.committed import MAX_LINEAGE, Checkpoint
from runner.errors import StoreError, one_line
from runner.storage.disk import Disk, lstat_inside
from vramfarm.checksum import crc32
from vramfarm.protocol import (
    ALGORITHM,
    CHUNK_BYTES,
    DAMAGED,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    REMOVED,
    TEMPORARY,
    Manifest,
    ProtocolError,
    Ref,
    Shard,
    dump_manifest,
    parse_manifest,
)

FOLDER: Final = "checkpoints"  # of a run, unless its job says otherwise
ORIGIN: Final = "origin"  # in the state of a manifest: the checkpoint of another run that it is a copy of
_FRAMEWORK: Final = r"[\w.-]{1,40}"
_MAX_ORIGIN: Final = 2000
RESTORING: Final = f"{TEMPORARY}restore-"
_NUM_READERS: Final = 4


def describe(manifest: Manifest) -> Checkpoint:
    """The manifest as a fact; `ProtocolError` if its time, lineage, algorithm or who wrote it makes no sense."""
    try:
        written_at = datetime.fromisoformat(manifest.written_at)
    except ValueError:
        raise ProtocolError(
            f"{MANIFEST}: written_at: expected an ISO date and time, got {manifest.written_at[:40]!r}"
        ) from None
    if manifest.lineage > MAX_LINEAGE:
        raise ProtocolError(f"{MANIFEST}: lineage: expected at most {MAX_LINEAGE}, got {manifest.lineage}")
    if manifest.algorithm != ALGORITHM:
        raise ProtocolError(f"{MANIFEST}: algorithm: expected {ALGORITHM!r}, got {manifest.algorithm[:40]!r}")
    if not re.fullmatch(_FRAMEWORK, manifest.framework):
        raise ProtocolError(f"{MANIFEST}: framework: expected a name, got {manifest.framework[:40]!r}")
    if manifest.world_size < 1:
        raise ProtocolError(f"{MANIFEST}: world_size: expected at least 1, got {manifest.world_size}")
    return Checkpoint(
        ref=manifest.ref,
        size_bytes=manifest.size_bytes,
        world_size=manifest.world_size,
        written_at=written_at if written_at.tzinfo else written_at.replace(tzinfo=UTC),
        framework=one_line(manifest.framework),
        origin=one_line(str(manifest.state.get(ORIGIN, ""))[:_MAX_ORIGIN]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """What one look at the folder found."""

    committed: tuple[Checkpoint, ...]
    leftovers: tuple[str, ...]  # names of folders that were being written
    damaged: tuple[str, ...]  # names of those that were set aside


def checkpoints_of(run_dir: Path) -> Path:
    """Of a run, as its accepted job says, which may have been moved or copied here since."""
    try:
        name = Path(json.loads((run_dir / "job.json").read_bytes())["checkpoint"]["dir"]).name
    except (OSError, ValueError, KeyError, TypeError):
        name = ""
    return run_dir / (name or FOLDER)


class CheckpointDir:
    """The checkpoints of one run. `committed()` is the only reader that resume, retention and offload use."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self.root = root
        self.disk = disk
        self._parsed: dict[str, tuple[tuple[int, ...], Manifest | ProtocolError]] = {}

    def look(self) -> Shelf:
        """
        All that is there, listed once.

        Costs one `lstat` a shard; a manifest is parsed again only when its file has changed.
        """
        names = self._names()
        manifests = [manifest for _, manifest in self._read_all(names) if isinstance(manifest, Manifest)]
        return Shelf(
            committed=tuple(describe(manifest) for manifest in sorted(manifests, key=lambda m: m.ref)),
            leftovers=tuple(n for n in names if n.startswith(TEMPORARY) and not n.startswith(RESTORING)),
            damaged=tuple(n for n in names if n.startswith(DAMAGED)),
        )

    def committed(self) -> tuple[Checkpoint, ...]:
        """All checkpoints that are whole, oldest first."""
        return self.look().committed

    def problems(self) -> tuple[str, ...]:
        """What has a checkpoint's name and is none, in plain words."""
        return tuple(
            f"{name}: {found}" for name, found in self._read_all(self._names()) if isinstance(found, ProtocolError)
        )

    def path(self, ref: Ref) -> Path:
        return self.root / ref.name

    def manifest(self, ref: Ref) -> Manifest:
        """The manifest of a committed checkpoint; `StoreError` if there is none."""
        found = self._read(ref.name)
        if isinstance(found, ProtocolError) or found.ref != ref:
            raise StoreError(f"{self.path(ref)}: expected a committed checkpoint, got {found}")
        return found

    def verify(self, ref: Ref, read: Callable[[str, int], None] = lambda _path, _num_bytes: None) -> tuple[str, ...]:
        """
        Read every byte; return what differs from the manifest, nothing if all is well.

        `read` is called from any thread with a shard's path and how many bytes of it were read.
        """
        manifest, folder = self.manifest(ref), self.path(ref)
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            verified = pool.map(lambda shard: _verify_shard(folder, shard, read), manifest.shards)
            return tuple(problem for found in verified for problem in found)

    def remove(self, ref: Ref) -> None:
        """Out of sight in one durable rename; the bytes follow."""
        self.disk.remove(self._rename(ref, REMOVED))

    def set_aside(self, ref: Ref) -> None:
        """No longer a checkpoint, but kept for a human."""
        self._rename(ref, DAMAGED)

    def _rename(self, ref: Ref, prefix: str) -> Path:
        target = self.root / f"{prefix}{ref.name}"
        if self.path(ref).exists():
            self.disk.remove(target)  # of a checkpoint that went before and was restored since
            self.disk.rename(self.path(ref), target)
        self.disk.sync(self.root)
        return target

    def leftovers(self) -> tuple[str, ...]:
        """
        Names of folders that were being written; whether somebody still does, the caller knows.

        Not those of a restore: the next restore goes on with its own and removes the others.
        """
        return self.look().leftovers

    def begin_restore(self, ref: Ref) -> Path:
        """The folder to restore into, perhaps from an earlier call; those of other checkpoints are removed."""
        folder = self.root / f"{RESTORING}{ref.name}"
        for name in self._names():
            if name.startswith(RESTORING) and name != folder.name:
                self.disk.remove(self.root / name)
        return folder

    def discard(self, name: str) -> None:
        """Remove a folder that was never committed, or is damaged."""
        if not name.startswith((TEMPORARY, DAMAGED)) or "/" in name:
            raise StoreError(f"{self.root}: expected a {TEMPORARY}… or {DAMAGED}… folder to discard, got {name!r}")
        self.disk.remove(self.root / name)

    def sweep(self) -> None:
        """Finish removals that were cut short."""
        for name in self._names():
            if name.startswith(REMOVED):
                self.disk.remove(self.root / name)

    def adopt(self, temporary: Path, manifest: Manifest) -> Checkpoint:
        """
        Commit a completely written folder below the root: durable when this returns.

        `StoreError` if a shard is missing or short, or if there is such a checkpoint already.
        """
        checkpoint, target = describe(manifest), self.path(manifest.ref)
        if temporary.parent != self.root or not temporary.name.startswith(TEMPORARY) or os.path.lexists(target):
            raise StoreError(f"{target}: expected a new name for {temporary.name}, got one that is taken or elsewhere")
        if problem := _missing(temporary, manifest.shards):
            raise StoreError(f"{temporary}: cannot be committed: {problem}")
        for path in _files_and_folders(temporary, manifest.shards):
            self.disk.sync(path)
        self.disk.write(temporary / MANIFEST, dump_manifest(manifest))
        self.disk.sync(temporary / MANIFEST)
        self.disk.sync(temporary)
        self.disk.rename(temporary, target)
        self.disk.sync(self.root)
        return checkpoint

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.root))  # noqa: PTH208  # names only
        except FileNotFoundError:
            return []

    def _read_all(self, names: Iterable[str]) -> Iterator[tuple[str, Manifest | ProtocolError]]:
        names = [name for name in names if name.startswith("step-")]
        self._parsed = {name: found for name, found in self._parsed.items() if name in names}
        return ((name, self._read(name)) for name in names)

    def _read(self, name: str) -> Manifest | ProtocolError:
        """The manifest of what has this name, or why it is no checkpoint."""
        folder = self.root / name
        try:
            found = self._parse(folder)
        except OSError as error:
            return ProtocolError(f"{MANIFEST}: {error.strerror}")
        if isinstance(found, ProtocolError):
            return found
        if problem := _missing(folder, found.shards):
            return ProtocolError(problem)
        return found

    def _parse(self, folder: Path) -> Manifest | ProtocolError:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            return ProtocolError("expected a folder, got a link or a file")
        entry = (folder / MANIFEST).lstat()
        seen = (entry.st_ino, entry.st_size, entry.st_mtime_ns, entry.st_ctime_ns)
        cached = self._parsed.get(folder.name)
        if cached is None or cached[0] != seen:
            cached = self._parsed[folder.name] = (seen, _parse_file(folder, entry))
        return cached[1]


def _parse_file(folder: Path, entry: os.stat_result) -> Manifest | ProtocolError:
    if not stat.S_ISREG(entry.st_mode) or entry.st_size > MAX_MANIFEST_BYTES:
        return ProtocolError(f"{MANIFEST}: expected a file of at most {MAX_MANIFEST_BYTES} bytes")
    try:
        manifest = parse_manifest((folder / MANIFEST).read_bytes())
        describe(manifest)
    except ProtocolError as error:
        return error
    if manifest.ref.name != folder.name:
        return ProtocolError(f"{MANIFEST}: expected the manifest of {folder.name}, got that of {manifest.ref.name}")
    return manifest


def _missing(folder: Path, shards: tuple[Shard, ...]) -> str:
    """The first shard that is not a plain file of its size inside the folder; empty if all are."""
    for shard in shards:
        try:
            entry = lstat_inside(folder, shard.path)
        except OSError as error:
            return f"{shard.path}: {error.strerror}"
        if not stat.S_ISREG(entry.st_mode):
            return f"{shard.path}: expected a plain file"
        if entry.st_size != shard.size_bytes:
            return f"{shard.path}: expected {shard.size_bytes} bytes, got {entry.st_size}"
    return ""


def _verify_shard(folder: Path, shard: Shard, read: Callable[[str, int], None]) -> list[str]:
    problems = []
    try:
        with (folder / shard.path).open("rb") as file:
            for index, expected in enumerate(shard.checksums):
                content = file.read(min(CHUNK_BYTES, shard.size_bytes - index * CHUNK_BYTES))
                found = crc32(content)
                read(shard.path, len(content))
                if found != expected:
                    problems.append(f"{shard.path}: chunk {index}: expected crc32 {expected:08x}, got {found:08x}")
    except OSError as error:  # a disk that cannot read its bytes back is damage, too
        problems.append(f"{shard.path}: {error.strerror}")
    return problems


def _files_and_folders(folder: Path, shards: tuple[Shard, ...]) -> list[Path]:
    files = [folder / shard.path for shard in shards]
    between = {parent for file in files for parent in file.parents if parent.parent.is_relative_to(folder)}
    return [*files, *sorted(between)]
