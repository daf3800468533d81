"""
The farm: what may be asked of it, and `tick`, which moves every server on.

`tick` looks at the store and the host and does the next thing; nothing is remembered between
two ticks, so a farm that was killed goes on where it was.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from runner.simulator.catalogue import MACHINES, choose
from runner.simulator.host import KILLED, WORKSPACE, Boot, Host
from runner.simulator.model import (
    Activity,
    Billing,
    Container,
    Email,
    Event,
    Fault,
    Idle,
    Machine,
    Policy,
    Rented,
    Save,
    SaveSpec,
    Server,
    ServerCreate,
    ServerUpdate,
    State,
    Stopping,
    StopRequest,
)
from runner.simulator.problem import Problem
from runner.simulator.store import Store
from runner.simulator.terms import billed_minutes, cost, follow, is_busy

_NEXT: Final[Mapping[State, State]] = {
    State.QUEUED: State.PROVISIONING,
    State.PROVISIONING: State.PULLING,
    State.PULLING: State.RUNNING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast the farm is, in seconds."""

    stage: float = 0.2  # each of queued, provisioning, pulling
    restart: float = 1.0  # from a container's exit to its next start
    tick: float = 0.1


class Farm:
    """One account with its servers. Thread-safe: whatever changes something is one transaction of the store."""

    def __init__(  # noqa: PLR0913  # made in one place
        self,
        state: Path,
        *,
        store: Store,
        host: Host,
        api_url: str,
        pace: Pace | None = None,
        machines: Sequence[Machine] = MACHINES,
        deposit: Decimal = Decimal(100),
    ) -> None:
        self.state = state
        self.pace = pace or Pace()
        self.machines = tuple(machines)
        self.host = host
        self.store = store
        self.leaving: set[str] = set()  # servers whose container is not to be started again by this process
        self.faults: list[Fault] = []
        self._api_url = api_url
        self.account_key = self._setting("account_key", f"vfa_{secrets.token_hex(16)}")
        self._deposit = Decimal(self._setting("deposit", str(deposit)))
        host.sweep({rented.server.id for rented in self.servers() if not rented.server.state.is_final})

    # ---------------------------------------------------------------------------- clock

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=int(self.store.text("setting", "clock") or 0))

    def advance(self, seconds: int) -> datetime:
        with self.store.transaction():
            ahead = int(self.store.text("setting", "clock") or 0) + seconds
            self.store.put("setting", "clock", str(ahead))
            return self.now()

    # -------------------------------------------------------------------------- servers

    def find(self, server_id: str) -> Rented:
        rented = self.store.get(Rented, server_id)
        if rented is None:
            raise Problem(404, f"{server_id}: no such server")
        return rented

    def servers(self) -> list[Rented]:
        """Newest first."""
        return self.store.all(Rented)[::-1]

    def server_of(self, key: str) -> Rented | None:
        return next((rented for rented in self.store.all(Rented) if rented.key == key), None)

    def show(self, rented: Rented) -> dict[str, Any]:
        """The server as the API answers it, with its bill up to now."""
        server = rented.server.model_copy(deep=True)
        server.billing = self.bill(server)
        if server.state is State.RUNNING:
            server.actions = ["stop", "save", "update"]
        elif not server.state.is_final:
            server.actions = ["stop"]
        return server.model_dump(mode="json")

    def bill(self, server: Server) -> Billing:
        billing = server.billing
        minutes = billed_minutes(billing.started_at, billing.ended_at or self._until(server))
        return billing.model_copy(
            update={"billed_minutes": minutes, "cost": cost(minutes, billing.price_per_hour)},
        )

    def _until(self, server: Server) -> datetime:
        """Now, but for a rental that ended while no simulator ran: it was not billed on."""
        return min(self.now(), server.rental_ends_at or self.now())

    def create(self, wish: ServerCreate) -> Rented:
        """Rent the cheapest machine that fits; answered as soon as the server is queued."""
        with self.store.transaction():
            self._check(wish)
            machine = choose(self.machines, wish)
            if machine is None:
                detail = f"no machine with {wish.count} x {wish.gpu or wish.machine_id} that fits this wish is free"
                raise Problem(409, detail, code="no_capacity")
            if self.balance() < machine.price_per_hour:
                raise Problem(
                    402,
                    f"one hour of this machine costs {machine.price_per_hour} EUR and the balance is {self.balance()} EUR",
                    required=str(machine.price_per_hour),
                    available=str(self.balance()),
                    currency="EUR",
                )
            rented = _new_server(wish, machine, self.now())
            self._put(rented)
            self._event(rented, "server.state_changed", state=State.QUEUED)
            return rented

    def update(self, server_id: str, wish: ServerUpdate) -> Rented:
        with self.store.transaction():
            rented = self.find(server_id)
            if rented.stop or rented.server.state.is_final:
                raise Problem(409, f"{server_id} is {rented.server.state}")
            if wish.idle_detection and wish.idle_detection.enabled and rented.server.kind == "docker_image":
                raise Problem(422, "servers of an own image are never stopped for idling", code="idle_stop_unavailable")
            if wish.idle_detection is not None:
                rented.server.idle_detection = Idle(enabled=wish.idle_detection.enabled)
            for name in wish.model_fields_set & {"label", "deadline_at"}:
                setattr(rented.server, name, getattr(wish, name))
            if "deadline_save" in wish.model_fields_set:
                rented.deadline_save = wish.deadline_save
            self._put(rented)
            return rented

    def stop(self, server_id: str, wish: StopRequest) -> tuple[Rented, bool]:
        """Begin the stop; returns the server and whether this call began it."""
        with self.store.transaction():
            rented = self.find(server_id)
            if rented.server.state.is_final:
                return rented, False
            if rented.stop is not None:
                if rented.stop.wish.save != wish.save:
                    raise Problem(409, "a stop that saves something else is under way", code="stop_in_progress")
                return rented, False
            self._begin_stop(rented, wish, wish.reason)
            return rented, True

    def set_activity(self, server_id: str, activity: Activity) -> None:
        """Load and connections, as idle detection sees them; what is not given stays."""
        with self.store.transaction():
            rented = self.find(server_id)
            given = activity.model_dump(exclude_none=True, exclude={"exit_code"})
            rented.activity = rented.activity.model_copy(update=given)
            self._put(rented)

    def end_container(self, server_id: str, code: int) -> None:
        """The container ends now, with this code, whatever it does."""
        with self.store.transaction():
            self.host.kill(server_id, code=code, number=self.find(server_id).server.container.restart_count)

    # ---------------------------------------------------------------------------- saves

    def save(self, server_id: str, spec: SaveSpec) -> Save:
        """Save a folder without stopping."""
        with self.store.transaction():
            rented = self.find(server_id)
            if rented.server.state is not State.RUNNING:
                raise Problem(409, f"{server_id} is {rented.server.state}, not running")
            save = self._save(rented, spec)
            self.store.put("Save", save.id, save, owner=server_id)
            return save

    def find_save(self, save_id: str) -> Save:
        save = self.store.get(Save, save_id)
        if save is None:
            raise Problem(404, f"{save_id}: no such save")
        return save

    def delete_save(self, save_id: str) -> None:
        with self.store.transaction():
            self.find_save(save_id)
            self.store.delete(Save, save_id)
            self.host.saves.delete(save_id)

    # -------------------------------------------------------------------------- account

    def balance(self) -> Decimal:
        return self._deposit - sum((self.bill(rented.server).cost for rented in self.servers()), Decimal(0))

    def top_up(self, amount: Decimal) -> None:
        with self.store.transaction():
            self._deposit += amount
            self.store.put("setting", "deposit", str(self._deposit))

    def burn(self) -> Decimal:
        billed = (r.server for r in self.servers() if r.server.billing.started_at and not r.server.billing.ended_at)
        return sum((server.billing.price_per_hour for server in billed), Decimal(0))

    # ----------------------------------------------------------------------------- tick

    def tick(self) -> None:
        """Move every server on by what is due."""
        with self.store.transaction():
            for rented in self.store.all(Rented):
                if not rented.server.state.is_final:
                    self._advance(rented)

    def _advance(self, rented: Rented) -> None:
        server = rented.server
        if self._follow_container(rented):
            return
        if rented.stop is not None:
            self._go_on_stopping(rented, rented.stop)
        elif server.state in _NEXT:
            if self.now() - server.state_changed_at >= timedelta(seconds=self.pace.stage):
                self._prepare(rented, _NEXT[server.state])
        elif self._follow_idleness(rented):
            return
        elif (why := self._why_stop(rented)) is not None:
            self._begin_stop(rented, StopRequest(save=why[1], on_save_failure="stop_anyway"), why[0])
        elif self._wants_container(server):
            self._start_container(rented)

    def _follow_container(self, rented: Rented) -> bool:
        """Whether it ended, or was started again by its host: one life at a time, so that none is missed."""
        box = rented.server.container
        if box.state == "none":
            return False
        seen = self.host.look(rented.server.id, box.restart_count)
        if box.state == "running" and (seen.number > box.restart_count or not seen.is_running):
            self._record_exit(rented)
            return True
        if box.state == "exited" and seen.number > box.restart_count:
            self._record_start(rented, box.restart_count + 1)
            return True
        return False

    def _prepare(self, rented: Rented, state: State) -> None:
        if state is State.RUNNING and not self.host.has_image(rented.server.image):
            self._enter(rented, State.FAILED, "image_pull_failed")
            return
        self._enter(rented, state)

    def _why_stop(self, rented: Rented) -> tuple[str, SaveSpec | None] | None:
        """What the provider itself stops a server for, and what it keeps."""
        server, now = rented.server, self.now()
        if server.deadline_at is not None and server.deadline_at <= now:
            return "deadline", rented.deadline_save
        if server.rental_ends_at is not None and server.rental_ends_at <= now:
            return "rental_ended", SaveSpec(path=str(WORKSPACE))
        if server.idle_detection.stops_at is not None and server.idle_detection.stops_at <= now:
            return "idle", SaveSpec(path=str(WORKSPACE))
        if self.balance() <= 0:
            return "balance_exhausted", SaveSpec(path=str(WORKSPACE))
        return None

    def _follow_idleness(self, rented: Rented) -> bool:
        """Whether something changed."""
        before = rented.server.idle_detection
        after = follow(before, busy=is_busy(rented.activity), now=self.now())
        if after == before:
            return False
        rented.server.idle_detection = after
        self._put(rented)
        if after.email_sent_at is not None:
            self._email(rented, "idle_warning", f"{rented.server.id} is idle; it is saved and stopped in an hour")
            self._event(rented, "idle.email_sent")
        return True

    def _wants_container(self, server: Server) -> bool:
        if server.id in self.leaving or server.container.state == "running":
            return False
        if server.container.exited_at is None:
            return True
        wanted = server.restart_policy is Policy.ALWAYS or (
            server.restart_policy is Policy.ON_FAILURE and server.container.exit_code != 0
        )
        if not wanted or self.host.look(server.id, server.container.restart_count).is_coming:
            return False
        return self.now() - server.container.exited_at >= timedelta(seconds=self.pace.restart)

    def _start_container(self, rented: Rented) -> None:
        server, restore = rented.server, None
        first = server.container.started_at is None
        if first and rented.restore_save_id:
            restore = (rented.restore_save_id, self.find_save(rented.restore_save_id).path)
        self._record_start(rented, 0 if first else server.container.restart_count + 1)
        boot = Boot(
            image=server.image,
            args=tuple(server.args),
            env=self._environment(rented),
            policy=server.restart_policy,
            number=server.container.restart_count,
            restore=restore,
        )
        self.host.start(server.id, boot)

    def _record_start(self, rented: Rented, number: int) -> None:
        rented.server.container = Container(state="running", restart_count=number, started_at=self.now())
        self._put(rented)
        if number:
            self._event(rented, "container.restarted", restart_count=number)

    def _environment(self, rented: Rented) -> dict[str, str]:
        server = rented.server
        given = {
            "VRAMFARM_SERVER_ID": server.id,
            "VRAMFARM_API_URL": self._api_url,
            "VRAMFARM_API_KEY": rented.key,
            "VRAMFARM_GPU": server.machine.gpu,
            "VRAMFARM_GPU_COUNT": str(server.count),
            "VRAMFARM_WORKSPACE": str(WORKSPACE),
            "VRAMFARM_RENTAL_ENDS_AT": server.rental_ends_at.isoformat() if server.rental_ends_at else "",
            "VRAMFARM_PRICE_PER_HOUR": str(server.billing.price_per_hour),
            "VRAMFARM_RESTART_COUNT": str(server.container.restart_count),
        }
        return server.env | rented.secrets | given

    def _record_exit(self, rented: Rented) -> None:
        box = rented.server.container
        box.state, box.exited_at = "exited", self.now()
        box.exit_code = self.host.exit_code(rented.server.id, box.restart_count)
        self._put(rented)
        self._event(rented, "container.exited", exit_code=box.exit_code)

    def vanish(self, server_id: str) -> Rented:
        """As a host that loses its power for good: everything of the server is gone at once."""
        with self.store.transaction():
            rented = self.find(server_id)
            if rented.server.state.is_final:
                return rented
            self.host.kill(server_id, code=KILLED, number=rented.server.container.restart_count)
            self.host.delete_disk(server_id)
            self._enter(rented, State.FAILED, "host_lost")
            return rented

    # ----------------------------------------------------------------------------- stop

    def _begin_stop(self, rented: Rented, wish: StopRequest, reason: str) -> None:
        if reason == "idle":
            self._email(rented, "idle_stopped", f"{rented.server.id} was idle: its workspace is saved, it stops")
            self._event(rented, "idle.stop")
        rented.stop = Stopping(wish=wish, reason=reason)
        self.host.hold(rented.server.id)
        self._enter(rented, State.STOPPING if wish.save is None else State.SAVING, reason)

    def _go_on_stopping(self, rented: Rented, stop: Stopping) -> None:
        """SIGTERM, the grace, SIGKILL, the save, the end of the disk: one of them."""
        server = rented.server
        if server.container.state == "running":
            self._push(rented, stop)
        elif server.state is State.SAVING and stop.wish.save is not None:
            self._save_and_go_on(rented, stop, stop.wish.save)
        else:
            self.host.delete_disk(server.id)
            self._enter(rented, State.STOPPED, stop.reason)

    def _push(self, rented: Rented, stop: Stopping) -> None:
        if stop.term_at is None:
            stop.term_at = self.now()
            self._put(rented)
            self.host.terminate(rented.server.id)
        elif self.now() - stop.term_at >= timedelta(seconds=stop.wish.grace_seconds):
            self.host.kill(rented.server.id, code=KILLED, number=rented.server.container.restart_count)

    def _save_and_go_on(self, rented: Rented, stop: Stopping, spec: SaveSpec) -> None:
        server = rented.server
        server.save = self._save(rented, spec)
        self.store.put("Save", server.save.id, server.save, owner=server.id)
        if server.save.state == "complete" or stop.wish.on_save_failure == "stop_anyway":
            self._enter(rented, State.STOPPING, stop.reason)
            return
        rented.stop = None
        self._enter(rented, State.RUNNING, "save_failed")

    def _save(self, rented: Rented, spec: SaveSpec) -> Save:
        """A save, complete or failed. A fault of `createSave` lets it fail."""
        server, now = rented.server, self.now()
        save = Save(id=_new_id("sav"), server_id=server.id, path=spec.path, name=spec.name, created_at=now)
        try:
            if self.take_fault("createSave"):
                raise OSError("the store of saves does not answer")  # noqa: TRY301  # the same way out as a real one
            save.bytes, save.files = self.host.keep(server.id, spec.path, save.id)
            save.state, save.completed_at = "complete", self.now()
        except OSError as error:
            save.state, save.error = "failed", str(error)
        self._event(rented, f"save.{save.state}", save_id=save.id)
        return save

    def take_fault(self, operation: str) -> Fault | None:
        """The next fault injected into an operation, used up by one."""
        with self.store.transaction():
            fault = next((f for f in self.faults if f.operation == operation), None)
            if fault is not None:
                fault.times -= 1
                self.faults = [f for f in self.faults if f.times > 0]
            return fault

    # ---------------------------------------------------------------------------- store

    def events(self, server_id: str) -> list[Event]:
        return self.store.all(Event, owner=server_id)

    def emails(self) -> list[Email]:
        return self.store.all(Email)

    def _enter(self, rented: Rented, state: State, reason: str | None = None) -> None:
        server, now = rented.server, self.now()
        server.state, server.state_reason, server.state_changed_at = state, reason, now
        if state is State.RUNNING and server.billing.started_at is None:
            server.billing.started_at = now
        if state.is_final and server.billing.started_at is not None:
            server.billing.ended_at = self._until(server)
        self._put(rented)
        self._event(rented, "server.state_changed", state=state, reason=reason)

    def _put(self, rented: Rented) -> None:
        self.store.put("Rented", rented.server.id, rented)

    def _event(self, rented: Rented, type_: str, **data: Any) -> None:  # noqa: ANN401  # JSON
        event = Event(id=_new_id("evt"), type=type_, server_id=rented.server.id, at=self.now(), data=data)
        self.store.put("Event", event.id, event, owner=rented.server.id)

    def _email(self, rented: Rented, kind: str, subject: str) -> None:
        email = Email(at=self.now(), kind=kind, server_id=rented.server.id, subject=subject)
        self.store.put("Email", _new_id("eml"), email)

    def _setting(self, name: str, first: str) -> str:
        if self.store.text("setting", name) is None:
            self.store.put("setting", name, first)
        return self.store.text("setting", name) or first

    def _check(self, wish: ServerCreate) -> None:
        reserved = sorted(name for name in {*wish.env, *wish.secrets} if name.startswith("VRAMFARM_"))
        if reserved:
            raise Problem(422, f"env: {', '.join(reserved)}: these names are reserved", code="reserved_env_name")
        if wish.idle_detection and wish.idle_detection.enabled and wish.kind == "docker_image":
            raise Problem(422, "servers of an own image are never stopped for idling", code="idle_stop_unavailable")
        if wish.machine_id and all(machine.id != wish.machine_id for machine in self.machines):
            raise Problem(404, f"{wish.machine_id}: no such machine")
        if wish.restore_save_id:
            self.find_save(wish.restore_save_id)


def _new_server(wish: ServerCreate, machine: Machine, now: datetime) -> Rented:
    server = Server(
        id=_new_id("srv"),
        kind=wish.kind,
        state=State.QUEUED,
        state_changed_at=now,
        created_at=now,
        machine=machine,
        count=machine.count,
        image=wish.image,
        args=wish.args,
        env=wish.env,
        label=wish.label,
        disk_gb=wish.disk_gb,
        rental_days=wish.rental_days,
        rental_ends_at=now + timedelta(days=wish.rental_days),
        restart_policy=wish.restart_policy,
        idle_detection=Idle(enabled=wish.kind == "pytorch_jupyter" and _idle_wanted(wish)),
        deadline_at=wish.deadline_at,
        billing=Billing(price_per_hour=machine.price_per_hour),
    )
    return Rented(
        server=server,
        key=f"vfs_{secrets.token_hex(16)}",
        secrets=wish.secrets,
        restore_save_id=wish.restore_save_id,
        deadline_save=wish.deadline_save,
    )


def _idle_wanted(wish: ServerCreate) -> bool:
    return wish.idle_detection is None or wish.idle_detection.enabled


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(4)}"
