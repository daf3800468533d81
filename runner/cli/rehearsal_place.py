"""What a rehearsal has to itself: a run folder and a place in the store, marked, so that they may be removed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runner.adapters.secrets import with_store_keys
from runner.cli.output import Bar
from runner.errors import JobError, LockedError, MachineError, json_object
from runner.facts import Checkpoint
from runner.job import ArchiveSource, GitSource, Job
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk, try_lock
from runner.supervise import page as pages
from runner.supervise import process
from runner.supervise.process import Process
from vramfarm.protocol import Env

if TYPE_CHECKING:
    from runner.storage.offsite import Store

MARK: Final = "rehearsal.json"  # what has it is a rehearsal's, and may be removed
_GUARDIAN_MARK: Final = "VRAMFARM_GUARDIAN"


@contextmanager
def own_folder(real: Job, job: Job) -> Iterator[Path]:
    """Empty, and this rehearsal's alone. What an earlier one left behind is ended and removed."""
    root, source = Path(job.run_dir), Path(real.run_dir) / "source"
    if root.exists() and not (root / MARK).exists() and any(root.iterdir()):
        raise JobError(f"{root}: expected the folder of a rehearsal, found one of something else", hint="rename that")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / MARK).open("a+") as mark:
            if not try_lock(mark):
                raise LockedError(f"{root}: another rehearsal of this job is at work", hint="wait for it")
            end_run(root, read_mark(root))
            pages.remove_stale(root)
            empty(root, keep=frozenset({MARK}))
            (root / MARK).write_text("{}")
            if job.setup or isinstance(job.source, GitSource | ArchiveSource):
                source.mkdir(parents=True, exist_ok=True)
                (root / "source").symlink_to(source)  # so that the night finds it in place
            try:
                yield root
            except BaseException:
                end_run(root, read_mark(root))
                shutil.rmtree(root, ignore_errors=True)
                raise
            finally:
                for folder in (source, source.parent):
                    with suppress(OSError):  # not there, or not empty
                        folder.rmdir()
    except OSError as error:
        raise MachineError(f"{error.filename or root}: {error.strerror or error}") from error


def read_mark(root: Path) -> Process | None:
    """The guardian of the run in this folder."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        fields = json.loads((root / MARK).read_bytes())
        return Process(int(fields["pid"]), int(fields["started"]))
    return None


def end_run(root: Path, guardian: Process | None) -> None:
    """Every process of the rehearsal's run, now."""
    if guardian is not None:
        process.kill([guardian], signal.SIGKILL)
    who = f"{guardian.pid}-{guardian.started}" if guardian else "nobody"

    def look() -> tuple[Process, ...]:
        return (*process.find(_GUARDIAN_MARK, who), *process.find(Env.RUN, str(root)))

    process.end_all(look)


def empty(root: Path, keep: frozenset[str]) -> None:
    for path in root.iterdir():
        if path.name not in keep:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


class Place:
    """`<store>/<name>-rehearsal`. Only what carries our mark is ever removed."""

    def __init__(self, job: Job, limit: timedelta) -> None:
        from runner.storage.offsite import open_store  # noqa: PLC0415  # slow

        self.store: Store = open_store(job.offload, with_store_keys(os.environ))
        self._name, self._key, self._limit = job.name, f"{job.name}/{MARK}", limit
        self.is_ours = False  # what is not is not to be cleared
        self._who = f"{socket.gethostname()}:{job.run_dir}"

    def take(self) -> None:
        """`StoreError` if the store refuses; `JobError` or `LockedError` if the place is somebody else's."""
        mark = self._read()
        if mark is None and any(True for _ in self.store.list(f"{self._name}/")):
            raise JobError(
                f"{self.store.address}/{self._name}: expected nothing, or what a rehearsal left, found something else",
                hint="give the job another name for the rehearsal",
            )
        now = datetime.now(UTC)
        if mark and mark.get("who") != self._who and now.isoformat() < str(mark.get("until", "")):
            raise LockedError(
                f"{self.store.address}/{self._name}: {mark.get('who')} rehearses this job until {mark['until']}"
            )
        self.is_ours = True
        self.clear()
        until = (now + self._limit).isoformat()
        self.store.put(self._key, json.dumps({"who": self._who, "until": until}).encode())

    def _read(self) -> Mapping[str, Any] | None:
        raw = self.store.get(self._key)
        return None if raw is None else json_object(raw)

    def clear(self) -> None:
        from runner.storage.offsite.tidying import remove_run  # noqa: PLC0415  # slow

        remove_run(self.store, self._name)

    def restore(self, folder: Path) -> Checkpoint:
        """The newest, into a folder that has nothing."""
        from runner.storage.offsite import restoring, surveying  # noqa: PLC0415  # slow

        newest = surveying.survey(self.store, self._name).checkpoints[-1]
        with Bar() as bar:
            return restoring.restore(self.store, self._name, newest.ref, CheckpointDir(folder, Disk()), bar)
