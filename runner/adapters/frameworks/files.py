"""Whether a file is whole, by its own format. Reads heads and tails, never the bytes between."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Final

_MAX_HEADER_BYTES: Final = 100_000_000  # safetensors' own limit
_ZIP_END: Final = b"PK\x05\x06"
_ZIP_END_BYTES: Final = 22
_MAX_COMMENT_BYTES: Final = 65_535


def is_whole(file: Path) -> bool:
    """Whether the file has its end. Formats that we cannot tell are whole if they are not empty."""
    try:
        match "".join(file.suffixes[-2:]) if file.name.endswith(".index.json") else file.suffix:
            case ".safetensors":
                return _is_whole_safetensors(file)
            case ".pt" | ".pth" | ".bin":
                return _is_whole_zip(file)
            case ".index.json":
                return _has_its_files(file)
            case ".json":
                return read_json(file) is not None
            case _:
                return True
    except OSError:
        return False


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
