"""
`submit`: a night started from outside, by a person or a cron line.

It rents the cheapest machine that will do, hands it the job, waits for the machine's own verdict,
and gives a bad one back within the minutes that are paid anyway. Everything that it relies on is
asked of the provider and the store each time; what it writes down is only which machines were no good.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Final

from runner.adapters.providers import vramfarm, with_secrets
from runner.adapters.providers.contract import Keep
from runner.adapters.providers.http import make_send
from runner.adapters.secrets import FOLDER, OWN_STORE_KEYS, STORE_KEYS, find_values
from runner.cli.dates import DATE_VARIABLE
from runner.cli.load import LoadedJob, load_job, place_of
from runner.cli.naming import JOB_VARIABLE, add_job, named_job
from runner.cli.output import out, out_json
from runner.cli.planned import check_framework, refuse_planned
from runner.cli.refusal import REFUSAL, digest
from runner.cli.script import check_script
from runner.cli.stores import address_of, open_run
from runner.errors import JobError, LockedError, MachineError, StoreError, json_object
from runner.facts import Machine, Offer, Outcome, RentedServer, Server, ServerState
from runner.job import ArchiveSource, Job, PathSource, ProviderName, parse_money
from runner.policy import ledger
from runner.policy.actions import EXIT_CODES
from runner.policy.limits import deadline, is_raised, is_reached, why_not_worth_renting
from runner.policy.night import (
    Accepted,
    GiveBack,
    Night,
    NoMore,
    Over,
    Refusal,
    Refused,
    Rent,
    TooShort,
    Watch,
    choose,
    decide_step,
    disk_gb,
    is_outdated,
    why_none,
    wish_of,
)
from runner.policy.resume import is_elsewhere
from runner.results import last_attempt
from runner.storage.disk import Disk, try_lock, write_durable
from runner.supervise.archive import pack

STATE_VARIABLE: Final = "VRAMFARM_SUBMIT_STATE"
WORKSPACE: Final = "/workspace"
_PASSED_ON: Final = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION")
_STORE_SECRETS: Final = (*STORE_KEYS, *OWN_STORE_KEYS, "RUNNER_NOTIFY_URL")
_LOOK_S: Final = 5.0
_SELDOM_S: Final = 30.0
_PATIENCE_S: Final = 600.0  # with a provider or a store that does not answer
_LOOK_THEN_GO_ON: Final = "look (vramfarm-runner logs and status STORE/NAME), then --go-on; or wait for the next night"
_OVER_UNTOLD: Final = frozenset({Outcome.LIMIT, Outcome.STOPPED, Outcome.GAVE_UP})  # done is what is in the store, too
_MARGIN: Final = timedelta(minutes=30)  # the provider's own deadline comes after ours


def configure(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument(
        "--at-most", metavar="PRICE", type=_price, help="highest price of the machine per hour, such as 25/h"
    )
    parser.add_argument("--wait", action="store_true", help="wait until the run is over, and end with its exit code")
    parser.add_argument(
        "--go-on", action="store_true", help="go on with a run that was stopped, gave up or reached its limit"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--look-every", type=float, default=_LOOK_S, help=argparse.SUPPRESS)


def _price(text: str) -> Decimal:
    try:
        return parse_money(text.removesuffix("/h").strip())
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a price an hour such as 25/h: {error}") from None


def run(args: argparse.Namespace) -> int:
    env = with_secrets(os.environ)
    loaded = load_job(named_job(args), env)
    env |= find_values((*loaded.job.secrets, *loaded.job.notify), env)
    _check(loaded, env)
    check_script(loaded)
    with _alone(loaded.job.name) as record:
        return _Submission(loaded, env, record, args).run()


def _check(loaded: LoadedJob, env: Mapping[str, str]) -> None:
    """All that can be found out before money is spent."""
    job = loaded.job
    refuse_planned(job)
    check_framework(job, partial(place_of, loaded))
    if is_elsewhere(job.checkpoint.resume) and "://" not in job.checkpoint.resume:
        raise JobError(
            f"checkpoint.resume: expected an address that a rented machine can reach, got the folder {job.checkpoint.resume}",
            hint="name the run in its store: s3://bucket/runs/NAME",
        )
    if job.provider.kind not in {ProviderName.AUTO, ProviderName.VRAMFARM}:
        raise JobError(f"provider.kind: submit rents at vramfarm only, got {job.provider.kind}")
    if not env.get(vramfarm.KEY):
        raise JobError(
            f"submit: expected the account's key in {vramfarm.KEY}, found none",
            hint=f"export {vramfarm.KEY}=…; without an account rehearse it on a local VRAMfarm: docs/simulate.md",
        )
    if job.offload.to is None:
        raise JobError(
            "offload.to: expected a store, found none: a night that is rented from outside is told by its store",
            hint="offload: {to: s3://my-bucket/runs}",
        )
    if missing := [name for name in (*job.secrets, *job.notify) if not env.get(name)]:
        raise JobError(
            f"secrets: no value for {', '.join(missing)}",
            hint=f"set them for this command, or put them into {FOLDER}: it passes them on",
        )


# ---------------------------------------------------------------------------------- memory


@dataclass
class Record:
    """What this host remembers of a run: its servers, so that `sweep` finds them, and those that were no good."""

    path: Path
    servers: dict[str, dict[str, str]] = field(default_factory=dict)

    def remember(self, server: str, **fields: str) -> None:
        """Durable when this returns."""
        self.servers.setdefault(server, {}).update(fields)
        write_durable(Disk(), self.path, json.dumps(self.servers, indent=1).encode())

    def refused(self) -> frozenset[str]:
        return frozenset(server for server, fields in self.servers.items() if "refused" in fields)

    def trained(self) -> frozenset[str]:
        return frozenset(server for server, fields in self.servers.items() if "trained" in fields)

    def rented_at(self) -> dict[str, datetime]:
        return {server: _moment(f["rented_at"]) for server, f in self.servers.items() if "rented_at" in f}

    def bad_machines(self) -> frozenset[str]:
        return frozenset(fields["machine"] for fields in self.servers.values() if "refused" in fields)


def state_folder(env: Mapping[str, str]) -> Path:
    """Where this host keeps its memory."""
    home = Path(env.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return Path(env.get(STATE_VARIABLE) or home / "vramfarm-runner")


def read_record(path: Path) -> Record:
    """A record that is not there, or is damaged, is empty: the provider knows the servers, too."""
    with suppress(OSError, ValueError, AttributeError):
        return Record(path, {str(server): dict(fields) for server, fields in json.loads(path.read_bytes()).items()})
    return Record(path)


@contextmanager
def _alone(name: str) -> Iterator[Record]:
    """One `submit` of a run at a time on this host: a cron line that comes again finds the first at work."""
    folder = state_folder(os.environ)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("a") as lock:
        if not try_lock(lock):
            raise LockedError(f"{name}: another submit of this run is at work on this host")
        yield read_record(folder / f"{name}.json")


# ------------------------------------------------------------------------------------ work


class _Submission:
    def __init__(self, loaded: LoadedJob, env: Mapping[str, str], record: Record, args: argparse.Namespace) -> None:
        self._loaded, self._job, self._env, self._record, self._args = loaded, loaded.job, env, record, args
        self._run = open_run(address_of(self._job))
        self._send = make_send(10.0)
        self._label = label_of(self._job.name)
        self._rented_now: set[str] = set()
        self._digest = ""
        self._live = ""  # the server that is not gone, as last seen
        self._told = ""
        self._trouble_since: float | None = None

    def run(self) -> int:
        try:
            return self._go()
        except KeyboardInterrupt:
            if self._live:
                self._say(
                    f"{self._live}: rented, and not stopped by this Ctrl-C; the same line again goes on from here"
                )
            raise

    def _go(self) -> int:
        while True:
            night = self._look()
            if night is None:
                time.sleep(self._args.look_every)
                continue
            step = decide_step(self._job, night, go_on=self._args.go_on, rented_now=self._rented_now)
            code = self._do(step)
            if code is not None:
                return code

    def _do(self, step: object) -> int | None:
        match step:
            case Over(outcome=outcome, reason=reason, missing=missing):
                more = f", but {missing}" if missing else "; --go-on goes on" if outcome is Outcome.STOPPED else ""
                code = StoreError.exit_code if missing else EXIT_CODES[outcome]
                return self._close(f"the run is over: {outcome}: {reason}{more}", code, outcome=outcome)
            case Refused(code=code, reason=reason):
                error = JobError if code == JobError.exit_code else StoreError
                hint = "mend it and submit again: with another job.yaml or other code it rents again, as with --go-on"
                raise error(f"{self._job.name}: nothing is rented, because the last server failed: {reason}", hint=hint)
            case TooShort(reason=reason):
                raise JobError(
                    f"{self._job.name}: nothing is rented: {reason}", hint="give it more (limits in job.yaml)"
                )
            case NoMore(reason=reason):
                raise MachineError(f"{self._job.name}: {reason}{self._why_refused()}", hint=_LOOK_THEN_GO_ON)
            case Accepted(rental=rental):
                return self._follow(rental)
            case Watch(rental=rental):
                self._say(f"{rental.id}: {rental.detail}; waiting for its verdict")
                time.sleep(self._args.look_every)
            case GiveBack(rental=rental, reason=reason):
                self._give_back(rental, reason)
            case Rent(number=number, reopens=reopens):
                self._rent(number, reopens=reopens)
        return None

    def _follow(self, rental: RentedServer) -> int | None:
        """It trains. Without --wait that is all; with it, until the store or the provider says otherwise."""
        if "trained" not in self._record.servers.get(rental.id, {}):
            self._record.remember(rental.id, machine=rental.machine, trained="yes")
        if not self._args.wait:
            return self._close(f"{rental.id} trains, {rental.price_per_hour} EUR/h", 0, server=rental.id)
        self._say(f"{rental.id} trains, {rental.price_per_hour} EUR/h; waiting for its end")
        time.sleep(max(self._args.look_every, min(_SELDOM_S, 6 * self._args.look_every)))
        return None

    def _close(self, text: str, code: int, **fields: object) -> int:
        store = f"{self._job.offload.to}/{self._job.name}"
        if self._args.json:
            out_json({"job": self._job.name, "store": store, "message": text, "exit_code": code, **fields})
        else:
            out(f"{self._job.name}: {text}")
            out(f"vramfarm-runner status {store}")
        return code

    def _say(self, line: str) -> None:
        """Once, until something else is said."""
        if line != self._told:
            print(f"{datetime.now():%H:%M:%S} {line}", file=sys.stderr, flush=True)  # noqa: DTZ005, T201  # the log
            self._told = line

    # ------------------------------------------------------------------------------- look

    def _look(self) -> Night | None:
        """None: the provider or the store did not answer; asked again, for ten minutes."""
        rentals = vramfarm.list_rentals(self._label, self._env, self._send)
        files = [self._read(name) for name in ("status.json", "outcome.json", REFUSAL, "ledger.json")]
        status, outcome, refusal, told = (fields or {} for fields in files)
        if isinstance(rentals, vramfarm.Trouble) or None in files:
            detail = rentals.detail if isinstance(rentals, vramfarm.Trouble) else "the store does not answer"
            self._bear(detail)
            return None
        self._trouble_since = None
        verdict, machines, now = status.get("verdict") or {}, ledger.parse(told), datetime.now(UTC)
        outcome = outcome if outcome.get("outcome") else _untold_end(status, machines, now)
        is_void = ledger.is_void(last_attempt(outcome), machines)
        if is_void or is_outdated(_moment(str(outcome.get("at"))), machines):
            outcome = {}
        told_by = str(status.get("server") or "")
        live = next((rental for rental in rentals if rental.state is not ServerState.GONE), None)
        self._live = live.id if live else ""
        silent = timedelta() if live is None or told_by == live.id else _age(live.created_at)
        return Night(
            outcome=str(outcome.get("outcome") or ""),
            reason=str(outcome.get("reason") or ""),
            missing=str(outcome.get("missing") or ""),
            rentals=rentals,
            refused=self._record.refused(),
            told_by=told_by,
            verdict=str(verdict.get("verdict") or ""),
            verdict_reason="; ".join(map(str, verdict.get("reasons") or ())),
            has_begun=bool(status.get("attempt")) and status.get("phase") in {"STARTING", "RUNNING"},
            silent_for=silent,
            is_raised=self._is_raised(status, machines),
            refusal=self._parse_refusal(refusal),
            rented_at={**self._record.rented_at(), **{rental.id: _moment(rental.created_at) for rental in rentals}},
            trained={*self._record.trained(), *(one.server for one in machines if one.attempts)},
            reopened={one.server for one in machines if one.is_anew},
            now=now,
            no_time=why_not_worth_renting(self._job.limits, now, ledger.sum_up(machines, but="")),
            no_time_anew=why_not_worth_renting(self._job.limits, now),
        )

    def _is_raised(self, status: Mapping[str, Any], machines: tuple[Machine, ...]) -> bool:
        """Only the machine that ended the run knows which limit it reached."""
        if not machines or not status.get("deadline_at") or machines[-1].server != (status.get("server") or ""):
            return False
        now = datetime.now(UTC)
        return is_raised(self._job.limits, machines, _moment(str(status["deadline_at"])), now)

    def _parse_refusal(self, told: Mapping[str, Any]) -> Refusal | None:
        if not told:
            return None
        if not self._digest:
            self._digest = digest(self._text())
        return Refusal(
            server=str(told.get("server")),
            code=JobError.exit_code if told.get("exit_code") == JobError.exit_code else StoreError.exit_code,
            reason=str(told.get("reason")),
            is_same=told.get("job") == self._digest,
            age=datetime.now(UTC) - _moment(str(told.get("at"))),
        )

    def _why_refused(self) -> str:
        """Why the servers were given back that were."""
        reasons = {fields["refused"] for fields in self._record.servers.values() if "refused" in fields}
        return f": {'; '.join(sorted(reasons))}" if reasons else ""

    def _bear(self, detail: str) -> None:
        self._say(f"no answer, asking again: {detail}")
        self._trouble_since = self._trouble_since or time.monotonic()
        if time.monotonic() - self._trouble_since > _PATIENCE_S:
            raise StoreError(f"{self._job.name}: no answer for {_PATIENCE_S / 60:.0f} min: {detail}")

    def _read(self, name: str) -> Mapping[str, Any] | None:
        """A small JSON object of the run in its store; empty if it is not there, None if nobody answers."""
        try:
            raw = self._run.store.get(f"{self._run.job}/{name}")
        except StoreError as error:
            if getattr(error, "final", True):
                raise
            return None
        return json_object(raw)

    # -------------------------------------------------------------------------------- act

    def _give_back(self, rental: RentedServer, reason: str) -> None:
        self._record.remember(rental.id, machine=rental.machine, refused=reason)
        self._say(f"{rental.id} is given back: {reason}")
        server = Server(provider="vramfarm", id=rental.id)
        vramfarm.stop(server, Keep(None, stop_anyway=True), 3, self._env, self._send)

    def _rent(self, number: int, *, reopens: bool) -> None:
        ends_at = deadline(self._job.limits, datetime.now(UTC), None)
        wish = wish_of(self._job, at_most=self._args.at_most, lasts=ends_at - datetime.now(UTC))
        offers = vramfarm.read_offers(self._env, self._send)
        if isinstance(offers, str):
            self._bear(offers)
            time.sleep(self._args.look_every)
            return
        chosen = choose(self._job, wish, offers, refused=self._record.bad_machines())
        if not chosen:
            raise MachineError(
                f"{self._job.name}: {why_none(self._job, wish, offers, refused=self._record.bad_machines())}"
            )
        self._expect_money(chosen[0])
        body = self._body(chosen[0], ends_at, wish.days) | ({"args": ["--go-on"]} if reopens else {})
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
        rental = vramfarm.rent(body, f"{self._job.name}-{number}-{digest}", self._env, self._send)
        if isinstance(rental, vramfarm.Trouble):
            self._cope(rental)
            return
        self._rented_now.add(rental.id)
        self._live = rental.id
        dates = {"deadline_at": (ends_at + _MARGIN).isoformat(), "rented_at": datetime.now(UTC).isoformat()}
        self._record.remember(rental.id, machine=rental.machine, **dates)
        self._say(f"rented {rental.id}: {chosen[0].cards} x {chosen[0].name}, {rental.price_per_hour} EUR/h")

    def _cope(self, trouble: vramfarm.Trouble) -> None:
        """What was surely not rented is a refusal; what may have been is found by its label in the next look."""
        if trouble.is_certain and trouble.status not in {409, 429}:
            raise MachineError(f"{self._job.name}: the provider rents nothing out: {trouble.detail}")
        self._bear(trouble.detail)
        time.sleep(max(self._args.look_every, trouble.retry_after_s))

    def _expect_money(self, offer: Offer) -> None:
        balance = vramfarm.read_balance(self._env, self._send)
        if isinstance(balance, Decimal) and balance < offer.price_per_hour:
            raise MachineError(
                f"{self._job.name}: the account has {balance} {offer.currency}, and an hour costs {offer.price_per_hour}",
                hint="top it up: a machine is rented out only to an account that can pay an hour",
            )

    def _body(self, offer: Offer, ends_at: datetime, days: int) -> dict[str, Any]:
        job, text = self._job, self._text()
        hold = {} if job.finish.hold != "auto" else {"RUNNER_HOLD_S": "0"}  # nobody looks in; the store has the logs
        date = {DATE_VARIABLE: self._loaded.date} if "{date}" in self._loaded.written.name else {}
        given = {name: self._env[name] for name in _PASSED_ON if self._env.get(name)}
        secrets = (*job.secrets, *job.notify, *_STORE_SECRETS)
        return {
            "kind": "docker_image",
            "machine_id": offer.id,
            "count": offer.cards,
            "image": job.provider.image,
            "env": {JOB_VARIABLE: base64.b64encode(text.encode()).decode(), **hold, **date, **given},
            "secrets": {name: self._env[name] for name in secrets if self._env.get(name)},
            "rental_days": days,
            "disk_gb": disk_gb(job, offer),
            "label": self._label,
            "restart_policy": "always",
            "deadline_at": (ends_at + _MARGIN).replace(second=0, microsecond=0).isoformat(),
            "deadline_save": {"path": WORKSPACE},
        }

    def _text(self) -> str:
        return json.dumps(self._handed_over().model_dump(mode="json", by_alias=True, exclude_defaults=True))

    def _handed_over(self) -> Job:
        """The job as written, so that its folders are the server's; local code goes to the store, by its content."""
        written, here = self._loaded.written, self._job.source
        if not isinstance(here, PathSource):
            return written
        name, raw = pack(Path(here.path))
        key = f"{self._run.job}/source/{name}"
        if self._run.store.head(key) is None:
            self._run.store.put(key, raw)
        return written.model_copy(update={"source": ArchiveSource(archive=f"{self._job.offload.to}/{key}")})


