"""`checkpoints ls|verify|restore|export`: what can be resumed from, whether its bytes are right, bringing it here, and the model in it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runner.cli.output import Bar, note, out, out_json, table, writing
from runner.cli.runs import expect_in_store, find_in_store
from runner.cli.shelves import (
    ALL_UNUSABLE,
    Candidate,
    candidates,
    candidates_in_store,
    damaged_names,
    expect_run,
    find_place,
    first_whole,
    problems_of,
)
from runner.cli.stores import Address, StoredRun, open_run
from runner.committed import Checkpoint
from runner.errors import JobError, RunnerError, StoreError
from runner.figures import size, span
from runner.storage.checkpoints import RESTORING, CheckpointDir
from runner.storage.disk import Disk

if TYPE_CHECKING:
    from runner.storage.export import Exported, Wish
    from runner.storage.offsite.meter import Meter
    from runner.storage.offsite.restoring import Source

_WHERE: Final = "nothing was verified; vramfarm-runner checkpoints ls shows what is there"
_RESTORE: Final = "copy a checkpoint from the store, or from another folder, into FOLDER, verified"
_EXPORT: Final = "write the model as verified safetensors files, which other programs can read"
_VERIFY: Final = "compare every byte with the manifest: what is here by reading it, what is in a store by the checksums that it reports"
_READ: Final = "of a checkpoint in a store: download every byte and compare that, whatever checksums the store reports"
_HEAD: Final = ("STEP", "ID", "LINEAGE", "SIZE", "AGE", "WHERE", "VERIFIED")


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ls|verify|restore|export")
    for name, summary in (
        ("ls", "list checkpoints: those committed here, and what the run last knew of the store"),
        ("verify", _VERIFY),
    ):
        action = actions.add_parser(name, help=summary, description=summary)
        action.add_argument(
            "run",
            metavar="RUN",
            nargs="?",
            help="folder, name or job.yaml of a run; folder of checkpoints or of one checkpoint; or an address in a store: STORE/NAME of a run, STORE/NAME/checkpoints/step-… of a checkpoint",
        )
        action.add_argument("--json", action="store_true", help="print JSON")
        if name == "verify":
            action.add_argument("--read", action="store_true", help=_READ)
    restore = actions.add_parser("restore", help=_RESTORE, description=_RESTORE)
    restore.add_argument(
        "which",
        metavar="CHECKPOINT|RUN|URL",
        help="address or folder of one checkpoint; or a run (address, folder or job.yaml): its newest one",
    )
    restore.add_argument("folder", metavar="FOLDER", help="destination; the checkpoint's own folder is created in it")
    restore.add_argument("--json", action="store_true", help="print JSON")
    _configure_export(actions.add_parser("export", help=_EXPORT, description=_EXPORT))


def _configure_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "which",
        metavar="CHECKPOINT|RUN|URL",
        help="folder of one checkpoint; or a run, here or in the store: its newest one",
    )
    parser.add_argument("--to", metavar="FOLDER", required=True, help="destination of the model; created if missing")
    parser.add_argument(
        "--dtype", choices=("keep", "bf16"), default="keep", help="bf16: round 32-bit floats to bfloat16"
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default="5GB",
        help="a larger model is split into several files and an index (default: 5GB)",
    )
    parser.add_argument(
        "--part",
        metavar="NAME",
        default="model",
        help="export another module that was given to Checkpointer, such as ema",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    match args.action:
        case "ls":
            return _ls(args.run, as_json=args.json)
        case "verify":
            return _verify(args.run, must_read=args.read, as_json=args.json)
        case "restore":
            return _restore(args.which, Path(args.folder), as_json=args.json)
        case _:
            return _export(args)


# -------------------------------------------------------------------------------------- ls


def _ls(which: str | None, *, as_json: bool) -> int:
    """Exit code 4 if all that is there is unusable: a run that has none yet is another thing."""
    rows, unusable = _rows(which)
    now = datetime.now(UTC)
    if as_json:
        out_json(rows)
    else:
        out(table([_HEAD, *(_cells(row, now) for row in rows)]))
    if unusable and not rows:
        raise StoreError("\n".join(unusable), hint=ALL_UNUSABLE)
    for problem in unusable:
        note(f"unusable: {problem}")
    return 0


def _rows(which: str | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Oldest first, and what cannot be used; what is only in the store has no size: the run never read it."""
    if address := find_in_store(which, os.environ):
        return _rows_of_store(address)
    place = find_place(which)
    directory = place.directory()
    rows = {c.ref.name: _row(c) for c in directory.committed() if place.means(c.ref.name)}
    unusable = [*place.problems()]
    if not rows and (damaged := [*filter(place.means, damaged_names(directory))]):
        unusable = [f"{place.root}: no whole checkpoint is there, only damaged ones: {', '.join(damaged)}"]
    for known in _known(place.run_dir):
        name = f"step-{known['step']:08d}-{known['id']}"
        if not place.means(name):
            continue
        here = rows.setdefault(name, {**known, "size_bytes": None, "written_at": None, "local": False})
        here.update(offsite=known["offsite"], verified=known["verified"])
    return sorted(rows.values(), key=lambda row: (row["lineage"], row["step"])), unusable


