"""A real simulator over HTTP for tests, and the few calls that they need."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from runner.adapters.providers import Reply
from runner.adapters.providers.http import make_send
from runner.simulator.farm import Farm, Pace
from runner.simulator.host import OUR_IMAGE, ProcessHost
from runner.simulator.serving import Options, Servers, serving

PACE = Pace(stage=0.0, restart=0.05, tick=0.02)
_numbers = itertools.count()


def wait_until(claim: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait for the claim to hold, and return its value."""
    ends = time.monotonic() + seconds
    while not (value := claim()):
        if time.monotonic() > ends:
            raise AssertionError(f"not within {seconds:g} s: {claim.__name__}")
        time.sleep(0.02)
    return value


@dataclass
class Farmhouse:
    """A farm that runs in this process, seen from outside."""

    url: str
    farm: Farm
    image: str = "team/train"  # what is rented, if a test does not say

    def call(self, method: str, path: str, body: Any = None, *, key: str | None = None, **headers: str) -> Reply:
        """One request with the account's key, or another; `Idempotency_Key` becomes a header of that name."""
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        if key != "":
            fields["Authorization"] = f"Bearer {key or self.farm.account_key}"
        raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        if raw is not None:
            fields["Content-Type"] = "application/json"
        return make_send(30.0)(  # an engine that has much to do takes its time
            method, self.url + path, headers=fields, body=raw
        )

    def rent(self, args: list[str], **wish: Any) -> str:
        """Rent the smallest machine for a process; returns the server's id."""
        body = {**WISH, "image": self.image, "args": args, **wish}
        body = {name: value for name, value in body.items() if value is not None}
        reply = self.call("POST", "/servers", body, Idempotency_Key=f"test-key-{next(_numbers)}")
        assert 201 == reply.status, reply.body
        return str(json.loads(reply.body)["id"])

    def server(self, server_id: str) -> dict[str, Any]:
        return dict(json.loads(self.call("GET", f"/servers/{server_id}").body))

    def wait(self, server_id: str, claim: Callable[[dict[str, Any]], Any], seconds: float = 60.0) -> dict[str, Any]:
        """Wait until the claim holds of the server."""
        try:
            wait_until(lambda: claim(self.farm.show(self.farm.find(server_id))), seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log(server_id)}") from None
        return self.server(server_id)

    def wait_stopped(self, server_id: str, seconds: float = 60.0) -> dict[str, Any]:
        return self.wait(server_id, lambda server: server["state"] == "stopped", seconds)

    def wait_started(self, server_id: str) -> dict[str, Any]:
        return self.wait(server_id, lambda server: server["container"]["state"] == "running")

    def wait_exited(self, server_id: str) -> dict[str, Any]:
        return self.wait(server_id, lambda server: server["container"]["state"] == "exited")

    def stop(self, server_id: str, **wish: Any) -> Reply:
        return self.call("POST", f"/servers/{server_id}/stop", {"save": None, "grace_seconds": 5, **wish})

    def fail(self, *faults: dict[str, Any]) -> None:
        reply = self.call("PUT", "/_sim/faults", {"faults": list(faults)})
        assert 204 == reply.status, reply.body

    def log(self, server_id: str) -> str:
        path = self.farm.host.log(server_id)
        return path.read_text() if path.exists() else ""

    def disk(self, server_id: str) -> Path:
        """Of a server that is a process."""
        assert isinstance(self.farm.host, ProcessHost)
        return self.farm.host.disk(server_id)

    def has_disk(self, server_id: str) -> bool:
        """Whatever the server is."""
        host = self.farm.host
        if isinstance(host, ProcessHost):
            return host.disk(server_id).exists()
        names = [volume.name for volume in host._engine.volumes.list()]
        return any(name.endswith(server_id) for name in names)

    def read(self, server_id: str, name: str) -> str:
        """A file of its disk, whatever the server is."""
        self.farm.host.keep(server_id, "/workspace", f"look-{server_id}")
        return (self.farm.host.saves.place(f"look-{server_id}") / name).read_text()


WISH: dict[str, Any] = {
    "kind": "docker_image",
    "gpu": "rtx-4090",
    "count": 1,
    "image": "team/train",
    "rental_days": 1,
    "disk_gb": 10,
    "restart_policy": "never",
}


@contextmanager
def open_farm(
    state: Path,
    *,
    per_minute: int = 100_000,
    creates: int = 100_000,
    balance: int = 100,
    entrypoint: tuple[str, ...] = (),
    image: str = "",
) -> Iterator[Farmhouse]:
    """
    A farm with its threads and its port; all of its containers are ended with it. `entrypoint`: of our image.
    With an `image` its servers are containers, else processes.
    """
    state.mkdir(parents=True, exist_ok=True)
    servers = Servers.DOCKER if image else Servers.PROCESS
    options = Options(
        state=state,
        port=0,
        run=None,
        price=None,
        balance=Decimal(balance),
        runner=entrypoint,
        pace=PACE,
        servers=servers,
        image=image or OUR_IMAGE,
    )
    with serving(options, per_minute=per_minute, creates_per_minute=creates) as farm:
        port = (state / "port").read_text()
        try:
            yield Farmhouse(f"http://127.0.0.1:{port}/v1", farm, image or Farmhouse.image)
        finally:
            with farm.store.transaction():  # nothing is started meanwhile
                farm.leaving.update(rented.server.id for rented in farm.servers())
                for rented in farm.servers():
                    if farm.host.is_running(rented.server.id):
                        farm.host.kill(rented.server.id, code=137, number=0)
                if image:
                    farm.host.sweep(())


def python(program: str) -> list[str]:
    return [sys.executable, "-I", "-c", program]
