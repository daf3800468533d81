"""What the saver is told, and where it says what it does."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from vramfarm import protocol
from vramfarm.protocol import Env


@dataclass(frozen=True)
class Orders:
    """What the saver is told, once, by its environment."""

    control: Path
    directory: Path
    interval_s: float
    job: str
    lineage: int
    attempt: int
    resumed_step: int
    end_file: Path | None
    keep_last: int | None

    @classmethod
    def parse(cls, env: Mapping[str, str]) -> Orders:
        resume = env.get(Env.RESUME, "none")
        end_file, keep_last = env.get(Env.END_FILE), env.get(Env.KEEP_LAST)
        return cls(
            control=Path(env[Env.CONTROL]),
            directory=Path(env[Env.CHECKPOINT_DIR]),
            interval_s=float(env.get(Env.SAVE_INTERVAL_S, "1800")),
            job=env.get(Env.JOB) or "job",
            lineage=int(env.get(Env.LINEAGE, "0")),
            attempt=int(env.get(Env.ATTEMPT, "1")),
            resumed_step=0 if resume == "none" else protocol.parse_name(Path(resume).name)[0],
            end_file=Path(end_file) if end_file else None,
            keep_last=int(keep_last) if keep_last else None,
        )


AGAIN_S: Final = 600.0
_NUMBER: Final = re.compile(r"\d[\d.]*(?: ?[kMGT]?B\b)?")


class Complaint:
    """What was complained of last. A disk that is full all night is told when that begins, and now and then: each try has its own step and bytes."""

    def __init__(self) -> None:
        self._what, self._told_at = "", 0.0

    def is_news(self, text: str, now: float) -> bool:
        """Whether to tell it: it is another one than before, or ten minutes have passed."""
        what = _NUMBER.sub("#", text)
        if what == self._what and now - self._told_at < AGAIN_S:
            return False
        self._what, self._told_at = what, now
        return True


def say(text: str) -> None:
    """Into its log, if there is room for it: whoever keeps the checkpoints does not die of a word."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: closed
        line = f"{datetime.now(timezone.utc):%H:%M:%S} saver: {text}\n"
        os.write(sys.stderr.fileno(), line.encode(errors="backslashreplace"))
