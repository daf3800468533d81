"""A disk that can lose power between any two operations."""

import os
import random
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from runner.storage.disk import Disk


class PowerLoss(BaseException):
    """Not an Exception: no `except Exception` may survive it."""


class Loss(StrEnum):
    """What the platter holds afterwards. A file system may do any of these."""

    UNSYNCED = "unsynced"  # all that was not synced is gone
    GARBLED = "garbled"  # every name is as it was last, but bytes that were not synced are zeros
    MIXED = "mixed"  # of each folder's names, some changes made it; of unsynced bytes, some


@dataclass(eq=False)
class _File:
    now: bytes = b""
    synced: bytes | None = None


@dataclass(eq=False)
class _Folder:
    now: "dict[str, _Node]" = field(default_factory=dict)
    synced: "dict[str, _Node]" = field(default_factory=dict)
    pending: "list[dict[str, _Node | None]]" = field(default_factory=list)

    def change(self, names: "dict[str, _Node | None]") -> None:
        _apply(self.now, names)
        self.pending.append(names)

    def sync(self) -> None:
        self.synced, self.pending = dict(self.now), []


_Node = _File | _Folder


class FaultyDisk(Disk):
    """
    A real folder and, beside it, a model of what is durable in it.

    Operation number `fail_at` (from 0) does half its work and raises `error`, by default
    `PowerLoss`. After that call `lose`, and go on with a new disk. Files that were not written
    through this disk are noticed, and are as volatile as those that were. Keep files small.
    `loses_nothing`: without the model, which takes a third of the time of a test that has no use for it.
    """

    def __init__(
        self, root: Path, fail_at: int | None = None, error: BaseException | None = None, *, loses_nothing: bool = False
    ) -> None:
        self.root, self.fail_at, self.num_operations = root, fail_at, 0
        self._error = error or PowerLoss()
        self._tree, self._has_model = _Folder(), not loses_nothing
        self._notice()
        _sync_all(self._tree)

    def write(self, path: Path, data: bytes) -> None:
        if self._is_last():
            super().write(path, data[: len(data) // 2])
        self._count()
        super().write(path, data)

    def append(self, path: Path, data: bytes) -> None:
        if self._is_last():
            super().append(path, data[: len(data) // 2])
        self._count()
        super().append(path, data)

    def write_at(self, path: Path, offset: int, data: bytes) -> None:
        if self._is_last():
            super().write_at(path, offset, data[: len(data) // 2])
        self._count()
        super().write_at(path, offset, data)

    def write_blocks(self, path: Path, offset: int, blocks: Iterable[bytes | memoryview]) -> None:
        self.write_at(path, offset, b"".join(map(bytes, blocks)))

    def reserve(self, path: Path, size_bytes: int) -> None:
        self._count()
        super().reserve(path, size_bytes)

    def make_folder(self, path: Path) -> None:
        self._count()
        super().make_folder(path)

    def sync(self, path: Path) -> None:
        self._count()
        if not self._has_model:
            return
        node = self._find(path)
        if isinstance(node, _Folder):
            node.sync()
        else:
            node.synced = node.now

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)
        if not self._has_model:
            return
        node, before, after = self._find(source), self._find(source.parent), self._find(target.parent)
        assert isinstance(before, _Folder)
        assert isinstance(after, _Folder)
        if before is after:
            before.change({source.name: None, target.name: node})
        else:
            before.change({source.name: None})
            after.change({target.name: node})

    def link(self, source: Path, target: Path) -> None:
        self._count()
        super().link(source, target)
        if not self._has_model:
            return
        folder = self._find(target.parent)
        assert isinstance(folder, _Folder)
        folder.change({target.name: self._find(source)})

    def remove(self, path: Path) -> None:
        """Each name of a tree is an operation of its own."""
        if path.is_dir() and not path.is_symlink():
            for child in sorted(path.iterdir()):
                self.remove(child)
            self._count()
            path.rmdir()
        else:
            self._count()
            super().remove(path)

    def lose(self, loss: Loss, seed: int = 0) -> None:
        """Make the folder what a machine finds when its power is back."""
        assert self._has_model
        self._notice()
        chance = random.Random(seed)
        for child in self.root.iterdir():
            shutil.rmtree(child) if child.is_dir() else child.unlink()
        _restore(self._tree, self.root, loss, chance)

    def _is_last(self) -> bool:
        return self.num_operations == self.fail_at

    def _count(self) -> None:
        self._notice()
        last = self._is_last()
        self.num_operations += 1
        if last:
            raise self._error

    def _notice(self) -> None:
        if self._has_model:
            _compare(self._tree, self.root)

    def _find(self, path: Path) -> _Node:
        node: _Node = self._tree
        for name in path.relative_to(self.root).parts:
            assert isinstance(node, _Folder)
            node = node.now[name]
        return node


def _compare(folder: _Folder, path: Path) -> None:
    """Bring the model up to what is there."""
    entries = {entry.name: entry for entry in os.scandir(path)}
    for name in [n for n in folder.now if n not in entries]:
        folder.change({name: None})
    for name, entry in entries.items():
        is_folder = entry.is_dir(follow_symlinks=False)
        node = folder.now.get(name)
        if node is None or isinstance(node, _Folder) != is_folder:
            node = _Folder() if is_folder else _File()
            folder.change({name: node})
        if isinstance(node, _Folder):
            _compare(node, path / name)
        else:
            node.now = (path / name).read_bytes()


def _sync_all(node: _Node) -> None:
    if isinstance(node, _File):
        node.synced = node.now
        return
    node.sync()
    for child in node.now.values():
        _sync_all(child)


def _restore(folder: _Folder, path: Path, loss: Loss, chance: random.Random) -> None:
    for name, node in _names_after(folder, loss, chance).items():
        if isinstance(node, _Folder):
            (path / name).mkdir()
            _restore(node, path / name, loss, chance)
        else:
            (path / name).write_bytes(_bytes_after(node, loss, chance))


def _names_after(folder: _Folder, loss: Loss, chance: random.Random) -> dict[str, _Node]:
    match loss:
        case Loss.UNSYNCED:
            return folder.synced
        case Loss.GARBLED:
            return folder.now
        case Loss.MIXED:
            names = dict(folder.synced)
            for change in folder.pending:
                if chance.random() < 0.5:
                    _apply(names, change)
            return names


def _bytes_after(file: _File, loss: Loss, chance: random.Random) -> bytes:
    if file.now == file.synced:
        return file.now
    synced = file.synced or b""
    safe = len(synced) if file.now.startswith(synced) else 0  # what was appended cannot take it back
    half = safe + (len(file.now) - safe) // 2
    zeros = file.now[:half].ljust(len(file.now), b"\0")
    match loss:
        case Loss.UNSYNCED:
            return synced
        case Loss.GARBLED:
            return zeros
        case Loss.MIXED:
            return chance.choice([synced, zeros, file.now[:half], file.now])


def _apply(names: dict[str, _Node], change: dict[str, _Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node
