"""
The assumed API over HTTP. Each function is one operation; the farm does the work.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import AfterValidator
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from runner.simulator.catalogue import numbers
from runner.simulator.farm import Farm
from runner.simulator.gate import App, Gate
from runner.simulator.model import (
    Activity,
    Advance,
    Country,
    Faults,
    Machine,
    Moment,
    Money,
    Save,
    SaveSpec,
    ServerCreate,
    ServerUpdate,
    State,
    StopRequest,
)
from runner.simulator.problem import Problem

_REMEMBERED_S: Final = 86_400


def _card_count(number: int) -> int:
    if number not in {1, 2, 4, 8}:
        raise ValueError("must be 1, 2, 4 or 8")
    return number


ServerId = Annotated[str, Query(pattern=r"^srv_[a-z0-9]{6,32}$")]
AtLeast = Annotated[int, Query(ge=1)]
CardCount = Annotated[int, AfterValidator(_card_count)]
Limit = Annotated[int, Query(ge=1, le=200)]
Cursor = Annotated[str, Query(max_length=256)]
Key = Annotated[str, Header(alias="Idempotency-Key", min_length=8, max_length=128, pattern=r"^[A-Za-z0-9._:-]+$")]


def make_app(farm: Farm, *, per_minute: int, creates_per_minute: int) -> App:
    """The whole API, ready for uvicorn."""
    api = FastAPI(title="VRAMfarm, simulated", openapi_url=None)
    api.add_exception_handler(Problem, _answer_problem)
    api.add_exception_handler(RequestValidationError, _answer_invalid)
    api.add_exception_handler(HTTPException, _answer_http)
    api.add_exception_handler(OSError, _answer_trouble)
    for add in (_add_machines, _add_servers, _add_stop_and_reading, _add_saves, _add_account, _add_controls):
        add(api, farm)
    return Gate(api, api.router.routes, farm, per_minute=per_minute, creates=creates_per_minute)


def _add_machines(api: FastAPI, farm: Farm) -> None:
    @api.get("/v1/machines", operation_id="listMachines")
    def list_machines(  # noqa: PLR0913, PLR0917  # the operation's own filters
        gpu: Annotated[list[str], Query()] = [],  # noqa: B006  # FastAPI copies it
        count: CardCount | None = None,
        min_vram_gb: AtLeast = 1,
        min_ram_gb: AtLeast = 1,
        min_cpu_cores: AtLeast = 1,
        min_disk_gb: AtLeast = 1,
        min_rental_days: AtLeast = 1,
        min_pcie_gb_s: Annotated[float, Query(gt=0, allow_inf_nan=False)] = 0.001,
        country: Annotated[list[Country], Query()] = [],  # noqa: B006  # as above
        min_driver: Annotated[str, Query(pattern=r"^\d+(\.\d+){0,2}$")] = "0",
        min_cuda: Annotated[str, Query(pattern=r"^\d+\.\d+$")] = "0.0",
        max_price: Money | None = None,
        sort: Annotated[str, Query(pattern="^-?(price|vram|pcie)$")] = "price",
        limit: Limit = 50,
        cursor: Cursor = "",
    ) -> dict[str, Any]:
        found = [
            machine
            for machine in farm.machines
            if (not gpu or machine.gpu in gpu)
            and count in {None, machine.count}
            and machine.vram_gb >= min_vram_gb
            and machine.ram_gb >= min_ram_gb
            and machine.cpu_cores >= min_cpu_cores
            and machine.disk_gb >= min_disk_gb
            and machine.max_rental_days >= min_rental_days
            and machine.pcie_gb_s >= min_pcie_gb_s
            and (not country or machine.country in country)
            and numbers(machine.driver) >= numbers(min_driver)
            and numbers(machine.cuda) >= numbers(min_cuda)
            and (max_price is None or machine.price_per_hour <= max_price)
        ]
        found.sort(key=_ORDER[sort.lstrip("-")], reverse=sort.startswith("-"))
        return _page("machines", [machine.model_dump(mode="json") for machine in found], limit, cursor)

    @api.get("/v1/machines/{machine_id}", operation_id="getMachine")
    def get_machine(machine_id: str) -> dict[str, Any]:
        for machine in farm.machines:
            if machine.id == machine_id:
                return machine.model_dump(mode="json")
        raise Problem(404, f"{machine_id}: no such machine")


_ORDER: Final[dict[str, Callable[[Machine], Any]]] = {
    "price": lambda machine: machine.price_per_hour,
    "vram": lambda machine: machine.vram_gb,
    "pcie": lambda machine: machine.pcie_gb_s,
}


def _add_servers(api: FastAPI, farm: Farm) -> None:
    @api.post("/v1/servers", operation_id="createServer", status_code=201)
    def create_server(wish: ServerCreate, key: Key) -> Response:
        def create() -> JSONResponse:
            rented = farm.create(wish)
            return JSONResponse(farm.show(rented), 201, {"Location": f"/v1/servers/{rented.server.id}"})

        return _once(farm, f"createServer {key}", wish.model_dump_json(), create)

    @api.get("/v1/servers", operation_id="listServers")
    def list_servers(
        state: Annotated[list[State], Query()] = [],  # noqa: B006  # FastAPI copies it
        label: Annotated[str | None, Query(max_length=64)] = None,
        limit: Limit = 50,
        cursor: Cursor = "",
    ) -> dict[str, Any]:
        found = [
            farm.show(rented)
            for rented in farm.servers()
            if (not state or rented.server.state in state) and label in {None, rented.server.label}
        ]
        return _page("servers", found, limit, cursor)

    @api.get("/v1/servers/{server_id}", operation_id="getServer")
    def get_server(server_id: str) -> dict[str, Any]:
        return farm.show(farm.find(server_id))

    @api.patch("/v1/servers/{server_id}", operation_id="updateServer")
    def update_server(server_id: str, wish: ServerUpdate) -> dict[str, Any]:
        return farm.show(farm.update(server_id, wish))

    @api.get("/v1/self", operation_id="getSelf")
    def get_self(request: Request) -> dict[str, Any]:
        return farm.show(farm.find(request.state.caller))


def _add_stop_and_reading(api: FastAPI, farm: Farm) -> None:
    @api.post("/v1/servers/{server_id}/stop", operation_id="stopServer")
    def stop_server(server_id: str, wish: StopRequest) -> JSONResponse:
        rented, begun = farm.stop(server_id, wish)
        return JSONResponse(farm.show(rented), 202 if begun else 200)

    @api.get("/v1/servers/{server_id}/logs", operation_id="getServerLogs")
    def get_logs(server_id: str, tail: Annotated[int, Query(ge=1, le=10_000)] = 200) -> PlainTextResponse:
        rented = farm.find(server_id)
        try:
            text = farm.host.log(server_id).read_text(errors="replace")
        except FileNotFoundError:
            text = ""
        for value in rented.secrets.values():
            text = text.replace(value, "***") if value else text
        return PlainTextResponse("".join(text.splitlines(keepends=True)[-tail:]))

    @api.get("/v1/servers/{server_id}/events", operation_id="listServerEvents")
    def list_events(server_id: str, limit: Limit = 50, cursor: Cursor = "") -> dict[str, Any]:
        farm.find(server_id)
        return _page("events", [event.model_dump(mode="json") for event in farm.events(server_id)], limit, cursor)


def _add_saves(api: FastAPI, farm: Farm) -> None:
    @api.post("/v1/servers/{server_id}/saves", operation_id="createSave", status_code=202)
    def create_save(server_id: str, spec: SaveSpec, key: Key) -> Response:
        def save() -> JSONResponse:
            made = farm.save(server_id, spec)
            return JSONResponse(made.model_dump(mode="json"), 202, {"Location": f"/v1/saves/{made.id}"})

        return _once(farm, f"createSave {server_id} {key}", spec.model_dump_json(), save)

    @api.get("/v1/saves", operation_id="listSaves")
    def list_saves(server_id: ServerId | None = None, limit: Limit = 50, cursor: Cursor = "") -> dict[str, Any]:
        saves = [save.model_dump(mode="json") for save in farm.store.all(Save, owner=server_id)]
        return _page("saves", saves, limit, cursor)

    @api.get("/v1/saves/{save_id}", operation_id="getSave")
    def get_save(save_id: str, request: Request) -> dict[str, Any]:
        save = farm.find_save(save_id)
        if request.state.caller not in {"", save.server_id}:
            raise Problem(403, f"{save_id} is not a save of this key's server")
        return save.model_dump(mode="json")

    @api.delete("/v1/saves/{save_id}", operation_id="deleteSave", status_code=204)
    def delete_save(save_id: str) -> Response:
        farm.delete_save(save_id)
        return Response(status_code=204)


def _add_account(api: FastAPI, farm: Farm) -> None:
    @api.get("/v1/balance", operation_id="getBalance")
    def get_balance() -> dict[str, Any]:
        balance, burn = farm.balance(), farm.burn()
        hours = None if burn == 0 else float(balance / burn)
        runs_out = None if hours is None else datetime.fromtimestamp(farm.now().timestamp() + hours * 3600, UTC)
        return {
            "balance": str(balance),
            "currency": "EUR",
            "burn_per_hour": str(burn),
            "runs_out_at": runs_out and runs_out.isoformat().replace("+00:00", "Z"),
        }

    @api.get("/v1/usage", operation_id="listUsage")
    def list_usage(
        server_id: ServerId | None = None,
        from_: Annotated[Moment | None, Query(alias="from")] = None,
        to: Moment | None = None,
        limit: Limit = 50,
        cursor: Cursor = "",
    ) -> dict[str, Any]:
        servers = [rented.server for rented in farm.servers() if server_id in {None, rented.server.id}]
        found = [
            {"server_id": s.id, "label": s.label, "billing": farm.bill(s).model_dump(mode="json")}
            for s in servers
            if (from_ is None or (s.billing.ended_at or farm.now()) >= from_) and (to is None or s.created_at <= to)
        ]
        return _page("usage", found, limit, cursor)


def _add_controls(api: FastAPI, farm: Farm) -> None:
    @api.post("/v1/_sim/clock", operation_id="simAdvanceClock")
    def advance_clock(wish: Advance) -> dict[str, str]:
        return {"now": farm.advance(wish.advance_seconds).isoformat().replace("+00:00", "Z")}

    @api.put("/v1/_sim/faults", operation_id="simSetFaults", status_code=204)
    def set_faults(wish: Faults) -> Response:
        farm.faults = wish.faults
        return Response(status_code=204)

    @api.put("/v1/_sim/servers/{server_id}/activity", operation_id="simSetActivity")
    def set_activity(server_id: str, wish: Activity) -> dict[str, Any]:
        farm.set_activity(server_id, wish)
        if wish.exit_code is not None:
            farm.end_container(server_id, wish.exit_code)
        return farm.show(farm.find(server_id))

    @api.post("/v1/_sim/servers/{server_id}/vanish", operation_id="simVanish")
    def vanish(server_id: str) -> dict[str, Any]:
        return farm.show(farm.vanish(server_id))

    @api.get("/v1/_sim/outbox", operation_id="simOutbox")
    def outbox() -> dict[str, Any]:
        return {"emails": [email.model_dump(mode="json") for email in farm.emails()]}


def _once(farm: Farm, key: str, body: str, act: Callable[[], JSONResponse]) -> Response:
    """Act, and remember the answer under the key in the same transaction; or give the remembered one again."""
    digest = hashlib.sha256(body.encode()).hexdigest()
    with farm.store.transaction():
        known = json.loads(farm.store.text("answer", key) or "null")
        if known is not None and farm.now().timestamp() - known["at"] < _REMEMBERED_S:
            if known["digest"] != digest:
                raise Problem(422, "this key came with another body before", code="idempotency_key_reused")
            headers = {**known["headers"], "Idempotency-Replayed": "true"}
            return JSONResponse(known["body"], known["status"], headers, media_type=known["media"])
        answer = _acted(act)
        headers = {"Location": answer.headers["location"]} if "location" in answer.headers else {}
        record = {
            "at": farm.now().timestamp(),
            "digest": digest,
            "status": answer.status_code,
            "headers": headers,
            "body": json.loads(bytes(answer.body)),
            "media": answer.media_type,
        }
        farm.store.put("answer", key, json.dumps(record))
        return answer


def _acted(act: Callable[[], JSONResponse]) -> JSONResponse:
    try:
        return act()
    except Problem as problem:  # raised before anything was written, so it is an answer like another
        return _problem(problem)


def _page(name: str, entries: Sequence[dict[str, Any]], limit: int, cursor: str) -> dict[str, Any]:
    if cursor and not (cursor.isascii() and cursor.isdigit()):
        raise Problem(422, "cursor: expected the next_cursor of the page before")
    start = int(cursor or 0)
    more = len(entries) > start + limit
    return {name: entries[start : start + limit], "next_cursor": str(start + limit) if more else None}


def _problem(problem: Problem) -> JSONResponse:
    return JSONResponse(problem.fields, problem.status, problem.headers, media_type="application/problem+json")


async def _answer_problem(_: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return _problem(error)


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = Problem(error.status_code, str(error.detail), code="not_found" if error.status_code == 404 else "")  # noqa: PLR2004
    problem.headers = dict(error.headers or {})
    if error.status_code == 405:  # noqa: PLR2004  # the framework names what the first route of that path allows
        problem.headers["Allow"] = ", ".join(sorted(_methods(request)))
    return _problem(problem)


async def _answer_trouble(_: Request, error: Exception) -> Response:
    """A full disk, or an engine that does not answer."""
    return _problem(Problem(503, f"{type(error).__name__}: {error}"))


def _methods(request: Request) -> set[str]:
    routes = (route for route in request.app.router.routes if isinstance(route, Route))
    return {
        method
        for route in routes
        if route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
        if method != "HEAD"
    }


async def _answer_invalid(_: Request, error: Exception) -> Response:
    """400 for what is no JSON or has no key for repeats, 422 for JSON that is wrong."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    malformed = any(e["type"] == "json_invalid" or e["loc"][0] == "header" for e in found)
    errors = [{"pointer": "/" + "/".join(map(str, e["loc"][1:])), "message": str(e["msg"])} for e in found]
    detail = "; ".join(f"{e['pointer']}: {e['message']}" for e in errors)
    return _problem(Problem(400 if malformed else 422, detail, errors=errors))
