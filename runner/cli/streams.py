"""Standard input, output and error, as they may be found: closed, full, or without a reader."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from runner.errors import MachineError


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


_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # surrogates cannot be written at all


def plain(text: str) -> str:
    """What comes out of a bucket must not move a cursor."""
    return _CONTROLS.sub("?", text)
