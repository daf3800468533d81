"""
The ledger of a run: what each machine did for it, when, and what it cost. `ledger.json` in the
store is all that one machine knows of another.

Whoever holds the lease writes it: its own entry anew, the others' as they are. Times of one
entry are by one clock; those of two machines are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from runner.errors import in_plain
from runner.facts import Attempt, Earlier, Ending, Exit, History, Machine, Server
from runner.policy.money import billed, tariff_of
from vramfarm.protocol import Ref

FORMAT: Final = 1
MAX_MACHINES: Final = 1000
MAX_ATTEMPTS: Final = 1000  # of a machine, the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The live attempt, as it was seen last."""

    step: int
    first_step_at: datetime | None
    from_log: bool = False


def identify_machine(id_: str, where: str, server: Server | None, paid_from: datetime) -> Machine:
    """What does not change of a machine's entry."""
    machine = Machine(id=id_, where=where, opened_at=paid_from, paid_from=paid_from, seen_at=paid_from)
    if server is None:
        return machine
    price, currency = server.price_per_hour, server.currency
    return replace(machine, provider=server.provider, server=server.id, price_per_hour=price, currency=currency)


def describe_machine(history: History, known: Machine, now: datetime, running: Running | None = None) -> Machine:
    """This machine's entry as of now; `known` is what does not change (`identify_machine`), `running` how far the live attempt is."""
    opened = history.opened_at or now
    attempts = history.attempts
    if running and history.running:
        first_step_at = history.running.first_step_at or running.first_step_at
        last = replace(history.running, step=running.step, first_step_at=first_step_at, from_log=running.from_log)
        attempts = (*attempts[:-1], last)
    return replace(
        known,
        opened_at=opened,
        seen_at=now,
        is_anew=history.earlier.is_anew,
        concluded_at=history.conclusion.at if history.conclusion else None,
        outcome=history.conclusion.outcome if history.conclusion else "",
        reason=history.conclusion.reason if history.conclusion else "",
        attempts=attempts,
        distrusted=tuple(sorted({*history.earlier.distrusted, *history.distrusted})),
    )


def merge(machines: tuple[Machine, ...], mine: Machine) -> tuple[Machine, ...]:
    """All machines in the order of their coming, with this one's newest entry: an upload that took long has an old one."""
    if any(_knows_more(machine, mine) for machine in machines):
        return machines
    others = tuple(machine for machine in machines if machine.id != mine.id)
    theirs = {attempt.id for machine in others for attempt in machine.attempts}
    # a folder that was kept and restored brings another machine's attempts along
    mine = replace(mine, attempts=tuple(a for a in mine.attempts if a.id not in theirs))
    at = next((number for number, machine in enumerate(machines) if machine.id == mine.id), len(others))
    return (*others[:at], mine, *others[at:])


def _knows_more(theirs: Machine, mine: Machine) -> bool:
    later = theirs.seen_at > mine.seen_at and len(theirs.attempts) >= len(mine.attempts)  # a clock may be put back
    return theirs.id == mine.id and later


def cost(machine: Machine) -> Decimal:
    """What it has cost until it was last seen; nothing where nobody bills."""
    if not machine.price_per_hour:
        return Decimal(0)
    seconds = (machine.seen_at - machine.paid_from).total_seconds()
    return billed(Decimal(machine.price_per_hour), seconds, tariff_of(machine.provider))


def sum_up(machines: tuple[Machine, ...], *, but: str) -> Earlier:
    """What the others did. Limits count from the last machine on that the operator reopened the run on."""
    others = tuple(machine for machine in machines if machine.id != but)
    begin = max((number for number, machine in enumerate(others) if machine.is_anew), default=0)
    counted = others[begin:]
    return Earlier(
        num_machines=len(others),
        last_attempt=max((a.number for machine in others for a in machine.attempts), default=0),
        duration=sum((machine.seen_at - machine.opened_at for machine in counted), timedelta()),
        cost=sum((cost(machine) for machine in counted), Decimal(0)),
        distrusted=tuple(sorted({mark for machine in others for mark in machine.distrusted})),
    )


def is_void(attempt: int | None, machines: tuple[Machine, ...]) -> bool:
    """Whether an end after this attempt was one only until the next: numbers go on over machines, clocks do not."""
    return attempt is not None and any(made.number > attempt for machine in machines for made in machine.attempts)


# ------------------------------------------------------------------------------------- JSON


