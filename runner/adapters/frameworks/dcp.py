"""torch.distributed.checkpoint, and what saves with it: torchtitan and scripts of one's own."""

from __future__ import annotations

from pathlib import Path

from runner.adapters.frameworks.files import Save, entries, files_below, is_whole_dcp, itself, last_number, make_save

uses_library = False
flag = "--resume"
resume_path = itself


def saves(folder: Path, world_size: int) -> list[Save]:  # noqa: ARG001  # the metadata names every rank's shards
    """Every folder of shards, by the number in its name."""
    found = [entry for entry in entries(folder) if entry.is_dir() and any(entry.glob("*.distcp"))]
    made = [
        make_save(path.name, path, files_below(path), step=last_number(path.name), complete=is_whole_dcp(path))
        for path in found
    ]
    return sorted(made, key=lambda save: (save.step or 0, save.stamp))
