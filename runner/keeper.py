"""
The keeper of the lease: the task that takes it, renews it as long as its runner lives, and
gives it back when asked to (`FINISH`). What it decides is in `policy.lease`.

It also keeps `status.json` in the store fresh: it has a connection, and the right to write.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from runner.facts import LeaseState
from runner.policy.lease import (
    Claim,
    Idle,
    Keeper,
    Look,
    Lost,
    Pace,
    Put,
    decide_move,
    failed,
    looked,
    may_write,
    put,
)
from runner.storage.offsite import OffsiteError, Store
from runner.supervise.process import boot_time_s as now_s
from runner.supervise.tasks import FINISH

LEASE: Final = "lease.json"
_TICK_S: Final = 1.0
_STATUS_EVERY_S: Final = 60.0
_STATUS_SPACING_S: Final = 5.0
_STATUS_WORTH: Final = ("phase", "outcome", "attempt", "verdict")  # a change of these is told at once
_MAX_BYTES: Final = 1 << 16

Tell = Callable[[Mapping[str, Any]], None]  # a line of a task


def keep_lease(  # noqa: PLR0913  # what differs between machines, and between tests
    store: Store, job: str, *, runner: int, holder: str, who: str, status: Path, tell: Tell, pace: Pace | None = None
) -> Mapping[str, Any]:
    """
    Hold the lease until the runner ends or asks for its release; returns why it is not held any more.

    An error is raised if the store has not answered before, or for as long as a lease is valid.
    """
    if not store.probe().conditional:
        return _told(LeaseState.NOT_NEEDED)
    keeping = _Keeping(store, job, Keeper(holder=holder, life=uuid.uuid4().hex, who=who, pace=pace or Pace()), tell)
    asked, published = threading.Event(), _Status(store, job, status)
    signal.signal(FINISH, lambda *_: asked.set())
    while os.getppid() == runner:
        if asked.is_set():
            if keeping.holds():
                published.publish()
            keeping.release()
            return _told(LeaseState.UNKNOWN)
        match decide_move(keeping.keeper, now_s()):
            case Lost(to=claim):
                return _told(LeaseState.TAKEN, claim)
            case Idle(until_s=until_s):
                if keeping.holds():
                    published.publish_if_changed()
                asked.wait(min(max(until_s - now_s(), 0.0), _TICK_S))
            case Look() | Put() as move:
                keeping.make(move)
    return _told(LeaseState.UNKNOWN)


def expect_ours(store: Store, job: str, holder: str) -> None:
    """
    An error if another one has the run. Whoever was suspended, or whose machine was, goes on where he was: his own
    clock need not tell him.
    """
    found = store.get(f"{job}/{LEASE}", limit_bytes=_MAX_BYTES)
    claim = parse_claim(found) if found else None
    if claim is not None and claim.holder != holder:
        raise OffsiteError(f"{store.address}/{job}: another runner has this run by now: {claim.who}", final=False)


def parse_claim(raw: bytes) -> Claim | None:
    """None: nothing that we understand; whoever wrote it has the lease all the same."""
    with suppress(ValueError, TypeError, RecursionError):
        found = json.loads(raw)
        known = {name: found[name] for name in (f.name for f in fields(Claim)) if name in found}
        claim = Claim(**known)
        texts = (claim.holder, claim.life, claim.who, claim.until)
        if all(isinstance(text, str) for text in texts) and type(claim.fence) is int and type(claim.beat) is int:
            return claim
    return None


def _told(state: LeaseState, claim: Claim | None = None, **more: Any) -> dict[str, Any]:  # noqa: ANN401  # JSON
    who = {"who": claim.who, "until": claim.until, "fence": claim.fence} if claim else {}
    return {"state": state, **who, **more}


@dataclass(slots=True)
class _Keeping:
    """The automaton and the store."""

    store: Store
    job: str
    keeper: Keeper
    tell: Tell
    answered_s: float = -math.inf

    def make(self, move: Look | Put) -> None:
        began_s = now_s()
        try:
            if isinstance(move, Look):
                self._look()
            else:
                self._put(move, began_s)
        except OffsiteError as error:
            if now_s() > self.answered_s + self.keeper.pace.valid_s:
                raise  # the loop knows what to do, and starts another keeper
            self.keeper = failed(self.keeper, now_s())
            self.tell({"progress": 1.0, "note": str(error)})
        else:
            self.answered_s = now_s()
            self._say()

    def _look(self) -> None:
        found = self.store.get_version(f"{self.job}/{LEASE}", limit_bytes=_MAX_BYTES)
        claim, tag = (parse_claim(found.content), found.tag) if found else (None, None)
        self.keeper = looked(self.keeper, claim, tag, now_s())

    def _put(self, move: Put, began_s: float) -> None:
        until = datetime.now(UTC) + timedelta(seconds=self.keeper.pace.watch_s)
        claim = replace(move.claim, until=until.isoformat(timespec="seconds"))
        tag = self.store.put_if(f"{self.job}/{LEASE}", _dump(claim), move.tag)
        self.keeper = put(self.keeper, claim, tag, began_s)

    def holds(self) -> bool:
        return may_write(self.keeper.renewed_s, now_s(), self.keeper.pace)

    def release(self) -> None:
        """Whoever comes next need not watch. If it fails, he watches."""
        if self.keeper.mine is not None:
            with suppress(OffsiteError):
                self.store.put_if(
                    f"{self.job}/{LEASE}", _dump(replace(self.keeper.mine, released=True)), self.keeper.tag
                )

    def _say(self) -> None:
        keeper = self.keeper
        if keeper.mine is not None:
            told = _told(LeaseState.HELD, keeper.mine, renewed_s=keeper.renewed_s, vacancy=keeper.vacancy)
        elif keeper.watched_s is not None:
            told = _told(LeaseState.WATCHING, keeper.there)
        else:
            return
        self.tell({"progress": 1.0, "note": "", "told": told})


def _dump(claim: Claim) -> bytes:
    return json.dumps(asdict(claim), indent=1).encode()


class _Status:
    """`status.json` of the run, copied once a minute, and at once when something happened."""

    def __init__(self, store: Store, job: str, path: Path) -> None:
        self._store, self._key, self._path = store, f"{job}/{path.name}", path
        self._worth: tuple[object, ...] | None = None
        self._at_s = -_STATUS_EVERY_S

    def publish_if_changed(self) -> None:
        age_s = now_s() - self._at_s
        if age_s >= _STATUS_SPACING_S:
            self.publish(even_if_unchanged=age_s >= _STATUS_EVERY_S)

    def publish(self, *, even_if_unchanged: bool = True) -> None:
        with suppress(OSError, ValueError, AttributeError, OffsiteError):  # the next look tries again
            raw = self._path.read_bytes()
            status = json.loads(raw)
            worth = tuple(status.get(name) for name in _STATUS_WORTH)
            if _says_something(status) and (even_if_unchanged or worth != self._worth):
                self._at_s = now_s()
                self._store.put(self._key, raw)
                self._worth = worth


def _says_something(status: Mapping[str, Any]) -> bool:
    """A machine that has done nothing yet, or finds the job done, leaves what an earlier one told."""
    return bool(status.get("attempt") or status.get("verdict") or status.get("phase") in {"SETUP", "RESTORING"})
