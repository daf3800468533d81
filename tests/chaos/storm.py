"""
A kill storm: a whole run on a simulated server, killed piece by piece at random moments, while
a witness looks on and checks what must hold at any time.

The random choices come from a seed, which is in every message; when the processes reach which
line is up to the machine, so a seed that failed may pass the next time. What was killed, and
when, is in the message too.
"""

from __future__ import annotations

import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from runner.job import OffloadPolicy
from runner.simulator.farm import Farm, Pace
from runner.simulator.model import Event, Policy, ServerCreate, State
from runner.simulator.serving import Options, serving
from runner.storage.journal import events
from runner.storage.offsite import comparing, open_store, surveying
from runner.supervise import page as pages
from runner.supervise.process import Process, end_all, find, kill
from tests.chaos.parts import PARTS, command_line, name_part, sort_parts
from tests.chaos.witness import LOOK_S, Content, Witness, check_checkpoint
from vramfarm.protocol import MANIFEST, TEMPORARY, Env, Manifest, Slot

BOX: Final = Path(__file__).with_name("box.py")
MARK: Final = "VRAMFARM_SERVER_ID"
NAME: Final = "storm"
PACE: Final = Pace(stage=0.0, restart=0.1, tick=0.05)
POLL_S: Final = 0.004
TRAINING: Final = {"shim", "launcher", "rank", "ranks", "saver"}
MOMENTS: Final = (
    "soon",
    "launching",
    "starting",
    "training",
    "training",
    "saving",
    "saving",
    "task",
    "ended",
    "concluded",
)
_GONE: Final = {State.STOPPING, State.SAVING, State.STOPPED, State.FAILED}


@dataclass(frozen=True, kw_only=True)
class Play:
    """What a storm is played with. `content(rank, step)` are the bytes of a shard, where they can be known."""

    seed: int
    guardian: tuple[str, ...]
    job: str  # job.yaml, with {store} to be filled in
    steps: int
    moments: tuple[str, ...]  # what to wait for before each kill
    moment_s: float  # at most this long
    patience_s: float  # from the last kill to the end of the run
    runner_deaths: int  # the guardian gives up after five
    content: Content | None = None
    parts: tuple[str, ...] = ()  # kill always these, not by chance


@contextmanager
def farm_in(state: Path) -> Iterator[Farm]:
    state.mkdir(parents=True)
    options = Options(state=state, port=0, run=None, price=None, balance=Decimal(1000), runner=(), pace=PACE)
    with serving(options, per_minute=100_000, creates_per_minute=100_000) as farm:
        try:
            yield farm
        finally:
            farm.leaving.update(rented.server.id for rented in farm.servers())
            with farm.store.transaction():
                for rented in farm.servers():
                    farm.host.kill(rented.server.id, code=137, number=0)


