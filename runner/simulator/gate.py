"""
What stands before the API: injected faults, keys, limits of rate. Plain ASGI, so that it can
also not answer.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

from starlette.routing import BaseRoute, Match

from runner.simulator.farm import Farm
from runner.simulator.model import Fault
from runner.simulator.problem import Problem

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_FOREVER_S: Final = 3600.0
_WINDOW_S: Final = 60.0
_OF_A_SERVER_KEY: Final = frozenset(
    {"getSelf", "getServer", "stopServer", "getServerLogs", "listServerEvents", "createSave", "getSave"}
)
_PROXY_PAGE: Final = b"<html><head><title>403 Forbidden</title></head><body><h1>Forbidden</h1></body></html>"


class Gate:
    """Wraps the API. Puts the caller (`""` the account, else a server's id) into the scope's state."""

    def __init__(self, app: App, routes: Iterable[BaseRoute], farm: Farm, *, per_minute: int, creates: int) -> None:
        self._app = app
        self._routes = list(routes)
        self._farm = farm
        self._limits = {"createServer": creates}
        self._per_minute = per_minute
        self._windows: dict[tuple[str, str], tuple[float, int]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        operation, parameters = self._operation(scope)
        fault = self._farm.take_fault(operation) if operation != "createSave" else None
        if fault is not None and not await _act(fault, receive, send):
            return
        try:
            headers = {} if operation.startswith("sim") else self._admit(scope, operation, parameters)
        except Problem as problem:
            await _answer(send, problem)
            return
        if fault is not None and fault.kind == "drop_after_commit":
            await self._app(scope, receive, _swallow)
            await _hang_up(send)
            return
        await self._app(scope, receive, _with_headers(send, headers))

    def _operation(self, scope: Scope) -> tuple[str, dict[str, str]]:
        for route in self._routes:
            match, child = route.matches(scope)
            if match is Match.FULL:
                return getattr(route, "operation_id", "") or "", child.get("path_params", {})
        return "", {}

    def _admit(self, scope: Scope, operation: str, parameters: dict[str, str]) -> dict[str, str]:
        """Check key, rate and reach; returns headers for the answer."""
        key = _bearer(scope)
        caller = self._caller(key)
        headers = self._count(key, operation)
        scope.setdefault("state", {})["caller"] = caller
        if caller and (operation not in _OF_A_SERVER_KEY or parameters.get("server_id", caller) != caller):
            raise Problem(403, f"a server's key may not call {operation} here")
        if not caller and operation == "getSelf":
            raise Problem(403, "getSelf works only with a server's key")
        return headers

    def _caller(self, key: str) -> str:
        if not key:
            raise Problem(401, "expected a header `Authorization: Bearer <key>`", code="missing_key")
        if key == self._farm.account_key:
            return ""
        rented = self._farm.server_of(key)
        if rented is None:
            raise Problem(401, "the bearer key is not known")
        if rented.server.state.is_final:
            raise Problem(401, "the server of this key is final", code="key_revoked")
        return rented.server.id

    def _count(self, key: str, operation: str) -> dict[str, str]:
        limit = self._limits.get(operation, self._per_minute)
        name = (key, operation if operation in self._limits else "")
        now = time.monotonic()
        began, used = self._windows.get(name, (now, 0))
        if now - began >= _WINDOW_S:
            began, used = now, 0
        left = int(_WINDOW_S - (now - began)) + 1
        self._windows[name] = (began, used + 1)
        headers = {
            "RateLimit": f'"minute";r={max(limit - used - 1, 0)};t={left}',
            "RateLimit-Policy": f'"minute";q={limit};w={int(_WINDOW_S)}',
        }
        if used >= limit:
            problem = Problem(429, f"more than {limit} requests a minute")
            problem.headers = {**headers, "Retry-After": str(left)}
            raise problem
        return headers


async def _act(fault: Fault, receive: Receive, send: Send) -> bool:
    """Do what the fault says; returns whether the request goes on."""
    match fault.kind:
        case "slow":
            await asyncio.sleep(fault.delay_ms / 1000)
            return True
        case "status":
            no_capacity = fault.operation == "createServer" and fault.status == 409  # noqa: PLR2004
            problem = Problem(fault.status, "an injected fault", code="no_capacity" if no_capacity else "")
            if fault.retry_after is not None:
                problem.headers = {"Retry-After": str(fault.retry_after)}
            await _answer(send, problem)
        case "html_body":
            await _respond(send, 403, b"text/html", _PROXY_PAGE, {})
        case "timeout":
            await _wait_for_the_client(receive, fault.delay_ms / 1000 or _FOREVER_S)
            await _hang_up(send)
        case "reset":
            await _hang_up(send, reset=True)
        case "drop_after_commit":
            return True
    return False


async def _swallow(_: Message) -> None:
    """The answer of a request whose client is not to hear it."""


async def _wait_for_the_client(receive: Receive, seconds: float) -> None:
    """Until the client gives up, or that long: a server that is told to end does not wait for us."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    try:
        await asyncio.wait_for(gone(), seconds)
    except TimeoutError:
        return


async def _hang_up(send: Send, *, reset: bool = False) -> None:
    """End the connection without an answer. ASGI has no word for it: uvicorn's own transport is asked."""
    transport = send.__self__.transport  # type: ignore[attr-defined]  # a bound method of uvicorn's cycle
    if reset:
        linger = struct.pack("ii", 1, 0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    transport.abort()
    await asyncio.sleep(0.01)  # else uvicorn answers 500 before it sees that nobody is there


def _bearer(scope: Scope) -> str:
    headers = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


async def _answer(send: Send, problem: Problem) -> None:
    body = json.dumps(problem.fields).encode()
    await _respond(send, problem.status, b"application/problem+json", body, problem.headers)


async def _respond(send: Send, status: int, kind: bytes, body: bytes, headers: dict[str, str]) -> None:
    fields = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *_encoded(headers)]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


def _with_headers(send: Send, headers: dict[str, str]) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *_encoded(headers)]
        await send(message)

    return sending


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]
