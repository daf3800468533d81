"""
The checkpoint of another run becomes the first of this one: copied, every chunk compared on its
way, under this run's name and lineage. Where it came from stands in its manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from runner.addresses import split_address
from runner.errors import JobError, StoreError
from runner.facts import Checkpoint
from runner.storage.checkpoints import FOLDER, ORIGIN, CheckpointDir, checkpoints_of
from runner.storage.disk import Disk
from runner.storage.export import HereSource
from runner.storage.offsite import OffsiteError, Store, restoring, surveying
from runner.storage.offsite.restoring import Source, StoreSource
from vramfarm.protocol import MANIFEST

NO_ATTEMPT: Final = 0  # of this run made it
_OLDER: Final = "name an older checkpoint in checkpoint.resume"

Progress = Callable[[float, str], None]
Open = Callable[[str], Store]


@dataclass(frozen=True, slots=True)
class Forked:
    checkpoint: Checkpoint
    passed_over: tuple[str, ...]  # newer ones, and why


@dataclass(frozen=True, slots=True)
class _Candidate:
    origin: str
    open: Callable[[], Source]


def fork(  # noqa: PLR0913  # from where, to where, and what it is there
    place: str,
    open_at: Open,
    directory: CheckpointDir,
    *,
    job: str,
    framework: str,
    lineage: int,
    progress: Progress,
    given_up: bool = False,
) -> Forked:
    """
    Commit a copy of the newest checkpoint at `place` that is whole: a checkpoint, a folder of some, or a run.
    `given_up`: what the store alone fails at was waited for long enough, and counts as damaged.

    `JobError` if there can be none, `StoreError` if there is none, or none that is whole.
    """
    passed_over: list[str] = []
    for candidate in _candidates(place, open_at, given_up=given_up):
        try:
            source = candidate.open()
            checkpoint = _copy(source, candidate.origin, directory, job, framework, lineage, progress)
        except OffsiteError as error:  # noqa: PERF203  # few
            is_unreadable = error.of_server and error.of_object
            if not (error.damaged or (given_up and is_unreadable)):
                raise
            passed_over.append(str(error))
        else:
            return Forked(checkpoint, tuple(passed_over))
    raise StoreError(f"checkpoint.resume: {place}: expected a whole checkpoint: {'; '.join(passed_over)}", hint=_OLDER)


def _copy(  # noqa: PLR0913, PLR0917  # as above
    source: Source, origin: str, directory: CheckpointDir, job: str, framework: str, lineage: int, progress: Progress
) -> Checkpoint:
    theirs = source.manifest
    if theirs.framework != framework:
        raise JobError(
            f"checkpoint.resume: {origin}: expected a checkpoint of {framework} (framework), got one of {theirs.framework}"
        )
    same = f"{lineage} {origin} {theirs.written_at}"  # a call that was killed is gone on with
    ours = replace(
        theirs,
        job=job,
        lineage=lineage,
        id=hashlib.sha256(same.encode()).hexdigest()[:8],
        attempt=NO_ATTEMPT,
        state={**theirs.state, ORIGIN: origin},
    )
    for checkpoint in directory.committed():
        if checkpoint.ref == ours.ref:
            return checkpoint
    return restoring.bring(ours, source, directory, progress)


# ------------------------------------------------------------------------- where it may be


def _candidates(place: str, open_at: Open, *, given_up: bool) -> Iterator[_Candidate]:
    """The newest first."""
    return _in_store(place, open_at, given_up=given_up) if "://" in place else _on_disk(Path(place))


def _in_store(place: str, open_at: Open, *, given_up: bool) -> Iterator[_Candidate]:
    where, job, name = split_address(place)
    store = open_at(where)
    survey = surveying.survey(store, job, wanted=name, given_up=given_up)
    found = [c.ref for c in survey.checkpoints if name in {"", c.ref.name}]
    if not found:
        problems = [problem for problem in survey.problems if problem.startswith(name)]
        raise StoreError(
            f"checkpoint.resume: {place}: expected a whole checkpoint: {'; '.join(problems) or 'none is there'}",
            hint="`vramfarm-runner checkpoints ls URL` shows what is there",
        )
    for ref in sorted(found, reverse=True):
        origin = place if name else f"{place}/{FOLDER}/{ref.name}"
        yield _Candidate(origin, partial(StoreSource, store, job, ref))


def _on_disk(path: Path) -> Iterator[_Candidate]:
    if not path.is_dir():
        raise JobError(f"checkpoint.resume: expected a folder at {path}, found none")
    is_one = (path / MANIFEST).is_file()
    root = path.parent if is_one else path if any(path.glob(f"step-*/{MANIFEST}")) else checkpoints_of(path)
    directory = CheckpointDir(root, Disk())
    found = [c.ref for c in directory.committed() if not is_one or c.ref.name == path.name]
    if not found:
        problems = [p for p in directory.problems() if not is_one or p.startswith(path.name)]
        error = f"checkpoint.resume: {path}: expected a whole checkpoint: {'; '.join(problems) or 'none is there'}"
        raise StoreError(error, hint=_OLDER) if problems else JobError(error)
    for ref in sorted(found, reverse=True):
        yield _Candidate(str(root / ref.name), partial(HereSource, directory, ref))
