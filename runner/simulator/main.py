"""
`vramfarm-runner simulate`: the local VRAMfarm, and with `--run` one job on it.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import secrets
import signal
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import uvicorn

from runner import guardian
from runner.errors import LeftError, LockedError, MachineError
from runner.simulator.api import make_app
from runner.simulator.catalogue import MACHINES
from runner.simulator.farm import Farm, Pace
from runner.simulator.host import KILLED, OUR_IMAGE, Host, ProcessHost
from runner.simulator.model import Machine, Policy, Rented, Server, ServerCreate, State
from runner.simulator.problem import Problem
from runner.simulator.store import Store
from runner.simulator.table import table

LOOPBACK: Final = "127.0.0.1"
_LOOK_S: Final = 0.1
_WATCH_S: Final = 0.5
_CLEAR: Final = "\x1b[H\x1b[J"
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


def main(argv: Sequence[str]) -> int:
    """Serve, or run one job; returns the exit code."""
    options = _parse(argv)
    if options.run is not None and not options.run.is_file():
        _say(f"{options.run}: expected a job.yaml, found no such file")
        return 2
    options.state.mkdir(parents=True, exist_ok=True)
    try:
        with _only_one(options.state) as is_ours, serving(options) as farm:
            stops = _count_signals()
            if options.run is None:
                return _watch(farm, stops, is_ours)
            return _run(farm, options, stops, is_ours)
    except BusyError as error:
        _say(str(error))
        return LockedError.exit_code


def _parse(argv: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="vramfarm-runner simulate", description="A local VRAMfarm.")
    parser.add_argument("--state", type=Path, required=True, help="folder of its memory, its servers and its saves")
    parser.add_argument(
        "--port", type=int, default=0, help="port on 127.0.0.1; 0: the one it had before, or a free one"
    )
    parser.add_argument("--run", type=Path, metavar="JOB.yaml", help="rent a server for this job and follow it")
    parser.add_argument("--price", type=_amount, help="price an hour of the machine that --run rents")
    parser.add_argument("--balance", type=_amount, default=Decimal(100), help="what a new account starts with")
    parser.add_argument(
        "--servers",
        type=Servers,
        choices=list(Servers),
        default=Servers.AUTO,
        help="containers, or processes of this machine; auto: containers where a Docker engine has the image; with --run always processes",
    )
    parser.add_argument("--image", default=OUR_IMAGE, help=f"the image that auto looks for (default: {OUR_IMAGE})")
    parser.add_argument("--runner-argv", nargs="+", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--restart-delay", type=float, default=Pace().restart, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.run and given.servers is Servers.DOCKER:
        parser.error("--run: its server sees the folder of the job, which a container would not; use submit or launch")
    runner = tuple(given.runner_argv) or (sys.executable, "-I", str(Path(guardian.__file__).resolve()))
    return Options(
        state=given.state.resolve(),
        port=given.port,
        run=given.run.resolve() if given.run else None,
        price=given.price,
        balance=given.balance,
        runner=runner,
        pace=Pace(restart=given.restart_delay),
        servers=Servers.PROCESS if given.run else given.servers,
        image=given.image,
    )


def _amount(text: str) -> Decimal:
    try:
        amount = Decimal(text)
    except InvalidOperation:
        amount = Decimal(-1)
    if not amount.is_finite() or amount < 0:
        raise argparse.ArgumentTypeError(f"expected an amount such as 2.36, got {text!r}")
    return amount


# ----------------------------------------------------------------------------------- serve


@contextmanager
def _only_one(state: Path) -> Iterator[Callable[[], bool]]:
    """Hold the state folder; gives a function that says whether it is still there and ours."""
    with (state / "simulator.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "one that just starts"
            raise BusyError(
                f"{state}: another simulator runs here ({holder}); end it, or take another --state"
            ) from None
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
            _say(f"servers are processes of this machine: {error}")
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
    _say(f"servers are containers; docker ps --filter label={engine.FARM}={farm_id} shows them")
    return engine.DockerHost(options.state, connected, farm_id=farm_id, image=options.image)


def _tick(farm: Farm, end: threading.Event) -> None:
    while not end.wait(farm.pace.tick):
        try:
            farm.tick()
        except (OSError, sqlite3.Error, Problem) as error:  # noqa: PERF203  # a full disk, say: the next tick tries again
            _say(f"simulator: {error}")
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
        listener = socket.socket()
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


def _watch(farm: Farm, stops: list[int], is_ours: Callable[[], bool]) -> int:
    """Until Ctrl-C: on a terminal a table that stays current, elsewhere a line for every change."""
    port = (farm.state / "port").read_text()
    head = (
        f"the simulated VRAMfarm listens on http://{LOOPBACK}:{port}/v1",
        f"account key: {farm.account_key}",
    )
    show = _make_table(farm, head) if sys.stdout.isatty() else _make_lines(farm, head)
    while not stops:
        if not is_ours():
            return _end_all(farm)
        show()
        time.sleep(_WATCH_S)
    return 0


def _make_table(farm: Farm, head: Sequence[str]) -> Callable[[], None]:
    def show() -> None:
        servers = [(r.server, farm.bill(r.server), _where(farm, r.server)) for r in reversed(farm.servers())]
        _say("\n".join((_CLEAR, *head, "", *table(servers, farm.emails(), farm.balance()))))

    return show


def _make_lines(farm: Farm, head: Sequence[str]) -> Callable[[], None]:
    said: dict[str, str] = {}
    mailed = len(farm.emails())
    for line in head:
        _say(line)

    def show() -> None:
        nonlocal mailed
        for rented in reversed(farm.servers()):
            line = _line(farm, rented)
            if said.get(rented.server.id) != line:
                said[rented.server.id] = line
                _say(line)
        emails = farm.emails()
        for email in emails[mailed:]:
            _say(f"email: {email.subject}")
        mailed = len(emails)

    return show


def _where(farm: Farm, server: Server) -> str:
    """By which a container that runs is found here; an engine that does not answer is said by the ticks."""
    with suppress(OSError):
        return farm.host.describe(server.id) if server.container.state == "running" else ""
    return ""


def _end_all(farm: Farm) -> int:
    """The state folder was removed under us: nobody would ever find these processes again."""
    _say(f"{farm.state}: removed while it was in use; ending its servers")
    for rented in farm.servers():
        farm.leaving.add(rented.server.id)
        farm.host.kill(rented.server.id, code=KILLED, number=rented.server.container.restart_count)
        farm.host.delete_disk(rented.server.id)
    return 1


def _line(farm: Farm, rented: Rented) -> str:
    server = rented.server
    bill = farm.bill(server)
    reason = f" ({server.state_reason})" if server.state_reason else ""
    starts = f", started {server.container.restart_count + 1} times" if server.container.restart_count else ""
    money = f"{bill.billed_minutes} min, {bill.cost} {bill.currency}"
    where = _where(farm, server)
    words = f"{server.id} {server.machine.count} x {server.machine.gpu_name} {server.state}{reason}{starts}"
    return f"{words}: {money}{f', {where}' if where else ''}"


# ------------------------------------------------------------------------------------- run


def _run(farm: Farm, options: Options, stops: list[int], is_ours: Callable[[], bool]) -> int:
    """Follow the job's server to its end; on Ctrl-C let the job save and leave, and keep the server."""
    job = options.run
    assert job is not None
    args = ["--config", str(job)]
    for _ in range(len(State)):  # what ended while no simulator ran, a rental say, ends now
        farm.tick()
    rented = _find_server(farm, args)
    if rented is None:
        if farm.balance() < farm.machines[0].price_per_hour:
            farm.top_up(options.balance)
            _say(f"the account was empty: topped up by {options.balance} EUR of play money")
        rented = farm.create(_wish(farm, job, args))
        _say(
            f"rented {rented.server.id}: {rented.server.machine.gpu_name}, {rented.server.billing.price_per_hour} EUR/h"
        )
    else:
        _say(f"going on with {rented.server.id}, rented {rented.server.created_at:%Y-%m-%d %H:%M:%S} UTC")
    server_id = rented.server.id
    tail = _Tail(farm.host.log(server_id))
    while not (rented := farm.find(server_id)).server.state.is_final:
        tail.show()
        if not is_ours():
            return _end_all(farm)
        if len(stops) > 1 or (stops and rented.stop is None):
            return _leave(farm, server_id, tail, stops)
        time.sleep(_LOOK_S)
    tail.show()
    _close(farm, rented)
    code = rented.server.container.exit_code
    return 0 if code is None else code


