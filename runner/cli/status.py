"""`status`: how a run is doing, from its folder or, without a way into the machine, from the store."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

from runner.cli.output import out, out_json
from runner.cli.refusal import REFUSAL, newest_word
from runner.cli.runs import STATUS, add_run, find_in_store, find_run, is_alive
from runner.cli.stores import Address, read_small
from runner.errors import JobError, StoreError, in_plain
from runner.facts import LeaseState, Verdict
from runner.figures import span
from runner.supervise.process import find
from vramfarm.protocol import Env

Status = Mapping[str, Any]
_DRAINING: Final = "DRAINING"  # as `words.phase` has it
_LEFT: Final = "LEFT"  # the same: of a runner that was asked to leave, whoever reads it, and from wherever
_FRESH: Final = timedelta(minutes=3)  # the copy in the store is renewed every minute


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="all of it, as JSON")


def run(args: argparse.Namespace) -> int:
    status, alive = read_status(args.run)
    left = (
        0 if alive is not False or find_in_store(args.run, os.environ) else count_left(find_run(args.run, os.environ))
    )
    if args.json:
        out_json({**status, "runner_alive": alive, "processes_left": left})
        return 0
    for line in describe(status, alive=alive, now=datetime.now(UTC), left=left):
        out(line)
    return 0


def read_status(which: str | None) -> tuple[Status, bool | None]:
    """The status and whether its runner lives; None where that cannot be seen from here."""
    if address := find_in_store(which, os.environ):
        return _look_into_store(address), None
    run_dir = find_run(which, os.environ)
    refusal = run_dir / REFUSAL
    if not refusal.is_file():
        return _parse(str(run_dir / STATUS), _read(run_dir)), is_alive(run_dir)
    told = _parse(str(refusal), refusal.read_bytes())
    status = _parse(str(run_dir / STATUS), _read(run_dir)) if (run_dir / STATUS).is_file() else {"job": run_dir.name}
    return newest_word(status, told), is_alive(run_dir)


def _look_into_store(address: Address) -> Status:
    """A run whose only start was refused has no status yet."""
    try:
        refusal = _parse(f"{address}/{REFUSAL}", read_small(address, REFUSAL))
    except StoreError:
        return _parse(f"{address}/{STATUS}", read_small(address, STATUS))
    try:
        status = _parse(f"{address}/{STATUS}", read_small(address, STATUS))
    except StoreError:
        status = {"job": address.text.rpartition("/")[2]}
    return newest_word(status, refusal)


def count_left(run_dir: Path) -> int:
    """Ranks and savers of the run that live on without their runner."""
    return len(find(Env.RUN, str(run_dir.resolve())))


def _read(run_dir: Path) -> bytes:
    try:
        return (run_dir / STATUS).read_bytes()
    except FileNotFoundError:
        raise JobError(f"{run_dir}: no {STATUS} yet", hint="the runner writes it within seconds of its start") from None


def _parse(where: str, raw: bytes) -> Status:
    try:
        status = in_plain(json.loads(raw))
    except (ValueError, RecursionError):
        status = None
    if not isinstance(status, dict):
        raise JobError(f"{where}: expected a JSON object, found something else")
    return {name: value for name, value in status.items() if _SENSE.get(name, _is_anything)(value)}


def _is_anything(_: object) -> bool:
    return True


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_number(value: object) -> bool:
    return value is None or (type(value) in {int, float} and abs(value) < _HUGE)  # type: ignore[arg-type]  # a number


def _is_moment(value: object) -> bool:
    with suppress(ValueError, TypeError):
        return value is None or datetime.fromisoformat(value).tzinfo is not None  # type: ignore[arg-type]  # raises
    return False


def _is_object(value: object, moment: str = "", number: str = "") -> bool:
    return value is None or (
        isinstance(value, dict) and _is_moment(value.get(moment)) and _is_number(value.get(number))
    )


def _are_objects(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(map(_is_object, value)))


def _is_verdict(value: object) -> bool:
    return value is None or (isinstance(value, dict) and isinstance(value.get("reasons", []), list))


_HUGE: Final = 1e18
_SENSE: Final[Mapping[str, Callable[[object], bool]]] = {  # of a bucket: whoever writes there may write anything
    **dict.fromkeys(("job", "phase", "outcome", "cost", "afterwards"), _is_text),
    **dict.fromkeys(("step", "max_steps", "loss", "steps_per_s", "eta_s", "attempt"), _is_number),
    **dict.fromkeys(("updated_at", "deadline_at"), _is_moment),
    **dict.fromkeys(("env_changes", "refusal"), _is_object),
    "spent": partial(_is_object, number="goodput"),
    **dict.fromkeys(("draining", "waiting"), partial(_is_object, moment="until")),
    "checkpoints": _are_objects,
    "verdict": _is_verdict,
}


def describe(status: Status, *, alive: bool | None, now: datetime, left: int = 0) -> Iterator[str]:
    """A few lines for a person; a field that is missing is left out. `left`: processes that outlived the runner."""
    alive = False if alive is None and status.get("phase") == _LEFT else alive
    phase = _phase(status, alive=alive, left=left, now=now)
    yield "  ".join(filter(None, (str(status.get("job", "?")), phase, _progress(status))))
    waiting = _waiting(status, alive=alive)
    if message := waiting or status.get("message"):
        yield f"  {message}"
    if (refusal := status.get("refusal")) and not alive:
        where = f" on {refusal['server']}" if refusal.get("server") else ""
        yield f"  the last start{where} ended with exit code {refusal.get('exit_code')}: {refusal.get('reason')}"
    yield from _verdict(status.get("verdict"))
    yield from _lease(status.get("lease"))
    yield from _trouble(status)
    if is_draining(status, alive=alive, now=now):
        yield f"  {describe_draining(status)}"
    yield f"  attempt {status.get('attempt', 0)}, {_checkpoints(status)}"
    if money := _time_and_money(status, now, alive=alive):
        yield f"  {money}"
    if after := status.get("afterwards"):
        yield f"  {after}"
    yield f"  {_freshness(status, alive=alive, now=now, left=left)}"


def _waiting(status: Status, *, alive: bool | None) -> str:
    """For what of the store an attempt waits, until when, and what then; a runner that is gone waits for nothing."""
    found = status.get("waiting")
    is_over = alive is False or status.get("outcome") or status.get("refusal")
    return str(found.get("what") or "") if isinstance(found, dict) and not is_over else ""


def _verdict(verdict: object) -> Iterator[str]:
    """Only what is worth a line: changes that were made, a machine that was refused."""
    words: dict[str, str] = {
        Verdict.CHANGES: "preflight",
        Verdict.SWAP: "machine refused",
        Verdict.REFUSE: "this job cannot run",
    }
    if isinstance(verdict, dict) and (word := words.get(str(verdict.get("verdict")))):
        yield from (f"  {word}: {reason}" for reason in verdict.get("reasons", ()))


def _lease(lease: object) -> Iterator[str]:
    """Only where it is in the way of copies."""
    if not isinstance(lease, dict):
        return
    words: dict[str, str] = {
        LeaseState.LAPSED: "the lease of the run cannot be renewed: copies wait for the store, and nothing else does",
        LeaseState.WATCHING: f"watching whether {lease.get('who') or 'another runner'} still has this run",
        LeaseState.TAKEN: f"{lease.get('who') or 'another runner'} has this run now",
    }
    if line := words.get(str(lease.get("state"))):
        yield f"  {line}"


def _trouble(status: Status) -> Iterator[str]:
    """Of the attempt that runs: whether it hangs, who is slow, why it is not saved, what was changed for it."""
    if status.get("outcome"):
        return
    for name, word in (("hang", "it hangs: "), ("straggler", ""), ("save_error", "not saved: "), ("outputs_stuck", "")):
        if told := status.get(name):
            yield f"  {word}{told}"
    if changes := status.get("env_changes"):
        yield f"  changed for this attempt: {', '.join(f'{name}={value}' for name, value in changes.items())}"


def is_draining(status: Status, *, alive: bool | None, now: datetime) -> bool:
    """Whether the job is over and its runner is not: it still gets things off the machine."""
    if not status.get("outcome") or status.get("phase") != _DRAINING:
        return False
    updated = status.get("updated_at")  # from afar: the last copy of an ended run says it, too
    is_fresh = bool(updated) and now - datetime.fromisoformat(str(updated)) < _FRESH
    return is_fresh if alive is None else alive


def describe_draining(status: Status) -> str:
    """What a runner that has not ended yet does, for whom the bill is not over."""
    found = status.get("draining")
    found = found if isinstance(found, dict) else {}
    until = f", until {datetime.fromisoformat(found['until']):%H:%M} UTC at the latest" if found.get("until") else ""
    what = f": {found['what']}" if found.get("what") else ""
    return f"the runner has not ended: it copies data off the machine{until}{what}; Ctrl-C or SIGTERM ends it before"


def _phase(status: Status, *, alive: bool | None, left: int, now: datetime) -> str:
    if status.get("refusal") and not alive and not left:
        return "refused"
    if outcome := status.get("outcome"):
        if is_draining(status, alive=alive, now=now):
            return f"{outcome}, draining (exit code {status.get('exit_code')} to come)"
        return f"{outcome} (exit code {status.get('exit_code')})"
    if left:
        return "without a runner"
    return "not running" if alive is False else str(status.get("phase", "")).lower()


def _progress(status: Status) -> str:
    step, max_steps = status.get("step") or 0, status.get("max_steps")
    parts = [f"step {step}/{max_steps}" if max_steps else f"step {step}"]
    if status.get("steps_from") == "log":
        parts[0] += " (by its log)"
    if (loss := status.get("loss")) is not None:
        parts.append(f"loss {loss:.4g}")
    if rate := status.get("steps_per_s"):
        parts.append(f"{rate:.3g} steps/s")
    if (left := status.get("eta_s")) is not None and not status.get("outcome"):
        parts.append(f"{span(left)} left")
    return "  ".join(parts)


def _checkpoints(status: Status) -> str:
    checkpoints = status.get("checkpoints") or []
    if not checkpoints:
        return "no checkpoint yet"
    newest = checkpoints[-1]
    safe = sum(bool(checkpoint.get("verified")) for checkpoint in checkpoints)
    alone = sum(bool(checkpoint.get("local") and not checkpoint.get("offsite")) for checkpoint in checkpoints)
    there = f"{safe} verified in the store" + (f", {alone} only on its disk" if alone else "")
    where = there if status.get("store") else "only on this disk"
    return f"{len(checkpoints)} checkpoints, {where}, the newest at step {newest.get('step')}"


def _time_and_money(status: Status, now: datetime, *, alive: bool | None) -> str:
    parts = []
    if (deadline := status.get("deadline_at")) and not status.get("outcome"):
        left = (datetime.fromisoformat(deadline) - now).total_seconds()
        what = "the server stops" if status.get("server") else "the run ends"
        when = f"{what} at the latest in {span(left)}" if left > 0 else f"the deadline was {deadline}"
        parts.append(_unwatched(left, is_rented=bool(status.get("server"))) if alive is False and left > 0 else when)
    if cost := status.get("cost"):
        parts.append(f"cost so far {cost}")
    if isinstance(spent := status.get("spent"), dict) and spent.get("useful_s"):
        parts.append(f"goodput {spent['goodput']:.0%}")
    if server := status.get("server"):
        parts.append(f"server {server}")
    return ", ".join(parts)


def _unwatched(left_s: float, *, is_rented: bool) -> str:
    """On a rented server the guardian may live, and start the runner again."""
    if is_rented:
        return f"the deadline is in {span(left_s)}, and only a guardian that still lives watches it"
    return f"the deadline is in {span(left_s)}, and nobody watches it"


def _freshness(status: Status, *, alive: bool | None, now: datetime, left: int) -> str:
    updated = status.get("updated_at")
    seen = f"as of {span((now - datetime.fromisoformat(updated)).total_seconds())} ago" if updated else "of unknown age"
    if left and not status.get("outcome"):
        who = "1 process lives on without it" if left == 1 else f"{left} processes live on without it"
        return f"{seen}; the runner is not alive, {who}: start it again with the same job.yaml and it goes on with them"
    if status.get("refusal") and not alive:
        return f"{seen}; mend that, then start it again"
    if alive is False and status.get("outcome") and status.get("phase") in {_DRAINING, _LEFT}:
        return f"{seen}; the runner is not alive and had not got everything off the machine: start it again and it does"
    if alive is False and not status.get("outcome"):
        return f"{seen}; the runner is not alive: start it again with the same job.yaml and it goes on"
    return seen
