"""`stop`: ask the run to end. The request is a file, so it holds whoever is alive to read it."""

from __future__ import annotations

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from runner.cli.output import out, out_json
from runner.cli.runs import find_run, is_alive
from runner.cli.status import Status, describe_draining, is_draining, read_status
from runner.storage.disk import Disk, write_durable

_REQUEST: Final = "stop"
_TRAINING: Final = frozenset({"STARTING", "RUNNING", "LEAVING"})  # phases with an attempt that may have what to save


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="folder, name or job.yaml of the run")
    parser.add_argument("--json", action="store_true", help="what was found and done, as JSON")


def run(args: argparse.Namespace) -> int:
    run_dir = find_run(args.run, os.environ)
    status, alive = _status(str(run_dir)), is_alive(run_dir)
    outcome = str(status.get("outcome") or "")
    if not outcome:
        write_durable(Disk(), run_dir / _REQUEST, f"asked {datetime.now(UTC).isoformat()}\n".encode())
    if args.json:
        out_json({"run_dir": str(run_dir), "asked": not outcome, "alive": alive, "outcome": outcome or None})
    else:
        _tell(run_dir, status, alive=alive)
    return 0


def _tell(run_dir: Path, status: Status, *, alive: bool) -> None:
    if outcome := status.get("outcome"):
        out(f"{run_dir.name} is over already: {outcome}")
        if is_draining(status, alive=alive, now=datetime.now(UTC)):
            out(describe_draining(status))
    elif alive:
        first = "save at its next step, finish" if status.get("phase") in _TRAINING else "begin no training, finish"
        out(f"{run_dir.name} will {first} its copies, and end with exit code 8")
        out(
            f"where the server is rented, it is stopped then; vramfarm-runner status {run_dir.name} shows how far it is"
        )
    else:
        out(f"{run_dir.name} has no live runner; the next one to start ends the job instead of training")
        out(f"to take this back: rm {run_dir / _REQUEST}")


def _status(run_dir: str) -> Status:
    try:
        return read_status(run_dir)[0]
    except Exception:  # noqa: BLE001  # no status is no reason not to stop
        return {}
