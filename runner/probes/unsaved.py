"""
What a run made that is only on this disk: the last question before a server's disk is thrown away.

Whoever asks keeps the folder when in doubt; a folder kept for nothing costs little.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Final

from runner.errors import one_line
from vramfarm.protocol import DAMAGED, REMOVED, SAVER_LOCK, TEMPORARY, is_name

_EXAMPLES: Final = 3
_MAX_ENTRIES: Final = 200_000
_OURS: Final = frozenset(
    {
        ".vramfarm",
        "logs",
        "evidence",
        "lib",
        "job.json",
        "journal.jsonl",
        "lock",
        "holder",
        "status.json",
        "metrics.jsonl",
        "report.html",
        "stop",
        ".ballast",
        ".probe",
        ".staging",
        ".outputs.json",
        ".published.json",
        ".logs-published",
        "refusal.json",
    }
)
_FORMS: Final = ("{}", ".{}.tmp", "{}.new")  # and what a kill in the middle of writing it leaves
_UNFINISHED: Final = (TEMPORARY, REMOVED, DAMAGED)
_MADE_AGAIN: Final = frozenset({".cache", ".git", ".venv", "__pycache__", "lost+found", "node_modules"})


def find_unsaved(  # noqa: PLR0913  # all by name
    folder: Path,
    *,
    run_dir: Path,
    checkpoint_dir: Path,
    since: datetime,
    outputs: Sequence[Path] = (),
    are_saved: bool = False,
    is_nothing: Callable[[str], bool] = lambda _: False,
) -> tuple[str, ...]:
    """
    Return a few files below `folder` that were written since, and are neither the run's own
    records nor checkpoints (whose copies are compared one by one). What a script saves beside the
    checkpoints counts like all else, and what cannot be read, but nothing under a name that `is_nothing`. Never follows a link.

    What is in `outputs`, wherever these are or lead to, is missed however old it is, unless they `are_saved`; and so is
    a link there that leads to something: the copy may go there, and says what it left.
    """
    outputs = tuple(dict.fromkeys((*outputs, *(_real(place) for place in outputs))))
    ours = {run_dir / form.format(name) for name in _OURS for form in _FORMS}
    ours |= {path for name in _OURS for path in run_dir.glob(f".{name}.*.tmp")}
    ours |= {folder / ".vramfarm", *(outputs if are_saved else ()), *_checkpoints(checkpoint_dir)}
    apart = [] if are_saved else [place for place in outputs if not place.is_relative_to(folder)]
    found = []
    for number, (path, entry) in enumerate(
        chain.from_iterable(_files(place, ours, outputs, is_nothing) for place in (folder, *apart))
    ):
        name = one_line(str(path.relative_to(folder) if path.is_relative_to(folder) else path))
        if number >= _MAX_ENTRIES:
            found.append(f"{folder} (more files than were looked at)")
        elif entry is None:
            found.append(f"{name} (cannot be read)")
        elif entry.st_mtime >= max(since.timestamp(), _fetched_at(path, run_dir)) or _is_in(path, outputs):
            found.append(name)
        if len(found) >= _EXAMPLES or number >= _MAX_ENTRIES:
            break
    return tuple(found)


def _real(place: Path) -> Path:
    try:
        return place.resolve()
    except (OSError, RuntimeError):  # links in a circle
        return place


def _is_in(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _is_wanted(folder: Path, outputs: Sequence[Path]) -> bool:
    return _is_in(folder, outputs) or any(place.is_relative_to(folder) for place in outputs)


def _checkpoints(directory: Path) -> Iterator[Path]:
    """What the saver and the runner have there."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return (p for p in paths if is_name(p.name) or p.name.startswith(_UNFINISHED) or p.name == SAVER_LOCK)


def has_files(folder: Path) -> bool:
    """Whether anything but the guardian's record is there; also true when that cannot be told."""
    try:
        return next(_files(folder, {folder / ".vramfarm"}), None) is not None
    except OSError:
        return True


def _files(
    folder: Path, ours: set[Path], outputs: Sequence[Path] = (), is_nothing: Callable[[str], bool] = lambda _: False
) -> Iterator[tuple[Path, os.stat_result | None]]:
    """None: it cannot be told what is there. What is made again is passed over, unless a job wants it."""
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        try:
            entries = list(os.scandir(place))
        except OSError:
            yield from _alone(place)
            continue
        for entry in entries:
            path = Path(entry.path)
            is_made_again = entry.name in _MADE_AGAIN and not _is_wanted(path, outputs)
            if path in ours or is_made_again or is_nothing(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.append(path)
            elif entry.is_symlink() and path not in outputs and _is_in(path, outputs):  # those are looked at themselves
                yield from _led_to(path)
            else:
                yield from _alone(path)


def _alone(path: Path) -> Iterator[tuple[Path, os.stat_result | None]]:
    """A plain file, or what cannot be looked at; nothing of what is gone."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    except OSError:
        yield path, None
        return
    if stat.S_ISREG(status.st_mode):
        yield path, status
    elif stat.S_ISDIR(status.st_mode):
        yield path, None


def _led_to(link: Path) -> Iterator[tuple[Path, os.stat_result | None]]:
    """A link that leads to a file or a folder, by its own name; nothing of one that leads nowhere."""
    try:
        mode = link.stat().st_mode
    except (FileNotFoundError, RuntimeError):
        return
    except OSError as error:
        if error.errno != errno.ELOOP:
            yield link, None
        return
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        yield link, link.lstat()


def _fetched_at(path: Path, run_dir: Path) -> float:
    """What came with the source is not the run's work: only what is younger than the fetch counts."""
    source = run_dir / "source"
    if not path.is_relative_to(source):
        return 0.0
    if path.parent == source:
        return math.inf  # a marker of ours
    marker = source / f"{path.relative_to(source).parts[0]}.done"
    try:
        return marker.stat().st_mtime
    except FileNotFoundError:
        return 0.0
