"""
Hugging Face Accelerate. https://huggingface.co/docs/accelerate/package_reference/cli

The command may begin with options of `accelerate launch`: `--config_file fsdp.yaml train.py`.
"""

from __future__ import annotations

from runner.adapters.launchers.launch import Launch, first_file, run_module


def argv(launch: Launch) -> tuple[str, ...]:
    options = (
        f"--num_processes={launch.num_procs}",  # more than one card makes it --multi_gpu, unless the user's config says more
        "--num_machines=1",
        "--max_restarts=0",
        "--tee=3",
        f"--log_dir={launch.log_dir}",
    )
    # no `--` before the script: it takes no abbreviations, so the script's options are safe from it
    return run_module(launch.python, "accelerate.commands.launch", *options, *launch.command)


target = first_file
