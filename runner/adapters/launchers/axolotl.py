"""Axolotl, under torchrun, as its page on several nodes has it. The command is its config file."""

from __future__ import annotations

from runner.adapters.launchers import torchrun
from runner.adapters.launchers.launch import Launch, first_file


def argv(launch: Launch) -> tuple[str, ...]:
    return torchrun.run(launch, ("--module", "axolotl.cli.train", *launch.command))


def target(words: tuple[str, ...]) -> str | None:
    file = first_file(words)
    return None if file is None or "://" in file else file  # it loads configs from the web, too
