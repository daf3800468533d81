"""`checkpoints ls|verify|restore|export`: what can be resumed from, whether its bytes are right, bringing it here, and the model in it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runner.cli.output import Bar, out, out_json, table, writing
from runner.cli.runs import expect_in_store, find_in_store, find_run
from runner.cli.status import read_status
from runner.cli.stores import Address, StoredRun, open_run
from runner.errors import JobError, RunnerError, StoreError
from runner.facts import Checkpoint
from runner.job import parse_size
from runner.storage.checkpoints import RESTORING, CheckpointDir
from runner.storage.disk import Disk
from runner.words import size, span
from vramfarm.protocol import MANIFEST, Ref

if TYPE_CHECKING:
    from runner.storage.offsite.transfer import Meter, Source, Survey

Differences = tuple[dict[str, list[str]], list[str]]  # by checkpoint's name; and what is none

_MARKS: Final = ("status.json", "ledger.json", "job.json")
_FOLDER: Final = "checkpoints"
_EXPORT: Final = "write the model as safetensors files, verified, which other programs read"
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".distcp")
_HEAD: Final = ("STEP", "ID", "LINEAGE", "SIZE", "AGE", "WHERE", "VERIFIED")


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ls|verify|restore|export")
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
        "which", metavar="URL", help="s3:// or file:// of one checkpoint, or of a run or its job.yaml: then its newest"
    )
    restore.add_argument("folder", metavar="FOLDER", help="where it goes; the checkpoint's own folder is made in it")
    restore.add_argument("--json", action="store_true", help="as JSON")
    _configure_export(actions.add_parser("export", help=_EXPORT, description=_EXPORT))


def _configure_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "which",
        metavar="CHECKPOINT|RUN|URL",
        help="folder of one checkpoint; or a run, here or in the store: its newest",
    )
    parser.add_argument("--to", metavar="FOLDER", required=True, help="where the model goes; made if it is not there")
    parser.add_argument("--dtype", choices=("keep", "bf16"), default="keep", help="bf16: 32-bit floats as bfloat16")
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default="5GB",
        help="a larger model becomes several files and an index (5GB)",
    )
    parser.add_argument(
        "--part", metavar="NAME", default="model", help="another module that was given to Checkpointer, such as ema"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(args: argparse.Namespace) -> int:
    match args.action:
        case "ls":
            return _ls(args.run, as_json=args.json)
        case "verify":
            return _verify(args.run, as_json=args.json)
        case "restore":
            return _restore(args.which, Path(args.folder), as_json=args.json)
        case _:
            return _export(args)


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
    if address := find_in_store(which, os.environ):
        return _rows_of_store(address)
    root, run_dir = _place(which)
    directory = CheckpointDir(root, Disk())
    rows = {checkpoint.ref.name: _row(checkpoint) for checkpoint in directory.committed()}
    if not rows and (damaged := _damaged(directory)):
        sys.stderr.write(f"{root}: no whole checkpoint is there, only damaged ones: {', '.join(damaged)}\n")
    for known in _known(run_dir):
        name = f"step-{known['step']:08d}-{known['id']}"
        here = rows.setdefault(name, {**known, "size_bytes": None, "written_at": None, "local": False})
        here.update(offsite=known["offsite"], verified=known["verified"])
    return sorted(rows.values(), key=lambda row: (row["lineage"], row["step"]))


def _damaged(directory: CheckpointDir) -> list[str]:
    """Names of those that cannot be read, and of those that were set aside."""
    return [*(problem.partition(": ")[0] for problem in directory.problems()), *directory.look().damaged]


def _rows_of_store(address: Address) -> list[dict[str, Any]]:
    """What is whole by the store's own listing; its bytes were not compared."""
    from runner.storage.offsite import transfer  # noqa: PLC0415  # slow

    run = open_run(address)
    with Bar() as bar:
        survey = transfer.survey(run.store, run.job, bar)
    _expect_run(address, run, survey)
    for problem in survey.unusable:
        sys.stderr.write(f"unusable: {problem}\n")
    return [{**_row(checkpoint), "local": False, "offsite": True} for checkpoint in survey.checkpoints]


def _expect_run(address: Address, run: StoredRun, survey: Survey) -> None:
    """A wrong name is told from a run without checkpoints, and so is the folder that runs are in."""
    if not survey.checkpoints and not survey.unusable:
        marks = (run.store.head(f"{run.job}/{name}") for name in _MARKS)
        if not any(marks):
            raise StoreError(f"{address}: expected a run, found none", hint="is its name right? STORE/NAME of the job")
    if run.checkpoint and all(c.ref.name != run.checkpoint for c in survey.checkpoints) and not survey.unusable:
        raise StoreError(f"{address}: expected a whole checkpoint, found none", hint="vramfarm-runner checkpoints ls")


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
    address = find_in_store(which, os.environ)
    found, others = _differences_in_store(address) if address else _differences_here(which)
    if as_json:
        out_json({"checkpoints": found, "problems": others})
    else:
        for name, differences in found.items():
            out(f"{name}  {'; '.join(differences) or 'every byte is what its manifest says'}")
    damaged = (f"{name}: {difference}" for name, differences in found.items() for difference in differences)
    if problems := [*damaged, *others]:
        raise StoreError(
            "\n".join(problems), hint="resume sets a damaged checkpoint aside and takes the next older one"
        )
    return 0


def _differences_here(which: str | None) -> Differences:
    from runner.storage.offsite.transfer import Meter  # noqa: PLC0415  # slow

    directory = CheckpointDir(_place(which)[0], Disk())
    checkpoints = directory.committed()
    with Bar() as bar:
        meter = Meter(sum(c.size_bytes for c in checkpoints), bar)
        found = {c.ref.name: list(directory.verify(c.ref, meter.add)) for c in checkpoints}
    return found, list(directory.problems())


