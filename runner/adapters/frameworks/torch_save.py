"""
A script with `torch.save` of its own: files with a step in their names, or one that is written
again and again.

Files that share their first number are one save (`model_100.pt`, `optim_100_rank0.pt`); it is
complete when every kind of file is there that the save before it had.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Final

from runner.adapters.frameworks.files import Save, entries, is_whole, make_save

uses_library = False
flag = "--resume"

_SUFFIXES: Final = frozenset({".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".json"})
_NUMBER: Final = re.compile(r"\d+")


def saves(folder: Path, world_size: int) -> list[Save]:  # noqa: ARG001  # names do not tell ranks from other numbers
    """What has a state of torch in it, oldest first."""
    groups: dict[int | None, list[Path]] = defaultdict(list)
    for entry in entries(folder):
        if entry.suffix in _SUFFIXES and entry.is_file() and not entry.is_symlink():
            groups[_first_number(entry.name)].append(entry)
    made: list[Save] = []
    kinds: set[str] = set()
    for step, files in sorted(groups.items(), key=lambda group: -1 if group[0] is None else group[0]):
        if not any(file.suffix != ".json" for file in files):
            continue
        mine = {_kind(file.name) for file in files}
        complete = all(map(is_whole, files)) and mine >= kinds
        kinds = mine if complete and step is not None else kinds
        name = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"
        made.append(make_save(name, folder, files, step=step, complete=complete))
    return sorted(made, key=lambda save: save.stamp)


def resume_path(checkpoint: Path) -> Path:
    """The one file in it, or the folder of several."""
    files = [entry for entry in entries(checkpoint) if entry.suffix in _SUFFIXES - {".json"}]
    return files[0] if len(files) == 1 else checkpoint


def _first_number(name: str) -> int | None:
    match = _NUMBER.search(name)
    return int(match[0]) if match else None


def _kind(name: str) -> str:
    """The name without its step."""
    return _NUMBER.sub("*", name, count=1)