def dump(machines: tuple[Machine, ...]) -> dict[str, Any]:
    """What `parse` reads; texts and numbers only."""
    return {"format": FORMAT, "machines": [dump_machine(machine) for machine in machines]}


def dump_machine(machine: Machine) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(machine).items() if name != "attempts"}
    times: dict[str, str | None] = {name: getattr(machine, name).isoformat() for name in _TIMES}
    times["concluded_at"] = machine.concluded_at.isoformat() if machine.concluded_at else None
    attempts = [dump_attempt(attempt) for attempt in machine.attempts[-MAX_ATTEMPTS:]]
    marks = [list(mark) for mark in machine.distrusted]
    return {**fields, **times, "cost": str(cost(machine)), "attempts": attempts, "distrusted": marks}


def dump_attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "id": attempt.id,
        "resume": None if attempt.resume is None else asdict(attempt.resume),
        "lineage": attempt.lineage,
        "boot_id": attempt.boot_id,
        "launched_at": attempt.launched_at.isoformat(),
        "first_step_at": attempt.first_step_at.isoformat() if attempt.first_step_at else None,
        "ended_at": attempt.ended_at.isoformat() if attempt.ended_at else None,
        "ending": attempt.ending,
        "code": attempt.exit.code if attempt.exit else None,
        "step": attempt.step,
        "from_log": attempt.from_log,
        "reason": attempt.reason,
        "left": attempt.left,
        "world_size": attempt.world_size,
        "steps_per_s": attempt.steps_per_s,
    }


_TEXTS: Final = ("where", "provider", "server", "outcome", "reason")
_TIMES: Final = ("opened_at", "paid_from", "seen_at")


def parse(fields: object) -> tuple[Machine, ...]:
    """Entries that can be read. Nothing in a store is trusted: what is no entry is left out."""
    if not isinstance(fields, Mapping) or not isinstance(fields.get("machines"), list):
        return ()
    return tuple(_parse_all(in_plain(fields["machines"][:MAX_MACHINES])))


def _parse_all(entries: list[Any]) -> Iterator[Machine]:
    for entry in entries:
        with suppress(KeyError, TypeError, ValueError, InvalidOperation, AttributeError, OverflowError):
            yield parse_machine(entry)


def parse_machine(entry: Mapping[str, Any]) -> Machine:
    """`ValueError` and the like if it is none."""
    price = str(entry.get("price_per_hour") or "")
    if price and not Decimal(0) <= Decimal(price) < Decimal("1e6"):
        raise ValueError("no price")
    known: dict[str, Any] = {name: str(entry.get(name) or "")[:500] for name in _TEXTS}
    known |= {name: _instant(entry[name]) for name in _TIMES}
    return Machine(
        id=str(entry["id"])[:500],
        price_per_hour=price,
        currency=str(entry.get("currency") or "EUR")[:10],
        is_anew=bool(entry.get("is_anew")),
        concluded_at=_moment(entry.get("concluded_at")),
        attempts=tuple(_parse_attempt(found) for found in entry.get("attempts", [])),
        distrusted=tuple((_count(number), _count(step)) for number, step in entry.get("distrusted", [])),
        **known,
    )


def _parse_attempt(found: Mapping[str, Any]) -> Attempt:
    resume = found.get("resume")
    return Attempt(
        number=_count(found["number"]),
        id=str(found["id"]),
        resume=None if resume is None else Ref(**{**resume, "step": _count(resume["step"])}),
        lineage=int(found["lineage"]),
        boot_id=str(found.get("boot_id", "")),
        launched_at=_instant(found["launched_at"]),
        first_step_at=_moment(found.get("first_step_at")),
        ended_at=_moment(found.get("ended_at")),
        ending=Ending(found["ending"]) if found.get("ending") else None,
        exit=Exit(code=found.get("code")) if found.get("ending") else None,
        step=_count(found.get("step", 0)),
        from_log=found.get("from_log") is True,
        reason=str(found.get("reason", ""))[:2000],
        left=str(found.get("left", ""))[:2000],
        world_size=int(found.get("world_size", 0)),
        steps_per_s=float(found.get("steps_per_s") or 0.0),
    )


_YEARS: Final = range(2000, 3000)


def _moment(text: str | None) -> datetime | None:
    return _instant(text) if text else None


def _instant(text: str) -> datetime:
    """`ValueError` for a time without a zone, which could not be compared, and for one that nothing can be added to."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None or moment.year not in _YEARS:
        raise ValueError("a time without a zone, or of another age")
    return moment


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise ValueError("no number of steps or attempts")
    return value
