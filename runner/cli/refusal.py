"""
Why a start came to nothing through the job's or the store's fault: `refusal.json`, in the run folder
and in the store, for whoever asks afterwards. A cron host must not rent for the same fault again.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from runner.adapters.secrets import with_store_keys
from runner.cli.load import LoadedJob
from runner.cli.runs import is_alive
from runner.errors import JobError, StoreError
from runner.storage.disk import Disk, write_durable

REFUSAL: Final = "refusal.json"
CODES: Final = frozenset({JobError.exit_code, StoreError.exit_code})
_PATIENCE_S: Final = 10.0  # the server costs, and the store may be what is broken


def digest(text: str) -> str:
    """Of a job as it was handed over, its code included: that has the name of its content."""
    return hashlib.sha256(text.encode()).hexdigest()


def record_refusal(loaded: LoadedJob, env: Mapping[str, str], *, code: int, reason: str, server: str) -> None:
    """Best effort. A run that another runner is at work on is left alone."""
    folder = Path(loaded.job.run_dir)
    if code not in CODES or is_alive(folder):
        return
    told = {"exit_code": code, "reason": reason, "server": server, "job": digest(loaded.text)}
    raw = json.dumps({**told, "at": datetime.now(UTC).isoformat()}).encode()
    if folder.is_dir():
        with suppress(OSError):
            write_durable(Disk(), folder / REFUSAL, raw)
    if server and loaded.job.offload.to:
        sending = threading.Thread(target=_send, args=(loaded, env, raw), daemon=True)
        sending.start()
        sending.join(_PATIENCE_S)


def _send(loaded: LoadedJob, env: Mapping[str, str], raw: bytes) -> None:
    from runner.storage.offsite import open_store  # noqa: PLC0415  # slow

    with suppress(Exception):  # why the run ended is said elsewhere; this is only one more place
        open_store(loaded.job.offload, with_store_keys(env)).put(f"{loaded.job.name}/{REFUSAL}", raw)


def newest_word(status: Mapping[str, Any], refusal: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status; with the refusal, if that came after it."""
    with suppress(KeyError, TypeError, ValueError):
        at, updated = datetime.fromisoformat(refusal["at"]), status.get("updated_at")
        if not updated or at >= datetime.fromisoformat(updated):
            return {**status, "refusal": refusal}
    return status
