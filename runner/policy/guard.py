"""
What the guardian decides: when the deadline is, whether a dead runner is started again, how
long a server is held for a look, when the provider is asked again. And the words it reads.

The deadline is a moment of the wall clock, and also a time left by the monotonic clock,
taken when it was armed. Whichever comes first counts: a clock that is set back does not
lengthen the rental, one that is set forward past the deadline ends it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from runner.facts import Server, ServerState
from runner.policy.money import tariff_of

EARLY_ENDS: Final = frozenset({1, 2, 3, 4, 5})  # exit codes that a person wants to look at
DEFAULT_LIMIT: Final = timedelta(hours=24)
MAX_DEATHS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """How long the guardian waits, in seconds. Tests shorten them."""

    restart_first: float = 1.0
    restart_last: float = 30.0
    short_life: float = 60.0
    deaths_within: float = 600.0
    last_word: float = 30.0  # from the runner's last word to its end
    killed: float = 10.0  # from a kill to the end: who hangs in the kernel does not end
    silence: float = 60.0  # a runner that is to leave and says nothing for so long is stuck
    unheard: float = 600.0  # any other is told of then
    disk: float = 10.0  # for a small file
    ask_first: float = 2.0
    ask_last: float = 60.0
    read: float = 2.0  # between looks at a server that is stopping
    stopping: float = 600.0  # a stop that takes longer is asked for again
    alert: float = 600.0  # a stop that is not confirmed by then is told
    alert_again: float = 3600.0
    repeat_log: float = 600.0
    look: float = 1.0  # between looks at the clock and the stop file


@dataclass(frozen=True, slots=True, kw_only=True)
class Armed:
    """What must be known when all else is gone. Kept in memory, and in guardian.json across boots."""

    server: str
    first_boot_at: datetime
    deadline_at: datetime
    keep: str | None
    stop_anyway: bool = False  # at the job's own limit, too, when the folder cannot be saved
    run: str = ""  # the run folder: the mark of its processes
    rented: Server | None = None  # what is stopped then; None: a machine of one's own


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The last word. `hold_s` None: by the rule of `hold_until`."""

    code: int
    stop: bool
    keep: str | None = None
    hold_s: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Listeners:
    """Addresses of those who are told when something is wrong at the end. Secrets: never written down."""

    urls: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Death:
    """A life of the runner that ended without a last word. `at` is of the monotonic clock."""

    lived_s: float
    at: float


def arm(*, now: datetime, rented: Server | None, keep: str) -> Armed:
    """The deadline of a first boot: the default, or the end of the rental if that is earlier."""
    deadline = now + DEFAULT_LIMIT
    ends = parse_moment(rented.rental_ends_at) if rented else None
    if ends is not None:
        deadline = min(deadline, ends)
    return Armed(server=_id(rented), first_boot_at=now, deadline_at=deadline, keep=keep, rented=rented)


def rearm(stored: Armed, found: Server | None, host: str) -> Armed | None:
    """
    What an earlier boot armed, if it was on this server: the one that the environment names, or the
    one that an earlier job named, on a machine that still has the same name.
    """
    if found is not None:
        return replace(stored, rented=found) if stored.server == found.id else None
    return stored if stored.rented is not None and stored.rented.id == host else None


def _id(rented: Server | None) -> str:
    return rented.id if rented else ""


def is_due(deadline: datetime, now: datetime, ends_mono: float, now_mono: float) -> bool:
    """Whether the deadline is here by either clock."""
    return now >= deadline or now_mono >= ends_mono


def decide_restart(deaths: Sequence[Death], waits: Waits) -> float | None:
    """Seconds until the next start, or None: it dies again and again."""
    short = 0
    for death in reversed(deaths):
        if death.lived_s >= waits.short_life:
            break
        short += 1
    recent = [death for death in deaths[len(deaths) - short :] if deaths[-1].at - death.at <= waits.deaths_within]
    if len(recent) >= MAX_DEATHS:
        return None
    return min(waits.restart_first * 2.0 ** max(short - 1, 0), waits.restart_last)


def decide_wait(state: ServerState, retry_after_s: float, tries: int, waits: Waits) -> float:
    """Seconds until the provider is spoken to again: slower and slower, and never before it allows."""
    if state is ServerState.STOPPING:
        return max(waits.read, retry_after_s)
    backoff = min(waits.ask_first * 2.0 ** min(tries - 1, 16), waits.ask_last)
    return max(backoff, min(retry_after_s, 3600.0))


