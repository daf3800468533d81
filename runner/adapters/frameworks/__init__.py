"""
Who saves the checkpoints, and when one of theirs is complete.

To add one: a module here with the members of `Framework`, and a line in `FRAMEWORKS`.
A save that is called complete here is committed and resumed from: when in doubt, it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

from runner.adapters.frameworks import dcp, deepspeed, hf_trainer, lightning, none, torch_save, vramfarm
from runner.adapters.frameworks.files import Save
from runner.errors import JobError
from runner.job import FrameworkName, Job, LauncherName

__all__ = ["FRAMEWORKS", "Framework", "Save", "framework_name", "get_framework", "resume_args"]


class Framework(Protocol):
    """What a framework module offers (PEP 544: a module satisfies a protocol)."""

    uses_library: bool
    """Whether the script saves with our library: then nobody watches folders."""

    flag: str
    """What its scripts call the checkpoint to resume from; empty where there is no such thing."""

    def saves(self, folder: Path, world_size: int) -> list[Save]:
        """
        What the framework saved in `folder`, oldest first, complete or not.

        What files say, at this moment: a caller looks twice, since a file may still be written.
        """
        ...

    def resume_path(self, checkpoint: Path) -> Path:
        """What the script wants to hear of a committed checkpoint: its folder, or the one file in it."""
        ...


FRAMEWORKS: Final[Mapping[FrameworkName, Framework]] = {
    FrameworkName.VRAMFARM: vramfarm,
    FrameworkName.HF_TRAINER: hf_trainer,
    FrameworkName.LIGHTNING: lightning,
    FrameworkName.DEEPSPEED: deepspeed,
    FrameworkName.DCP: dcp,
    FrameworkName.TORCH_SAVE: torch_save,
    FrameworkName.NONE: none,
}
_OF_LAUNCHER: Final = {
    LauncherName.AXOLOTL: FrameworkName.HF_TRAINER,
    LauncherName.LLAMAFACTORY: FrameworkName.HF_TRAINER,
}
_FLAG_OF_LAUNCHER: Final = {LauncherName.LLAMAFACTORY: "resume_from_checkpoint="}  # it takes key=value


def framework_name(job: Job) -> FrameworkName:
    """Whose checkpoints these are: for `auto` the launcher's own."""
    if job.framework is FrameworkName.AUTO:
        return _OF_LAUNCHER.get(job.launcher, FrameworkName.VRAMFARM)
    return job.framework


def get_framework(job: Job) -> Framework:
    """Return the adapter; `JobError` if there is none yet."""
    name = framework_name(job)
    framework = FRAMEWORKS.get(name)
    if framework is None:
        known = ", ".join(("auto", *FRAMEWORKS))
        raise JobError(
            f"framework: {name} is not supported yet, expected one of {known}",
            hint="`framework: none` runs the job without watching its checkpoints",
        )
    return framework


def resume_args(job: Job, framework: Framework, checkpoint: Path | None) -> tuple[str, ...]:
    """The words for `{resume_args}`: a flag and a path, one word if the flag ends with `=`; none at step 0."""
    flag = job.checkpoint.resume_flag
    if flag == "auto":
        flag = _FLAG_OF_LAUNCHER.get(job.launcher, framework.flag)
    if checkpoint is None or not flag:
        return ()
    path = str(framework.resume_path(checkpoint))
    return (f"{flag}{path}",) if flag.endswith("=") else (flag, path)
