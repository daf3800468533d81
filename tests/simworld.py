"""A whole run in simulated time: real checkpoints and journal on a disk that can lose power."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from runner.facts import (
    Attempt,
    Checkpoint,
    Conclusion,
    Diagnosis,
    Exit,
    Failed,
    Finished,
    History,
    Live,
    Machine,
    Observed,
    Outcome,
    Progress,
    Running,
    Server,
    TaskKind,
    TaskState,
)
from runner.job import Job
from runner.loop import run
from runner.policy.actions import End
from runner.policy.divergence import LossWatch, divergence, watch_loss
from runner.policy.ledger import describe_machine, merge
from runner.policy.limits import deadline
from runner.results import StoreView
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk
from runner.storage.journal import Journal
from runner.tasks import dump_checkpoint
from tests.fakes import FaultyDisk, PowerLoss
from vramfarm.protocol import ALGORITHM, TEMPORARY, EndRecord, Manifest, Ref, Shard, shard_name

DAMAGED = "checksum mismatch"
SAVE_EVERY = 100
FORKED_STEP = 200  # of the checkpoint of another run
TURN = timedelta(minutes=1)
START = datetime(2026, 1, 1, tzinfo=UTC)


def shard_bytes(step: int, rank: int) -> bytes:
    return f"{step}:{rank}:".encode() * 20


class TooLongError(AssertionError):
    """The run did not end in a year of simulated time."""


@dataclass
class Elsewhere:
    """What survives the machine: the store, time, the user's wishes; and what will go wrong."""

    now: datetime = START
    boots: int = 1
    lives: int = 0
    store: dict[Ref, Checkpoint] = field(default_factory=dict)
    outcome: Conclusion | None = None
    ledger: tuple[Machine, ...] = ()
    launches: list[tuple[int, int | None]] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    promised: set[Ref] = field(default_factory=set)
    stop_at: datetime | None = None
    sigterms: set[datetime] = field(default_factory=set)
    crash_at_step: dict[int, int] = field(default_factory=dict)  # attempt -> step it dies at
    diagnoses: dict[int, Diagnosis] = field(default_factory=dict)  # attempt -> what triage says of its end
    environments: list[dict[str, str]] = field(default_factory=list)  # the changes of each launch
    messages: list[tuple[str, str]] = field(default_factory=list)  # what people were told
    hanging_listener: bool = False  # a message is never delivered, nor refused
    nan_from: dict[int, int] = field(default_factory=dict)  # attempt -> step from which on its loss is NaN
    store_down: tuple[datetime, datetime] | None = None
    store_refuses: bool = False
    deaf: bool = False  # the ranks never answer an interrupt
    damaged_there: set[int] = field(default_factory=set)  # steps whose offsite copy does not restore
    rots: dict[int, int] = field(
        default_factory=dict
    )  # step -> so many of its copies are damaged as soon as they are there
    spoilt: tuple[str, ...] = ()  # names that the store has with manifests that make no sense
    setup_fails: bool = False
    disk_full: bool = False
    only_here: tuple[str, ...] = ()
    other_job: str = ""
    other_run: str = ""  # the newest checkpoint of another run; empty: there is none

    def is_down(self) -> bool:
        return self.store_down is not None and self.store_down[0] <= self.now < self.store_down[1]