def _rows_of_store(address: Address) -> tuple[list[dict[str, Any]], list[str]]:
    """What is whole by the store's own listing; its bytes were not compared."""
    from runner.storage.offsite import surveying  # noqa: PLC0415  # slow

    run = open_run(address)
    with Bar() as bar:
        survey = surveying.survey_readable(run.store, run.job, bar)
    expect_run(address, run, survey)
    found = (checkpoint for checkpoint in survey.checkpoints if run.means(checkpoint.ref.name))
    return [{**_row(one), "local": False, "offsite": True} for one in found], problems_of(run, survey)


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
    from runner.cli.status import read_status  # noqa: PLC0415  # slow

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


@dataclass(frozen=True, slots=True)
class _Compared:
    """A checkpoint: how it differs from its manifest, and how much of it was read to tell."""

    name: str
    differences: tuple[str, ...]
    size_bytes: int
    bytes_read: int  # 0 of one that differs: it ends where that is found

    def __str__(self) -> str:
        if self.differences:
            return "; ".join(self.differences)
        if self.bytes_read == self.size_bytes:
            return "every byte is what its manifest says"
        read = f"{size(self.bytes_read)} of {size(self.size_bytes)} read" if self.bytes_read else "nothing was read"
        return f"the store reports the checksums of its manifest; {read} (--read downloads and compares all)"


def _verify(which: str | None, *, must_read: bool, as_json: bool) -> int:
    address = find_in_store(which, os.environ)
    found, others = _compare_in_store(address, must_read=must_read) if address else _compare_here(which)
    if as_json:
        names = {one.name: list(one.differences) for one in found}
        out_json({"checkpoints": names, "bytes_read": {one.name: one.bytes_read for one in found}, "problems": others})
    else:
        for one in found:
            out(f"{one.name}  {one}")
    damaged = (f"{one.name}: {difference}" for one in found for difference in one.differences)
    if problems := [*damaged, *others]:
        hint = "resume sets a damaged checkpoint aside and takes the next older one" if found else _WHERE
        raise StoreError("\n".join(problems), hint=hint)
    return 0


def _compare_here(which: str | None) -> tuple[list[_Compared], list[str]]:
    from runner.storage.offsite.meter import Meter  # noqa: PLC0415  # slow

    place = find_place(which)
    directory = place.directory()
    checkpoints = [c for c in directory.committed() if place.means(c.ref.name)]
    with Bar() as bar:
        meter = Meter(sum(c.size_bytes for c in checkpoints), bar)
        found = [
            _Compared(c.ref.name, directory.verify(c.ref, meter.add), c.size_bytes, c.size_bytes) for c in checkpoints
        ]
    nothing = () if checkpoints else (f"{place.root}: expected a checkpoint, found none",)
    return found, list(place.problems() or nothing)


