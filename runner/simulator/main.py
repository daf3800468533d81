"""
`vramfarm-runner simulate`: the local VRAMfarm, and with `--run` one job on it.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Final

from runner import guardian
from runner.errors import LeftError, LockedError
from runner.simulator.farm import Farm, Pace
from runner.simulator.host import KILLED, OUR_IMAGE
from runner.simulator.model import Billing, Email, Policy, Rented, Server, ServerCreate, State
from runner.simulator.serving import LOOPBACK, BusyError, Options, Servers, only_one, say, serving

_LOOK_S: Final = 0.1
_WATCH_S: Final = 0.5
_CLEAR: Final = "\x1b[H\x1b[J"
_HEADS: Final = ("SERVER", "MACHINE", "STATE", "STARTS", "MINUTES", "EUR", "WHERE")
_EMAILS: Final = 5  # the newest


def main(argv: Sequence[str]) -> int:
    """Serve, or run one job; returns the exit code."""
    options = _parse(argv)
    if options.run is not None and not options.run.is_file():
        say(f"{options.run}: expected a job.yaml, found no such file")
        return 2
    options.state.mkdir(parents=True, exist_ok=True)
    try:
        with only_one(options.state) as is_ours, serving(options) as farm:
            stops = _count_signals()
            if options.run is None:
                return _watch(farm, stops, is_ours)
            return _run(farm, options, stops, is_ours)
    except BusyError as error:
        say(str(error))
        return LockedError.exit_code


def _parse(argv: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="vramfarm-runner simulate", description="A local VRAMfarm.")
    parser.add_argument("--state", type=Path, required=True, help="folder for its state, its servers and its saves")
    parser.add_argument(
        "--port", type=int, default=0, help="port on 127.0.0.1 (default: the one it had before, or a free one)"
    )
    parser.add_argument("--run", type=Path, metavar="JOB.yaml", help="rent a server for this job and follow it")
    parser.add_argument("--price", type=_amount, help="hourly price of the machine that --run rents")
    parser.add_argument("--balance", type=_amount, default=Decimal(100), help="balance of a new account")
    parser.add_argument(
        "--servers",
        type=Servers,
        choices=list(Servers),
        default=Servers.AUTO,
        help="what servers are: processes of this machine, or containers; auto: containers if a Docker engine has the image; with --run always processes",
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


# ----------------------------------------------------------------------------------- watch


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
        say("\n".join((_CLEAR, *head, "", *_table(servers, farm.emails(), farm.balance()))))

    return show


def _make_lines(farm: Farm, head: Sequence[str]) -> Callable[[], None]:
    said: dict[str, str] = {}
    mailed = len(farm.emails())
    for line in head:
        say(line)

    def show() -> None:
        nonlocal mailed
        for rented in reversed(farm.servers()):
            line = _line(farm, rented)
            if said.get(rented.server.id) != line:
                said[rented.server.id] = line
                say(line)
        emails = farm.emails()
        for email in emails[mailed:]:
            say(f"email: {email.subject}")
        mailed = len(emails)

    return show


def _where(farm: Farm, server: Server) -> str:
    """By which a container that runs is found here; an engine that does not answer is said by the ticks."""
    with suppress(OSError):
        return farm.host.describe(server.id) if server.container.state == "running" else ""
    return ""


def _end_all(farm: Farm) -> int:
    """The state folder was removed under us: nobody would ever find these processes again."""
    say(f"{farm.state}: removed while it was in use; ending its servers")
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
            say(f"the account was empty: topped up by {options.balance} EUR of play money")
        rented = farm.create(_wish(farm, job, args))
        say(
            f"rented {rented.server.id}: {rented.server.machine.gpu_name}, {rented.server.billing.price_per_hour} EUR/h"
        )
    else:
        say(f"going on with {rented.server.id}, rented {rented.server.created_at:%Y-%m-%d %H:%M:%S} UTC")
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
    say("leaving: the job saves what it has (again Ctrl-C: do not wait)")
    farm.host.terminate(server_id)
    asked = len(stops)
    while farm.host.is_running(server_id) and len(stops) == asked:
        tail.show()
        time.sleep(_LOOK_S)
    tail.show()
    rented = farm.find(server_id)
    bill = farm.bill(rented.server)
    say(
        f"{server_id} stays rented: {bill.billed_minutes} min, {bill.cost} EUR so far; the same command goes on with it"
    )
    return LeftError.exit_code


def _close(farm: Farm, rented: Rented) -> None:
    server, bill = rented.server, farm.bill(rented.server)
    say("")
    say(f"server   {server.id}, {server.machine.count} x {server.machine.gpu_name}")
    say(f"state    {server.state}{f' ({server.state_reason})' if server.state_reason else ''}")
    say(f"billed   {bill.billed_minutes} min at {bill.price_per_hour} EUR/h: {bill.cost} EUR (15 min at least)")
    if server.save is not None:
        place = farm.state / "saves" / server.save.id
        say(f"disk     kept as a save, {server.save.path}: {server.save.state}, {server.save.files} files in {place}")
    else:
        say("disk     deleted with the server, as the job asked: nothing was only there")


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


def _table(servers: Sequence[tuple[Server, Billing, str]], emails: Sequence[Email], balance: Decimal) -> Iterator[str]:
    """What a person who watches sees, in lines. Each server comes with its bill, and with that by which it is found on this machine."""
    rows = [_HEADS, *(_row(*shown) for shown in servers)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    billed = sum((bill.cost for _, bill, _ in servers), Decimal(0))
    yield f"billed {billed} EUR, balance {balance} EUR"
    for email in emails[-_EMAILS:]:
        yield f"email {email.at:%Y-%m-%d %H:%M:%S} UTC: {email.subject}"


def _row(server: Server, bill: Billing, where: str) -> tuple[str, ...]:
    starts = server.container.restart_count + (server.container.state != "none")
    return (
        server.id,
        f"{server.machine.count} x {server.machine.gpu_name}",
        f"{server.state} ({server.state_reason})" if server.state_reason else str(server.state),
        str(starts),
        str(bill.billed_minutes),
        str(bill.cost),
        where,
    )
