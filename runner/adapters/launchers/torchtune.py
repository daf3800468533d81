"""
torchtune: `tune run` takes torchrun's options. https://docs.pytorch.org/torchtune/stable/tune_cli.html

The command is a recipe and its arguments: `full_finetune_distributed --config llama3/8B_full`.
"""

from __future__ import annotations

from runner.adapters.launchers import torchrun
from runner.adapters.launchers.launch import Launch, run_module


def argv(launch: Launch) -> tuple[str, ...]:
    return run_module(launch.python, "torchtune._cli.tune", "run", *torchrun.options(launch), *launch.command)


def target(words: tuple[str, ...]) -> str | None:  # noqa: ARG001  # a recipe is a name or a file: it knows which
    return None
