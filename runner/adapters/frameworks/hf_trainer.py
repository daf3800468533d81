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

from runner.adapters.frameworks.files import is_whole, read_json

uses_library = False

_NAME: Final = re.compile(r"checkpoint-(\d+)")
_STATE: Final = "trainer_state.json"
_INCOMPLETE: Final = "checkpoint-is-incomplete.txt"


def resume_args(checkpoint: Path) -> tuple[str, ...]:
    """Always a path: with `True` the Trainer takes the highest number, complete or not."""
    return ("--resume_from_checkpoint", str(checkpoint))


def complete(folder: Path, world_size: int) -> list[Path]:
    """Return the complete `checkpoint-N` in the Trainer's `output_dir`, by N."""
    try:
        numbered = {int(match[1]): entry for entry in folder.iterdir() if (match := _NAME.fullmatch(entry.name))}
    except FileNotFoundError:
        return []
    return [path for step, path in sorted(numbered.items()) if _is_complete(path, step, world_size)]


def _is_complete(checkpoint: Path, step: int, world_size: int) -> bool:
    state = read_json(checkpoint / _STATE)
    return (
        state is not None
        and state.get("global_step") == step
        and not (checkpoint / _INCOMPLETE).exists()
        and _has_random_states(checkpoint, world_size)
        and _has_whole_shards(checkpoint, world_size)
        and all(is_whole(file) for file in checkpoint.iterdir() if file.is_file())
    )


def _has_random_states(checkpoint: Path, world_size: int) -> bool:
    if not (checkpoint / "scheduler.pt").exists():  # written before the state: `save_only_model`
        return True
    names = ["rng_state.pth"] if world_size == 1 else [f"rng_state_{rank}.pth" for rank in range(world_size)]
    return all((checkpoint / name).is_file() for name in names)


def _has_whole_shards(checkpoint: Path, world_size: int) -> bool:
    """Sharded optimizers lie in folders: those of FSDP have their metadata last, DeepSpeed's one file per rank."""
    fsdp = [entry for entry in checkpoint.iterdir() if re.fullmatch(r"(pytorch_model_fsdp|optimizer)_\d+", entry.name)]
    if not all((entry / ".metadata").is_file() for entry in fsdp if entry.is_dir()):
        return False
    latest = checkpoint / "latest"
    if not latest.exists():
        return not any(checkpoint.glob("global_step*"))
    shards = list((checkpoint / latest.read_text().strip()).glob("*_optim_states.pt"))
    return len(shards) >= world_size and all(shard.stat().st_size > 0 for shard in shards)