def _compare_in_store(address: Address, *, must_read: bool) -> tuple[list[_Compared], list[str]]:
    """By size and checksum as the store reports them; where it confirms none, or if asked to, by reading every byte."""
    from runner.storage.offsite import surveying  # noqa: PLC0415  # slow
    from runner.storage.offsite.meter import Meter  # noqa: PLC0415  # slow

    run = open_run(address)
    run = open_run(address, surveying.read_abilities(run.store, run.job))
    survey = surveying.survey_readable(run.store, run.job)
    expect_run(address, run, survey)
    wanted = [c for c in survey.checkpoints if run.means(c.ref.name)]
    with Bar() as bar:
        meter = Meter(sum(c.size_bytes for c in wanted), bar)
        found = [_compare_one(run, c, meter, must_read=must_read) for c in wanted]
    nothing = () if found else (f"{address}: expected a checkpoint, found none",)
    return found, problems_of(run, survey) or list(nothing)


def _compare_one(run: StoredRun, checkpoint: Checkpoint, meter: Meter, *, must_read: bool) -> _Compared:
    from runner.storage.offsite import OffsiteError, comparing  # noqa: PLC0415  # slow

    name, num_bytes = checkpoint.ref.name, checkpoint.size_bytes
    try:
        _, bytes_read = comparing.compare(run.store, run.job, checkpoint.ref, meter.add, must_read=must_read)
    except OffsiteError as error:
        if not error.damaged:
            raise
        return _Compared(name, (str(error),), num_bytes, 0)
    return _Compared(name, (), num_bytes, bytes_read)


# --------------------------------------------------------------------------------- restore


def _restore(which: str, folder: Path, *, as_json: bool) -> int:
    """Exit 0 only if every byte that was brought is what the manifest says."""
    is_job = Path(which).is_file()
    found = candidates_in_store(expect_in_store(which, os.environ)) if is_job else candidates(which)
    with writing("FOLDER", str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
    checkpoint = first_whole(found, partial(_bring, CheckpointDir(folder, Disk())))
    place = str(folder / checkpoint.ref.name)
    if as_json:
        out_json({"checkpoint": checkpoint.ref.name, "step": checkpoint.ref.step, "folder": place})
    else:
        out(place)
    return 0


def _bring(directory: CheckpointDir, candidate: Candidate) -> Checkpoint:
    from runner.storage.offsite import OffsiteError  # noqa: PLC0415  # slow

    try:
        with Bar() as bar:
            return candidate.bring(directory, bar)
    except OffsiteError as error:
        if error.damaged:
            directory.discard(f"{RESTORING}{candidate.ref.name}")
        raise


# ---------------------------------------------------------------------------------- export


def _export(args: argparse.Namespace) -> int:
    """Exit 0 only if the whole model is there, durably, and every byte of it was what the manifest says."""
    from runner.job import parse_size  # noqa: PLC0415  # slow
    from runner.storage.export import Wish  # noqa: PLC0415  # slow

    try:
        wish = Wish(part=args.part, max_file_bytes=parse_size(args.max_shard_size), as_bf16=args.dtype == "bf16")
    except ValueError as error:
        raise JobError(f"--max-shard-size: {error}") from None
    source, done = first_whole(candidates(args.which), partial(_export_one, Path(args.to), wish))
    if done.left_out:
        note(f"left out, no tensors of the model: {', '.join(done.left_out)}")
    if not args.json:
        for name in done.files:
            out(str(Path(args.to) / name))
        return 0
    out_json(
        {
            "checkpoint": source.manifest.ref.name,
            "step": source.manifest.step,
            "folder": args.to,
            "files": done.files,
            "num_tensors": done.num_tensors,
            "size_bytes": done.size_bytes,
            "left_out": done.left_out,
        }
    )
    return 0


def _export_one(folder: Path, wish: Wish, candidate: Candidate) -> tuple[Source, Exported]:
    from runner.storage.export import export  # noqa: PLC0415  # slow

    source = candidate.open()
    with Bar() as bar:
        return source, export(source, folder, wish, Disk(), bar)
