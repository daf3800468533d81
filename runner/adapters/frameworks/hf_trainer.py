"""
Hugging Face Trainer, and what is built on it: TRL, Unsloth, Axolotl, LLaMA-Factory.

It writes `checkpoint-N`: the model, then optimizer and scheduler, then each rank its random
state without waiting for the others, and rank 0 `trainer_state.json`. So that file alone
proves nothing: every rank's random state has to be there too.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from runner.adapters.frameworks.files import (
    Save,
    entries,
    files_below,
    is_whole,
    is_whole_dcp,
    itself,
    make_save,
    read_json,
)

uses_library = False
flag = "--resume_from_checkpoint"  # always with a path: without, the Trainer takes the highest number, complete or not
resume_path = itself

_NAME: Final = re.compile(r"checkpoint-(\d+)")
_STATE: Final = "trainer_state.json"
_INCOMPLETE: Final = "checkpoint-is-incomplete.txt"


def saves(folder: Path, world_size: int) -> list[Save]:
    """Every `checkpoint-N` in the Trainer's `output_dir`, by N."""
    numbered = {int(match[1]): entry for entry in entries(folder) if (match := _NAME.fullmatch(entry.name))}
    return [
        make_save(path.name, path, files_below(path), step=step, complete=_is_complete(path, step, world_size))
        for step, path in sorted(numbered.items())
    ]


def _is_complete(checkpoint: Path, step: int, world_size: int) -> bool:
    try:
        state = read_json(checkpoint / _STATE)
        return (
            state is not None
            and state.get("global_step") == step
            and not (checkpoint / _INCOMPLETE).exists()
            and _has_random_states(checkpoint, world_size)
            and _has_whole_shards(checkpoint, world_size)
            and all(is_whole(file) for file in checkpoint.iterdir() if file.is_file())
        )
    except OSError:  # the Trainer's own rotation takes it away
        return False


def _has_random_states(checkpoint: Path, world_size: int) -> bool:
    if not (checkpoint / "scheduler.pt").exists():  # written before the state: `save_only_model`
        return True
    names = ["rng_state.pth"] if world_size == 1 else [f"rng_state_{rank}.pth" for rank in range(world_size)]
    return all((checkpoint / name).is_file() for name in names)


def _has_whole_shards(checkpoint: Path, world_size: int) -> bool:
    """Sharded optimizers lie in folders: those of FSDP have their metadata last, DeepSpeed's one file per rank."""
    fsdp = [entry for entry in checkpoint.iterdir() if re.fullmatch(r"(pytorch_model_fsdp|optimizer)_\d+", entry.name)]
    if not all(is_whole_dcp(entry) for entry in fsdp if entry.is_dir()):
        return False
    latest = checkpoint / "latest"
    if not latest.exists():
        return not any(checkpoint.glob("global_step*"))
    shards = list((checkpoint / latest.read_text().strip()).glob("*_optim_states.pt"))
    return len(shards) >= world_size and all(shard.stat().st_size > 0 for shard in shards)
