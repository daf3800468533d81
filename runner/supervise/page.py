"""
The control page of an attempt, from the supervisor's side: made before launch, read every
turn, removed when its attempt is gone.
"""

from __future__ import annotations

import hashlib
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from runner.facts import Progress
from runner.supervise import process
from vramfarm.protocol import ControlPage, Ended, Env, Phase, ProtocolError, Slot, Told, Word

_MEMORY: Final = Path("/dev/shm")  # noqa: S108  # named by the attempt's unique id, mode 0600, O_EXCL
_RATE_WINDOW_NS: Final = 60 * 10**9


def create(run_dir: Path, attempt_id: str, *, num_ranks: int) -> Path:
    """Make the page, in memory or, where that is full or not writable, in the run folder."""
    memory, disk = _places(run_dir, attempt_id)
    for path in (memory, disk):
        path.unlink(missing_ok=True)  # of a runner that died before it launched this attempt
    try:
        ControlPage.create(memory, num_ranks=num_ranks).close()
    except OSError:
        ControlPage.create(disk, num_ranks=num_ranks).close()
        return disk
    return memory


def find(run_dir: Path, attempt_id: str) -> ControlPage | None:
    """Open the page of an attempt, wherever it was made; None if there is none."""
    for path in _places(run_dir, attempt_id):
        with suppress(OSError, ProtocolError):
            return ControlPage.open(path)
    return None


def find_path(run_dir: Path, attempt_id: str) -> Path | None:
    """Where the page of an attempt is; None if there is none."""
    return next((path for path in _places(run_dir, attempt_id) if path.exists()), None)


def pipes_beside(control: Path) -> str:
    """Where an attempt's pipes are, without rank and ending; empty where a disk may not know pipes."""
    return f"{control}.fr-" if control.parent == _MEMORY else ""


def request_leave(page: ControlPage) -> None:
    """Ask the ranks to save and leave. Asking again changes nothing."""
    page[Word.REQUEST_LEAVE] = 1


def leave_requested(page: ControlPage) -> bool:
    return page[Word.REQUEST_LEAVE] != 0


def request_save(page: ControlPage) -> None:
    """Ask for one more save, at the next step."""
    page[Word.REQUEST_SAVE] += 1


def remove_stale(run_dir: Path) -> None:
    """Remove pages of this run, and pipes beside them, whose attempt has no process any more."""
    prefix = _prefix(run_dir)
    for path in (*_MEMORY.glob(f"{prefix}*"), *run_dir.glob(f"{prefix}*")):
        if not process.find(Env.ATTEMPT_ID, path.name.removeprefix(prefix).partition(".")[0]):
            path.unlink(missing_ok=True)


class ProgressReader:
    """Reads one page; remembers a minute of beats, for the rate."""

    def __init__(self, page: ControlPage) -> None:
        self.page = page
        self._beats: deque[tuple[int, int]] = deque()  # (beat, step) of the first attached rank
        self._failed = self._committed = 0  # the saves that failed, and those committed when the last one did

    def read(self) -> Progress:
        """Return what the ranks last said. The step is the slowest rank's; the loss rank 0's."""
        page = self.page
        saves = Progress(
            num_failed=page[Word.NUM_FAILED],
            save_error=self._save_error(),
            is_waiting=self._is_waiting(),
        )
        ranks = [rank for rank in range(page.num_ranks) if page.get(rank, Slot.PID)]
        if not ranks:
            return saves
        return replace(
            saves,
            attached=True,
            ended=page[Word.ENDED] in {Ended.DONE, Ended.LEFT},
            step=min(page.get(rank, Slot.STEP) for rank in ranks),
            max_steps=max(page.get(rank, Slot.MAX_STEPS) for rank in ranks),
            loss=_loss(page),
            steps_per_s=self._rate(ranks[0]),
            phase=_phase(page, ranks[0]),
        )

    def _save_error(self) -> str:
        """Why the last save failed, or whom one waits for; a commit after it makes that history."""
        failed, committed = self.page[Word.NUM_FAILED], self.page[Word.NUM_COMMITTED]
        if failed != self._failed:
            self._failed, self._committed = failed, committed
        is_history = failed and committed > self._committed and not self._is_waiting()
        return "" if is_history else self.page.error()

    def _is_waiting(self) -> bool:
        return self.page[Word.TOLD] == Told.WAITING

    def _rate(self, rank: int) -> float | None:
        beat, step = self.page.get(rank, Slot.BEAT_NS), self.page.get(rank, Slot.STEP)
        if step and (not self._beats or self._beats[-1][1] != step):
            self._beats.append((beat, step))
        while len(self._beats) > 2 and beat - self._beats[0][0] > _RATE_WINDOW_NS:  # noqa: PLR2004  # a rate takes two
            self._beats.popleft()
        if len(self._beats) < 2 or self._beats[-1][0] <= self._beats[0][0]:  # noqa: PLR2004
            return None
        (first_beat, first_step), (last_beat, last_step) = self._beats[0], self._beats[-1]
        return (last_step - first_step) * 1e9 / (last_beat - first_beat)


def _loss(page: ControlPage) -> float | None:
    return page.get_float(0, Slot.LOSS) if page.get(0, Slot.LOSS) else None  # all bits zero: never told


def _phase(page: ControlPage, rank: int) -> str:
    with suppress(ValueError):
        return Phase(page.get(rank, Slot.PHASE)).name.lower()
    return "unknown"


def _places(run_dir: Path, attempt_id: str) -> tuple[Path, Path]:
    name = _prefix(run_dir) + attempt_id
    return _MEMORY / name, run_dir.resolve() / name


def _prefix(run_dir: Path) -> str:
    """Pages of other runs lie in the same memory: the run's folder is in the name."""
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()
    return f"vramfarm-page-{digest[:12]}-"
