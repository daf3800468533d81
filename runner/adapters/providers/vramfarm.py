"""
VRAMfarm. Its API is not public: addresses and fields here are an assumption, and this module
and the simulator are the only places that hold it.

The rule: what we do not understand is UNKNOWN, and UNKNOWN is never gone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, TypeVar
from urllib.parse import quote

from runner.adapters.providers.answers import NOT_FOUND, bearer, missing, read_fields, unknown
from runner.adapters.providers.contract import Answer, Keep, Reply, Send
from runner.facts import Offer, RentedServer, Server, ServerState

KEY: Final = "VRAMFARM_API_KEY"
_URL: Final = "VRAMFARM_API_URL"
NAMES: Final = ("VRAMFARM_SERVER_ID", _URL, KEY, "VRAMFARM_PRICE_PER_HOUR", "VRAMFARM_RENTAL_ENDS_AT")
_SERVER_KEY: Final = "vfs_"  # made for one server; valid until that server is final
_STATES: Final[Mapping[str, ServerState]] = {
    "queued": ServerState.RUNNING,
    "provisioning": ServerState.RUNNING,
    "pulling": ServerState.RUNNING,
    "running": ServerState.RUNNING,
    "saving": ServerState.STOPPING,
    "stopping": ServerState.STOPPING,
    "stopped": ServerState.GONE,
    "failed": ServerState.GONE,
}
_OK: Final = 200
_MOST_PAGES: Final = 50
_GB: Final = 10**9
_REASONS: Final[Mapping[int, str]] = {0: "job_succeeded", 7: "self_request", 8: "user_request"}  # by exit code
_HINTS: Final[Mapping[int, str]] = {
    401: f"the key is not accepted; check {KEY}",
    403: f"the key may not do this; check {KEY}",
    404: "no such server; check VRAMFARM_SERVER_ID",
    429: "too many requests",
}


def identify(env: Mapping[str, str]) -> Server | None:
    """This server, if VRAMFARM_SERVER_ID is set, by the provider or by hand."""
    if not env.get("VRAMFARM_SERVER_ID"):
        return None
    return Server(
        provider="vramfarm",
        id=env["VRAMFARM_SERVER_ID"],
        price_per_hour=env.get("VRAMFARM_PRICE_PER_HOUR", ""),
        rental_ends_at=env.get("VRAMFARM_RENTAL_ENDS_AT", ""),
    )


def read(server: Server, env: Mapping[str, str], send: Send) -> Answer:
    """The server's state."""
    reply = _call("GET", f"/servers/{server.id}", None, env, send)
    if reply.status == 401 and _code(reply) == "key_revoked" and env.get(KEY, "").startswith(_SERVER_KEY):  # noqa: PLR2004
        return Answer(ServerState.GONE, "the server's own key ended with it")
    return _understand(reply)


def stop(server: Server, keep: Keep, code: int, env: Mapping[str, str], send: Send) -> Answer:
    """Ask for the stop."""
    wish = {
        "save": None if keep.folder is None else {"path": keep.folder},
        "on_save_failure": "stop_anyway" if keep.stop_anyway else "keep_running",
        "reason": _REASONS.get(code, "job_failed"),
    }
    reply = _call("POST", f"/servers/{server.id}/stop", wish, env, send)
    if reply.status == 409 and _code(reply) == "stop_in_progress":  # noqa: PLR2004
        return Answer(ServerState.STOPPING, "another stop is under way")
    return _understand(reply)


# ------------------------------------------------------------- from outside, with an account's key


@dataclass(frozen=True)
class Trouble:
    """No answer, or one that is no help."""

    detail: str
    code: str = ""
    status: int = 0
    retry_after_s: float = 0.0

    @property
    def is_certain(self) -> bool:
        """Whether nothing was done; else it may have been, and asking again with the same key finds out."""
        return 400 <= self.status < 500 and self.code != "idempotency_in_progress"  # noqa: PLR2004


_T = TypeVar("_T")


def rent(wish: Mapping[str, Any], key: str, env: Mapping[str, str], send: Send) -> RentedServer | Trouble:
    """
    Rent what `wish` says (`kind`, `machine_id` or `gpu` and `count`, `image`, `args`, `env`, `secrets`, `label`, …).

    With the same `key` and wish within a day it is rented once, however often this is called.
    """
    return _read_one(_call("POST", "/servers", dict(wish), env, send, **{"Idempotency-Key": key}), _rental)


def list_rentals(label: str, env: Mapping[str, str], send: Send) -> tuple[RentedServer, ...] | Trouble:
    """Servers of the account with this label, newest first, those that are gone, too. They are stopped by `stop`."""
    found: list[RentedServer] = []
    for reply in _pages(f"/servers?limit=100&label={quote(label, safe='')}", env, send):
        page = _read_one(reply, lambda fields: [_rental(server) for server in fields["servers"]])
        if isinstance(page, Trouble):
            return page
        found += page
    return tuple(found)


