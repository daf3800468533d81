"""
A farm that is served: the API on a port of loopback, its ticks, and what its servers are.
"""

from __future__ import annotations

import os
import secrets
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import uvicorn

from runner.errors import MachineError
from runner.simulator.api import make_app
from runner.simulator.catalogue import MACHINES
from runner.simulator.farm import Farm, Pace
from runner.simulator.host import OUR_IMAGE, Host, ProcessHost
from runner.simulator.model import Machine, Rented
from runner.simulator.problem import Problem
from runner.simulator.store import Store
from runner.storage.disk import try_lock

LOOPBACK: Final = "127.0.0.1"
_PORTS: Final = range(20_000, 32_000)  # below those that the kernel gives to clients, so that it stays ours


class BusyError(Exception):
    """Another simulator holds the state folder."""


class Servers(StrEnum):
    """What servers are."""

    AUTO = "auto"
    DOCKER = "docker"
    PROCESS = "process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    state: Path
    port: int
    run: Path | None
    price: Decimal | None
    balance: Decimal
    runner: tuple[str, ...]
    pace: Pace
    servers: Servers = Servers.PROCESS
    image: str = OUR_IMAGE


@contextmanager
def only_one(state: Path) -> Iterator[Callable[[], bool]]:
    """Hold the state folder; gives a function that says whether it is still there and ours."""
    with (state / "simulator.lock").open("a+") as lock:
        if not try_lock(lock):
            lock.seek(0)
            holder = lock.read().strip() or "one that just starts"
            raise BusyError(f"{state}: another simulator runs here ({holder}); end it, or take another --state")
        lock.truncate(0)
        lock.write(f"pid {os.getpid()}")
        lock.flush()

        def is_ours() -> bool:
            try:
                return os.path.samestat(os.fstat(lock.fileno()), Path(lock.name).stat())
            except FileNotFoundError:
                return False

        yield is_ours


@contextmanager
def serving(options: Options, *, per_minute: int = 60, creates_per_minute: int = 6) -> Iterator[Farm]:
    """The API on loopback, and the farm's ticks, in threads."""
    store = Store(options.state / "farm.sqlite")
    host = _open_host(options, store)
    listener = _listen(options, host)
    farm = Farm(
        options.state,
        store=store,
        host=host,
        api_url=f"http://{LOOPBACK}:{listener.getsockname()[1]}/v1",
        pace=options.pace,
        machines=_machines(options),
        deposit=options.balance,
    )
    app = make_app(farm, per_minute=per_minute, creates_per_minute=creates_per_minute)
    config = uvicorn.Config(app, log_level="critical", lifespan="off", access_log=False)
    server = uvicorn.Server(config)
    end = threading.Event()
    threads = [
        threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="api", daemon=True),
        threading.Thread(target=_tick, args=(farm, end), name="tick", daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        yield farm
    finally:
        end.set()
        server.should_exit = server.force_exit = True
        for thread in threads:
            thread.join(5.0)


def _open_host(options: Options, store: Store) -> Host:
    """What servers are; servers that still exist stay what they were."""
    before = store.text("setting", "servers")
    if before and any(not rented.server.state.is_final for rented in store.all(Rented)):
        if options.servers not in {Servers.AUTO, before}:
            raise MachineError(
                f"simulate: the servers of {options.state} are of the kind {before}, got --servers {options.servers}",
                hint="stop them first, or take another --state",
            )
        host = _make_host(Servers(before), options, store)
    else:
        host = _make_host(options.servers, options, store)
    kind = Servers.PROCESS if isinstance(host, ProcessHost) else Servers.DOCKER
    store.put("setting", "servers", kind)
    return host


def _make_host(servers: Servers, options: Options, store: Store) -> Host:
    if servers is not Servers.PROCESS:
        try:
            return _containers(options, store, needs_image=servers is Servers.AUTO)
        except OSError as error:
            if servers is Servers.DOCKER:
                raise MachineError(f"simulate: servers cannot be containers: {error}") from error
            say(f"servers are processes of this machine: {error}")
    return ProcessHost(options.state, options.runner)


def _containers(options: Options, store: Store, *, needs_image: bool) -> Host:
    if find_spec("docker") is None:
        raise OSError("no package docker: pip install 'vramfarm-runner[docker]'")
    from runner.simulator import engine  # noqa: PLC0415  # an extra: not everybody has it

    connected = engine.connect()
    if needs_image and not engine.has_image(connected, options.image):
        raise OSError(f"the Docker engine has no image {options.image}: docker build --tag {options.image} .")
    farm_id = store.text("setting", "farm_id") or secrets.token_hex(4)
    store.put("setting", "farm_id", farm_id)
    say(f"servers are containers; docker ps --filter label={engine.FARM}={farm_id} shows them")
    return engine.DockerHost(options.state, connected, farm_id=farm_id, image=options.image)


def _tick(farm: Farm, end: threading.Event) -> None:
    while not end.wait(farm.pace.tick):
        try:
            farm.tick()
        except (OSError, sqlite3.Error, Problem) as error:  # noqa: PERF203  # a full disk, say: the next tick tries again
            say(f"simulator: {error}")
            end.wait(1.0)


def _listen(options: Options, host: Host) -> socket.socket:
    """On the port it had before, because its servers know the API by it."""
    memory = options.state / "port"
    before = _read_port(memory)
    wanted = options.port or before
    listener = _bind([wanted]) if wanted else None
    if listener is None and wanted and (options.port or host.any_running()):
        raise BusyError(f"port {wanted} of {LOOPBACK} is taken, and servers know the simulator by it; free it")
    if listener is None:
        listener = _bind(_PORTS.start + secrets.randbelow(len(_PORTS)) for _ in range(100))
    if listener is None:
        raise BusyError(f"no free port on {LOOPBACK}; name one with --port")
    listener.listen(128)
    temporary = memory.with_suffix(".tmp")
    temporary.write_text(str(listener.getsockname()[1]))
    temporary.replace(memory)
    return listener


def _bind(ports: Iterable[int]) -> socket.socket | None:
    for port in ports:
        listener = socket.socket(proto=socket.IPPROTO_TCP)  # else asyncio holds the body of an answer back for 40 ms
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError, OverflowError):
            listener.bind((LOOPBACK, port))
            return listener
        listener.close()
    return None


def _read_port(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _machines(options: Options) -> tuple[Machine, ...]:
    """The catalogue; the first, which `--run` rents, at the price that was asked for."""
    first, *others = MACHINES
    price = first.price_per_hour if options.price is None else options.price
    return (first.model_copy(update={"price_per_hour": price}), *others)


def say(text: str) -> None:
    """One line of the command's output."""
    print(text, flush=True)  # noqa: T201
