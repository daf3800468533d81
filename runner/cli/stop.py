"""`stop`: ask the run to end. The request is a file, so it holds whoever is alive to read it."""

from __future__ import annotations

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from runner.cli.output import out, out_json
from runner.cli.runs import find_run, is_alive
from runner.cli.status import read_status
from runner.storage.disk import Disk, write_durable

_REQUEST: Final = "stop"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="folder, name or job.yaml of the run")
    parser.add_argument("--json", action="store_true", help="what was found and done, as JSON")


def run(args: argparse.Namespace) -> int:
    run_dir = find_run(args.run, os.environ)
    outcome, alive = _outcome(str(run_dir)), is_alive(run_dir)
    if not outcome:
        write_durable(Disk(), run_dir / _REQUEST, f"asked {datetime.now(UTC).isoformat()}\n".encode())
    if args.json:
        out_json({"run_dir": str(run_dir), "asked": not outcome, "alive": alive, "outcome": outcome or None})
    else:
        _tell(run_dir, outcome, alive=alive)
    return 0


def _tell(run_dir: Path, outcome: str, *, alive: bool) -> None:
    if outcome:
        out(f"{run_dir.name} is over already: {outcome}")
    elif alive:
        out(f"{run_dir.name} will save at its next step, finish its copies, and end with exit code 8")
        out(
            f"where the server is rented, it is stopped then; vramfarm-runner status {run_dir.name} shows how far it is"
        )
    else:
        out(f"{run_dir.name} has no live runner; the next one to start ends the job instead of training")
        out(f"to take this back: rm {run_dir / _REQUEST}")


def _outcome(run_dir: str) -> str:
    try:
        status, _ = read_status(run_dir)
    except Exception:  # noqa: BLE001  # no status is no reason not to stop
        return ""
    return str(status.get("outcome") or "")
