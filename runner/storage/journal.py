"""
An append-only file of what the runner did, one JSON object a line.

Only what cannot be observed again goes in, before the act it announces. A line without its
newline was never written: the reader drops it, and the next append starts after it.
"""

import errno
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from runner.facts import Attempt, Conclusion, Decision, Diagnosis, Earlier, Ending, Exit, History, Outcome
from runner.storage.disk import Disk
from vramfarm.protocol import Ref

Event = Mapping[str, Any]
_LINE_CHARS: Final = 500


# Events are made here and folded below, side by side, so that neither can change alone.


def accepted(at: datetime) -> Event:
    return {"event": "accepted", "at": at.isoformat()}


def reopened(*, start_over: bool, order: str, at: datetime, machine: str = "") -> Event:
    return {"event": "reopened", "start_over": start_over, "order": order, "at": at.isoformat(), "machine": machine}


def joined(machine: str, earlier: Earlier, at: datetime) -> Event:
    return {
        "event": "joined",
        "machine": machine,
        "num_machines": earlier.num_machines,
        "last_attempt": earlier.last_attempt,
        "duration_s": earlier.duration.total_seconds(),
        "cost": str(earlier.cost),
        "distrusted": earlier.distrusted,
        "at": at.isoformat(),
    }


def launched(attempt: Attempt) -> Event:
    return {
        "event": "launched",
        "number": attempt.number,
        "id": attempt.id,
        "resume": None if attempt.resume is None else asdict(attempt.resume),
        "origin": attempt.origin,
        "lineage": attempt.lineage,
        "boot_id": attempt.boot_id,
        "env": dict(attempt.env),
        "world_size": attempt.world_size,
        "global_batch": attempt.global_batch,
        "at": attempt.launched_at.isoformat(),
    }


def stepped(number: int, at: datetime) -> Event:
    return {"event": "stepped", "number": number, "at": at.isoformat()}


def killed(number: int, reason: str, at: datetime) -> Event:
    return {"event": "killed", "number": number, "reason": reason, "at": at.isoformat()}


def left_behind(number: int, reason: str, at: datetime) -> Event:
    return {"event": "left_behind", "number": number, "reason": reason, "at": at.isoformat()}


def distrusted(number: int, step: int, reason: str) -> Event:
    return {"event": "distrusted", "number": number, "step": step, "reason": reason}


def found_unusable(names: frozenset[str]) -> Event:
    """All that are now, so that the last such event counts."""
    return {"event": "unusable", "names": sorted(names)}


def interrupted(number: int, reason: str, at: datetime) -> Event:
    return {"event": "interrupted", "number": number, "reason": reason, "at": at.isoformat()}


def exited(  # noqa: PLR0913  # the fields of the event
    ending: Ending,
    exit_: Exit,
    *,
    step: int,
    reason: str,
    at: datetime,
    diagnosis: Diagnosis | None = None,
    steps_per_s: float | None = None,
    from_log: bool = False,
) -> Event:
    return {
        "event": "exited",
        "ending": ending,
        "code": exit_.code,
        "step": step,
        "steps_from": "log" if from_log else None,
        "steps_per_s": steps_per_s,
        "reason": reason,
        "diagnosis": None if diagnosis is None else _dump_diagnosis(diagnosis),
        "at": at.isoformat(),
    }


def _dump_diagnosis(diagnosis: Diagnosis) -> Event:
    """A line of a log may have 64 kB; its beginning tells it apart."""
    return asdict(replace(diagnosis, primary_line=diagnosis.primary_line[:_LINE_CHARS], env=dict(diagnosis.env)))


def concluded(conclusion: Conclusion) -> Event:
    return {
        "event": "concluded",
        "outcome": conclusion.outcome,
        "reason": conclusion.reason,
        "at": conclusion.at.isoformat(),
    }


def gone_on(at: datetime) -> Event:
    return {"event": "gone_on", "at": at.isoformat()}


