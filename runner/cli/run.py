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
from pathlib import Path
from typing import Final, NoReturn

from runner.adapters.providers import find_server
from runner.cli.load import JOB_VARIABLE, STDIN
from runner.errors import JobError

_GUARDIAN: Final = Path(__file__).resolve().parents[1] / "guardian.py"
_MAX_VARIABLE_BYTES: Final = 120_000  # Linux takes 128 KiB for one variable


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="JOB",
        help=f"path of job.yaml, - or an https:// or s3:// address; without it, ${JOB_VARIABLE}",
    )
    parser.add_argument(
        "--start-over",
        action="store_true",
        help="begin at step 0, or at checkpoint.resume, although there are checkpoints",
    )
    parser.add_argument(
        "--go-on", action="store_true", help="go on although the run was ended: stopped, given up, at a limit"
    )
    parser.add_argument(
        "--accept-change", action="store_true", help="go on although job.yaml is not the one this run began with"
    )


def run(args: argparse.Namespace) -> NoReturn:
    config = args.config
    if config == STDIN:
        _keep(sys.stdin.buffer.read(_MAX_VARIABLE_BYTES))
        config = None
    options = [] if config is None else ["--config", config]
    options += ["--accept-change"] * args.accept_change
    if args.start_over or args.go_on:
        options += ["--start-over" if args.start_over else "--go-on", "--order", _order(os.environ)]
    os.execv(sys.executable, [sys.executable, "-I", str(_GUARDIAN), *options])  # noqa: S606  # argv, no shell


def _order(env: Mapping[str, str]) -> str:
    """
    What makes this wish one wish: the runner may be started again, and a container with it.

    On a rented server and in a container the same command line comes back with every
    restart; only elsewhere is each a new order.
    """
    server = find_server(env)
    if server:
        return server.id
    return socket.gethostname() if Path("/.dockerenv").exists() else uuid.uuid4().hex


def _keep(text: bytes) -> None:
    """Standard input can be read once, but the runner may be started again: its environment keeps the job."""
    encoded = base64.b64encode(text).decode()
    if len(encoded) > _MAX_VARIABLE_BYTES:
        raise JobError(
            "stdin: expected a job.yaml of at most 90 kB", hint="write it to a file and name that: --config job.yaml"
        )
    os.environ[JOB_VARIABLE] = encoded