def label_of(name: str) -> str:
    """By it a run's servers are found again at the provider."""
    return f"run:{name}"[:64]


def _untold_end(status: Mapping[str, Any], machines: tuple[Machine, ...], now: datetime) -> Mapping[str, Any]:
    """An end that its machine had no time to publish: its last status says it, or that its deadline was there."""
    if not machines or machines[-1].server != (status.get("server") or ""):
        return {}
    told = {"attempt": status.get("attempt"), "at": status.get("updated_at")}
    if status.get("outcome") in _OVER_UNTOLD:
        return {**told, "outcome": status["outcome"], "reason": status.get("reason")}
    with suppress(ValueError, TypeError):
        deadline_at, told_at = (datetime.fromisoformat(str(status.get(key))) for key in ("deadline_at", "updated_at"))
        if is_reached(deadline_at, told_at, now):
            why = status.get("deadline_why") or "the time limit"
            return {**told, "outcome": Outcome.LIMIT, "reason": f"{why} was reached, and its machine could not say so"}
    return {}


def _moment(text: str) -> datetime:
    """Now, where it is none: then it is not taken for long ago."""
    with suppress(ValueError):
        moment = datetime.fromisoformat(text)
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return datetime.now(UTC)


def _age(moment: str) -> timedelta:
    with suppress(ValueError):
        return datetime.now(UTC) - datetime.fromisoformat(moment)
    return timedelta()