def stop_sent(life: str, *, keep: bool, at: datetime) -> Event:
    return {"event": "stop_sent", "life": life, "keep": keep, "at": at.isoformat()}


def waiting(line: str, until: datetime, at: datetime) -> Event:
    """For whoever asks in the morning why nothing began; it changes no decision."""
    return {"event": "waiting", "what": line, "until": until.isoformat(), "at": at.isoformat()}


def stuck(line: str, at: datetime) -> Event:
    """The same of outputs that do not get into the store."""
    return {"event": "stuck", "what": line, "at": at.isoformat()}


def notified(key: str, at: datetime) -> Event:
    return {"event": "notified", "key": key, "at": at.isoformat()}


def fold(history: History, event: Event) -> History:  # noqa: C901, PLR0911, PLR0912  # one arm an event
    """The history after one more event; an event of a newer runner changes nothing."""
    match event:
        case {"event": "accepted", "at": at}:
            now = datetime.fromisoformat(at)
            first, opened = history.accepted_at or now, history.opened_at or now
            return replace(history, accepted_at=first, opened_at=opened)
        case {"event": "reopened", "start_over": start_over, "order": order, "at": at}:
            count = len(history.attempts)
            fresh = history.next_number if start_over else history.fresh_from
            machine = str(event.get("machine", ""))
            earlier = history.earlier
            if machine and machine == history.machine:
                earlier = replace(earlier, duration=timedelta(), cost=Decimal(0), is_anew=True)
            return replace(
                history,
                conclusion=None,
                orders=history.orders | {order},
                opened_at=datetime.fromisoformat(at),
                budget_from=count,
                reopened_on=machine,
                earlier=earlier,
                fresh_from=fresh,
            )
        case {"event": "joined"}:
            return _joined(history, event)
        case {"event": "launched"}:
            return replace(history, attempts=(*history.attempts, _attempt(event)))
        case {"event": "stepped", "at": at}:
            *before, last = history.attempts
            return replace(history, attempts=(*before, replace(last, first_step_at=datetime.fromisoformat(at))))
        case {"event": "killed", "reason": reason}:
            *before, last = history.attempts
            return replace(history, attempts=(*before, replace(last, killed=reason)))
        case {"event": "left_behind", "reason": reason}:
            *before, last = history.attempts
            return replace(history, attempts=(*before, replace(last, left=reason)))
        case {"event": "distrusted", "number": number, "step": step}:
            return replace(history, distrusted=(*history.distrusted, (number, step)))
        case {"event": "unusable", "names": names}:
            return replace(history, unusable=frozenset(names))
        case {"event": "interrupted", "number": number}:
            return replace(history, interrupted=number)
        case {"event": "exited"}:
            *before, last = history.attempts
            return replace(history, attempts=(*before, _ended(last, event)))
        case {"event": "concluded", "outcome": outcome, "reason": reason, "at": at}:
            conclusion = Conclusion(outcome=Outcome(outcome), reason=reason, at=datetime.fromisoformat(at))
            return replace(history, conclusion=conclusion)
        case {"event": "gone_on"}:
            return replace(history, conclusion=None)
        case {"event": "stop_sent", "life": life}:
            return replace(history, stop_sent_in=life)
        case {"event": "notified", "key": key, "at": at}:
            return replace(history, notified={**history.notified, key: datetime.fromisoformat(at)})
        case _:
            return history


def _joined(history: History, event: Event) -> History:
    """On another machine than before (a folder that was kept, restored there) its time begins anew."""
    machine, is_other = event["machine"], history.machine not in {"", event["machine"]}
    is_anew = history.reopened_on == machine
    return replace(
        history,
        machine=machine,
        opened_at=datetime.fromisoformat(event["at"]) if is_other else history.opened_at,
        earlier=Earlier(
            num_machines=event["num_machines"],
            last_attempt=event["last_attempt"],
            duration=timedelta() if is_anew else timedelta(seconds=event["duration_s"]),
            cost=Decimal(0) if is_anew else Decimal(event["cost"]),
            is_anew=is_anew,
            distrusted=tuple((number, step) for number, step in event.get("distrusted", ())),
        ),
    )


