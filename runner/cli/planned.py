"""
Keys of job.yaml that are read and checked, and not acted upon yet.

A job that relies on one is refused before anything is started: to train without the data, or
to stop a server whose checkpoints nobody watched, would cost more than a refusal. When one is
built, its line here goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from runner.adapters.frameworks import framework_name, get_framework, resume_args
from runner.errors import JobError
from runner.job import FrameworkName, Job
from runner.policy.resume import is_elsewhere

_PLANNED: Final[tuple[tuple[str, Callable[[Job], bool], str], ...]] = (
    ("framework", lambda job: job.framework is FrameworkName.TORCHTUNE, "its checkpoints are not watched"),
)


def planned(job: Job) -> Iterator[str]:
    """What this job relies on and does not get yet, a line each."""
    return (f"{name}: not built yet: {instead}" for name, asks, instead in _PLANNED if asks(job))


def check_framework(job: Job, place: Callable[[str], str] = lambda _: "") -> None:
    """`JobError` if a restart could not tell the script where to go on. `place` says where a key stands."""
    if job.framework is FrameworkName.TORCHTUNE:
        return  # `planned` says it
    framework = get_framework(job)
    if is_elsewhere(job.checkpoint.resume) and not framework.uses_library and not framework.flag:
        raise JobError(
            f"{place('checkpoint.resume')}checkpoint.resume: expected auto or never with framework: {framework_name(job)}, found {job.checkpoint.resume}",
            hint="nobody could tell the script where to begin: name the framework that saved it, or load it in the script",
        )
    if not framework.uses_library and framework.flag and "{resume_args}" not in job.command:
        flag = " ".join(resume_args(job, framework, Path("FOLDER")))
        raise JobError(
            f"{place('command')}command: expected {{resume_args}} in it, since {framework_name(job)} saves by itself (framework); found none",
            hint=f"it becomes {flag!r} when there is a checkpoint to resume from; the script must accept that option",
        )


def refuse_planned(job: Job) -> None:
    """`JobError` if the job relies on what is not built yet."""
    if lines := list(planned(job)):
        raise JobError("\n".join(lines), hint="leave these out, or wait for the version that has them: CHANGELOG.md")
