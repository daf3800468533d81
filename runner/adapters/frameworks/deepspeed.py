"""
DeepSpeed's engine: `<tag>/` with each rank's shards, and `latest` with the tag.

Rank 0 writes `latest` without waiting for the others: it alone proves nothing.
"""

from __future__ import annotations

from pathlib import Path

from runner.adapters.frameworks.files import Save, entries, files_below, is_whole, itself, last_number, make_save

uses_library = False
flag = "--resume"
resume_path = itself  # the folder with `latest` in it, which `load_checkpoint` takes


def saves(folder: Path, world_size: int) -> list[Save]:
    """Every folder with states of a model, by the number in its tag."""
    latest = _read(folder / "latest")
    made = [_save(folder, path, latest, world_size) for path in entries(folder) if any(path.glob("*_model_states.pt"))]
    return sorted(made, key=lambda save: (save.step or 0, save.stamp))


def _save(folder: Path, path: Path, latest: str, world_size: int) -> Save:
    shards = list(path.glob("*_optim_states.pt"))  # none without ZeRO: then the model's states hold the optimizer
    complete = latest == path.name and len(shards) in {0, world_size} and all(map(is_whole, path.glob("*.pt")))
    files = [*files_below(path), *([folder / "latest"] if complete else [])]
    return make_save(path.name, folder, files, step=last_number(path.name), complete=complete)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
