"""
Who saves the checkpoints, and when one of theirs is complete.

To add one: a module here with the members of `Framework`, and a line in `FRAMEWORKS`.
A checkpoint that is called complete here is committed and resumed from: when in doubt, it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

from runner.adapters.frameworks import hf_trainer, none, vramfarm
from runner.errors import JobError
from runner.job import FrameworkName


class Framework(Protocol):
    """What a framework module offers (PEP 544: a module satisfies a protocol)."""

    uses_library: bool
    """Whether the script saves with our library: then nobody watches folders."""

    def resume_args(self, checkpoint: Path) -> tuple[str, ...]:
        """Arguments that make the script resume from this folder."""
        ...

    def complete(self, folder: Path, world_size: int) -> list[Path]:
        """
        The framework's checkpoints in `folder` that hold all they should, oldest first.

        What files say, at this moment: a caller looks twice, since a file may still be written.
        """
        ...


FRAMEWORKS: Final[Mapping[FrameworkName, Framework]] = {
    FrameworkName.AUTO: vramfarm,
    FrameworkName.VRAMFARM: vramfarm,
    FrameworkName.HF_TRAINER: hf_trainer,
    FrameworkName.NONE: none,
}


def get_framework(name: FrameworkName) -> Framework:
    """Return the adapter; `JobError` if there is none yet."""
    framework = FRAMEWORKS.get(name)
    if framework is None:
        known = ", ".join(FRAMEWORKS)
        raise JobError(
            f"framework: {name} is not supported yet, expected one of {known}",
            hint="`framework: none` runs the job without watching its checkpoints",
        )
    return framework
