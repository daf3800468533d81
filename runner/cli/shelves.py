"""
The checkpoints that a command is about: one, a folder of some, those of a run, here or in a store.

Libraries of the store are imported late: they are slow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from runner.cli.naming import workspace_of
from runner.cli.output import note
from runner.cli.runs import find_in_store, find_run, is_run, runs_in
from runner.cli.stores import Address, StoredRun, no_run, open_run
from runner.committed import Checkpoint
from runner.errors import JobError, StoreError
from runner.storage.checkpoints import FOLDER, CheckpointDir, checkpoints_of
from runner.storage.disk import Disk
from vramfarm.protocol import DAMAGED, MANIFEST, ProtocolError, Ref, is_name, parse_manifest

if TYPE_CHECKING:
    from runner.storage.offsite.meter import Progress
    from runner.storage.offsite.restoring import Source
    from runner.storage.offsite.surveying import Survey

_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".distcp")
_A_FEW: Final = 5
_LOOK: Final = "vramfarm-runner checkpoints ls shows what is there"
ALL_UNUSABLE: Final = "none of it can be used: is there a copy elsewhere, on a disk or in a store?"
_TRIES: Final = 3  # of one that the store fails at, and reads others
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Checkpoints on this machine; `name`: of the one that is meant, else all. `run_dir`: whose they are, if known."""

    root: Path
    run_dir: Path | None = None
    name: str = ""

    def directory(self) -> CheckpointDir:
        return CheckpointDir(self.root, Disk())

    def means(self, name: str) -> bool:
        return self.name in {"", name}

    def problems(self) -> tuple[str, ...]:
        return tuple(p for p in self.directory().problems() if self.means(p.partition(": ")[0]))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that is whole by its manifest. Its bytes are compared as they are read."""

    ref: Ref
    open: Callable[[], Source]
    bring: Callable[[CheckpointDir, Progress], Checkpoint]
    older: str = ""  # where the next older one is, of one that was named


def find_place(which: str | None) -> Place:
    """`JobError`: there is no such place on this machine. `StoreError`: it is here, and has no checkpoint."""
    if which is None or Path(which).is_file():
        return _of_run(find_run(which, os.environ))
    path = Path(which).absolute()
    if is_name(path.name):
        return _of_one(path)
    if (path / MANIFEST).is_file():
        raise JobError(
            f"{which}: expected a checkpoint under its own name, found {_own_name(path)} under another",
            hint="give the folder its name again: it stands in the manifest, too",
        )
    is_whose = is_run(path.parent)
    if _has_checkpoints(path) or (is_whose and path == checkpoints_of(path.parent)):
        return Place(root=path, run_dir=path.parent if is_whose else None)
    if is_run(path) or _has_checkpoints(path / FOLDER):
        return _of_run(path)
    if not path.is_dir() or is_run(workspace_of(os.environ) / which):
        return _of_run(find_run(which, os.environ))
    _refuse_pickles(path)
    expected = f"{which}: expected a run folder, a folder of checkpoints, or of one"
    if runs := ", ".join(run.name for run in runs_in(path)[:_A_FEW]):
        raise JobError(f"{expected}; found runs: {runs} in it", hint="name one of them")
    raise StoreError(
        f"{expected}; found none in it", hint=f"a checkpoint's folder is called step-…, and has a {MANIFEST}"
    )


def candidates(which: str) -> list[Candidate]:
    """Those that it may mean, the newest first: there is one at least. What is none is told."""
    if address := find_in_store(which, os.environ):
        return candidates_in_store(address)
    place = find_place(which)
    directory = place.directory()
    problems = place.problems()
    refs = [c.ref for c in directory.committed()]
    found = [ref for ref in refs if place.means(ref.name)]
    _expect_some(which, len(found), problems, is_one=bool(place.name))
    all_of_them = refs if place.name else []
    return [
        replace(_here(directory, ref), older=_older(ref, all_of_them, directory.path))
        for ref in sorted(found, reverse=True)
    ]


def candidates_in_store(address: Address) -> list[Candidate]:
    from runner.storage.offsite import surveying  # noqa: PLC0415  # slow

    run = open_run(address)
    survey = surveying.survey(run.store, run.job, wanted=run.checkpoint)
    expect_run(address, run, survey)
    found = [c.ref for c in survey.checkpoints if run.means(c.ref.name)]
    problems = problems_of(run, survey)
    _expect_some(str(address), len(found), problems, is_one=bool(run.checkpoint))
    all_of_them = [c.ref for c in survey.checkpoints] if run.checkpoint else []
    return [
        replace(_there(run, ref), older=_older(ref, all_of_them, partial(_address_of, address)))
        for ref in sorted(found, reverse=True)
    ]


def first_whole(found: Sequence[Candidate], take: Callable[[Candidate], _T], *, pause_s: float = 5.0) -> _T:
    """What `take` makes of the newest whose every byte is right; which ones were not is told."""
    import tenacity  # noqa: PLC0415  # slow

    from runner.storage.offsite import OffsiteError  # noqa: PLC0415  # slow

    def may_pass(error: BaseException) -> bool:
        return isinstance(error, OffsiteError) and error.of_server and error.of_object

    insist = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(_TRIES),
        wait=tenacity.wait_fixed(pause_s),
        retry=tenacity.retry_if_exception(may_pass),
        reraise=True,
    )
    *newer, oldest = found
    for candidate in newer:
        try:
            return insist(take, candidate)
        except OffsiteError as error:  # noqa: PERF203  # each may fail
            if not (error.damaged or may_pass(error)):
                raise
            note(f"passed over: {candidate.ref.name}: {error}")
    try:
        return insist(take, oldest)
    except OffsiteError as error:
        if error.damaged and oldest.older:  # a refusal has its own cure
            error.hint = f"this one is damaged; the next older is {oldest.older}"
        raise


def expect_run(address: Address, run: StoredRun, survey: Survey) -> None:
    """A wrong name is told from a run without checkpoints, and so is the folder that runs are in."""
    if not survey.checkpoints and not survey.problems and not run.is_there():
        raise no_run(address)
    is_found = any(run.means(c.ref.name) for c in survey.checkpoints) or problems_of(run, survey)
    if run.checkpoint and not is_found:
        there = ", ".join(c.ref.name for c in survey.checkpoints[-_A_FEW:])
        hint = f"there are {there}" if there else "no whole one is there"
        raise StoreError(f"{address}: expected a whole checkpoint, found none", hint=hint)


def problems_of(run: StoredRun, survey: Survey) -> list[str]:
    """Of the checkpoint that the address names, or of all that is there."""
    return [problem for problem in survey.problems if run.means(problem.partition(": ")[0])]


def damaged_names(directory: CheckpointDir) -> list[str]:
    """Names of those that cannot be read, and of those that were set aside."""
    return [*(problem.partition(": ")[0] for problem in directory.problems()), *directory.look().damaged]


# -------------------------------------------------------------------------------- helpers


def _older(ref: Ref, refs: Sequence[Ref], where: Callable[[Ref], object]) -> str:
    older = max((one for one in refs if one < ref), default=None)
    return str(where(older)) if older else ""


def _address_of(of_one: Address, ref: Ref) -> str:
    return f"{str(of_one).rstrip('/').rpartition('/')[0]}/{ref.name}"


def _expect_some(which: str, number: int, problems: Sequence[str], *, is_one: bool) -> None:
    if not number:
        raise StoreError(
            f"{which}: expected a whole checkpoint: {'; '.join(problems) or 'none is there'}",
            hint=_LOOK + ": name the folder it is in" if is_one else ALL_UNUSABLE if problems else _LOOK,
        )
    for problem in problems:
        note(f"passed over: {problem}")


def _here(directory: CheckpointDir, ref: Ref) -> Candidate:
    from runner.storage.export import HereSource  # noqa: PLC0415  # slow
    from runner.storage.offsite.restoring import bring  # noqa: PLC0415  # the same

    def copy(target: CheckpointDir, progress: Progress) -> Checkpoint:
        there = next((c for c in target.committed() if c.ref == ref), None)
        source = HereSource(directory, ref)
        return there or bring(source.manifest, source, target, progress)

    return Candidate(ref, partial(HereSource, directory, ref), copy)


def _there(run: StoredRun, ref: Ref) -> Candidate:
    from runner.storage.offsite import restoring  # noqa: PLC0415  # slow

    return Candidate(
        ref,
        partial(restoring.StoreSource, run.store, run.job, ref),
        partial(restoring.restore, run.store, run.job, ref),
    )


def _of_run(run_dir: Path) -> Place:
    return Place(root=checkpoints_of(run_dir), run_dir=run_dir)


def _of_one(path: Path) -> Place:
    if not path.is_dir():
        there = [c.ref.name for c in CheckpointDir(path.parent, Disk()).committed()]
        kind = StoreError if path.parent.is_dir() else JobError
        raise kind(
            f"{path}: expected the folder of a checkpoint, found none",
            hint=f"there are {', '.join(there[-_A_FEW:])}" if there else "vramfarm-runner checkpoints ls RUN",
        )
    return Place(root=path.parent, run_dir=path.parent.parent if is_run(path.parent.parent) else None, name=path.name)


def _own_name(path: Path) -> str:
    try:
        return parse_manifest((path / MANIFEST).read_bytes()).ref.name
    except (OSError, ProtocolError):
        return "step-…"


def _has_checkpoints(path: Path) -> bool:
    """Or damaged ones, which are worth a word."""
    try:
        return any(is_name(name.removeprefix(DAMAGED)) for name in os.listdir(path))  # noqa: PTH208  # names only
    except OSError:
        return False


def _refuse_pickles(path: Path) -> None:
    """A folder of somebody else's engine: say why it is not read, in place of that it is no run."""
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in _PICKLES)
    if pickles:
        raise StoreError(
            f"{path}: expected a checkpoint with {MANIFEST} and .safetensors files, found {pickles[0]}; "
            "a pickle can run code and is not read",
        )
