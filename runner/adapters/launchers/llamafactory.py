"""LLaMA-Factory. `llamafactory-cli train` starts torchrun on this module, but without our options."""

from __future__ import annotations

from runner.adapters.launchers import torchrun
from runner.adapters.launchers.launch import Launch, first_file


def argv(launch: Launch) -> tuple[str, ...]:
    return torchrun.run(launch, ("--module", "llamafactory.launcher", *launch.command))


target = first_file
