"""What a rehearsal says: a line a check, and the figures of the night. Pure: results in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from typing import Any, Final, assert_never

from runner.facts import History, Observed, Server
from runner.figures import size, span
from runner.job import Job
from runner.policy.limits import ends
from runner.policy.money import billed, tariff_of
from runner.policy.rehearsal import Check, Mark, Result, Scene, Seen, crash_costs_s, saves_every_s
from runner.words import tell_cadence, tell_end

_WIDTH: Final = 10
_SHORT_S: Final = 10.0


def describe(result: Result) -> Iterator[str]:
    """`ok       save       …`, and the cure below where it did not go well."""
    told = [_tell(result.check, result.figures)] if result.figures else []
    text = "; ".join([*filter(None, told), *filter(None, [result.problem])])
    yield f"{result.mark:<8} {result.check:<{_WIDTH}} {text}"
    if result.cure and result.mark is not Mark.OK:
        yield f"{'':<8} {'hint':<{_WIDTH}} {result.cure}"


def _tell(check: Check, found: Mapping[str, Any]) -> str:  # noqa: PLR0911  # one arm a check
    match check:
        case Check.STOP:
            return str(found["text"])
        case Check.NOTIFY:
            return (
                f"a test message was sent to {found['told']} address{'es' * (found['told'] != 1)}"
                if found["told"]
                else ""
            )
        case Check.PREFLIGHT:
            reasons = f" ({'; '.join(found['reasons'])})" if found["reasons"] else ""
            return f"verdict {found['verdict']}{reasons}, and launched, after {seconds(found['seconds'])}"
        case Check.FIRST_STEP:
            return f"{seconds(found['seconds'])} after the launch"
        case Check.SAVE:
            return _tell_save(found)
        case Check.STORE:
            return (
                f"{size(found['size_bytes'])} verified there {seconds(found['seconds'])} after the save: "
                f"a save every {span(found['save_interval_s'])} needs {size(found['needed_bytes_per_s'])}/s; "
                f"measured {size(found['bytes_per_s'])}/s"
            )
        case Check.CRASH:
            return _tell_crash(found)
        case Check.LEAVE:
            return _tell_leave(found)
        case Check.RESTORE:
            return (
                f"step {found['step']}, {size(found['size_bytes'])}, from the store into an empty folder in "
                f"{seconds(found['seconds'])}, every chunk compared"
            )
        case _:
            assert_never(check)


def _tell_save(found: Mapping[str, Any]) -> str:
    durable = f", durable in {seconds(found['seconds'])}" if found["seconds"] else ""
    stall = "" if found["stall_s"] is None else f", the slowest step meanwhile {seconds(found['stall_s'])} longer"
    room = f"{size(found['needed_bytes'])} needed on the disk (keep_last + 2), {size(found['room_bytes'])} there"
    return f"step {found['step']}, {size(found['size_bytes'])}{durable}{stall}; {room}"


def _tell_crash(found: Mapping[str, Any]) -> str:
    steps = max(found["killed_at_step"] - found["resumed_step"], 0)
    at = f" at step {found['killed_at_step']}" if found["killed_at_step"] else ""  # a framework tells none
    again = f" ({steps} steps repeated)" if at else ""
    return (
        f"rank {found['rank']} killed{at}: trains again {seconds(found['seconds'])} later, "
        f"from step {found['resumed_step']}{again}; first error named: {found['first_error'] or 'none'}"
    )


def _tell_leave(found: Mapping[str, Any]) -> str:
    at = f" at step {found['asked_at_step']}" if found["asked_at_step"] else ""
    saved = f", newest checkpoint of step {found['saved_step']}" if found["saved_step"] else ", no checkpoint"
    took = f"exit {found['exit_code']} after {seconds(found['seconds'])} (grace period {span(found['grace_s'])})"
    return f"SIGTERM{at}: {took}{saved}"


def seconds(took: float) -> str:
    """`0.4s`, `2m 05s`: below ten seconds tenths matter."""
    return f"{took:.1f}s" if took < _SHORT_S else span(took)


def night(  # noqa: PLR0913  # all that was found out
    job: Job, results: Sequence[Result], scene: Scene, found: Seen, *, server: Server | None, now: datetime
) -> Iterator[str]:
    """The figures of the night, from those of the rehearsal."""
    every_s = saves_every_s(scene, found)
    if (costs := crash_costs_s(every_s, results)) is not None:
        seldom = "" if scene.uses_library else f" (the script saves every {span(every_s)}, as seen here)"
        yield f"a crash costs at most {span(costs)}: what was trained since the last save{seldom}, that save, and the way back"
    at, why = min(ends(job.limits, now, server))
    seen = Observed(
        now=now,
        boot_id="",
        life="",
        local=found.local,
        last_save_s=found.save_s,
        last_upload_s=found.upload_s,
        deadline_at=at,
    )
    history = History(opened_at=now, attempts=tuple(replace(attempt, ending=None) for attempt in found.attempts))
    yield tell_end(job, history, seen, server)
    left_s = (at - now).total_seconds()
    price = Decimal(server.price_per_hour) if server and server.price_per_hour else None
    money = ""
    if price is not None and server is not None:
        money = f": at most {billed(price, left_s, tariff_of(server.provider))} {server.currency}"
    yield f"until the limit ({why}) {span(left_s)}{money or ', no price known'}"
    if advice := tell_cadence(job, history, seen):
        yield advice
