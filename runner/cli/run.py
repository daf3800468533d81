"""
`run` becomes the guardian, which starts the runner and keeps the deadline.

Nothing is checked here: on a rented server even a job that cannot be read must end with the
server stopped, and only the guardian can do that.
"""

from __future__ import annotations

import argparse
import base64
import os
import socket
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from runner.cli.naming import JOB_VARIABLE, STDIN, add_job, named_job
from runner.errors import JobError

_GUARDIAN: Final = Path(__file__).resolve().parents[1] / "guardian.py"
_SHELLS: Final = frozenset({"bash", "dash", "fish", "sh", "zsh"})
_MAX_VARIABLE_BYTES: Final = 120_000  # Linux takes 128 KiB for one variable


def configure(parser: argparse.ArgumentParser) -> None:
    add_job(parser, default=f"; without it, ${JOB_VARIABLE}")
    parser.add_argument(
        "--start-over",
        action="store_true",
        help="begin at step 0, or at checkpoint.resume, even if there are checkpoints",
    )
    parser.add_argument(
        "--go-on",
        action="store_true",
        help="go on with a run that is over: stopped, given up, at a limit, or done and given more steps",
    )
    parser.add_argument(
        "--accept-change", action="store_true", help="go on although job.yaml has changed since this run began"
    )
    parser.add_argument(
        "--order",
        metavar="NAME",
        default="",
        help="names this order of --start-over or --go-on; each name is carried out once. Without it, each order typed in "
        "a terminal is new, and the one in a container's or rented server's own command is the same at every restart",
    )


def run(args: argparse.Namespace) -> NoReturn:
    config = named_job(args)
    if config == STDIN:
        _keep(sys.stdin.buffer.read(_MAX_VARIABLE_BYTES))
        config = None
    options = [] if config is None else ["--config", config]
    options += ["--accept-change"] * args.accept_change
    if args.start_over or args.go_on:
        options += ["--start-over" if args.start_over else "--go-on", "--order", args.order or _order(os.environ)]
    os.execv(sys.executable, [sys.executable, "-I", str(_GUARDIAN), *options])  # noqa: S606  # argv, no shell


def _order(env: Mapping[str, str]) -> str:
    """
    What makes this wish one wish: the runner may be started again, and a container with it.

    On a rented server and in a container the same command line comes back with every
    restart; only what is typed there, and elsewhere all, is a new order each time.
    """
    from runner.adapters.providers import find_server  # noqa: PLC0415  # slow, and most orders are none

    server = find_server(env)
    if is_typed():
        return uuid.uuid4().hex
    if server:
        return server.id
    return socket.gethostname() if Path("/.dockerenv").exists() else uuid.uuid4().hex


def is_typed() -> bool:
    """
    Whether a person gave this command in a terminal: no restart types it again.

    A shell with job control makes each command the leader of a group, in the foreground; a script
    does not. What PID 1 began is the container's own, unless that is nothing but a shell.
    """
    try:
        leads = os.getpgrp() == os.getpid() == os.tcgetpgrp(0)
        first = _words_of_first()
    except OSError:  # no terminal, or not ours
        return False
    if not leads or os.getpid() == 1 or _has_order(first):
        return False
    is_shell = (
        bool(first)
        and Path(first[0].lstrip("-")).name in _SHELLS
        and all(word in {"-i", "-l", "--login"} for word in first[1:])
    )
    return os.getppid() != 1 or is_shell


def comes_back(guardian: int) -> bool:
    """Whether a restart of this container gives the order again: its own command, or a script that is that, does."""
    with suppress(OSError, ValueError):
        parent = int(Path(f"/proc/{guardian}/stat").read_text().rpartition(")")[2].split()[1])
        return guardian == 1 or parent == 1 or _has_order(_words_of_first())
    return True


def _words_of_first() -> list[str]:
    return Path("/proc/1/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]


def _has_order(words: list[str]) -> bool:
    return any("--start-over" in word or "--go-on" in word for word in words)


def _keep(text: bytes) -> None:
    """Standard input can be read once, but the runner may be started again: its environment keeps the job."""
    encoded = base64.b64encode(text).decode()
    if len(encoded) > _MAX_VARIABLE_BYTES:
        raise JobError(
            "stdin: expected a job.yaml of at most 90 kB", hint="write it to a file and name that: --config job.yaml"
        )
    os.environ[JOB_VARIABLE] = encoded
