"""
What starts one process per card: the user's command becomes an argv.

To add one: a module here with the functions of `Launcher`, and a line in `LAUNCHERS`.
Launchers run so that no file of the user can hide a module from them.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from runner.adapters.launchers import accelerate, axolotl, command, deepspeed, llamafactory, torchrun, torchtune
from runner.adapters.launchers.launch import Launch, Launcher
from runner.errors import JobError
from runner.job import LauncherName

__all__ = ["LAUNCHERS", "Launch", "Launcher", "check_command", "check_first_word", "split_command"]

LAUNCHERS: Final[Mapping[LauncherName, Launcher]] = {
    LauncherName.TORCHRUN: torchrun,
    LauncherName.ACCELERATE: accelerate,
    LauncherName.DEEPSPEED: deepspeed,
    LauncherName.AXOLOTL: axolotl,
    LauncherName.LLAMAFACTORY: llamafactory,
    LauncherName.TORCHTUNE: torchtune,
    LauncherName.COMMAND: command,
}

_SETS: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_STARTS_SCRIPTS: Final = re.compile(
    r"python[\d.]*|torchrun|accelerate|deepspeed|axolotl|llamafactory-cli|tune|uv|sh|bash|sudo|mpirun|srun"
)
_BY_PROGRAM: Final = {
    "accelerate": LauncherName.ACCELERATE,
    "deepspeed": LauncherName.DEEPSPEED,
    "axolotl": LauncherName.AXOLOTL,
    "llamafactory-cli": LauncherName.LLAMAFACTORY,
    "torchrun": LauncherName.TORCHRUN,
    "tune": LauncherName.TORCHTUNE,
}


def split_command(text: str, *, resume_args: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """
    Return the words of `command` with their placeholders filled in.

    `{resume_args}` alone in a word becomes as many words as there are. Braces that name
    nothing of ours stay: they may be the script's own.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise JobError(f"command: cannot be split into words: {error}: {text!r}", hint="close the quotes") from None
    filled: list[str] = []
    for word in words:
        filled += resume_args if word == "{resume_args}" else [_fill(word, values)]
    return tuple(filled)


def check_command(name: LauncherName, launch: Launch, *, cwd: Path) -> None:
    """Raise `JobError` if what the launcher would start is not there, or cannot be read."""
    if not launch.command:
        raise JobError("command: expected a script and its arguments, got nothing")
    if name is not LauncherName.COMMAND:
        check_first_word(name, launch.command, cwd=cwd)
    target = LAUNCHERS[name].target(launch.command)
    if target is None:
        return
    if name is LauncherName.COMMAND:
        _check_program(target, cwd)
        return
    file = cwd / target
    try:
        there = file.is_file()
    except OSError as error:
        raise JobError(
            f"command: {file} cannot be looked at: {error.strerror}",
            hint=f"let this user read the folder {cwd}: chmod o+rx",
        ) from None
    if not there:
        raise JobError(
            f"command: expected a file {target!r} in {cwd}, found none",
            hint="check `workdir` and `source`, or give the script's whole path",
        )
    if not os.access(file, os.R_OK):
        raise JobError(f"command: {file} cannot be read", hint="let this user read it: chmod +r")


def check_first_word(name: LauncherName, words: Sequence[str], *, cwd: Path | None) -> None:
    """Raise `JobError` if the command begins with what starts a script, or sets a variable; `cwd` None: not here yet."""
    word = words[0] if words else ""
    if "=" in word and _SETS.match(word):
        variable, _, value = word.partition("=")
        raise JobError(
            f"command: expected a script or a program first, got {word!r}", hint=f"write `env: {{{variable}: {value}}}`"
        )
    program = word.rpartition("/")[2]
    is_theirs = cwd is not None and not word.startswith("/") and (cwd / word).is_file()
    if name is LauncherName.COMMAND or is_theirs or not _STARTS_SCRIPTS.fullmatch(program):
        return
    others = [LauncherName.COMMAND] + ([_BY_PROGRAM[program]] if _BY_PROGRAM.get(program, name) is not name else [])
    raise JobError(
        f"command: expected the script and its arguments only, got {word!r} before it: `launcher: {name}` starts the script",
        hint=f"leave {word!r} out, or write {' or '.join(f'`launcher: {other}`' for other in reversed(others))}",
    )


def _check_program(target: str, cwd: Path) -> None:
    local = os.sep in target
    check_first_word(LauncherName.COMMAND, (target,), cwd=cwd)
    if shutil.which(str(cwd / target) if local else target) is None:
        raise JobError(
            f"command: expected a program {target!r}, found none that can be run in {cwd if local else 'PATH'}",
            hint="check the spelling and `workdir`; a script needs chmod +x and a first line such as #!/bin/sh",
        )


def _fill(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word
