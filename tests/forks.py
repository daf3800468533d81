"""
The command line without its imports: a process that has them all, and forks for each command.

A line of JSON on standard input is a command, a line on standard output says where it has written
and its exit code. What a fork is told, and what it prints, are files.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

from runner.cli.main import COMMANDS, main

_IN, _OUT = os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC


def serve() -> None:
    for name in COMMANDS:
        import_module(f"runner.cli.{name}")
    for line in iter(sys.stdin.readline, ""):
        wish = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(wish)
            os._exit(_play(wish["arguments"]))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps([wish["stdout"], code]), flush=True)


def _become(wish) -> None:
    """A process as `python -m runner` is one: its own streams, folder and environment."""
    for number, (name, flags) in enumerate((("stdin", _IN), ("stdout", _OUT), ("stderr", _OUT))):
        descriptor = os.open(wish[name], flags, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # nothing of the parent's in its buffer
    os.chdir(wish["cwd"])
    os.environ.clear()
    os.environ.update(wish["env"])


def _play(arguments: list[str]) -> int:
    try:
        code = main(arguments)
    except SystemExit as done:  # argparse
        code = done.code if isinstance(done.code, int) else 0
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    serve()