def hold_until(end: End, armed: Armed, now: datetime, override: str) -> datetime:
    """
    Until when a server is held for a look: as long as is said, else, after an early end,
    until the minutes that are paid anyway are used up, where there are any. Never past the deadline.
    """
    seconds = _seconds(override)
    seconds = end.hold_s if seconds is None else seconds
    if seconds is not None:
        until = now + timedelta(seconds=min(seconds, 1e9))
    elif end.code in EARLY_ENDS:
        paid = tariff_of(armed.rented.provider).minimum if armed.rented else timedelta()
        until = armed.first_boot_at + paid if paid else now
    else:
        until = now
    return min(until, armed.deadline_at)


def parse_word(raw: bytes, armed: Armed) -> End | Armed | Listeners:
    """The runner's word: its last, what is armed from now on, or whom to tell. ValueError if it is none of these."""
    fields = _object(raw)
    if isinstance(fields.get("end"), dict):
        return _parse_end(fields["end"])
    if isinstance(fields.get("notify"), list):
        return Listeners(tuple(map(str, fields["notify"])))
    if "server" in fields:
        rented = parse_server(fields["server"])
        return replace(armed, rented=rented, server=_id(rented))
    deadline = parse_moment(fields.get("deadline"))
    if deadline is None:
        raise ValueError(f"expected a deadline with a zone, a server, or an end, got {str(fields)[:120]}")
    run = str(fields.get("run") or armed.run)
    keep, stop_anyway = _folder(fields.get("keep", armed.keep)), fields.get("stop_anyway") is True
    return replace(armed, deadline_at=deadline, keep=keep, stop_anyway=stop_anyway, run=run)


def names_run(raw: bytes) -> str:
    """The run folder of a deadline, whose job is accepted then; empty for any other word."""
    fields = _object(raw)
    return str(fields.get("run") or "") if "deadline" in fields else ""


def _parse_end(fields: Mapping[str, Any]) -> End:
    code, stop, hold = fields.get("code"), fields.get("stop"), fields.get("hold_s")
    if type(code) is not int or not isinstance(stop, bool):
        raise ValueError(f"expected an end with a code and a stop, got {str(fields)[:120]}")
    return End(
        code=code & 0xFF,
        stop=stop,
        keep=_folder(fields.get("keep")),
        hold_s=_seconds(str(hold)),
        reason=" ".join(str(fields.get("reason", "")).split())[:500],
    )


def parse_armed(raw: bytes) -> Armed:
    """What `dump_armed` wrote; ValueError if it is something else."""
    fields = _object(raw)
    first, deadline = parse_moment(fields.get("first_boot_at")), parse_moment(fields.get("deadline_at"))
    if first is None or deadline is None:
        raise ValueError("no first_boot_at and deadline_at with a zone")
    return Armed(
        server=str(fields.get("server")),
        first_boot_at=first,
        deadline_at=deadline,
        keep=_folder(fields.get("keep")),
        stop_anyway=fields.get("stop_anyway") is True,
        run=str(fields.get("run") or ""),
        rented=parse_server(fields.get("rented")),
    )


def parse_server(value: object) -> Server | None:
    """A server as a JSON object has it; None for null. ValueError if it is something else."""
    if value is None:
        return None
    if not isinstance(value, dict) or not value.get("provider") or not value.get("id"):
        raise ValueError(f"expected a server with a provider and an id, got {str(value)[:120]}")

    def text(name: str) -> str:
        return str(value.get(name) or "")

    def words(name: str) -> tuple[str, ...]:
        return tuple(map(str, value.get(name) or ()))

    return Server(
        provider=text("provider"),
        id=text("id"),
        price_per_hour=text("price_per_hour"),
        currency=text("currency"),
        rental_ends_at=text("rental_ends_at"),
        keeping=text("keeping"),
        stop_command=words("stop_command"),
        status_command=words("status_command"),
    )


def _object(raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw)
    except RecursionError as error:
        raise ValueError("too deep") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{str(fields)[:40]!r} is no object")  # noqa: TRY004  # one error for all that is garbled
    return fields


def dump_armed(armed: Armed) -> bytes:
    return json.dumps(asdict(armed), default=datetime.isoformat).encode() + b"\n"


def parse_moment(value: object) -> datetime | None:
    """A moment with a zone, or None."""
    try:
        moment = datetime.fromisoformat(str(value))
        return moment.astimezone(UTC) if moment.tzinfo else None
    except (ValueError, OverflowError):
        return None


def _folder(value: object) -> str | None:
    return None if value is None else str(value)


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return max(seconds, 0.0) if seconds == seconds else None  # noqa: PLR0124  # not a number is no time
