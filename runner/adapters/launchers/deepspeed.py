"""
DeepSpeed's launcher, on one machine. https://www.deepspeed.ai/getting-started/#launching-deepspeed-training

It passes `--local_rank` to the script.
"""

from __future__ import annotations

from runner.adapters.launchers.launch import Launch, apart, first_file, run_module


def argv(launch: Launch) -> tuple[str, ...]:
    options = (
        "--hostfile=/dev/null",  # a hostfile of the image would send us to other machines
        f"--num_gpus={launch.num_procs}",
        f"--enable_each_rank_log={launch.log_dir}",
    )
    return run_module(launch.python, "deepspeed.launcher.runner", *options, *apart(launch.command))


def target(words: tuple[str, ...]) -> str | None:
    return first_file(words)
