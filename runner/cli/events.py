"""`events`: what the runner did, one line each, as its journal has it."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from runner.cli.output import out
from runner.cli.runs import add_follow, add_run, find_in_store, find_run, is_alive, refuse_follow
from runner.cli.stores import Address, open_run
from runner.errors import StoreError, in_plain
from runner.storage import journal

_LOOK_S: Final = 0.5
_JOURNAL: Final = "journal.jsonl"
_MAX_BYTES: Final = 64 << 20  # of one machine
_SHOWN_FIRST: Final = ("event", "at")


def configure(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_follow(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object per line, as in the journal")


def run(args: argparse.Namespace) -> int:
    if address := find_in_store(args.run, os.environ):
        return _from_the_store(args, address)
    run_dir = find_run(args.run, os.environ)
    told = 0
    while True:
        lives = args.follow and is_alive(run_dir)  # before the read: what came after is read in the next turn
        told = _tell(run_dir / _JOURNAL, told, as_json=args.json)
        if not lives:
            return 0
        time.sleep(_LOOK_S)


def _tell(path: Path, told: int, *, as_json: bool) -> int:
    """Tell what comes after the first `told` events; returns how many there are."""
    events = journal.events(path)
    _print(events[told:], as_json=as_json)
    return len(events)


def _from_the_store(args: argparse.Namespace, address: Address) -> int:
    """Machine after machine, in the order of their coming: their clocks are not compared."""
    refuse_follow(args)
    run = open_run(address)
    found = (e.key for e in run.store.list(f"{run.job}/machines/") if e.key.endswith(f"/{_JOURNAL}"))
    keys = sorted(key for key in found if key.split("/")[-2].isdecimal())
    if not keys:
        raise StoreError(
            f"{address}: expected the journal of a machine, found none",
            hint="the runner writes it with its first copy; is the name of the run right?",
        )
    for key in keys:
        events = journal.parse(run.store.get(key, limit_bytes=_MAX_BYTES) or b"")
        number = key.split("/")[-2].lstrip("0")
        _print([{**event, "of_machine": number} for event in events], as_json=args.json)
    return 0


def _print(events: Iterable[Mapping[str, Any]], *, as_json: bool) -> None:
    for event in events:
        out(json.dumps(event, sort_keys=True) if as_json else describe(event))


def describe(event: Mapping[str, Any]) -> str:
    """`2026-01-01 03:12:40  exited  ending=failed code=1 …`; what is empty is left out."""
    event, stamp = in_plain(event), " " * 19
    with suppress(KeyError, TypeError, ValueError, OverflowError):  # of a bucket: it may be anything
        stamp = f"{datetime.fromisoformat(event['at']).astimezone():%Y-%m-%d %H:%M:%S}"
    rest = {
        name: value
        for name, value in event.items()
        if name not in _SHOWN_FIRST and value is not None and value is not False and value not in ("", {}, [])
    }
    return f"{stamp}  {event.get('event', '?')!s:<12} " + " ".join(f"{k}={_show(v)}" for k, v in rest.items())


def _show(value: object) -> str:
    return value if isinstance(value, str) and " " not in value else json.dumps(value, separators=(",", ":"))
