"""What a reply of a JSON API says, for the provider modules. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from runner.adapters.providers.contract import Answer, Reply
from runner.errors import json_object
from runner.facts import ServerState

OK: Final = frozenset({200, 201, 202, 204})
NOT_FOUND: Final = 404
REFUSED: Final = frozenset({401, 403})


def read_fields(reply: Reply) -> Mapping[str, Any]:
    """The JSON object of the body; empty if it is something else."""
    return json_object(reply.body)


def unknown(reply: Reply, hints: Mapping[int, str]) -> Answer:
    """An answer that says nothing about the server, in words for a person."""
    return Answer(
        ServerState.UNKNOWN,
        _explain(reply, hints),
        retry_after_s=_retry_after(reply),
        refused=reply.status in REFUSED,
    )


def missing(names: tuple[str, ...], env: Mapping[str, str]) -> Reply | None:
    """A reply that says which of the variables are not set; None if all are."""
    lacking = [name for name in names if not env.get(name, "").strip()]
    if not lacking:
        return None
    return Reply(0, f"{' and '.join(lacking)} not set: without it the provider cannot be asked".encode())


def bearer(key: str, body: object = None) -> dict[str, str]:
    """Headers of a request with a key, and with JSON if it has a body."""
    headers = {"Authorization": f"Bearer {key.strip()}", "Accept": "application/json", "User-Agent": "vramfarm-runner"}
    return headers if body is None else {**headers, "Content-Type": "application/json"}


def _explain(reply: Reply, hints: Mapping[int, str]) -> str:
    if reply.status == 0:
        return reply.body.decode(errors="replace")
    fields = read_fields(reply)
    said = next((str(fields[name]) for name in ("detail", "message", "msg", "error") if fields.get(name)), "")
    said = said or reply.body[:120].decode(errors="replace")
    hint = hints.get(reply.status, "")
    return " ".join(f"HTTP {reply.status}: {said[:300]}{f' ({hint})' if hint else ''}".split())


def _retry_after(reply: Reply) -> float:
    text = reply.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else 0.0
