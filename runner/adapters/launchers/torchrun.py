"""torchrun, on one machine. https://docs.pytorch.org/docs/stable/elastic/run.html"""

from __future__ import annotations

from runner.adapters.launchers.launch import Launch, apart, first_file, run_module


def argv(launch: Launch) -> tuple[str, ...]:
    return run(launch, launch.command)


def run(launch: Launch, words: tuple[str, ...]) -> tuple[str, ...]:
    """torchrun on these words; those of others name a module first."""
    return run_module(launch.python, "torch.distributed.run", *options(launch), *apart(words))


def options(launch: Launch) -> tuple[str, ...]:
    """Options of torchrun, which others take too."""
    return (
        "--standalone",  # a port of its own: nobody can have taken it
        "--local-addr=127.0.0.1",  # otherwise the host's name is looked up, which may be slow or wrong
        f"--nproc-per-node={launch.num_procs}",
        "--max-restarts=0",  # restarts are ours: its own hide the first error
        f"--log-dir={launch.log_dir}",
        "--redirects=3",  # one file per rank and stream: nothing is mixed
    )


target = first_file
