"""
Vast.ai, by its public reference (docs.vast.ai/api-reference, https://console.vast.ai/api/v0).

An instance finds itself by CONTAINER_ID and has CONTAINER_API_KEY, a key for this instance
alone, which may stop and destroy it. *Destroy* (DELETE) ends the bill and deletes the disk;
*stop* keeps the disk, and costs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from runner.adapters.providers.answers import NOT_FOUND, OK, bearer, missing, read_fields, unknown
from runner.adapters.providers.contract import Answer, Keep, Reply, Send
from runner.facts import Server, ServerState

KEY: Final = "CONTAINER_API_KEY"
_URL: Final = "VAST_URL"
NAMES: Final = ("CONTAINER_ID", "VAST_CONTAINERLABEL", KEY, _URL)
_HALTED: Final = frozenset({"stopped", "exited"})
_HINTS: Final[Mapping[int, str]] = {
    401: f"the key is not accepted; check {KEY}",
    403: f"the key may not do this; check {KEY}",
    429: "too many requests",
}


def identify(env: Mapping[str, str]) -> Server | None:
    """This instance: CONTAINER_ID beside something else of Vast's, since the name is nobody's alone."""
    label = env.get("VAST_CONTAINERLABEL", "")
    number = env.get("CONTAINER_ID") or label.removeprefix("C.")
    if not number or not (label or env.get(KEY)):
        return None
    return Server(provider="vast", id=number, currency="USD")


def read(server: Server, env: Mapping[str, str], send: Send) -> Answer:
    """The instance's state, its price, the end of its rental, and what its disk would cost when stopped."""
    reply = _call("GET", server, None, env, send)
    if reply.status not in OK:
        return _not_there() if _is_missing(reply) else unknown(reply, _HINTS)
    fields = read_fields(reply)
    instance = fields.get("instances")
    if isinstance(instance, dict):
        return _state(instance)
    if "instances" in fields and instance is None:
        return _not_there()
    return Answer(ServerState.UNKNOWN, f"expected an instance, got {str(dict(fields))[:120]}")


def stop(server: Server, keep: Keep, code: int, env: Mapping[str, str], send: Send) -> Answer:
    """Destroy the instance, or stop it if its disk is to be kept."""
    del code
    reply = (
        _call("DELETE", server, None, env, send)
        if keep.folder is None
        else _call("PUT", server, {"state": "stopped"}, env, send)
    )
    if _is_missing(reply):
        return _not_there()
    if reply.status in OK and read_fields(reply).get("success") is True:
        return Answer(ServerState.STOPPING, "asked for")
    return unknown(reply, _HINTS)


def explain(keep: Keep, seen: Answer) -> str:
    """Destroy costs nothing after it; stop goes on costing."""
    if keep.folder is None:
        return "the instance is destroyed and its disk deleted; nothing is billed after it"
    rate = seen.keeping or "what the host asks for storage"
    return f"the instance is stopped; its whole disk stays and costs {rate} until you destroy the instance"


def _state(instance: Mapping[str, Any]) -> Answer:
    actual, current = instance.get("actual_status"), instance.get("cur_state")
    if "actual_status" not in instance and current is None:
        return Answer(ServerState.UNKNOWN, f"expected an instance with a status, got {str(dict(instance))[:120]}")
    return Answer(
        _judge(str(actual), str(current), str(instance.get("intended_status"))),
        f"{actual}, wished {instance.get('intended_status')}",
        price_per_hour=_text(_number(instance.get("dph_total"))),
        ends_at=_moment(_number(instance.get("end_date"))),
        keeping=_keeping(instance),
    )


def _judge(actual: str, current: str, intended: str) -> ServerState:
    if current == "unloaded" or (actual in _HALTED and intended == "stopped"):
        return ServerState.GONE
    return ServerState.STOPPING if intended == "stopped" else ServerState.RUNNING


def _keeping(instance: Mapping[str, Any]) -> str:
    """`storage_cost` is for a GB and month."""
    rate, size = _number(instance.get("storage_cost")), _number(instance.get("disk_space"))
    return f"{rate * size:.2f} USD a month ({size.normalize():f} GB)" if rate and size else ""


def _number(value: object) -> Decimal | None:
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        return None
    return number if number.is_finite() and number > 0 else None


def _text(number: Decimal | None) -> str:
    return "" if number is None else str(number)


def _moment(seconds: Decimal | None) -> str:
    try:
        return "" if seconds is None else datetime.fromtimestamp(int(seconds), UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        return ""


def _not_there() -> Answer:
    return Answer(ServerState.GONE, "the provider does not know this instance")


def _is_missing(reply: Reply) -> bool:
    """The API's own 404 is JSON that says so; a proxy's is not."""
    return reply.status == NOT_FOUND and "success" in read_fields(reply)


def _call(method: str, server: Server, wish: object, env: Mapping[str, str], send: Send) -> Reply:
    if lacking := missing((KEY,), env):
        return lacking
    url = f"{(env.get(_URL) or 'https://console.vast.ai').rstrip('/')}/api/v0/instances/{server.id}/"
    body = None if wish is None else json.dumps(wish).encode()
    return send(method, url, headers=bearer(env[KEY], body), body=body)
