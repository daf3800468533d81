"""How commands speak: data on standard output, which may be closed, full, or without a reader."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self

from runner.errors import JobError, MachineError
from runner.figures import span

_SAY_EVERY_S: Final = 5.0  # into a file
_DRAW_EVERY_S: Final = 0.1  # on a terminal
_BAR_CELLS: Final = 24
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # surrogates cannot be written at all


def out(text: str) -> None:
    """A line of data, or several."""
    _write(plain(text))


def note(text: str) -> None:
    """A line for a person, beside the data."""
    sys.stderr.write(f"{plain(text)}\n")


def out_json(value: Any) -> None:  # noqa: ANN401  # JSON
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    _write(text.encode(errors="backslashreplace").decode())  # half a surrogate pair is none, and JSON has a name for it


def _write(text: str) -> None:
    with speaking():
        sys.stdout.write(f"{text}\n")


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns side by side; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


@contextmanager
def writing(option: str, path: str) -> Iterator[None]:
    """A place that cannot be written to is the caller's to mend; what is in the way is named."""
    try:
        yield
    except OSError as error:
        place = f"{option} {path}"
        raise JobError(f"{place}: expected a place to write to, found: {error.strerror or error}") from error


class Bar:
    """
    Progress for a person, on standard error: a bar on a terminal, elsewhere a line every five seconds.

    What is over at once shows nothing.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        self._next = self._began + (_DRAW_EVERY_S if self._is_terminal else _SAY_EVERY_S)
        self._drawn = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave the terminal's line as it was found."""
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def __call__(self, fraction: float, note: str) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (_DRAW_EVERY_S if self._is_terminal else _SAY_EVERY_S)
        left = f"{span((now - self._began) * (1 - fraction) / fraction)} left" if fraction > 0 else ""
        if self._is_terminal:
            self._drawn = True
            full = round(_BAR_CELLS * fraction)
            sys.stderr.write(f"\r\x1b[K[{'#' * full}{'.' * (_BAR_CELLS - full)}] {fraction:4.0%} {left}  {note}")
        else:
            sys.stderr.write(f"{fraction:4.0%} {left}  {note}\n")
        sys.stderr.flush()


def open_what_is_closed() -> None:
    """Else the next file that is opened would be standard output, and be written to."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nothing = os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free: this one
            os.set_inheritable(nothing, True)  # noqa: FBT003  # the guardian has it, too
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def write_whatever_comes() -> None:
    """A terminal that knows ASCII only gets escapes in place of the signs that it lacks; none of our words is worth a crash."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def speaking() -> Iterator[None]:
    """Standard output may lead to a disk that is full; a reader that is gone is another matter."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_stdout()
        raise MachineError(
            f"standard output: {(error.strerror or str(error)).lower()}", hint="free some space where it is written to"
        ) from error


def discard_stdout() -> None:
    """Python flushes standard output once more on its way out; let that succeed."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def plain(text: str) -> str:
    """What comes out of a bucket must not move a cursor."""
    return _CONTROLS.sub("?", text)
