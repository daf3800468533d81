"""What a rehearsal sees of the run that it drives: status, journal, store, control page; and the two things it does to it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from runner.adapters.frameworks import get_framework
from runner.errors import json_object
from runner.folder import RunFolder
from runner.job import Job
from runner.policy.rehearsal import Beat, Kill, Seen
from runner.storage import journal
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk
from runner.supervise import attempt as attempts
from runner.supervise import page as pages
from runner.supervise import process
from runner.supervise.cards import Cards
from runner.supervise.page import ProgressReader
from runner.supervise.pulse import PulseReader
from vramfarm.protocol import Ref, Slot, Word

LOG: Final = "rehearsal.log"
_MOST_BEATS: Final = 20_000
_NS: Final = 1e-9
_TAIL_BYTES: Final = 1 << 16


class Eye:
    """Looks at the run from outside."""

    def __init__(self, job: Job, child: subprocess.Popen[bytes]) -> None:
        self._job, self._child = job, child
        self._root = Path(job.run_dir)
        self._folder = RunFolder(root=self._root)
        self._checkpoints = CheckpointDir(Path(job.checkpoint.dir), Disk())
        self._begun_s = time.monotonic()
        self._followed = ""  # the attempt whose page `_reader` reads
        self._reader: ProgressReader | None = None
        self._beats: list[Beat] = []
        self._pulses: dict[str, PulseReader] = {}
        self._uses_library = get_framework(job).uses_library

    def now_s(self) -> float:
        return time.monotonic() - self._begun_s

    def look(self) -> Seen:
        code = self._child.poll()  # first: what an ended run wrote is all there
        history, status = journal.read(self._folder.journal), self._status()
        last = history.last
        if last is not None:
            self._follow(last.id)
        self.beat()
        progress = self._reader.read() if self._reader else None
        said = {} if code is None else self._last_words()
        store_error, gave_up, hint = self._store_trouble()
        committed = self._checkpoints.committed()
        brought = {c.ref.id for c in committed if c.origin}  # of another run (checkpoint.resume): no save of this one
        launched = (datetime.now(UTC) - last.launched_at).total_seconds() if last else 0.0
        return Seen(
            now_s=self.now_s(),
            code=code,
            reason=history.conclusion.reason if history.conclusion else said.get("error", ""),
            hint=said.get("hint", "") or hint,
            message=str(status.get("message") or ""),
            store_error=store_error,
            store_gave_up=gave_up,
            verdict=str((status.get("verdict") or {}).get("verdict", "")),
            reasons=tuple((status.get("verdict") or {}).get("reasons", ())),
            launched_s=self.now_s() - launched if last else None,
            attempts=history.attempts,
            step=progress.step if progress else last.step if last else 0,
            shows_progress=bool(last and not self._uses_library and self._shows_progress(last.number, last.id)),
            beats=tuple(self._beats),
            local=tuple(c for c in committed if not c.origin),
            offsite=tuple(
                Ref(c["lineage"], c["step"], 0, c["id"])
                for c in status.get("checkpoints", ())
                if c.get("verified") and c["id"] not in brought
            ),
            save_s=(self._reader.page[Word.SAVE_NS] * _NS if self._reader else 0.0)
            or float(status.get("save_took_s") or 0.0),
            save_error=progress.save_error if progress and progress.num_failed else "",
            upload_s=float(status.get("last_upload_s") or 0.0),
            free_bytes=shutil.disk_usage(self._root).free,
        )

    def beat(self) -> None:
        """Rank 0's newest step, if it is new."""
        if self._reader is None:
            return
        page = self._reader.page
        at_s, step = page.get(0, Slot.BEAT_NS) * _NS - self._begun_s, page.get(0, Slot.STEP)
        if step and len(self._beats) < _MOST_BEATS and (not self._beats or self._beats[-1].step != step):
            self._beats.append(Beat(at_s=at_s, step=step))

    def ask_save(self) -> bool:
        if self._reader is None:
            return False
        pages.request_save(self._reader.page)
        return True

    def kill_rank(self, seen: Seen) -> Kill | None:
        """The highest rank, as a crash of its own would end it; None if no rank can be told."""
        last = seen.attempts[-1]
        live = attempts.live(last.id)
        if live is None:
            return None
        page = self._reader.page if self._reader else None
        ranks = PulseReader(self._folder.attempt(last.number), Cards("")).read(live, page, cards_every_s=60).ranks
        if not ranks:
            return None
        with suppress(ProcessLookupError):
            victim = process.identify(ranks[-1].pid)
            now = self.now_s()
            process.kill([victim], signal.SIGKILL)
            return Kill(attempt=last.number, rank=ranks[-1].rank, step=seen.step, at_s=now)
        return None

    def _follow(self, attempt: str) -> None:
        if self._followed != attempt:
            self._followed, self._reader, self._beats = attempt, None, []
        if self._reader is None and (page := pages.find(self._root, attempt)):
            self._reader = ProgressReader(page)

    def _shows_progress(self, number: int, attempt: str) -> bool:
        live = attempts.live(attempt)
        if live is None:
            return False
        reader = self._pulses.setdefault(attempt, PulseReader(self._folder.attempt(number), Cards("")))
        return bool(reader.read(live, None, cards_every_s=60).progress)

    def _status(self) -> Mapping[str, Any]:
        with suppress(OSError):
            return json_object(self._folder.status.read_bytes())
        return {}

    def _store_trouble(self) -> tuple[str, bool, str]:
        """(error, it is not tried again, hint) of the newest copy, else of the newest look into the store."""
        for kind in ("upload", "survey"):
            last = last_line(self._folder.tasks / f"{kind}.jsonl")
            if last:
                return str(last.get("error", "")), bool(last.get("final")), str(last.get("hint", ""))
        return "", False, ""

    def _last_words(self) -> dict[str, str]:
        """`error: …` and `hint: …` as `run` says them when it ends early."""
        with suppress(OSError):
            raw = (self._root / LOG).read_bytes()[-_TAIL_BYTES:]
            words = [line.partition(": ") for line in raw.decode(errors="replace").splitlines()]
            return {name: text for name, _, text in reversed(words) if name in {"error", "hint"}}
        return {}


def last_line(path: Path) -> Mapping[str, Any]:
    with suppress(OSError, IndexError):
        return json_object(path.read_bytes()[-_TAIL_BYTES:].splitlines()[-1])
    return {}
