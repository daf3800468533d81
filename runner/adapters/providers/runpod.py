"""
RunPod, by its public REST reference (docs.runpod.io/api-reference, https://rest.runpod.io/v1).

A pod finds itself by RUNPOD_POD_ID and has RUNPOD_API_KEY, a key for this pod alone. Whether
the REST API takes such a key is not documented, the older GraphQL API does: a key that REST
refuses is tried there, in a header, never in the address.

A pod whose process ends is started again; what ends the bill is *terminate* (DELETE), which
deletes the volume disk. *Stop* keeps it, and costs. A network volume outlives both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from runner.adapters.providers.answers import NOT_FOUND, OK, REFUSED, bearer, missing, read_fields, unknown
from runner.adapters.providers.contract import Answer, Keep, Reply, Send
from runner.facts import Server, ServerState

KEY: Final = "RUNPOD_API_KEY"
_REST: Final = "RUNPOD_REST_URL"
_GRAPHQL: Final = "RUNPOD_API_BASE_URL"  # the name that RunPod's own Python client reads
NAMES: Final = ("RUNPOD_POD_ID", KEY, _REST, _GRAPHQL)
_STATES: Final[Mapping[str, ServerState]] = {
    "RUNNING": ServerState.RUNNING,
    "EXITED": ServerState.GONE,
    "TERMINATED": ServerState.GONE,
}
_STOPPED_GB_MONTH: Final = Decimal("0.20")  # a stopped pod's volume disk, docs.runpod.io/pods/storage/types
_HINTS: Final[Mapping[int, str]] = {
    400: "check RUNPOD_POD_ID",
    401: f"the key is not accepted; check {KEY}: a template may have replaced the pod's own",
    403: f"the key may not do this; check {KEY}: a template may have replaced the pod's own",
    429: "too many requests",
}
_QUERY: Final = "query($id: String!) { pod(input: {podId: $id}) { id desiredStatus costPerHr volumeInGb } }"
_STOP: Final = "mutation($id: String!) { podStop(input: {podId: $id}) { id desiredStatus } }"
_TERMINATE: Final = "mutation($id: String!) { podTerminate(input: {podId: $id}) }"


def identify(env: Mapping[str, str]) -> Server | None:
    """This pod, if RUNPOD_POD_ID is set."""
    if not env.get("RUNPOD_POD_ID"):
        return None
    return Server(provider="runpod", id=env["RUNPOD_POD_ID"], currency="USD")


def read(server: Server, env: Mapping[str, str], send: Send) -> Answer:
    """The pod's state, its price, and what its disk would cost when stopped."""
    reply = _rest("GET", f"/pods/{server.id}", env, send)
    if reply.status in REFUSED:
        fields, reply = _graphql(_QUERY, server, env, send)
        if fields is None:
            return unknown(reply, _HINTS)
        return _state(fields["pod"]) if fields.get("pod") else _not_there()
    if reply.status in OK:
        return _state(read_fields(reply))
    return _not_there() if _is_missing(reply) else unknown(reply, _HINTS)


def stop(server: Server, keep: Keep, code: int, env: Mapping[str, str], send: Send) -> Answer:
    """Terminate the pod, or stop it if its disk is to be kept."""
    del code
    reply = (
        _rest("DELETE", f"/pods/{server.id}", env, send)
        if keep.folder is None
        else _rest("POST", f"/pods/{server.id}/stop", env, send)
    )
    if reply.status in REFUSED:
        fields, reply = _graphql(_TERMINATE if keep.folder is None else _STOP, server, env, send)
        return unknown(reply, _HINTS) if fields is None else _asked()
    if reply.status in OK:
        return _asked()
    return _not_there() if _is_missing(reply) else unknown(reply, _HINTS)


def explain(keep: Keep, seen: Answer) -> str:
    """Terminate costs nothing after it; stop goes on costing."""
    if keep.folder is None:
        return "the pod is terminated and its disk deleted; nothing is billed after it but a network volume"
    rate = f"{_STOPPED_GB_MONTH} USD per GB and month"
    return (
        f"the pod is stopped; its volume disk stays and costs {seen.keeping or rate} until you terminate the pod; "
        "what lies outside of /workspace is lost"
    )


def _state(pod: Mapping[str, Any]) -> Answer:
    word = str(pod.get("desiredStatus", ""))
    if word not in _STATES:
        return Answer(ServerState.UNKNOWN, f"expected a pod with a desiredStatus, got {str(dict(pod))[:120]}")
    price = pod.get("adjustedCostPerHr") or pod.get("costPerHr")
    return Answer(_STATES[word], word.lower(), price_per_hour=_amount(price), keeping=_keeping(pod.get("volumeInGb")))


def _keeping(volume_gb: object) -> str:
    size = _amount(volume_gb)
    return f"{Decimal(size) * _STOPPED_GB_MONTH:.2f} USD a month ({size} GB)" if size else ""


def _amount(value: object) -> str:
    try:
        amount = Decimal(str(value))
    except InvalidOperation:
        return ""
    return str(amount) if amount.is_finite() and amount > 0 else ""


def _asked() -> Answer:
    return Answer(ServerState.STOPPING, "asked for")


def _not_there() -> Answer:
    return Answer(ServerState.GONE, "the provider does not know this pod")


def _is_missing(reply: Reply) -> bool:
    """The API's own 404 speaks of the pod; a proxy's does not."""
    return reply.status == NOT_FOUND and b"pod" in reply.body.lower() and not reply.body.lstrip().startswith(b"<")


def _rest(method: str, path: str, env: Mapping[str, str], send: Send) -> Reply:
    if lacking := missing((KEY,), env):
        return lacking
    url = (env.get(_REST) or "https://rest.runpod.io/v1").rstrip("/") + path
    return send(method, url, headers=bearer(env[KEY]))


def _graphql(query: str, server: Server, env: Mapping[str, str], send: Send) -> tuple[Mapping[str, Any] | None, Reply]:
    """What `data` holds, None if the query was not carried out; and the reply."""
    url = (env.get(_GRAPHQL) or "https://api.runpod.io").rstrip("/") + "/graphql"
    body = json.dumps({"query": query, "variables": {"id": server.id}}).encode()
    reply = send("POST", url, headers=bearer(env[KEY], body), body=body)
    fields = read_fields(reply)
    data = fields.get("data")
    done = reply.status in OK and not fields.get("errors") and isinstance(data, dict)
    return (data if done else None), reply
