"""
A Docker engine, as on a box of one's own: the server is this container.

Over the engine's own API and socket (docs.docker.com/reference/api/engine), which must be mounted
into the container. Nothing is billed here, so both intents are one verb, *stop*: the container
stays with its log and exit code, is not restarted whatever its restart policy, and its volumes stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from runner.adapters.providers.answers import NOT_FOUND, OK, read_fields, unknown
from runner.adapters.providers.contract import Answer, Keep, Reply, Send
from runner.facts import Server, ServerState

CONTAINER: Final = "RUNNER_CONTAINER"
_ENGINE: Final = "DOCKER_HOST"
NAMES: Final = (CONTAINER,)
_SOCKET: Final = "unix:///var/run/docker.sock"
_STATES: Final[Mapping[str, ServerState]] = {
    "created": ServerState.RUNNING,
    "running": ServerState.RUNNING,
    "paused": ServerState.RUNNING,
    "restarting": ServerState.RUNNING,
    "removing": ServerState.STOPPING,
    "exited": ServerState.GONE,
    "dead": ServerState.GONE,
}
_STOPPED_ALREADY: Final = 304
_GRACE_S: Final = 30  # the guardian needs a moment to say its exit code
_HINTS: Final[Mapping[int, str]] = {0: "mount the engine's socket: --volume /var/run/docker.sock:/var/run/docker.sock"}


def identify(env: Mapping[str, str]) -> Server | None:
    """This container, if RUNNER_CONTAINER has its name or id; `launch` sets it for jobs with `kind: docker`."""
    if not env.get(CONTAINER):
        return None
    return Server(provider="docker", id=env[CONTAINER], currency="")


def read(server: Server, env: Mapping[str, str], send: Send) -> Answer:
    """The container's state."""
    reply = _call("GET", f"/containers/{quote(server.id)}/json", env, send)
    if reply.status not in OK:
        return _not_there() if _is_missing(reply) else _unknown(reply)
    state = read_fields(reply).get("State")
    word = str(state.get("Status", "")) if isinstance(state, dict) else ""
    if word not in _STATES:
        return Answer(
            ServerState.UNKNOWN, f"expected a container with a State, got {reply.body[:120].decode(errors='replace')}"
        )
    return Answer(_STATES[word], word)


def stop(server: Server, keep: Keep, code: int, env: Mapping[str, str], send: Send) -> Answer:
    """Stop the container; it is not removed."""
    del keep, code
    reply = _call("POST", f"/containers/{quote(server.id)}/stop?t={_GRACE_S}", env, send)
    if reply.status in OK or reply.status == _STOPPED_ALREADY:
        return Answer(ServerState.STOPPING, "asked for")
    return _not_there() if _is_missing(reply) else _unknown(reply)


def explain(keep: Keep, seen: Answer) -> str:
    """Nothing is billed."""
    del keep, seen
    return "the container stops and stays, with its log and its disk; nothing is billed; docker rm removes it"


def _call(method: str, path: str, env: Mapping[str, str], send: Send) -> Reply:
    engine = env.get(_ENGINE) or _SOCKET
    scheme, _, address = engine.partition("://")
    base = f"http+unix://{quote(address, safe='')}" if scheme == "unix" else f"http://{address}"
    return send(method, base + path, headers={"Accept": "application/json", "Host": "docker"})


def _unknown(reply: Reply) -> Answer:
    answer = unknown(reply, _HINTS)
    if reply.status == 0:
        return Answer(ServerState.UNKNOWN, f"{answer.detail}; {_HINTS[0]}")
    return answer


def _not_there() -> Answer:
    return Answer(ServerState.GONE, "the engine does not know this container")


def _is_missing(reply: Reply) -> bool:
    return reply.status == NOT_FOUND and "no such container" in str(read_fields(reply).get("message", "")).lower()
