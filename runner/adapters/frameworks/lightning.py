"""
Lightning: `*.ckpt`, one file (DDP) or a folder of shards (FSDP, ModelParallel, DeepSpeed).

A single file is written elsewhere and moved into place, so what has its end is complete; a
folder has the shards' metadata, and `meta.pt` written after them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from runner.adapters.frameworks.files import Save, entries, files_below, is_whole, is_whole_dcp, last_number, make_save

uses_library = False
flag = "--ckpt_path"

_STEP: Final = re.compile(r"step[=_-]?(\d+)")


def saves(folder: Path, world_size: int) -> list[Save]:
    """Every `.ckpt` that is no link to another one, oldest first."""
    found = [entry for entry in entries(folder) if entry.suffix == ".ckpt" and not entry.is_symlink()]
    made = [
        make_save(path.name, folder, _files(path), step=_step(path.name), complete=_is_complete(path, world_size))
        for path in found
    ]
    return sorted(made, key=lambda save: save.stamp)


def resume_path(checkpoint: Path) -> Path:
    """The `.ckpt` in it."""
    return next((entry for entry in entries(checkpoint) if entry.suffix == ".ckpt"), checkpoint)


def _files(path: Path) -> list[Path]:
    return files_below(path) if path.is_dir() else [path]


def _step(name: str) -> int | None:
    match = _STEP.search(name)
    return int(match[1]) if match else last_number(name)


def _is_complete(path: Path, world_size: int) -> bool:
    if path.is_file():
        return is_whole(path)
    tag = path / "checkpoint"  # DeepSpeed's, by Lightning's name for it
    if tag.is_dir():
        shards = [*tag.glob("*_optim_states.pt")]
        return (path / "latest").is_file() and len(shards) in {0, world_size} and all(map(is_whole, tag.glob("*.pt")))
    return is_whole_dcp(path) and is_whole(path / "meta.pt")
