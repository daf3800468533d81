"""`report`: what a run came to: machines, attempts, first errors, cost, goodput, checkpoints."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from runner.cli.output import out, out_json, writing
from runner.cli.runs import add_run, find_in_store, find_run
from runner.cli.stores import no_run, open_run
from runner.errors import JobError


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="all of it, as JSON")
    parser.add_argument(
        "--html", metavar="FILE", help="write the report as a web page to FILE, and nothing to the terminal"
    )


def run(args: argparse.Namespace) -> int:
    from runner.report import as_json, gather_folder, gather_store, page, text  # noqa: PLC0415  # slow

    if address := find_in_store(args.run, os.environ):
        found = open_run(address)
        report = gather_store(found.store, found.job)
        if not report.status and not report.spendings:
            raise no_run(address)
    else:
        report = gather_folder(find_run(args.run, os.environ))
    if not report.status and not report.spendings:
        raise JobError(
            f"{report.address}: expected a run, found neither a status nor attempts", hint="is the name right?"
        )
    if args.json:
        out_json(as_json(report))
    elif args.html:
        with writing("--html", args.html):
            Path(args.html).write_text(page(report))
    else:
        for line in text(report):
            out(line)
    return 0
