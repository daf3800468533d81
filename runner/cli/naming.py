"""Which job a command is about, as it was typed, and in which folder runs have theirs. Apart from the reading of it: `run` only passes it on."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from runner.errors import JobError

STDIN: Final = "-"
JOB_VARIABLE: Final = "RUNNER_JOB"
WORKSPACE_VARIABLE: Final = "VRAMFARM_WORKSPACE"


def add_job(parser: argparse.ArgumentParser, *, default: str = "") -> None:
    """JOB, in both ways that people type it."""
    parser.add_argument(
        "job",
        metavar="JOB",
        nargs="?",
        help=f"path of job.yaml, an https:// or s3:// address of it, or - for standard input{default}",
    )
    parser.add_argument("--config", metavar="JOB", help="the same as JOB")


def named_job(args: argparse.Namespace) -> str | None:
    if args.job and args.config and args.job != args.config:
        raise JobError(f"expected one job, found two: {args.job} and {args.config}")
    named: str | None = args.config or args.job
    return named


def workspace_of(env: Mapping[str, str]) -> Path:
    """$VRAMFARM_WORKSPACE; else /workspace where there is one that we may write; else the current folder."""
    if named := env.get(WORKSPACE_VARIABLE):
        return Path(named).absolute()
    usual = Path("/workspace")
    return usual if os.access(usual, os.W_OK) else Path.cwd()
