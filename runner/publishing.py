"""
What a person reads of a run from the bucket alone: ledger, journal, samples, logs, the report. Told again and
again, so that a machine may vanish. Nothing here is worth a checkpoint: what cannot be read is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from runner.errors import json_object
from runner.policy import ledger
from runner.storage.disk import alone_in
from runner.storage.offsite import Store, uploading
from runner.storage.offsite.known import Known

LEDGER: Final = "ledger.json"
_MAX_JSON_BYTES: Final = 4 << 20
_TREES: Final = ("logs", "evidence")
_LOG_LIMIT_BYTES: Final = 64 << 20  # of one file; of a larger one its end goes
_LOGS_SOON_BYTES: Final = 16 << 20  # of all files of an attempt while it runs: the whole comes when it is over
_LOG_SOON_BYTES: Final = 4 << 20  # of one of these
KNOWN: Final = ".published.json"  # in the run folder
LOGS_AT: Final = ".logs-published"  # there, too: its time
_LOGS_LATE_S: Final = 900.0  # a line that is never free of checkpoints carries them behind one


def read_json(store: Store, key: str) -> dict[str, Any]:
    return json_object(store.get(key, limit_bytes=_MAX_JSON_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Publishing:
    """Of one machine, which `machine` describes as the ledger does. What others told is never overwritten."""

    store: Store
    job: str
    run_dir: Path
    machine: Mapping[str, Any]
    is_leaving: bool  # there are seconds left
    is_over: bool  # the run: what was published is looked at, and not believed

    def publish_files(self, *, logs: bool, wait: bool = True) -> int:
        """
        Returns their number. What has not changed is not read. An upload and a copy of their own may both want to:
        one at a time, for a large file and the notes have one writer. Who does not `wait` leaves it to the other.
        """
        with alone_in(self.run_dir, wait=wait) as is_alone:
            return self._publish_files(logs=logs) if is_alone else 0

    def _publish_files(self, *, logs: bool) -> int:
        number = self._write_ledger()
        places = {
            "job.json": "job.json",
            "journal.jsonl": f"machines/{number:04d}/journal.jsonl",
            "metrics.jsonl": f"machines/{number:04d}/metrics.jsonl",
        }
        files = {place: (self.run_dir / name, _LOG_LIMIT_BYTES) for name, place in places.items()}
        files = {place: found for place, found in files.items() if found[0].is_file()}
        files |= self._logs(number) if logs else {}
        if self.is_over:
            (self.run_dir / KNOWN).unlink(missing_ok=True)
        known = Known(self.run_dir / KNOWN, self.store)
        try:
            for place, (path, limit_bytes) in files.items():
                uploading.publish_file(self.store, f"{self.job}/{place}", path, limit_bytes, known)
        finally:
            known.save()
        if logs:
            with suppress(OSError):
                (self.run_dir / LOGS_AT).touch()
        return len(files)

    def are_logs_late(self) -> bool:
        with suppress(FileNotFoundError):
            return datetime.now(UTC).timestamp() > (self.run_dir / LOGS_AT).stat().st_mtime + _LOGS_LATE_S
        return True

    def publish_report(self) -> None:
        """Of all machines: only the store knows them."""
        from runner.report import gather_store, page  # noqa: PLC0415  # slow

        status = self.run_dir / "status.json"
        with suppress(FileNotFoundError):
            uploading.publish(self.store, self.job, {"status.json": status.read_bytes()})
        written = page(gather_store(self.store, self.job))
        uploading.publish(self.store, self.job, {"report.html": written.encode()})

    def _write_ledger(self) -> int:
        """Put this machine's entry in, as it is now; returns its number."""
        mine = ledger.parse_machine(self.machine)
        machines = ledger.merge(ledger.parse(read_json(self.store, f"{self.job}/{LEDGER}")), mine)
        uploading.publish(self.store, self.job, {LEDGER: json.dumps(ledger.dump(machines), indent=1).encode()})
        return 1 + next(number for number, machine in enumerate(machines) if machine.id == mine.id)

    def _logs(self, number: int) -> dict[str, tuple[Path, int]]:
        """By place, logs of this machine's attempts and tasks, and how much of each goes: the end of one that is too large."""
        files: dict[str, tuple[Path, int]] = {}
        for attempt in self.machine["attempts"]:
            name = f"attempt-{attempt['number']:04d}"
            found = [path for tree in _TREES for path in _plain_files(self.run_dir / tree / name)]
            soon = min(_LOG_SOON_BYTES, _LOGS_SOON_BYTES // max(1, len(found)))
            limit_bytes = soon if attempt["ending"] is None or self.is_leaving else _LOG_LIMIT_BYTES
            files |= {path.relative_to(self.run_dir).as_posix(): (path, limit_bytes) for path in found}
        tasks = self.run_dir / "logs" / "tasks"
        here = f"machines/{number:04d}/tasks"
        return files | {
            f"{here}/{path.relative_to(tasks).as_posix()}": (path, _LOG_SOON_BYTES) for path in _plain_files(tasks)
        }


def _plain_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
