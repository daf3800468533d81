"""Our own library: it finds its checkpoint in the environment, and commits by itself."""

from __future__ import annotations

from pathlib import Path

from runner.adapters.frameworks.files import Save

uses_library = True
flag = ""  # VRAMFARM_RESUME says it


def saves(folder: Path, world_size: int) -> list[Save]:  # noqa: ARG001  # the saver commits
    return []


def resume_path(checkpoint: Path) -> Path:
    return checkpoint
