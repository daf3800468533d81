"""
How far a script is that knows nothing of the library: the steps and losses that rank 0 prints.

What comes out is a guess. It is shown and counted as time of training; nothing is resumed, stopped or given up for it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from runner.facts import Progress
from runner.supervise.logs import Stream, clean, find_streams
from runner.supervise.triage.evidence import PROGRESS

_LIMIT_BYTES: Final = 16_384  # of a stream, at one look: the newest
_WINDOW_S: Final = 60.0
_SURE_AFTER: Final = 2  # different steps: one line may be anything
_COUNT: Final = r"(?P<step>\d[\d,_]{0,14})(?:\s*/\s*(?P<total>\d[\d,_]{0,14}))?(?![\w.,]*\d)"
_STEP: Final = re.compile(rf"(?i)\b(?:global[_ ]?step|step|iter(?:ation)?)s?\b[^\w\n]{{0,4}}{_COUNT}")
_BAR: Final = re.compile(r"\d+%\|.*?(?P<step>\d{1,12})/(?P<total>\d{1,12}) \[")
_EPOCH: Final = re.compile(r"(?i)\bepoch\b[^\w\n]{0,4}(?P<epoch>\d{1,6})(?!\.\d|\d)(?:\s*/\s*(?P<of>\d{1,6}))?")
_LOSS: Final = re.compile(
    r"(?i)\b(?:train(?:ing)?[_ /])?loss\b[^\w+\-.]{0,4}(?P<loss>nan|[-+]?inf|[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)(?!\w)"
)
_OTHER: Final = re.compile(r"(?i)\b(?:eval\w*|valid\w*|test\w*|predict\w*|sanity\b|benchmark\w*|train_runtime\b)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What one line says. `total` is 0 where it is not known; a bar says less of what it counts than a word."""

    step: int | None = None
    total: int = 0
    loss: float | None = None
    is_bar: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """What the lines so far come to."""

    newest: Mark = Mark(is_bar=True)
    num_steps: int = 0  # different ones
    loss: float | None = None

    @property
    def is_sure(self) -> bool:
        return self.num_steps >= _SURE_AFTER


def read_line(text: str) -> Mark | None:
    """Return what a line of progress says; None for any other."""
    if not PROGRESS.search(text) or _OTHER.search(text):
        return None
    found = _LOSS.search(text)
    loss = float(found["loss"]) if found else None
    if match := _STEP.search(text):
        return _within_epoch(_mark(match, loss, is_bar=False), text)
    if match := _BAR.search(text):
        return _within_epoch(_mark(match, loss, is_bar=True), text)
    return Mark(loss=loss) if loss is not None else None


def _mark(match: re.Match[str], loss: float | None, *, is_bar: bool) -> Mark:
    return Mark(step=_whole(match["step"]), total=_whole(match["total"] or "0"), loss=loss, is_bar=is_bar)


def _whole(text: str) -> int:
    return int(text.replace(",", "").replace("_", ""))


def _within_epoch(mark: Mark, text: str) -> Mark:
    """A total beside an epoch is the epoch's. `Epoch 3:` counts from 0 (Lightning), `Epoch [3/10]` from 1."""
    epoch = _EPOCH.search(text)
    if epoch is None or mark.step is None or not mark.total:
        return mark
    before = max(int(epoch["epoch"]) - (epoch["of"] is not None), 0)
    return replace(mark, step=before * mark.total + mark.step, total=int(epoch["of"] or 0) * mark.total)


def follow(before: Guess, mark: Mark) -> Guess:
    """Return the guess after one more line."""
    now = before if mark.loss is None else replace(before, loss=mark.loss)
    if mark.step is None or not _goes_on(before, mark):
        return now
    return replace(now, newest=mark, num_steps=before.num_steps + 1)


def _goes_on(before: Guess, mark: Mark) -> bool:
    """
    Whether a line counts what the ones before it count. An evaluation has a bar of its own, with
    another total, in the midst of training or after it.
    """
    newest = before.newest
    if mark.is_bar is not newest.is_bar:
        return newest.is_bar
    if mark.is_bar and mark.total != newest.total and before.is_sure:
        return 0 < newest.total <= (newest.step or 0) and mark.total > newest.total
    return newest.step is None or not before.is_sure or (mark.step or 0) > newest.step


class StepReader:
    """Reads what rank 0 of one attempt prints, again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._guess = Guess()
        self._beats: deque[tuple[float, int]] = deque()  # (when it was seen, step)

    def look(self, at_s: float, *, ended: bool = False) -> None:
        """Read what came since the last look. `ended`: nobody writes any more, so a last line needs no end."""
        for stream in find_streams(self._folder):
            if stream.rank <= 0:
                self._follow(stream, ended=ended)
        if self._guess.is_sure and self._guess.newest.step is not None:
            self._beat(at_s, self._guess.newest.step)

    def fill(self, progress: Progress) -> Progress:
        """Return `progress` with what the log says, where the ranks say nothing."""
        newest = self._guess.newest
        if progress.attached or not self._guess.is_sure or newest.step is None:
            return progress
        return replace(
            progress,
            step=newest.step,
            max_steps=newest.total,
            loss=self._guess.loss,
            steps_per_s=self._rate(),
            phase="training",
            from_log=True,
        )

    def _follow(self, stream: Stream, *, ended: bool) -> None:
        for raw in self._new_lines(stream.path, ended=ended):
            if mark := read_line(clean(raw)):
                self._guess = follow(self._guess, mark)

    def _new_lines(self, path: Path, *, ended: bool) -> Sequence[bytes]:
        """Whole lines, and states of bars; the first may be cut."""
        offset = self._offsets.get(path, 0)
        with suppress(OSError), path.open("rb") as file:
            offset = max(offset, file.seek(0, 2) - _LIMIT_BYTES)
            file.seek(offset)
            raw = file.read(_LIMIT_BYTES)
            *whole, last = re.split(rb"[\r\n]", raw)
            self._offsets[path] = offset + len(raw) - (0 if ended else len(last))
            return [*whole, last] if ended else whole
        return ()

    def _beat(self, at_s: float, step: int) -> None:
        beats = self._beats
        if beats and step < beats[-1][1]:
            beats.clear()  # another count
        if not beats or beats[-1][1] != step:
            beats.append((at_s, step))
        while len(beats) > 2 and at_s - beats[0][0] > _WINDOW_S:  # noqa: PLR2004  # a rate takes two
            beats.popleft()

    def _rate(self) -> float | None:
        (first_s, first), (last_s, last) = self._beats[0], self._beats[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None
