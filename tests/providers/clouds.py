"""
The documented APIs of providers as small real servers, one machine each, with the answers that
their references print; and what may go wrong between us and any of them.
"""

from __future__ import annotations

import json
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

KEY = "secret-key-of-the-machine"


@dataclass(frozen=True)
class Fault:
    """What the next requests get instead of an answer. `drops`: done, but the answer is lost."""

    status: int = 500
    body: bytes = b"<html>Bad Gateway</html>"
    headers: tuple[tuple[str, str], ...] = ()
    drops: bool = False


@dataclass
class Request:
    method: str
    path: str
    key: str
    body: Any
    raw: str  # request line and all headers


@dataclass
class Cloud:
    """One machine at one provider. `state` is running, stopped or deleted."""

    name: str = ""
    url: str = ""
    state: str = "running"
    key: str = KEY
    fault: Fault | None = None
    requests: list[Request] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        raise NotImplementedError

    def answer(self, request: Request) -> tuple[int, Any]:
        raise NotImplementedError

    def now(self) -> str:
        """running, stopped or deleted."""
        return self.state

    def halt(self, state: str) -> None:
        if self.state != "deleted":
            self.state = state


@dataclass
class RunPod(Cloud):
    """docs.runpod.io/api-reference: GET, DELETE /pods/{id}, POST /pods/{id}/stop; GraphQL beside it."""

    name: str = "runpod"
    pod_key_is_for_graphql_only: bool = False

    @property
    def env(self) -> dict[str, str]:
        return {
            "RUNPOD_POD_ID": "xedezhzb9la3ye",
            "RUNPOD_API_KEY": KEY,
            "RUNPOD_REST_URL": self.url + "/v1",
            "RUNPOD_API_BASE_URL": self.url,
        }

    def answer(self, request: Request) -> tuple[int, Any]:
        if request.path == "/graphql":
            return self._graphql(request)
        if request.key != self.key or self.pod_key_is_for_graphql_only:
            return 401, {"error": "Unauthorized."}
        return self._rest(request)

    def _rest(self, request: Request) -> tuple[int, Any]:
        if "/pods/xedezhzb9la3ye" not in request.path or self.state == "deleted":
            return 404, {"error": "Pod not found."}
        match request.method, request.path:
            case "DELETE", "/v1/pods/xedezhzb9la3ye":
                self.halt("deleted")
                return 204, None
            case "POST", "/v1/pods/xedezhzb9la3ye/stop":
                self.halt("stopped")
                return 200, None
            case "GET", "/v1/pods/xedezhzb9la3ye":
                return 200, self._pod()
        return 400, {"error": "Invalid Pod ID."}

    def _pod(self) -> dict[str, Any]:
        return {
            "adjustedCostPerHr": 0.69,
            "costPerHr": "0.74",
            "desiredStatus": "RUNNING" if self.state == "running" else "EXITED",
            "id": "xedezhzb9la3ye",
            "containerDiskInGb": 50,
            "volumeInGb": 20,
        }

    def _graphql(self, request: Request) -> tuple[int, Any]:
        if request.key != self.key:
            return 401, {"errors": [{"message": "Unauthorized"}]}
        query, there = request.body["query"], self.state != "deleted"
        if "podTerminate" in query and there:
            self.halt("deleted")
            return 200, {"data": {"podTerminate": None}}
        if "podStop" in query and there:
            self.halt("stopped")
            return 200, {"data": {"podStop": {"id": "xedezhzb9la3ye", "desiredStatus": "EXITED"}}}
        if "pod(" in query:
            return 200, {"data": {"pod": self._pod() if there else None}}
        return 200, {"errors": [{"message": "pod not found"}], "data": None}


@dataclass
class Vast(Cloud):
    """docs.vast.ai/api-reference/instances: show, manage and destroy."""

    name: str = "vast"

    @property
    def env(self) -> dict[str, str]:
        return {
            "CONTAINER_ID": "312",
            "VAST_CONTAINERLABEL": "C.312",
            "CONTAINER_API_KEY": KEY,
            "VAST_URL": self.url,
        }

    def answer(self, request: Request) -> tuple[int, Any]:
        if request.key != self.key:
            return 401, {"success": False, "error": "auth_error", "msg": "Invalid user key"}
        if request.path != "/api/v0/instances/312/" or self.state == "deleted":
            return 404, {"success": False, "error": "no_such_instance", "msg": "No such instance."}
        match request.method:
            case "DELETE":
                self.halt("deleted")
                return 200, {"success": True, "msg": "Instance destroyed successfully"}
            case "PUT" if request.body == {"state": "stopped"}:
                self.halt("stopped")
                return 200, {"success": True}
            case "GET":
                return 200, {"instances": self._instance()}
        return 400, {"success": False, "error": "invalid_args", "msg": "Invalid state."}

    def _instance(self) -> dict[str, Any]:
        return {
            "id": 312,
            "actual_status": self.state,
            "cur_state": self.state,
            "intended_status": self.state,
            "dph_total": 2.4,
            "storage_cost": 0.15,
            "disk_space": 100.0,
            "end_date": 1798761600.0,
            "status_msg": "success, running",
        }


