"""
Everything that ends `run` early. One class, one exit code, all in this file, so that the
codes stay unique and `docs/exit-codes.md` can be generated from it.

A message says where, what was expected, what was found; `hint` says what to do.
"""

import json
from contextlib import suppress
from typing import Any, ClassVar, Final

_MAX_DEPTH: Final = 40


def one_line(text: str) -> str:
    """Names and words of others, as they may stand in a message: nothing in them moves a cursor or begins a line."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def in_plain(value: Any, depth: int = 0) -> Any:  # noqa: ANN401  # JSON
    """The same, for every text in what others wrote as JSON."""
    match value:
        case str():
            return one_line(value)
        case dict() | list() if depth > _MAX_DEPTH:
            return "..."
        case dict():
            return {one_line(name): in_plain(inner, depth + 1) for name, inner in value.items()}
        case list():
            return [in_plain(inner, depth + 1) for inner in value]
    return value


def json_object(raw: bytes | str | None) -> dict[str, Any]:
    """The object that others wrote as JSON; empty where there is none that makes sense."""
    with suppress(ValueError, RecursionError):
        found = json.loads(raw or b"{}")
        return found if isinstance(found, dict) else {}
    return {}


class RunnerError(Exception):
    """Something unexpected; a bug report is written."""

    exit_code: ClassVar[int] = 1
    meaning: ClassVar[str] = "unexpected: a fault of the runner; a bug report is written"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class JobError(RunnerError):
    exit_code = 2
    meaning = "job.yaml, the code or the command line is wrong; no attempt was begun"


class MachineError(RunnerError):
    exit_code = 3
    meaning = "this machine is wrong: refused in preflight, or given up later"


class StoreError(RunnerError):
    exit_code = 4
    meaning = (
        "the store cannot be used, lacks something of a run that is done, or has a checkpoint that broke the contract"
    )


class LockedError(RunnerError):
    exit_code = 5
    meaning = "locked: another runner writes this run"


class GaveUpError(RunnerError):
    exit_code = 6
    meaning = "gave up: the job itself fails"


class LimitError(RunnerError):
    exit_code = 7
    meaning = "a limit was reached (time, cost); saved and resumable"


class StoppedError(RunnerError):
    exit_code = 8
    meaning = "stopped by the operator; saved"


class LeftError(RunnerError):
    exit_code = 75
    meaning = "left when asked to (SIGTERM or Ctrl-C): saved, resumable, start it again"


ALL_ERRORS: tuple[type[RunnerError], ...] = (
    RunnerError,
    JobError,
    MachineError,
    StoreError,
    LockedError,
    GaveUpError,
    LimitError,
    StoppedError,
    LeftError,
)
