"""`checkpoints ls|verify|restore`: what can be resumed from, whether its bytes are right, and bringing it here."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runner.cli.output import out, out_json, table
from runner.cli.runs import find_run
from runner.cli.status import read_status
from runner.cli.stores import StoredRun, is_address, open_run
from runner.errors import RunnerError, StoreError
from runner.facts import Checkpoint
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk
from runner.words import size, span
from vramfarm.protocol import MANIFEST, Ref

if TYPE_CHECKING:
    from runner.storage.offsite.transfer import Survey

Differences = tuple[dict[str, list[str]], list[str]]  # by checkpoint's name; and what is none

_SAY_EVERY_S: Final = 5.0
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
    if which is not None and is_address(which):
        return _rows_of_store(which)
    root, run_dir = _place(which)
    rows = {checkpoint.ref.name: _row(checkpoint) for checkpoint in CheckpointDir(root, Disk()).committed()}
    for known in _known(run_dir):
        name = f"step-{known['step']:08d}-{known['id']}"
        here = rows.setdefault(name, {**known, "size_bytes": None, "written_at": None, "local": False})
        here.update(offsite=known["offsite"], verified=known["verified"])
    return sorted(rows.values(), key=lambda row: (row["lineage"], row["step"]))


def _rows_of_store(address: str) -> list[dict[str, Any]]:
    """What is whole by the store's own listing; its bytes were not compared."""
    from runner.storage.offsite import transfer  # noqa: PLC0415  # slow

    run = open_run(address)
    survey = transfer.survey(run.store, run.job)
    for problem in survey.unusable:
        sys.stderr.write(f"unusable: {problem}\n")
    return [{**_row(checkpoint), "local": False, "offsite": True} for checkpoint in survey.checkpoints]


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
        "in the store" if row["verified"] else "not compared" if row["offsite"] else "no",
    )


# ---------------------------------------------------------------------------------- verify


def _verify(which: str | None, *, as_json: bool) -> int:
    found, others = _differences_in_store(which) if which and is_address(which) else _differences_here(which)
    if as_json:
        out_json({"checkpoints": found, "problems": others})
    else:
        for name, differences in found.items():
            out(f"{name}  {'; '.join(differences) or 'every byte is what its manifest says'}")
    if problems := [*(problem for differences in found.values() for problem in differences), *others]:
        raise StoreError(
            "\n".join(problems), hint="resume sets a damaged checkpoint aside and takes the next older one"
        )
    return 0


def _differences_here(which: str | None) -> Differences:
    directory = CheckpointDir(_place(which)[0], Disk())
    found = {c.ref.name: list(directory.verify(c.ref)) for c in directory.committed()}
    return found, list(directory.problems())


def _differences_in_store(address: str) -> Differences:
    """By size and checksum as the store reports them; of a folder, every byte is read back."""
    from runner.storage.offsite import transfer  # noqa: PLC0415  # slow

    run = open_run(address)
    survey = transfer.survey(run.store, run.job)
    wanted = [c.ref for c in survey.checkpoints if run.checkpoint in {"", c.ref.name}]
    return {ref.name: _differences(run, ref) for ref in wanted}, list(survey.unusable)


def _differences(run: StoredRun, ref: Ref) -> list[str]:
    from runner.storage.offsite import OffsiteError, transfer  # noqa: PLC0415  # slow

    try:
        transfer.verify(run.store, run.job, ref)
    except OffsiteError as error:
        if not error.final:
            raise
        return [str(error)]
    return []


# --------------------------------------------------------------------------------- restore


def _restore(address: str, folder: Path) -> int:
    """Exit 0 only if every byte that was brought is what the manifest says."""
    from runner.storage.offsite import transfer  # noqa: PLC0415  # slow

    run = open_run(address)
    checkpoint = _choose(address, run.checkpoint, transfer.survey(run.store, run.job))
    folder.mkdir(parents=True, exist_ok=True)
    transfer.restore(run.store, run.job, checkpoint.ref, CheckpointDir(folder, Disk()), Meter())
    out(str(folder / checkpoint.ref.name))
    return 0


def _choose(address: str, name: str, survey: Survey) -> Checkpoint:
    """The one that the address names, or the newest."""
    found = [c for c in survey.checkpoints if name in {"", c.ref.name}]
    if not found:
        problems = "; ".join(survey.unusable) or "none is there"
        raise StoreError(
            f"{address}: expected a whole checkpoint: {problems}", hint="vramfarm-runner checkpoints ls URL"
        )
    return max(found, key=lambda checkpoint: checkpoint.ref)


class Meter:
    """Progress for a person, on standard error: a line whenever five seconds have passed."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, fraction: float, note: str) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _SAY_EVERY_S
            sys.stderr.write(f"{fraction:4.0%} {note}\n")
            sys.stderr.flush()


def _place(which: str | None) -> tuple[Path, Path | None]:
    """(folder of checkpoints, run folder if there is one)."""
    if which is not None and Path(which).is_dir() and any(Path(which).glob(f"step-*/{MANIFEST}")):
        return Path(which), None
    run_dir = find_run(which, os.environ)
    return _folder(run_dir), run_dir


def _folder(run_dir: Path) -> Path:
    """As the accepted job says, which may have been moved or copied here since."""
    try:
        name = Path(json.loads((run_dir / "job.json").read_bytes())["checkpoint"]["dir"]).name
    except (OSError, ValueError, KeyError, TypeError):
        name = ""
    return run_dir / (name or _FOLDER)