@dataclass
class Docker(Cloud):
    """docs.docker.com/reference/api/engine: inspect and stop of one container."""

    name: str = "docker"
    key: str = ""

    @property
    def env(self) -> dict[str, str]:
        return {"RUNNER_CONTAINER": "job", "DOCKER_HOST": self.url}

    def answer(self, request: Request) -> tuple[int, Any]:
        path, _, query = request.path.partition("?")
        if not path.startswith("/containers/job/") or self.state == "deleted":
            return 404, {"message": "No such container: job"}
        if (request.method, path) == ("GET", "/containers/job/json"):
            return 200, {"Id": "4fa6e0f0c678", "State": {"Status": "running" if self.state == "running" else "exited"}}
        if (request.method, path, query) == ("POST", "/containers/job/stop", "t=30"):
            before, self.state = self.state, "stopped"
            return (204 if before == "running" else 304), None
        return 400, {"message": "bad parameter"}


@dataclass
class Webhook(Cloud):
    """Somebody who is told."""

    name: str = "webhook"
    key: str = ""

    def answer(self, request: Request) -> tuple[int, Any]:
        return 200, {}

    def events(self) -> list[str]:
        return [request.body.get("event", "") for request in self.requests]


class _Handler(BaseHTTPRequestHandler):
    """Answers as its server's cloud does, or as its fault wants it."""

    cloud: Cloud

    def log_message(self, *_: object) -> None:
        pass

    def _take(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        body = json.loads(raw) if raw else None
        request = Request(self.command, self.path, key, body, f"{self.requestline}\n{self.headers}")
        self.cloud.requests.append(request)
        fault = self.cloud.fault
        if fault and not fault.drops:
            self._reply(fault.status, fault.body, dict(fault.headers))
            return
        status, fields = self.cloud.answer(request)
        if fault:
            return  # done, and not a word about it
        self._reply(status, b"" if fields is None else json.dumps(fields).encode(), {})

    def _reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status not in {204, 304}:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if status not in {204, 304}:
            self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = _take  # noqa: N815  # http.server's names


class _UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def get_request(self) -> tuple[Any, Any]:
        connection, _ = super().get_request()
        return connection, ("engine", 0)


@contextmanager
def serving(cloud: Cloud, folder: Path) -> Iterator[Cloud]:
    """The cloud, answering at `cloud.url`; Docker's at a socket in `folder`."""
    handler = type("Handler", (_Handler,), {"cloud": cloud})
    if isinstance(cloud, Docker):
        path = folder / "docker.sock"
        server: socketserver.BaseServer = _UnixServer(str(path), handler)
        cloud.url = f"unix://{path}"
    else:
        web = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server, cloud.url = web, f"http://127.0.0.1:{web.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield cloud
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


PROGRAM = """
import os, sys
from pathlib import Path
state, verb = Path(sys.argv[1]), sys.argv[2]
if verb == "status":
    print({"running": "running"}.get(state.read_text(), "gone"))
else:
    state.write_text("stopped" if os.environ["RUNNER_KEEP"] else "deleted")
"""


@dataclass
class Command(Cloud):
    """A program of the user's, with a file for a machine."""

    name: str = "command"
    key: str = ""
    file: Path = Path()

    def now(self) -> str:
        return self.file.read_text()

    @property
    def env(self) -> dict[str, str]:
        program = f"{sys.executable} -I {self.file.with_suffix('.py')} {self.file}"
        return {"RUNNER_STOP_COMMAND": f"{program} stop", "RUNNER_STATUS_COMMAND": f"{program} status"}


@contextmanager
def programmed(folder: Path) -> Iterator[Command]:
    """The program and its file."""
    cloud = Command(file=folder / "machine")
    cloud.file.write_text("running")
    cloud.file.with_suffix(".py").write_text(PROGRAM)
    yield cloud