def _find_server(farm: Farm, args: list[str]) -> Rented | None:
    """The server of the same job file that still exists."""
    return next((r for r in farm.servers() if r.server.args == args and not r.server.state.is_final), None)


def _wish(farm: Farm, job: Path, args: list[str]) -> ServerCreate:
    machine = farm.machines[0]
    return ServerCreate(
        kind="docker_image",
        machine_id=machine.id,
        count=machine.count,
        image="vramfarm/runner",
        args=args,
        env={"RUNNER_HOLD_S": "0", "PYTHONUNBUFFERED": "1"},
        rental_days=1,
        disk_gb=10,
        label="".join(c if c.isascii() and (c.isalnum() or c in "._:-") else "-" for c in job.name)[:64],
        restart_policy=Policy.ALWAYS,
    )


def _leave(farm: Farm, server_id: str, tail: _Tail, stops: list[int]) -> int:
    farm.leaving.add(server_id)
    _say("leaving: the job saves what it has (again Ctrl-C: do not wait)")
    farm.host.terminate(server_id)
    asked = len(stops)
    while farm.host.is_running(server_id) and len(stops) == asked:
        tail.show()
        time.sleep(_LOOK_S)
    tail.show()
    rented = farm.find(server_id)
    bill = farm.bill(rented.server)
    _say(
        f"{server_id} stays rented: {bill.billed_minutes} min, {bill.cost} EUR so far; the same command goes on with it"
    )
    return LeftError.exit_code


def _close(farm: Farm, rented: Rented) -> None:
    server, bill = rented.server, farm.bill(rented.server)
    _say("")
    _say(f"server   {server.id}, {server.machine.count} x {server.machine.gpu_name}")
    _say(f"state    {server.state}{f' ({server.state_reason})' if server.state_reason else ''}")
    _say(f"billed   {bill.billed_minutes} min at {bill.price_per_hour} EUR/h: {bill.cost} EUR (15 min at least)")
    if server.save is not None:
        place = farm.state / "saves" / server.save.id
        _say(f"saved    {server.save.path}: {server.save.state}, {server.save.files} files in {place}")
    else:
        _say("saved    nothing: the disk was thrown away, as the job asked")


class _Tail:
    """The end of a growing file, shown as it grows; what was there before is not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0

    def show(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                while piece := file.read(1 << 16):
                    self._at += len(piece)
                    sys.stdout.buffer.write(piece)
        except FileNotFoundError:
            return
        sys.stdout.buffer.flush()


def _count_signals() -> list[int]:
    """A list that grows by one with every Ctrl-C or SIGTERM."""
    stops: list[int] = []

    def note(number: int, _: Any) -> None:  # noqa: ANN401  # a frame
        stops.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    return stops


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201  # the command's output


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