def _attempt(event: Event) -> Attempt:
    resume = event["resume"]
    return Attempt(
        number=event["number"],
        id=event["id"],
        resume=None if resume is None else Ref(**resume),
        origin=event.get("origin", ""),
        lineage=event["lineage"],
        boot_id=event["boot_id"],
        launched_at=datetime.fromisoformat(event["at"]),
        env=event.get("env") or {},
        world_size=event.get("world_size", 0),  # an older runner did not write it down
        global_batch=event.get("global_batch", 0),
    )


def _ended(attempt: Attempt, event: Event) -> Attempt:
    first = event.get("first_step_at")  # of an older runner, which told it only here
    return replace(
        attempt,
        ending=Ending(event["ending"]),
        exit=Exit(code=event["code"]),
        step=event["step"],
        from_log=event.get("steps_from") == "log",
        steps_per_s=event.get("steps_per_s") or 0.0,
        first_step_at=attempt.first_step_at or (datetime.fromisoformat(first) if first else None),
        reason=event["reason"],
        diagnosis=_diagnosis(event.get("diagnosis")),
        ended_at=datetime.fromisoformat(event["at"]),
    )


def _diagnosis(fields: Mapping[str, Any] | None) -> Diagnosis | None:
    """None, too, where a newer runner wrote one with other fields: the budget decides then."""
    with suppress(TypeError, ValueError, KeyError):
        return Diagnosis(**{**fields, "decision": Decision(fields["decision"])}) if fields else None
    return None


_TORN: Final = b"#torn\n"  # makes the line before it no JSON, whatever it is
_BALLAST: Final = ".ballast"
_BALLAST_BYTES: Final = 1 << 20


class Journal:
    """
    The file. It is read once; what this process appends is folded as it goes.

    A training run that fills the disk must not keep us from writing down how it ended: a
    megabyte is kept beside the journal, and given up when it is needed.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self._ballast = path.with_name(_BALLAST)
        self.history = read(path)
        if not self._ballast.exists():
            with suppress(OSError):  # no room for it: then there is none for checkpoints, and preflight says so
                disk.write(self._ballast, bytes(_BALLAST_BYTES))

    def append(self, event: Event) -> History:
        """The event is durable when this returns. Call it before the act it announces."""
        try:
            self._append(event)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT} or not self._ballast.exists():
                raise
            self._disk.remove(self._ballast)
            self._append(event)
        self.history = fold(self.history, event)
        return self.history

    def note(self, event: Event) -> History:
        """
        The same where the act is right whether or not it is written down: a disk that takes no line must not keep a
        person from being told, nor an attempt from being asked to leave. Then it is known in this life only.
        """
        try:
            return self.append(event)
        except OSError:
            self.history = fold(self.history, event)
            return self.history

    def _append(self, event: Event) -> None:
        new = not self._path.exists()
        if not new and not _ends_with_newline(self._path):
            self._disk.append(self._path, _TORN)  # a line that never was must not become one
        self._disk.append(self._path, json.dumps(event, sort_keys=True).encode() + b"\n")
        self._disk.sync(self._path)
        if new:
            self._disk.sync(self._path.parent)


def read(path: Path) -> History:
    """The history in a journal; an empty one where there is no file."""
    history = History()
    for event in events(path):
        history = fold(history, event)
    return history


def events(path: Path) -> list[Event]:
    """All whole lines, oldest first."""
    return parse(path.read_bytes()) if path.exists() else []


def parse(content: bytes) -> list[Event]:
    """The same, of a journal's bytes."""
    found: list[Event] = []
    for raw in content.split(b"\n")[:-1]:
        try:
            event = json.loads(raw)
        except ValueError:
            continue  # torn by a crash
        if isinstance(event, dict):
            found.append(event)
    return found


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(0, 2)
        if file.tell() == 0:
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"
