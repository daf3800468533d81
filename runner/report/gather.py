"""Where a report comes from. Nothing here is trusted: what cannot be read is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from runner.errors import in_plain, json_object, one_line
from runner.policy import ledger
from runner.policy.goodput import share_out
from runner.report.model import Report, Sample, Saved
from runner.storage.offsite import Store, surveying

METRICS: Final = "metrics.jsonl"
STATUS: Final = "status.json"
_MAX_BYTES: Final = 16 << 20
_MAX_SAMPLES: Final = 100_000
_MAX_STEP: Final = 1 << 53
_DISK: Final = "disk"
_LEFT: Final = "the disk of its machine, as that last said"

Read = Callable[[str], bytes | None]


def gather_folder(run_dir: Path) -> Report:
    """Of this disk: this machine's own samples, and all machines that it knows of."""

    def read(name: str) -> bytes | None:
        with suppress(OSError):
            return (run_dir / name).read_bytes()[:_MAX_BYTES]
        return None

    status = json_object(read(STATUS))
    machines = status.get("machines")
    own = [(len(machines) if isinstance(machines, list) else 1, METRICS)]
    return _report(str(run_dir), read, status, {"machines": machines}, own, _saved(status))


def gather_store(store: Store, job: str) -> Report:
    """Of the store: all machines that ever told it anything."""

    def read(name: str) -> bytes | None:
        return store.get(f"{job}/{name}", limit_bytes=_MAX_BYTES)

    status, found = json_object(read(STATUS)), json_object(read("ledger.json"))
    number = len(ledger.parse(found))
    metrics = [(n, f"machines/{n:04d}/{METRICS}") for n in range(1, number + 1)]
    whole = surveying.survey_readable(store, job).checkpoints
    saved = tuple(
        Saved(name=c.ref.name, step=c.ref.step, where="store", written_at=c.written_at.isoformat()) for c in whole
    )
    names = {one.name for one in saved}
    alone = (one for one in _saved(status) if one.where == _DISK and one.name not in names)
    saved = (*saved, *(replace(one, where=_LEFT) for one in alone))
    return _report(f"{store.address}/{job}", read, status, found, metrics, saved)


def _report(  # noqa: PLR0913, PLR0917  # what differs between a folder and a store
    address: str,
    read: Read,
    status: Mapping[str, Any],
    machines: Mapping[str, Any],
    metrics: list[tuple[int, str]],
    saved: tuple[Saved, ...],
) -> Report:
    job = json_object(read("job.json"))
    return Report(
        address=address,
        status=in_plain(status),
        command=one_line(str(job.get("command", ""))),
        spendings=share_out(ledger.parse(machines), max((s.step for s in saved if s.where != _LEFT), default=0)),
        checkpoints=saved,
        samples=tuple(sample for number, name in metrics for sample in _samples(number, read(name) or b"")),
    )


def _saved(status: Mapping[str, Any]) -> tuple[Saved, ...]:
    found = []
    for entry in status.get("checkpoints") or []:
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            where = " and ".join(word for key, word in (("local", _DISK), ("offsite", "store")) if entry.get(key))
            name = f"step-{int(entry['step']):08d}-{entry['id']}"
            written_at = str(entry.get("written_at", ""))
            found.append(Saved(name=name, step=int(entry["step"]), where=where, written_at=written_at))
    return tuple(found)


def _samples(machine: int, raw: bytes) -> Iterator[Sample]:
    for line in raw.splitlines()[-_MAX_SAMPLES:]:
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            found = json_object(line)
            loss, rate = found.get("loss"), found.get("steps_per_s")
            at, step = datetime.fromisoformat(found["at"]), int(found["step"])
            if at.tzinfo is None or not 0 <= step < _MAX_STEP:
                continue
            yield Sample(
                at=at,
                machine=machine,
                attempt=int(found["attempt"]),
                step=step,
                loss=None if loss is None else float(loss),
                steps_per_s=None if rate is None else float(rate),
            )
