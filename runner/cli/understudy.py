"""The run of a rehearsal: `run`, whose life hangs on the rehearsal's. When that dies in whatever way, this is asked to leave."""

from __future__ import annotations

import argparse
import os
import signal

from runner.cli import run as real
from runner.cli.naming import STDIN
from runner.errors import LeftError
from runner.supervise.process import end_with_parent


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parent", type=int, required=True, help="the rehearsal's pid")


def run(args: argparse.Namespace) -> int:
    end_with_parent(signal.SIGTERM)
    if os.getppid() != args.parent:  # it died before it was asked for
        return LeftError.exit_code
    return real.run(argparse.Namespace(job=None, config=STDIN, start_over=False, go_on=False, accept_change=False))
