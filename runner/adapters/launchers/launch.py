"""What a launcher is given, and what it offers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch: `command` is the user's, in words, filled in."""

    python: str  # the training interpreter
    command: tuple[str, ...]
    num_procs: int
    log_dir: Path  # for one file per rank and stream


class Launcher(Protocol):
    """What a launcher module offers (PEP 544: a module satisfies a protocol)."""

    def argv(self, launch: Launch) -> tuple[str, ...]:
        """The command line that starts `num_procs` processes."""
        ...

    def target(self, words: tuple[str, ...]) -> str | None:
        """The file or program that the user's words name; None if that cannot be told."""
        ...


# Folders of PYTHONPATH go to the end of the path before anything is imported: `-m` would put the
# working folder, and `python` PYTHONPATH, in front, and a json.py or torch.py there would be taken
# for the real one. `-P` would do a part of it, and Python 3.10 does not know that. The ranks are
# started by the launcher with a path as Python makes it.
_BOOT: Final = (
    "import os, sys; "
    "last = {os.path.abspath(p) for p in os.environ.get('PYTHONPATH', '').split(os.pathsep)}; "
    "sys.path = sorted(filter(None, sys.path), key=lambda p: os.path.abspath(p) in last); "
    "import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def run_module(python: str, module: str, *arguments: str) -> tuple[str, ...]:
    """Argv that runs a module of the training environment as `python -m` would, out of the user's reach."""
    return (python, "-c", _BOOT, module, *arguments)


def apart(words: tuple[str, ...]) -> tuple[str, ...]:
    """
    The user's words for a launcher whose argparse would take `--log` of the script for an abbreviation of its own.

    `--` ends its options. Where the words begin with options of the launcher, nobody but it knows where those end.
    """
    if words[:1] in {("-m",), ("--module",)}:
        return (words[0], "--", *words[1:])
    return words if words[:1] and words[0].startswith("-") else ("--", *words)


def first_file(words: tuple[str, ...]) -> str | None:
    """The first word, unless it is an option: those have values we cannot tell from files."""
    return None if words[0].startswith("-") else words[0]
