"""`checkpoints ls|verify|restore`: what can be resumed from, whether its bytes are right, and bringing it here."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from runner.cli.output import out, out_json, table
from runner.cli.runs import find_run
from runner.cli.status import read_status
from runner.cli.stores import is_address
from runner.errors import JobError, RunnerError, StoreError
from runner.facts import Checkpoint
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk
from runner.words import size, span
from vramfarm.protocol import MANIFEST

_FOLDER: Final = "checkpoints"
_HEAD: Final = ("STEP", "ID", "LINEAGE", "SIZE", "AGE", "WHERE", "VERIFIED")


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ls|verify|restore")
    for name, summary in (
        ("ls", "list them: committed here, and what the run last knew of the store"),
        ("verify", "read every byte and compare it with the manifest"),
    ):
        action = actions.add_parser(name, help=summary, description=summary)
        action.add_argument(
            "run",
            metavar="RUN",
            nargs="?",
            help="folder, name or job.yaml of a run; or a folder or address of checkpoints",
        )
        action.add_argument("--json", action="store_true", help="as JSON")
    restore = actions.add_parser("restore", help="bring one here from the store, verified")
    restore.add_argument(
        "address", metavar="URL", help="s3:// or file:// of one checkpoint, or of a run: then its newest"
    )
    restore.add_argument("folder", metavar="FOLDER", help="where it goes; the checkpoint's own folder is made in it")


def run(args: argparse.Namespace) -> int:
    match args.action:
        case "ls":
            return _ls(args.run, as_json=args.json)
        case "verify":
            return _verify(args.run, as_json=args.json)
        case _:
            return _restore(args.address, Path(args.folder))


# -------------------------------------------------------------------------------------- ls


def _ls(which: str | None, *, as_json: bool) -> int:
    rows = _rows(which)
    if as_json:
        out_json(rows)
        return 0
    now = datetime.now(UTC)
    out(table([_HEAD, *(_cells(row, now) for row in rows)]))
    return 0


def _rows(which: str | None) -> list[dict[str, Any]]:
    """Oldest first; what is only in the store has no size: the run never read it."""
    root, run_dir = _place(which)
    rows = {checkpoint.ref.name: _row(checkpoint) for checkpoint in CheckpointDir(root, Disk()).committed()}
    for known in _known(run_dir):
        name = f"step-{known['step']:08d}-{known['id']}"
        here = rows.setdefault(name, {**known, "size_bytes": None, "written_at": None, "local": False})
        here.update(offsite=known["offsite"], verified=known["verified"])
    return sorted(rows.values(), key=lambda row: (row["lineage"], row["step"]))


def _row(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "step": checkpoint.ref.step,
        "id": checkpoint.ref.id,
        "lineage": checkpoint.ref.lineage,
        "size_bytes": checkpoint.size_bytes,
        "written_at": checkpoint.written_at.isoformat(),
        "local": True,
        "offsite": None,
        "verified": None,
    }


def _known(run_dir: Path | None) -> list[Mapping[str, Any]]:
    """Checkpoints that the run's status says are in the store."""
    if run_dir is None:
        return []
    try:
        status, _ = read_status(str(run_dir))
    except RunnerError:
        return []  # it has no status yet, so it knows of none
    return [checkpoint for checkpoint in status.get("checkpoints") or [] if checkpoint["offsite"]]


def _cells(row: Mapping[str, Any], now: datetime) -> tuple[str, ...]:
    written = row["written_at"]
    where = " ".join(filter(None, ("local" if row["local"] else "", "offsite" if row["offsite"] else "")))
    return (
        str(row["step"]),
        row["id"],
        str(row["lineage"]),
        "?" if row["size_bytes"] is None else size(row["size_bytes"]),
        "?" if written is None else span((now - datetime.fromisoformat(written)).total_seconds()),
        where,
        "in the store" if row["verified"] else "no",
    )


# ---------------------------------------------------------------------------------- verify


def _verify(which: str | None, *, as_json: bool) -> int:
    root, _ = _place(which)
    checkpoints = CheckpointDir(root, Disk())
    found = [(c.ref.name, checkpoints.verify(c.ref)) for c in checkpoints.committed()]
    problems = [*(p for _, differences in found for p in differences), *checkpoints.problems()]
    if as_json:
        out_json({"checkpoints": {name: list(differences) for name, differences in found}, "problems": problems})
    else:
        for name, differences in found:
            out(f"{name}  {'; '.join(differences) or 'every byte is what its manifest says'}")
    if problems:
        raise StoreError(
            "\n".join(problems), hint="resume sets a damaged checkpoint aside and takes the next older one"
        )
    return 0


# --------------------------------------------------------------------------------- restore


def _restore(address: str, folder: Path) -> int:
    raise JobError(f"{address}: restore into {folder} needs a store")


def _place(which: str | None) -> tuple[Path, Path | None]:
    """(folder of checkpoints, run folder if there is one)."""
    if which is not None and is_address(which):
        raise JobError(f"{which}: expected a run or a folder of checkpoints on this machine")
    if which is not None and Path(which).is_dir() and any(Path(which).glob(f"step-*/{MANIFEST}")):
        return Path(which), None
    run_dir = find_run(which, os.environ)
    return run_dir / _FOLDER, run_dir
