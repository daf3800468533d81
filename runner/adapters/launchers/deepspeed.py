"""
DeepSpeed's launcher, on one machine. https://www.deepspeed.ai/getting-started/#launching-deepspeed-training

It passes `--local_rank` to the script.

There are two parsers: the launcher's, and that of `deepspeed.launcher.launch`, which gets the first word and the rest as they
come out of the first. Both would take options of the script for short for one of their own (`--no`, `--m`), so each gets its `--`.
"""

from __future__ import annotations

from runner.adapters.launchers.launch import Launch, apart, first_file, run_module


def argv(launch: Launch) -> tuple[str, ...]:
    options = (
        "--hostfile=/dev/null",  # a hostfile of the image would send us to other machines
        f"--num_gpus={launch.num_procs}",
        f"--enable_each_rank_log={launch.log_dir}",
    )
    return run_module(launch.python, "deepspeed.launcher.runner", *options, *_twice(apart(launch.command)))


def _twice(words: tuple[str, ...]) -> tuple[str, ...]:
    """The first parser takes the second `--` for the script, and hands it on in front of the words."""
    at = words.index("--") if "--" in words[:2] else None
    return words if at is None else (*words[:at], "--", *words[at:])


target = first_file
