"""Whether a file is whole, by its own format. Reads heads and tails, never the bytes between."""

from __future__ import annotations

import json
import pickletools
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_MAX_HEADER_BYTES: Final = 100_000_000  # safetensors' own limit
_MAX_METADATA_BYTES: Final = 512 << 20
_ZIP_END: Final = b"PK\x05\x06"
_ZIP_END_BYTES: Final = 22
_MAX_COMMENT_BYTES: Final = 65_535
_METADATA: Final = ".metadata"
_NUMBER: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """
    What a framework calls a checkpoint. Names of `files` start at `root`, with slashes.

    `step` is None where no name tells it. `stamp` is the newest time of change, in nanoseconds:
    with `name` it tells one writing of it from the next.
    """

    name: str
    root: Path
    files: tuple[str, ...]
    step: int | None
    complete: bool
    stamp: int
    size_bytes: int

    @property
    def id(self) -> str:
        return f"{self.name}@{self.stamp}"


def itself(checkpoint: Path) -> Path:
    """`resume_path` of a framework whose scripts take the folder."""
    return checkpoint


def unwatched(folder: Path, world_size: int) -> list[Save]:  # noqa: ARG001  # there is nothing to look for
    """`saves` of what commits by itself, or not at all."""
    return []


def make_save(name: str, root: Path, files: Iterable[Path], *, step: int | None, complete: bool) -> Save:
    """Look at the files once more; one that went in between makes it incomplete."""
    kept, stamp, size = [], 0, 0
    for file in sorted(files):
        try:
            entry = file.lstat()
        except OSError:
            complete = False
            continue
        kept.append(file.relative_to(root).as_posix())
        stamp, size = max(stamp, entry.st_mtime_ns), size + entry.st_size
    return Save(
        name=name,
        root=root,
        files=tuple(kept),
        step=step,
        complete=complete and bool(kept),
        stamp=stamp,
        size_bytes=size,
    )


def entries(folder: Path) -> list[Path]:
    """What is in a folder by name, but for hidden ones; nothing where there is no folder."""
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


def files_below(folder: Path) -> list[Path]:
    """Plain files, at any depth, hidden ones too; no links, which could lead anywhere."""
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


def last_number(name: str) -> int | None:
    """The last number in a name: the step, as scripts name what they save."""
    numbers = _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else None


def is_whole(file: Path) -> bool:
    """Whether the file has its end. Formats that we cannot tell are whole if they are not empty."""
    try:
        match "".join(file.suffixes[-2:]) if file.name.endswith(".index.json") else file.suffix:
            case ".safetensors":
                return _is_whole_safetensors(file)
            case ".pt" | ".pth" | ".bin" | ".ckpt":
                return _is_whole_zip(file)
            case ".index.json":
                return _has_its_files(file)
            case ".json":
                return read_json(file) is not None
            case _:
                return True
    except OSError:
        return False


def is_whole_dcp(folder: Path) -> bool:
    """
    Whether a folder of torch.distributed.checkpoint has its metadata, written last, and what that names.

    The metadata is a pickle: its opcodes are read for names, and nothing in it is ever built or called.
    """
    try:
        if (folder / _METADATA).stat().st_size > _MAX_METADATA_BYTES:
            return False
        names = _strings((folder / _METADATA).read_bytes())
        shards = {name for name in names if name.endswith(".distcp") and "/" not in name}
        return bool(shards) and all((folder / name).stat().st_size > 0 for name in shards)
    except (OSError, ValueError):
        return False


def _strings(raw: bytes) -> set[str]:
    try:
        return {argument for _, argument, _ in pickletools.genops(raw) if isinstance(argument, str)}
    except Exception as error:  # noqa: BLE001  # a cut pickle fails in many ways
        raise ValueError(f"no whole pickle: {error}") from None


def read_json(file: Path) -> dict[str, Any] | None:
    """Return the object in a file, or None if there is no whole one."""
    try:
        fields = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return fields if isinstance(fields, dict) else None


def _is_whole_safetensors(file: Path) -> bool:
    with file.open("rb") as opened:
        head = opened.read(8)
        (length,) = struct.unpack("<Q", head.ljust(8, b"\xff"))
        if length > _MAX_HEADER_BYTES:
            return False
        raw = opened.read(length)
    try:
        header = json.loads(raw)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return int(8 + length + max(ends, default=0)) == file.stat().st_size
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return False


def _is_whole_zip(file: Path) -> bool:
    size = file.stat().st_size
    with file.open("rb") as opened:
        if opened.read(4) != b"PK\x03\x04":
            return False
        opened.seek(max(0, size - _ZIP_END_BYTES - _MAX_COMMENT_BYTES))
        tail = opened.read()
    at = tail.rfind(_ZIP_END)
    return at >= 0 and len(tail) - at >= _ZIP_END_BYTES


def _has_its_files(index: Path) -> bool:
    fields = read_json(index)
    names = (fields or {}).get("weight_map")
    return isinstance(names, dict) and all((index.parent / str(name)).is_file() for name in set(names.values()))