class Storm:
    """One run and all that happens to it. `run` returns when the server is stopped and everything was checked."""

    def __init__(self, play: Play, folder: Path, farm: Farm) -> None:
        self.play, self.farm, self.folder = play, farm, folder
        self.random = random.Random(play.seed)
        self.store = folder / "store"
        job = folder / "job.yaml"
        job.write_text(play.job.replace("{store}", f"file://{self.store}"))
        argv = [sys.executable, "-I", str(BOX), *play.guardian, "--config", str(job)]
        self.server_id = farm.create(_wish(argv)).server.id
        self.run_dir = farm.host.disk(self.server_id).resolve() / NAME
        self.witness = Witness(self.run_dir, self.store / NAME, self._find_attempt, play.content)
        self.killed: list[str] = []
        self.num_kills = 0
        self._deaths: Counter[Process] = Counter()
        self._began = time.monotonic()

    def run(self) -> None:
        print(f"storm: seed {self.play.seed}")
        try:
            for moment in self.play.moments:
                if not self._wait_for(moment):
                    break
                self._strike()
            self._wait(self._is_stopped, self.play.patience_s, "the server is stopped")
            self._check_end()
            print(f"storm: {self.num_kills} kills, resumed at {self.witness.resumed}", *self.killed, sep="\n")
        except Exception as error:
            raise AssertionError(f"{error!r}\n{self._story()}") from error

    # -------------------------------------------------------------------------- moments

    def _wait_for(self, moment: str) -> bool:
        """Wait for a moment to strike, not for ever; False: the server is being stopped."""
        launched = len(self._launched())
        claim = {
            "soon": lambda: False,
            "launching": lambda: len(self._launched()) > launched,
            "starting": lambda: bool(self._parts()["ranks"]),
            "training": self._is_training,
            "saving": lambda: any(self.run_dir.glob(f"checkpoints/{TEMPORARY}*")),
            "task": lambda: bool(self._parts()["tasks"]),
            "ended": lambda: any(self.run_dir.glob("logs/attempt-*/end.json")),
            "concluded": lambda: any(e["event"] == "concluded" for e in events(self.run_dir / "journal.jsonl")),
        }[moment]
        self._watch_until(claim, self.random.uniform(0, 1.5) if moment == "soon" else self.play.moment_s)
        self._watch_until(lambda: False, self.random.choice((0, 0.003, 0.02, 0.1, 0.7)))
        return not self._is_ending()

    def _is_training(self) -> bool:
        """Whether the last attempt has made a step."""
        launched = self._launched()
        page = pages.find(self.run_dir, launched[-1]["id"]) if launched else None
        if page is None:
            return False
        step = min(page.get(rank, Slot.STEP) for rank in range(page.num_ranks))
        page.close()
        return step > (launched[-1]["resume"]["step"] if launched[-1]["resume"] else 0)

    def _launched(self) -> list[Mapping[str, Any]]:
        return [event for event in events(self.run_dir / "journal.jsonl") if event["event"] == "launched"]

    def _watch_until(self, claim: Callable[[], Any], seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not claim() and not self._is_ending():
            self._look()
            time.sleep(POLL_S)

    def _wait(self, claim: Callable[[], Any], seconds: float, what: str) -> None:
        until = time.monotonic() + seconds
        while not claim():
            assert time.monotonic() < until, f"not within {seconds:g} s: {what}"
            self._look()
            time.sleep(LOOK_S)

    def _look(self) -> None:
        if time.monotonic() >= self.witness.next_look:
            with self.farm.store.transaction():  # the farm's threads look for processes, too: one at a time
                self.witness.look()

    def _state(self) -> State:
        return self.farm.find(self.server_id).server.state

    def _is_ending(self) -> bool:
        return self._state() in _GONE

    def _is_stopped(self) -> bool:
        return self._state().is_final

    # --------------------------------------------------------------------------- strikes

    def _strike(self) -> None:
        roll = self.random.random()
        if self.play.parts:
            self._kill(*self.play.parts)
        elif roll < 0.08:
            self._lose_the_machine()
        elif roll < 0.16:
            self._kill("box")
        elif roll < 0.26:
            self._kill("guardian", number=signal.SIGTERM)
        elif roll < 0.36:
            self._kill(*PARTS)
        else:
            parts = self._parts()
            there = [name for name in PARTS if parts["ranks" if name == "rank" else name]]
            there += 2 * [name for name in there if name in TRAINING]
            self._kill(*self.random.sample(there, min(len(there), self.random.choice((1, 1, 1, 2, 2, 3)))))

    def _kill(self, *names: str, number: signal.Signals = signal.SIGKILL) -> None:
        parts = self._parts()
        if "guardian" not in names and parts["guardian"] and "runner" in names:
            guardian = parts["guardian"][0]
            self._deaths[guardian] += 1
            names = names if self._deaths[guardian] <= self.play.runner_deaths else ("guardian", *names)
        chosen = {name: self._choose(name, parts) for name in names}
        kill([process for found in chosen.values() for process in found], number)
        if any(chosen.values()):
            self._note(f"{number.name} {' '.join(f'{k}={[p.pid for p in v]}' for k, v in chosen.items() if v)}")

    def _choose(self, name: str, parts: dict[str, list[Process]]) -> list[Process]:
        if name == "rank":
            return [self.random.choice(parts["ranks"])] if parts["ranks"] else []
        return parts[name]

    def _lose_the_machine(self) -> None:
        """Everything ends at once and the disk is gone; the provider starts the container on an empty one."""
        with self.farm.store.transaction():
            if self._is_ending():
                return
            number = self.farm.find(self.server_id).server.container.restart_count
            self.farm.host.kill(self.server_id, code=137, number=number)
            left = end_all(lambda: find(Env.RUN, str(self.run_dir)), timeout_s=5.0)
            assert () == left
            self.witness.lost()
            shutil.rmtree(self.farm.host.disk(self.server_id))
        self._note("lost the machine")

    def _note(self, text: str) -> None:
        self.num_kills += 1
        self.killed.append(f"{datetime.now(UTC):%H:%M:%S.%f} +{time.monotonic() - self._began:.2f} {text}")

    # -------------------------------------------------------------------------- processes

    def _parts(self) -> dict[str, list[Process]]:
        """The processes of the run by what they are."""
        return sort_parts(self._processes())

    def _processes(self) -> list[Process]:
        with self.farm.store.transaction():
            found = {*find(Env.RUN, str(self.run_dir)), *find(MARK, self.server_id)}  # the first knows the roles
        return sorted(found, key=lambda process: process.pid)

    @staticmethod
    def _find_attempt(attempt_id: str) -> tuple[Process, ...]:
        return tuple(process for process in find(Env.ATTEMPT_ID, attempt_id) if process.role != "saver")

    # -------------------------------------------------------------------------------- end

    def _check_end(self) -> None:
        """All that must be true when the server is gone."""
        server = self.farm.find(self.server_id).server
        assert (State.STOPPED, "job_succeeded") == (server.state, server.state_reason)
        stopping = [e for e in self._events("server.state_changed") if e.data["state"] in {"stopping", "saving"}]
        assert 1 == len(stopping), stopping
        manifest = self._check_store()
        committed_at = (self.store / NAME / "checkpoints" / manifest.ref.name / MANIFEST).stat().st_mtime
        assert committed_at <= stopping[0].at.timestamp(), "the server was stopped before its last checkpoint was safe"
        self._wait(lambda: not self._processes(), 5.0, "no process of the run is left")
        prefix = pages._prefix(self.run_dir)
        assert [] == sorted(Path("/dev/shm").glob(f"{prefix}*"))

    def _check_store(self) -> Manifest:
        """The store has the last step, every byte of it, and says how the job ended."""
        store = open_store(OffloadPolicy(to=f"file://{self.store}"), {})
        found = surveying.survey(store, NAME)
        assert () == found.unusable
        assert found.outcome is not None
        assert "succeeded" == found.outcome["outcome"]
        newest = max(checkpoint.ref for checkpoint in found.checkpoints)
        assert self.play.steps == newest.step
        for checkpoint in found.checkpoints:
            check_checkpoint(self.store / NAME / "checkpoints" / checkpoint.ref.name, self.play.content)
        return comparing.verify(store, NAME, newest)

    def _events(self, kind: str) -> list[Event]:
        return [event for event in self.farm.events(self.server_id) if event.type == kind]

    def _story(self) -> str:
        """What a person needs to understand a failure."""
        log = self.farm.host.log(self.server_id)
        tail = log.read_text(errors="replace").splitlines()[-60:] if log.exists() else []
        journal = self.run_dir / "journal.jsonl"
        alive = [f"{name_part(p)} {p.pid} {command_line(p)[:6]}" for p in self._processes()]
        lines = [
            f"seed {self.play.seed}, {self.num_kills} kills, in {self.folder}",
            *self.killed,
            "alive:",
            *alive,
            "journal:",
            *(journal.read_text().splitlines()[-12:] if journal.exists() else ["none"]),
            "log:",
            *tail,
        ]
        return "\n".join(lines)


def _wish(argv: list[str]) -> ServerCreate:
    return ServerCreate(
        kind="docker_image",
        gpu="rtx-4090",
        count=1,
        image="vramfarm/runner",
        args=argv,
        env={"RUNNER_HOLD_S": "0", "PYTHONUNBUFFERED": "1"},
        rental_days=1,
        disk_gb=10,
        restart_policy=Policy.ALWAYS,
    )
