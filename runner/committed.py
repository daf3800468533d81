"""What a committed checkpoint is to everybody here. Apart from the other facts, since who only moves bytes needs none of them."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from vramfarm.protocol import Ref

# Every lineage took a launch. What claims a later one was not made by a run, and would be the newest for ever.
MAX_LINEAGE: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint: its manifest exists, so every shard it names does too."""

    ref: Ref
    size_bytes: int
    world_size: int
    written_at: datetime
    framework: str = "vramfarm"
    origin: str = ""  # the checkpoint of another run that this is a copy of
