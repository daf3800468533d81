"""Whether the code has the file that the command names, as far as that can be told before there is a machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from runner.adapters.launchers import LAUNCHERS, Launch, check_command, split_command
from runner.cli.load import LoadedJob
from runner.errors import JobError
from runner.job import LauncherName, PathSource
from runner.supervise.archive import list_files

_INSTALLS: Final = re.compile(r"\s*(python3?\s+-m\s+)?(pip3?|uv|apt|apt-get|conda)\s[^;&|>]*")
_PYTHONS: Final = frozenset({"python", "python3"})


def check_script(loaded: LoadedJob) -> None:
    """
    `JobError` if the folder that is packed surely lacks it.

    What setup may write, what lies on the machine, and what git ignores but another source brings, is not judged.
    """
    job, source = loaded.job, loaded.job.source
    if not isinstance(source, PathSource) or not all(map(_INSTALLS.fullmatch, job.setup)):
        return
    words = split_command(job.command, resume_args=(), values={})
    target = _named(job.launcher, words)
    workdir = Path(job.workdir or ".")
    if target is None or "{" in target or Path(target).is_absolute() or workdir.is_absolute():
        return
    root = Path(source.path)
    cwd = root / workdir
    if job.launcher is not LauncherName.COMMAND:
        check_command(job.launcher, Launch(python="python", command=words, num_procs=1, log_dir=root), cwd=cwd)
    elif not (cwd / target).is_file():
        raise JobError(f"command: expected a file {target!r} in {cwd}, found none", hint="check `workdir` and `source`")
    file = (cwd / target).resolve()
    if file.is_relative_to(root.resolve()) and file.relative_to(root.resolve()).as_posix() not in list_files(root):
        raise JobError(
            f"command: {file} is not among what is packed: git ignores it",
            hint="`git check-ignore -v` names the rule; take it out, or name another script",
        )


def _named(launcher: LauncherName, words: tuple[str, ...]) -> str | None:
    """The file, if there is one to look for here: a program of the server's PATH is not."""
    if not words:
        return None
    if launcher is not LauncherName.COMMAND:
        return LAUNCHERS[launcher].target(words)
    is_python = words[0] in _PYTHONS
    word = words[1] if is_python and len(words) > 1 else words[0]
    return word if "/" in word or (is_python and word.endswith(".py")) else None