def _pages(path: str, env: Mapping[str, str], send: Send) -> Iterator[Reply]:
    """One after the other, to the last; one that is no page names no next."""
    cursor = ""
    for _ in range(_MOST_PAGES):
        reply = _call("GET", f"{path}&cursor={quote(cursor, safe='')}" if cursor else path, None, env, send)
        yield reply
        cursor = str(read_fields(reply).get("next_cursor") or "")
        if not cursor:
            return


def read_balance(env: Mapping[str, str], send: Send) -> Decimal | Trouble:
    """What the account has; a machine is rented out only to one that can pay an hour of it."""
    return _read_one(_call("GET", "/balance", None, env, send), lambda fields: Decimal(str(fields["balance"])))


def _read_one(reply: Reply, make: Callable[[Mapping[str, Any]], _T]) -> _T | Trouble:
    fields = read_fields(reply)
    if reply.status not in {200, 201}:
        said = unknown(reply, _HINTS)
        return Trouble(said.detail, str(fields.get("code", "")), reply.status, said.retry_after_s)
    try:
        return make(fields)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        return Trouble(f"an answer that is not understood: {type(error).__name__}: {str(error)[:120]}")


def _rental(fields: Mapping[str, Any]) -> RentedServer:
    answer = _state(fields)
    return RentedServer(
        id=str(fields["id"]),
        state=answer.state,
        detail=answer.detail,
        label=str(fields.get("label") or ""),
        machine=str(fields["machine"]["id"]),
        created_at=str(fields["created_at"]),
        rental_ends_at=str(fields.get("rental_ends_at") or ""),
        price_per_hour=Decimal(str(fields["billing"]["price_per_hour"])),
        cost=Decimal(str(fields["billing"]["cost"])),
    )


def read_offers(env: Mapping[str, str], send: Send) -> tuple[Offer, ...] | str:
    """The catalogue: machines that can be rented now; or why it could not be read."""
    offers: list[Offer] = []
    for reply in _pages("/machines?limit=100", env, send):
        machines = read_fields(reply).get("machines")
        if reply.status != _OK or not isinstance(machines, list):
            return unknown(reply, _HINTS).detail
        offers += [offer for machine in machines if (offer := _offer(machine)) is not None]
    return tuple(offers)


def _offer(machine: Any) -> Offer | None:  # noqa: ANN401  # JSON
    """None for a machine that we do not understand: it is not offered to anybody."""
    try:
        price = Decimal(str(machine["price_per_hour"]))
        offer = Offer(
            id=str(machine["id"]),
            card=str(machine["gpu"]),
            name=str(machine["gpu_name"]),
            cards=int(machine["count"]),
            card_bytes=int(machine["vram_gb_per_card"]) * _GB,
            cpu_cores=int(machine["cpu_cores"]),
            ram_bytes=int(machine["ram_gb"]) * _GB,
            disk_bytes=int(machine["disk_gb"]) * _GB,
            price_per_hour=price,
            currency=str(machine["currency"]),
            max_rental_days=int(machine["max_rental_days"]),
            available=bool(machine["available"]),
        )
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None
    return offer if price.is_finite() and price >= 0 and offer.cards > 0 else None


# ---------------------------------------------------------------------------------- the words


def explain(keep: Keep, seen: Answer) -> str:
    """A stop deletes the disk, whatever is kept."""
    del seen
    if keep.folder is None:
        return "the disk is deleted with the server; nothing is billed after it"
    then = "the server is stopped all the same" if keep.stop_anyway else "the server goes on, and is billed"
    return f"{keep.folder} is saved by the provider, the rest of the disk is deleted; billing ends when it is saved; if that fails, {then}"


def _call(
    method: str, path: str, wish: dict[str, Any] | None, env: Mapping[str, str], send: Send, **headers: str
) -> Reply:
    if lacking := missing((_URL, KEY), env):
        return lacking
    body = None if wish is None else json.dumps(wish).encode()
    return send(method, env[_URL].rstrip("/") + path, headers={**bearer(env[KEY], body), **headers}, body=body)


def _understand(reply: Reply) -> Answer:
    fields = read_fields(reply)
    if reply.status in {200, 202}:
        return _state(fields)
    if reply.status == NOT_FOUND and fields.get("code") == "not_found":  # a proxy's 404 has no code
        return Answer(ServerState.GONE, "the provider does not know this server")
    return unknown(reply, _HINTS)


def _state(fields: Mapping[str, Any]) -> Answer:
    word = str(fields.get("state", ""))
    if word not in _STATES:
        return Answer(ServerState.UNKNOWN, f"expected a server with a state, got {str(dict(fields))[:120]}")
    billing, reason = fields.get("billing"), fields.get("state_reason")
    cost = str(billing.get("cost", "")) if isinstance(billing, dict) else ""
    return Answer(_STATES[word], f"{word} ({reason})" if reason else word, cost=cost)


def _code(reply: Reply) -> str:
    return str(read_fields(reply).get("code", ""))
