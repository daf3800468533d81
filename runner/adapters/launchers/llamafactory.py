"""LLaMA-Factory. `llamafactory-cli train` starts torchrun on this module, but without our options."""

from __future__ import annotations

from runner.adapters.launchers import torchrun
from runner.adapters.launchers.launch import Launch, apart, first_file, run_module


def argv(launch: Launch) -> tuple[str, ...]:
    module = ("--module", "llamafactory.launcher")
    return run_module(
        launch.python, "torch.distributed.run", *torchrun.options(launch), *apart((*module, *launch.command))
    )


target = first_file
