"""
`sweep`: the last line of defence, from outside. Stops what `submit` rented on this host and
whose deadline is over, however dead the server's own guardian and the provider's own limit are.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from runner.adapters.providers import vramfarm, with_secrets
from runner.adapters.providers.contract import Keep
from runner.adapters.providers.http import make_send
from runner.cli.output import out, out_json
from runner.cli.submit import WORKSPACE, Record, read_record, state_folder
from runner.errors import JobError
from runner.facts import Server, ServerState

_NOT_STOPPED = 1


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="what was found and done, as JSON")


def run(args: argparse.Namespace) -> int:
    env = with_secrets(os.environ)
    if not env.get(vramfarm.KEY):
        raise JobError(f"sweep: expected the account's key in {vramfarm.KEY}, found none")
    told = [line for path in sorted(state_folder(env).glob("*.json")) for line in _sweep(path, env)]
    if args.json:
        out_json(told)
    else:
        for line in told:
            out(f"{line['server']} of {line['job']}: {line['did']}")
        out(f"{len(told)} servers past their deadline" if told else "no server of ours is past its deadline")
    return _NOT_STOPPED if any(line["is_stopping"] == "no" for line in told) else 0


def _sweep(path: Path, env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """What was done about each server of a run that should be gone."""
    record, send = read_record(path), make_send(10.0)
    for server_id, fields in record.servers.items():
        if "gone" in fields or not _is_past(fields.get("deadline_at", "")):
            continue
        server = Server(provider="vramfarm", id=server_id)
        answer = vramfarm.read(server, env, send)
        if answer.state is ServerState.RUNNING:
            answer = vramfarm.stop(server, Keep(WORKSPACE, stop_anyway=True), 7, env, send)
        if answer.state is ServerState.GONE:
            _forget(record, server_id)
            continue
        stopping = answer.state is ServerState.STOPPING
        did = f"its deadline was {fields['deadline_at']}; {answer.detail}"
        yield {"job": path.stem, "server": server_id, "did": did, "is_stopping": "yes" if stopping else "no"}


def _forget(record: Record, server_id: str) -> None:
    record.remember(server_id, gone=datetime.now(UTC).isoformat(timespec="seconds"))


def _is_past(moment: str) -> bool:
    try:
        return datetime.now(UTC) >= datetime.fromisoformat(moment)
    except ValueError:
        return False  # given back before it had one