class SimWorld:
    """One life of the runner on one boot. The trainer is a counter that saves every 100 steps."""

    def __init__(self, job: Job, root: Path, disk: Disk, elsewhere: Elsewhere, *, last_step: int) -> None:
        self.job, self.elsewhere, self.last_step = job, elsewhere, last_step
        self._disk = disk
        self.dir = CheckpointDir(root / "checkpoints", disk)
        self.dir.root.mkdir(exist_ok=True)
        disk.sync(root)
        self.dir.sweep()
        elsewhere.lives += 1
        self.life = f"life-{elsewhere.lives}"
        self.machine, self.born_at, self.history = str(root), elsewhere.now, History()
        self.attempt: Attempt | None = None
        self.loss = LossWatch()
        self.step: int | None = None  # of the ranks; None: they are gone
        self.reached = 0
        self.exit: Exit | None = None
        self.end: EndRecord | None = None
        self.leave_sent_at: datetime | None = None
        self.tasks: dict[TaskKind, TaskState] = {}
        self.offsite: tuple[Checkpoint, ...] | None = None
        self.view = StoreView(job.offload.keep_last)
        self.leaving = False
        self.server: Server | None = None

    def observe(self, history: History) -> Observed:
        self.history = history
        self._finish_tasks()
        self.view.learn(self.tasks)
        live = None
        last = history.attempts[-1] if history.attempts else None
        mine = last is not None and self.attempt is not None and last.id == self.attempt.id
        if mine and self.step is not None:
            live = Live(attempt_id=last.id, trainers=(1,), savers=())
        now = self.elsewhere.now
        return Observed(
            now=now,
            boot_id=f"boot-{self.elsewhere.boots}",
            life=self.life,
            live=live,
            exit=self.exit if mine else None,
            end=self.end if mine else None,
            diagnosis=self.elsewhere.diagnoses.get(last.number) if last else None,
            progress=self._progress(bool(live)),
            divergence=divergence(self.loss) if live else None,
            leave_sent_at=self.leave_sent_at,
            first_step_at=now if live and self.reached else None,
            local=self.dir.committed(),
            leftovers=() if live else self.dir.leftovers(),
            offsite=self.offsite,
            unusable=self.view.unusable(history.unusable),
            unusable_now=self.view.unusable_now(),
            spoilt=frozenset(self.view.spoilt),
            vanished=self.view.vanished,
            other_job=self.elsewhere.other_job,
            concluded_elsewhere=self.elsewhere.outcome if self.offsite is not None else None,
            tasks=dict(self.tasks),
            setup_digest="digest" if self.job.setup else "",
            set_up=isinstance(self.tasks.get(TaskKind.SETUP), Finished),
            stop_requested=self.elsewhere.stop_at is not None and now >= self.elsewhere.stop_at,
            leaving=self.leaving,
            rented=True,
            machine=self.machine,
            ledger=self.elsewhere.ledger if self.offsite is not None else None,
            only_here=self.elsewhere.only_here,
            deadline_at=deadline(self.job.limits, history.opened_at or now, self.server, history.earlier),
            last_upload_s=2 * TURN.total_seconds(),
        )

    def _progress(self, attached: bool) -> Progress:
        nan_from = self.elsewhere.nan_from.get(self.attempt.number if self.attempt else 0, 10**9)
        loss = float("nan") if self.reached >= nan_from else 1.0
        progress = Progress(step=self.reached, attached=attached, loss=loss if attached else None)
        self.loss = watch_loss(self.loss, progress, self.job.guard)
        return progress

    def new_id(self) -> str:
        return f"{self.life}-{len(self.elsewhere.launches)}"

    # --------------------------------------------------------------------------- tasks

    def begin(self, kind: TaskKind, subject: str) -> None:
        assert not isinstance(self.tasks.get(kind), Running), f"{kind} begun twice"
        before = self.tasks.get(kind)
        self._failures = getattr(self, "_failures", {})
        if not (isinstance(before, Failed) and before.subject == subject):
            self._failures[kind] = (0, None)
        self.tasks[kind] = Running(subject=subject, started_at=self.elsewhere.now)
        self._listed = getattr(self, "_listed", {})
        self._listed[kind] = set(self.elsewhere.store)  # a listing is as old as the task that took it

    def _finish_tasks(self) -> None:
        for kind, state in tuple(self.tasks.items()):
            if isinstance(state, Running) and self.elsewhere.now > state.started_at:
                self.tasks[kind] = self._finish(kind, state)

    def _finish(self, kind: TaskKind, state: Running) -> TaskState:  # noqa: PLR0911  # one line a trouble
        if kind is TaskKind.SETUP and self.elsewhere.setup_fails:
            return self._failed(kind, state, "setup: exit 1", final=True)
        if kind is TaskKind.NOTIFY:
            return state if self.elsewhere.hanging_listener else Finished(subject=state.subject, at=self.elsewhere.now)
        if kind is TaskKind.FORK and not self.elsewhere.other_run:
            return self._failed(kind, state, "expected a whole checkpoint: none is there", final=True)
        if kind is not TaskKind.SETUP:
            if self.elsewhere.store_refuses:
                return self._failed(kind, state, "403: access denied", final=True)
            if self.elsewhere.is_down():
                return self._failed(kind, state, "connection refused", final=False)
        problem = getattr(self, f"_do_{kind}", lambda _: "")(state.subject)
        if problem:
            return self._failed(kind, state, problem, final=True)
        if kind in {TaskKind.SURVEY, TaskKind.UPLOAD, TaskKind.TIDY}:
            known = set(self.elsewhere.store) if kind is TaskKind.UPLOAD else self._listed[kind]
            self.offsite = tuple(
                sorted((c for r, c in self.elsewhere.store.items() if r in known), key=lambda c: c.ref)
            )
            result = {
                "spoilt": dict.fromkeys(self.elsewhere.spoilt),
                "checkpoints": [dump_checkpoint(c) for c in self.offsite],
            }
            return Finished(subject=state.subject, at=self.elsewhere.now, result=result)
        return Finished(subject=state.subject, at=self.elsewhere.now)

    def _failed(self, kind: TaskKind, state: Running, error: str, *, final: bool) -> Failed:
        count, since = self._failures[kind]
        since = since or self.elsewhere.now
        self._failures[kind] = (count + 1, since)
        return Failed(
            subject=state.subject,
            at=self.elsewhere.now,
            error=error,
            final=final,
            failures=count + 1,
            since=since,
            damaged=error == DAMAGED,
        )

    def _do_upload(self, name: str) -> str:
        found = [c for c in self.dir.committed() if c.ref.name == name]
        assert found, f"{name} was pruned while it was being uploaded"
        assert self.dir.verify(found[0].ref) == ()
        self.elsewhere.store[found[0].ref] = found[0]
        self.elsewhere.damaged_there.discard(found[0].ref.step)
        if self.elsewhere.rots.get(found[0].ref.step, 0) > 0:
            self.elsewhere.rots[found[0].ref.step] -= 1
            self.elsewhere.damaged_there.add(found[0].ref.step)
        return ""

    def _do_verify(self, name: str) -> str:
        (ref,) = (ref for ref in self.elsewhere.store if ref.name == name)
        return DAMAGED if ref.step in self.elsewhere.damaged_there else ""

    def _do_restore(self, name: str) -> str:
        (ref,) = (ref for ref in self.elsewhere.store if ref.name == name)
        if ref.step in self.elsewhere.damaged_there:
            return DAMAGED
        if self.elsewhere.disk_full:
            return "not enough room"
        self._save(ref)
        return ""

    def _do_fork(self, subject: str) -> str:
        lineage, _, _ = subject.partition(" ")
        ref = Ref(int(lineage), FORKED_STEP, 0, f"{int(lineage):08x}")
        if ref not in {c.ref for c in self.dir.committed()}:
            self._save(ref, origin=self.elsewhere.other_run)
        return ""

    def _do_tidy(self, name: str) -> str:
        del name
        known = self.view.unusable(self.history.unusable)
        kept = sorted(ref for ref in self.elsewhere.store if ref.name not in known)[-self.job.offload.keep_last :]
        gone = [ref for ref in self.elsewhere.store if kept and ref < kept[0]]
        good = {ref for ref in self.elsewhere.store if ref.step not in self.elsewhere.damaged_there}
        assert not good or good - {*gone}, "what could be restored was tidied away"
        self.elsewhere.store = {ref: c for ref, c in self.elsewhere.store.items() if ref not in gone}
        return ""

    def _do_reopen(self, subject: str) -> str:
        del subject
        self.elsewhere.outcome = None
        return ""

    def _do_publish(self, subject: str) -> str:
        if subject in set(Outcome):
            self.elsewhere.outcome = Conclusion(outcome=subject, reason="published", at=self.elsewhere.now)
        now = self.elsewhere.now
        known = Machine(id=self.machine, price_per_hour="12", opened_at=now, paid_from=self.born_at, seen_at=now)
        self.elsewhere.ledger = merge(self.elsewhere.ledger, describe_machine(self.history, known, now))
        return ""

    def cease(self, kind: TaskKind) -> None:
        del self.tasks[kind]

    def notify(self, event: str, text: str) -> None:
        self.elsewhere.messages.append((event, text))
        self.tasks[TaskKind.NOTIFY] = Running(subject=event, started_at=self.elsewhere.now)

    # ----------------------------------------------------------------------- checkpoints

    def discard(self, name: str) -> None:
        self.dir.discard(name)

    def prune(self, ref: Ref) -> None:
        self.elsewhere.promised.discard(ref)
        self.dir.remove(ref)

    def set_aside(self, ref: Ref) -> None:
        self.dir.set_aside(ref)

    def trim_logs(self, max_bytes: int) -> None:
        """Nobody prints here."""

    def _save(self, ref: Ref, origin: str = "") -> None:
        """As the saver does it: shards, then the manifest, then the rename."""
        folder = self.dir.root / f"{TEMPORARY}{ref.name}"
        self._disk.remove(folder)
        self._disk.make_folder(folder)
        shards = []
        for rank in range(2):
            data = shard_bytes(ref.step, rank)
            self._disk.write(folder / shard_name(rank, 2), data)
            from zlib import crc32  # noqa: PLC0415

            shards.append(Shard(shard_name(rank, 2), len(data), (crc32(data),)))
        manifest = Manifest(
            job=self.job.name,
            lineage=ref.lineage,
            step=ref.step,
            id=ref.id,
            attempt=ref.attempt,
            world_size=2,
            written_at=START.isoformat(),
            algorithm=ALGORITHM,
            shards=tuple(shards),
            state={"origin": origin} if origin else {},
        )
        self.dir.adopt(folder, manifest)
        self.elsewhere.promised.add(ref)

    # -------------------------------------------------------------------------- attempts

    def check_launch(self) -> None:
        pass

    def launch(self, attempt: Attempt) -> None:
        if attempt.resume is not None:
            assert attempt.resume in {c.ref for c in self.dir.committed()}
        assert self.offsite is None or self.elsewhere.outcome is None, "the store says that a run is over which trains"
        self.elsewhere.launches.append((attempt.number, attempt.resume.step if attempt.resume else None))
        self.elsewhere.environments.append(dict(attempt.env))
        self.attempt, self.exit, self.end, self.leave_sent_at = attempt, None, None, None
        self.step = self.reached = attempt.resume.step if attempt.resume else 0
        self.loss = LossWatch()

    def interrupt(self) -> None:
        self.leave_sent_at = self.elsewhere.now

    def kill(self, *, savers: bool, hung: bool) -> None:
        del savers, hung
        self.step, self.exit = None, Exit(code=-9)

    def forget(self) -> None:
        self.attempt, self.reached = None, 0

    def wait(self) -> None:
        self.elsewhere.now += TURN
        if self.elsewhere.now > START + timedelta(days=3):
            raise TooLongError
        self.leaving |= self.elsewhere.now in self.elsewhere.sigterms
        if self.step is not None:
            self._train()

    def _train(self) -> None:
        assert self.attempt is not None
        assert self.step is not None
        if self.leave_sent_at is not None and not self.elsewhere.deaf:
            self._leave()
            return
        if self.step < self.last_step:
            self.step = self.reached = self.step + SAVE_EVERY
        if self.step == self.elsewhere.crash_at_step.get(self.attempt.number):
            self.step, self.exit = None, Exit(code=1)
            return
        self._save_here()
        if self.step >= self.last_step:
            self._finish_attempt("done")

    def _leave(self) -> None:
        assert self.step is not None
        if self.step:
            self._save_here()
        self._finish_attempt("left")

    def _finish_attempt(self, kind: str) -> None:
        self.end, self.exit = EndRecord(kind, self.reached), Exit(code=0)
        self.step = None

    def _save_here(self) -> None:
        assert self.attempt is not None
        assert self.step is not None
        unique = f"{self.attempt.lineage:04x}{self.attempt.number:04x}"
        ref = Ref(self.attempt.lineage, self.step, self.attempt.number, unique)
        if ref not in {c.ref for c in self.dir.committed()}:
            self._save(ref)


def boot(
    job: Job,
    root: Path,
    elsewhere: Elsewhere,
    *,
    last_step: int = 500,
    fail_at: int | None = None,
    before: Callable[[Journal], None] | None = None,
) -> tuple[End | None, FaultyDisk]:
    """One life: until the end, or until the power goes."""
    root.mkdir(exist_ok=True)
    disk = FaultyDisk(root, fail_at, loses_nothing=fail_at is None)
    try:
        journal = Journal(root / "journal.jsonl", disk)
        if before:
            before(journal)
        end = run(job, journal, SimWorld(job, root, disk, elsewhere, last_step=last_step), lambda *_: None)
    except PowerLoss:
        return None, disk
    elsewhere.ends.append(end)
    return end, disk
