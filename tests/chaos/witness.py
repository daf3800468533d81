"""Looks on while a run is killed piece by piece: what must hold at any time, seen from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from runner.storage.journal import events
from runner.supervise.process import Process, is_alive
from vramfarm.checksum import crc32
from vramfarm.protocol import CHUNK_BYTES, MANIFEST, ProtocolError, parse_manifest

LOOK_S: Final = 0.05
Content = Callable[[int, int], bytes]  # of the shard of (rank, step)


class Witness:
    """Looks on from outside, many times a second, and checks what must hold at any time."""

    def __init__(
        self,
        run_dir: Path,
        offsite: Path,
        find_attempt: Callable[[str], tuple[Process, ...]],
        content: Content | None,
    ) -> None:
        self.next_look = 0.0
        self._run_dir, self._offsite = run_dir, offsite / "checkpoints"
        self._find_attempt, self._content = find_attempt, content
        self._checked: set[Path] = set()
        self._floor = 0  # no attempt that begins from now on may begin before this step
        self._offsite_floor = 0
        self._attempts: list[dict[str, Any]] = []
        self.resumed: list[int] = []
        self.ended: dict[int, int] = {}  # attempt -> the step that it came to, as the journal says

    def look(self) -> None:
        self._look_at_attempts()
        self._look_at_checkpoints()
        self.next_look = time.monotonic() + LOOK_S

    def lost(self) -> None:
        """The disk goes now, and all that is only on it."""
        self._look_at_checkpoints()
        self._floor = self._offsite_floor
        self._attempts = []
        self._checked = {path for path in self._checked if path.is_relative_to(self._offsite)}

    def _look_at_attempts(self) -> None:
        journal = events(self._run_dir / "journal.jsonl")
        launched = [event for event in journal if event["event"] == "launched"]
        self.ended |= enumerate([event["step"] for event in journal if event["event"] == "exited"], 1)
        for attempt in launched[len(self._attempts) :]:
            begins = attempt["resume"]["step"] if attempt["resume"] else 0
            assert begins >= self._floor, f"attempt {attempt['number']} began at {begins}, {self._floor} was committed"
            self.resumed.append(begins)
        self._attempts = launched
        assert [*range(1, len(launched) + 1)] == [attempt["number"] for attempt in launched]
        self._look_at_two(launched)

    def _look_at_two(self, launched: list[dict[str, Any]]) -> None:
        """The later attempt first: whoever of the earlier one is alive after that lived beside it."""
        if len(launched) > 1 and self._find_attempt(launched[-1]["id"]):
            both = [process for process in self._find_attempt(launched[-2]["id"]) if is_alive(process)]
            assert [] == both, f"attempts {launched[-2]['number']} and {launched[-1]['number']} live at once"

    def _look_at_checkpoints(self) -> None:
        for folder in (self._run_dir / "checkpoints", self._offsite):
            for manifest in folder.glob(f"step-*/{MANIFEST}"):
                if manifest.parent not in self._checked:
                    step = check_checkpoint(manifest.parent, self._content)
                    self._checked.add(manifest.parent)
                    self._floor = max(self._floor, step)
                    if folder == self._offsite:
                        self._offsite_floor = max(self._offsite_floor, step)


def check_checkpoint(folder: Path, content: Content | None) -> int:
    """
    Every byte of it is what its manifest says, and what was written. Returns its step.

    It may be pruned meanwhile; then it must have left its name before its bytes.
    """
    try:
        manifest = parse_manifest((folder / MANIFEST).read_bytes())
        for rank, shard in enumerate(manifest.shards):
            found = (folder / shard.path).read_bytes()
            chunks = [found[start : start + CHUNK_BYTES] for start in range(0, len(found), CHUNK_BYTES)]
            assert shard.checksums == tuple(crc32(chunk) for chunk in chunks), f"{folder / shard.path} is damaged"
            assert content is None or content(rank, manifest.step) == found, f"{folder / shard.path}: other bytes"
    except (FileNotFoundError, ProtocolError) as error:
        torn = str(error)
    else:
        return manifest.step
    assert not (folder / MANIFEST).exists(), f"{folder} has a manifest and is not whole: {torn}"
    return 0
