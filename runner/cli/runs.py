"""Which run a command is about: its folder, its job.yaml, its name, or the newest there is."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from runner.addresses import is_address
from runner.cli.naming import workspace_of
from runner.cli.stores import Address, address_of
from runner.errors import JobError
from runner.storage.disk import try_lock

if TYPE_CHECKING:
    from runner.job import Job

STATUS: Final = "status.json"
LOCK: Final = "lock"
_MARKS: Final = (STATUS, "journal.jsonl", "job.json")


def add_run(parser: argparse.ArgumentParser) -> None:
    """RUN, for the commands that read a run here or in the store."""
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="folder, name or job.yaml of a run, or its s3:// or file:// address in the store (default: the run in this folder, else the newest)",
    )


def add_follow(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--follow", action="store_true", help="follow until the runner ends")


def refuse_follow(args: argparse.Namespace) -> None:
    """Of a run in the store."""
    if args.follow:
        raise JobError(
            "--follow: the store has copies, a few minutes old", hint="leave it out, or log in to the machine"
        )


def find_run(which: str | None, env: Mapping[str, str]) -> Path:
    """Return the run folder; `JobError` lists what there is."""
    workspace = workspace_of(env)
    if which is None:
        return _newest(workspace)
    path = Path(which)
    if path.is_file():
        return _of_job(_read_job(which, env), workspace)
    candidates = (path.absolute(), workspace / which)
    return next((folder for folder in candidates if is_run(folder)), None) or _missing(which, workspace)


def find_in_store(which: str | None, env: Mapping[str, str]) -> Address | None:
    """Address of a run that is named by it, or by a job.yaml whose run is not on this machine."""
    if which is None or not (is_address(which) or Path(which).is_file()):
        return None
    if is_address(which):
        return Address(which)
    job = _read_job(which, env)
    return address_of(job) if job.offload.to and not is_run(Path(job.run_dir)) else None


def expect_in_store(which: str, env: Mapping[str, str]) -> Address:
    """The same, wherever its run folder is."""
    if is_address(which):
        return Address(which)
    if not Path(which).is_file():
        raise JobError(f"{which}: expected s3:// or file:// of a run or a checkpoint, or a job.yaml")
    job = _read_job(which, env)
    if job.offload.to is None:
        raise JobError(f"{which}: expected a job with a store (offload.to), found none")
    return address_of(job)


def is_run(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in _MARKS)


def is_alive(run_dir: Path) -> bool:
    """Whether a runner holds the lock of this run."""
    with suppress(OSError), (run_dir / LOCK).open("rb") as file:
        return not try_lock(file, shared=True)
    return False


def runs_in(folder: Path) -> list[Path]:
    try:
        return sorted(run for run in folder.iterdir() if run.is_dir() and is_run(run))
    except OSError:
        return []


def _read_job(which: str, env: Mapping[str, str]) -> Job:
    from runner.cli.load import load_job  # noqa: PLC0415  # a tenth of a second, which who names a run or an address need not wait

    return load_job(which, env).job


def _newest(workspace: Path) -> Path:
    here = Path.cwd()
    if is_run(here):
        return here
    runs = runs_in(workspace)
    return max(runs, key=_changed_at) if runs else _missing("a run", workspace)


def _changed_at(run_dir: Path) -> float:
    return max(mark.stat().st_mtime for mark in map(run_dir.joinpath, _MARKS) if mark.is_file())


def _of_job(job: Job, workspace: Path) -> Path:
    """Its folder is on the machine that it runs on, which may be another one, or a simulated one."""
    run_dir = Path(job.run_dir)
    if not is_run(run_dir) and job.offload.to:
        raise JobError(
            f"{run_dir}: expected the run folder of {job.name}, found none on this machine",
            hint=f"it may run on another, or a simulated one: name the run in its store: {job.offload.to}/{job.name}",
        )
    return run_dir if is_run(run_dir) else _missing(str(run_dir), workspace)


def _missing(what: str, workspace: Path) -> NoReturn:
    names = ", ".join(run.name for run in runs_in(workspace))
    found = f"runs there: {names}" if names else "no run is there"
    raise JobError(
        f"{what}: expected a run folder, a name in {workspace}, or a job.yaml; {found}",
        hint="name the folder, or set VRAMFARM_WORKSPACE to where the runs are",
    )
