"""
Where the links in `outputs` lead. A script that writes one means what lies there: that is copied under the link's
name, once, where it is the script's own; else it is left, and told. What is copied anyway, and what holds
nothing, is nobody's loss.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Folders of a run. Links may lead to what is in `workspace`; checkpoints go to the store by themselves, and `data` came from one."""

    run_dir: Path
    checkpoint_dir: Path
    workspace: Path
    data: tuple[Path, ...] = ()

    @classmethod
    def of(cls, job: Job) -> Places:
        return cls(
            run_dir=Path(job.run_dir),
            checkpoint_dir=Path(job.checkpoint.dir),
            workspace=Path(job.finish.save_folder),
            data=tuple(Path(item.to) for item in job.data),
        )


class Links:
    """Of one copy; asked in the order in which the links are found."""

    def __init__(self, folders: Sequence[Path], places: Places) -> None:
        self._workspace = _real(places.workspace)
        self._checkpoints = _real(places.checkpoint_dir)
        self._run_dir = _real(places.run_dir)
        real = {_real(place) for place in (*folders, *places.data)}
        self._covered = {place for place in real if not self._why_ours(place)}
        self.followed: list[str] = []

    def why_not_outputs(self, folder: Path) -> str:
        """Of a folder that job.yaml names: why it is none of the script's own; empty: it is one."""
        return self._why_ours(_real(folder))

    def follow(self, path: str) -> tuple[str, str]:
        """Where the file or folder is that a link stands for, and why it is left; both are empty where nothing is lost."""
        try:
            place = os.path.realpath(path, strict=True)
            kind = stat.S_IFMT(os.stat(place).st_mode)  # noqa: PTH116  # one of many
        except FileNotFoundError:
            return "", ""
        except OSError as error:
            return (
                ("", "")
                if error.errno == errno.ELOOP
                else (path, f"it leads to what cannot be read: {error.strerror}; mend or remove the link")
            )
        if kind not in {stat.S_IFREG, stat.S_IFDIR} or not self._covered.isdisjoint(_ways(place)):
            return "", ""
        if ours := self._why_ours(place):
            return path, ours
        if not _is_in(place, self._workspace):
            return (
                place,
                f"the link {path} leads here, out of {self._workspace}; name {place} in outputs, or move it there",
            )
        self._covered.add(place)
        self.followed.append(place)
        return place, ""

    def _why_ours(self, place: str) -> str:
        if _is_in(self._run_dir, place):
            return f"expected the script's own, got {place}, which has the run folder in it; name a folder below, or lead the link there"
        if _is_in(self._checkpoints, place) or _is_in(place, self._checkpoints):
            return f"expected the script's own, got {place}: checkpoints go to the store by themselves; take it out of outputs"
        return ""


def _ways(place: str) -> Iterator[str]:
    """The place, and all folders that it is in: of many links each is asked for."""
    while place != (parent := os.path.dirname(place)):  # noqa: PTH120  # one of many
        yield place
        place = parent
    yield place


def _real(place: Path) -> str:
    return os.path.realpath(place)


def _is_in(place: str, folder: str) -> bool:
    return place == folder or place.startswith(folder.rstrip("/") + "/")