def _differences_in_store(address: Address) -> Differences:
    """By size and checksum as the store reports them; where it confirms none, every byte is read back."""
    from runner.storage.offsite import transfer  # noqa: PLC0415  # slow

    run = open_run(address)
    run = open_run(address, transfer.read_abilities(run.store, run.job))
    survey = transfer.survey(run.store, run.job)
    _expect_run(address, run, survey)
    wanted = [c for c in survey.checkpoints if run.checkpoint in {"", c.ref.name}]
    with Bar() as bar:
        meter = transfer.Meter(sum(c.size_bytes for c in wanted), bar)
        found = {c.ref.name: _differences(run, c.ref, meter) for c in wanted}
    return found, list(survey.unusable)


def _differences(run: StoredRun, ref: Ref, meter: Meter) -> list[str]:
    from runner.storage.offsite import OffsiteError, transfer  # noqa: PLC0415  # slow

    try:
        transfer.verify(run.store, run.job, ref, meter.add)
    except OffsiteError as error:
        if not error.final:
            raise
        return [str(error)]
    return []


# --------------------------------------------------------------------------------- restore


def _restore(which: str, folder: Path, *, as_json: bool) -> int:
    """Exit 0 only if every byte that was brought is what the manifest says."""
    from runner.storage.offsite import transfer  # noqa: PLC0415  # slow

    address = expect_in_store(which, os.environ)
    run = open_run(address)
    candidates = _candidates(address, run.checkpoint, transfer.survey(run.store, run.job))
    with writing("FOLDER", str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
    checkpoint = _bring(run, candidates, CheckpointDir(folder, Disk()))
    place = str(folder / checkpoint.ref.name)
    if as_json:
        out_json({"checkpoint": checkpoint.ref.name, "step": checkpoint.ref.step, "folder": place})
    else:
        out(place)
    return 0


def _bring(run: StoredRun, candidates: Sequence[Checkpoint], directory: CheckpointDir) -> Checkpoint:
    """The newest whose every byte is right; which ones were not is told."""
    from runner.storage.offsite import OffsiteError, transfer  # noqa: PLC0415  # slow

    newest, *older = candidates
    try:
        with Bar() as bar:
            transfer.restore(run.store, run.job, newest.ref, directory, bar)
    except OffsiteError as error:
        if error.damaged:
            directory.discard(f"{RESTORING}{newest.ref.name}")
        if not (error.damaged and older):
            raise
        sys.stderr.write(f"passed over: {newest.ref.name}: {error}\n")
        return _bring(run, older, directory)
    return newest


def _candidates(address: Address, name: str, survey: Survey) -> list[Checkpoint]:
    """The one that the address names, or all, the newest first."""
    found = [c for c in survey.checkpoints if name in {"", c.ref.name}]
    if not found:
        problems = "; ".join(survey.unusable) or "none is there"
        raise StoreError(
            f"{address}: expected a whole checkpoint: {problems}", hint="vramfarm-runner checkpoints ls URL"
        )
    for problem in () if name else survey.unusable:
        sys.stderr.write(f"passed over: {problem}\n")
    return sorted(found, key=lambda checkpoint: checkpoint.ref, reverse=True)


# ---------------------------------------------------------------------------------- export


def _export(args: argparse.Namespace) -> int:
    """Exit 0 only if the whole model is there, durably, and every byte of it was what the manifest says."""
    from runner.storage.export import Wish, export  # noqa: PLC0415  # slow

    try:
        wish = Wish(part=args.part, max_file_bytes=parse_size(args.max_shard_size), as_bf16=args.dtype == "bf16")
    except ValueError as error:
        raise JobError(f"--max-shard-size: {error}") from None
    source = _source(args.which)
    with Bar() as bar:
        done = export(source, Path(args.to), wish, Disk(), bar)
    if done.left_out:
        sys.stderr.write(f"left out, no tensors of the model: {', '.join(done.left_out)}\n")
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


def _source(which: str) -> Source:
    from runner.storage.export import HereSource  # noqa: PLC0415  # slow
    from runner.storage.offsite import transfer  # noqa: PLC0415  # slow
    from runner.storage.offsite.transfer import StoreSource  # noqa: PLC0415  # the same

    if address := find_in_store(which, os.environ):
        run = open_run(address)
        checkpoint = _candidates(address, run.checkpoint, transfer.survey(run.store, run.job))[0]
        return StoreSource(run.store, run.job, checkpoint.ref)
    path = Path(which).absolute()
    is_one = (path / MANIFEST).is_file()
    if not is_one:
        _refuse_pickles(path)
    directory = CheckpointDir(path.parent if is_one else _place(which)[0], Disk())
    found = [c.ref for c in directory.committed() if not is_one or c.ref.name == path.name]
    if not found:
        problems = "; ".join(p for p in directory.problems() if not is_one or p.startswith(path.name))
        raise StoreError(
            f"{which}: expected a whole checkpoint: {problems or 'none is there'}",
            hint="vramfarm-runner checkpoints ls",
        )
    return HereSource(directory, max(found))


def _refuse_pickles(path: Path) -> None:
    """A folder of somebody else's engine: say why it is not read, in place of that it is no run."""
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in _PICKLES) if path.is_dir() else []
    if pickles:
        raise StoreError(
            f"{path}: expected a checkpoint with {MANIFEST} and .safetensors files, found {pickles[0]}; "
            "a pickle can run code and is not read",
        )


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
