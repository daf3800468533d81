"""
The world of one run on one machine: `observe()` looks, one method an action does.

No decision is made here. What is slow was started as a task or an attempt, and is only
looked at; what cannot be seen again is in the journal, which the loop writes.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from runner.adapters.frameworks import get_framework, resume_args
from runner.adapters.launchers import LAUNCHERS, Launch, check_command, split_command
from runner.errors import JobError
from runner.facts import (
    Attempt,
    Finished,
    History,
    LeaseState,
    Machine,
    Observed,
    Server,
    TaskKind,
    TaskState,
)
from runner.folder import RunFolder, free_bytes
from runner.job import Job
from runner.policy import ledger
from runner.policy.batch import accumulation
from runner.policy.finish import ALL_OUTPUTS, tell_missing
from runner.policy.limits import ends
from runner.policy.preflight import share_cores
from runner.policy.slow import is_lost_there
from runner.probes.host import count_cores
from runner.probes.unsaved import find_unsaved
from runner.results import Checked, LeaseView, StoreView, dump_conclusion
from runner.sight import AttemptSight, HangWatch, Logs, Saves
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk, is_own_name, write_durable
from runner.storage.offsite import dump_place
from runner.storage.offsite.staging import is_staged
from runner.supervise import attempt as attempts
from runner.supervise import page as pages
from runner.supervise import process
from runner.supervise.alarm import Alarm
from runner.supervise.autopsy import HANG_FILE
from runner.supervise.cards import Cards
from runner.supervise.clock import Clock
from runner.supervise.kills import count_kills
from runner.supervise.source import is_in_place, source_folder
from runner.supervise.tasks import TaskBoard
from vramfarm.protocol import Ref

TICK_S: Final = 0.5
_STEADY_TICK_S: Final = 1.0  # while an attempt runs: most of what supervision costs is the number of looks
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_LAST_WORDS_S: Final = 10.0
_MAY_WRITE: Final = frozenset({LeaseState.HELD, LeaseState.NOT_NEEDED})
_NAMED_BY_HAND: Final = frozenset({"command", "docker"})  # two of their servers may have one id


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What was found out about the machine before the loop began; true for this life."""

    job: Job
    setup_digest: str
    data_digest: str
    config_dir: Path  # of job.yaml
    python: str  # the training interpreter
    num_cards: int
    num_procs: int
    card: str  # model of the first
    server: Server | None
    withhold: frozenset[str]  # names of the supervisor's own secrets
    secrets: Mapping[str, str]
    paid_from: datetime | None = None  # the server's first boot
    missing: tuple[str, ...] = ()  # secrets without a value, in a life that takes over from one that had them
    refusal: str = ""
    wrong: JobError | None = None  # why the job cannot start here as it is
    stop_doubt: str = ""
    identity: Mapping[str, Any] | None = None  # what makes this job this job; None: any change is accepted


class RealWorld:
    """`loop.World`, on real files and processes."""

    def __init__(self, setting: Setting, folder: RunFolder, disk: Disk) -> None:
        self._setting, self._job, self._folder = setting, setting.job, folder
        self.checkpoints = CheckpointDir(Path(self._job.checkpoint.dir), disk)
        self.checkpoints.sweep()
        self._clock = Clock()
        self._board = TaskBoard(folder.tasks, str(folder.root))
        self._board.kill_leftovers()
        self._pages_are_tidy = False
        self._life = uuid.uuid4().hex
        self._boot_id = _BOOT_ID.read_text().strip()
        self._store = StoreView(self._job.offload.keep_last)
        self._logs = Logs(folder.root / "logs")
        self._lease = LeaseView(is_needed=self._job.offload.to is not None)
        self._holder = identify_holder(setting.server, folder, disk)
        hangs = HangWatch(self._job.hang, folder, self._cards())
        self._sight = AttemptSight(folder, hangs, self._job.guard, self._clock)
        self._saves = Saves(self._job, setting.num_procs)
        self._checked = Checked(users=frozenset({*self._job.env, *self._job.secrets, *os.environ}))
        self._history = History()
        self._seen: Observed | None = None  # between attempts, and at the end
        self._deadline_at: datetime | None = None
        self.on_deadline: Callable[[datetime], None] = lambda _: None
        self.on_turn: Callable[[], None] = lambda: None
        self._code = source_folder(
            self._job.source, run_dir=folder.root, digest=setting.setup_digest, config_dir=setting.config_dir
        )
        self._set_up = self._is_set_up()
        self._staged = is_staged([item.to for item in self._job.data], folder.root, setting.data_digest)
        self._last_save_s = 0.0
        self._only_here: tuple[str, ...] | None = None
        self._saved: tuple[bool, tuple[str, ...]] = (False, ())
        self.checkpoints.root.mkdir(parents=True, exist_ok=True)
        self._alarm = Alarm({folder.root: "stop", self.checkpoints.root: "step-"})
        self.leaving = threading.Event()

    def close(self) -> None:
        """All slow work ends, the store gets a last word, and then the lease is given back."""
        tasks = self._board.states(self._clock.now())
        for kind in set(TaskKind) - {TaskKind.LEASE, TaskKind.NOTIFY}:  # a message has its own short limit
            self._board.end(kind)
        if self._has_last_words(tasks):
            self.begin(TaskKind.PUBLISH, "last words")
            self._board.wait(TaskKind.PUBLISH, timeout_s=_LAST_WORDS_S)
            self._board.end(TaskKind.PUBLISH)
        self._board.finish(TaskKind.LEASE)
        if self._sight.shim() is None:  # a rank that still prints would lose what it prints at this moment
            self._logs.keep_ahead(self._clock.now(), None)
        self._alarm.close()

    def _has_last_words(self, tasks: Mapping[TaskKind, TaskState]) -> bool:
        """Whether there is something to tell of this boot, and we may."""
        lease = self._lease.look(tasks.get(TaskKind.LEASE))
        return bool(self._history.machine) and lease.state in _MAY_WRITE

    # ------------------------------------------------------------------------------- look

    def observe(self, history: History) -> Observed:
        self.on_turn()
        process.reap()
        self._history = history
        now = self._clock.now()
        tasks = self._board.states(now)
        self._store.learn(tasks)
        self._checked.learn(tasks.get(TaskKind.PREFLIGHT))
        opened = history.opened_at or now
        deadline_at, deadline_why = self._tell_deadline(history, opened)
        shelf = self.checkpoints.look()
        running = self._sight.attempt
        logs = self._folder.attempt(running.number) if running else None
        self._logs.keep_ahead(now, logs)
        seen = Observed(
            now=now,
            boot_id=self._boot_id,
            life=self._life,
            local=shelf.committed,
            free_bytes=free_bytes(self.checkpoints.root),
            log_bytes=self._logs.size(now, logs),
            log_error=self._logs.error,
            leftovers=shelf.leftovers,
            damaged=shelf.damaged,
            offsite=self._store.checkpoints,
            unusable=self._store.unusable(history.unusable),
            unusable_now=self._store.unusable_now(),
            spoilt=frozenset(self._store.spoilt),
            vanished=self._store.vanished,
            outputs_stuck=self._store.outputs_stuck,
            other_job=self._difference(),
            concluded_elsewhere=self._store.conclusion,
            tasks=tasks,
            kills=count_kills(),
            refusal=self._setting.refusal,
            wrong_job=_describe_wrong(self._setting.wrong),
            num_procs=self._setting.num_procs,
            card=self._setting.card,
            global_batch=self._job.batch.global_ if self._job.batch else 0,
            stored_batch=self._store.global_batch(),
            lease=self._lease.look(tasks.get(TaskKind.LEASE)),
            preflight=self._checked.verdict,
            setup_digest=self._setting.setup_digest,
            set_up=self._is_set_up_now(tasks),
            data_digest=self._setting.data_digest,
            staged=self._is_staged_now(tasks),
            stop_requested=self._folder.stop.exists(),
            leaving=self.leaving.is_set(),
            rented=self._setting.server is not None,
            stop_doubt=self._setting.stop_doubt,
            machine=self._holder,
            ledger=self._store.ledger,
            deadline_at=deadline_at,
            deadline_why=deadline_why,
            last_save_s=self._last_save_s,
            last_upload_s=self._store.last_upload_s,
        )
        if history.running:
            self._only_here = None
            seen = self._sight.look(seen, history.running)
            ready = self._saves.ready(now, history.running, seen.live)
            return replace(seen, ready=ready, last_save_s=self._time_of_a_save(seen.last_save_s))
        seen = replace(seen, only_here=self._find_only_here(opened, tasks.get(TaskKind.OUTPUTS)))
        self._tidy_pages()  # only now: the page of a dead attempt says how far it came
        self._seen = seen
        return seen

    def _time_of_a_save(self, of_library_s: float) -> float:
        """As the last one had it, which may be of an attempt before: the page that says it goes with its attempt."""
        written_s = self._saves.write_s
        self._last_save_s = of_library_s or (written_s and written_s + self._store.last_commit_s) or self._last_save_s
        return self._last_save_s

    def _tell_deadline(self, history: History, opened: datetime) -> tuple[datetime, str]:
        setting = self._setting
        at, why = min(ends(self._job.limits, opened, setting.server, history.earlier, setting.paid_from))
        if at != self._deadline_at:
            self._deadline_at = at
            self.on_deadline(at)
        return at, why

    def _tidy_pages(self) -> None:
        """Once a life: those of a runner that died between writing down an exit and removing the page."""
        if not self._pages_are_tidy:
            pages.remove_stale(self._folder.root)
            self._pages_are_tidy = True

    def _difference(self) -> str:
        mine, theirs = self._setting.identity, self._store.job
        if not mine or not theirs:
            return ""
        changed = [name for name in mine if theirs.get(name) != mine[name]]
        return "; ".join(f"{n}: there {json.dumps(theirs.get(n))}, here {json.dumps(mine[n])}" for n in changed)

    def _find_only_here(self, since: datetime, outputs: TaskState) -> tuple[str, ...]:
        """Looked for once after each attempt, and when the outputs are in the store: it reads a whole tree."""
        is_all = isinstance(outputs, Finished) and outputs.subject == ALL_OUTPUTS
        told = outputs.result if isinstance(outputs, Finished) and is_all else {}
        left: tuple[str, ...] = tuple(told.get("only_here", ()))
        if self._only_here is None or (is_all, left) != self._saved:
            self._saved = (is_all, left)
            self._only_here = left + find_unsaved(
                Path(self._job.finish.save_folder),
                run_dir=self._folder.root,
                checkpoint_dir=self.checkpoints.root,
                since=since,
                outputs=tuple(map(Path, (*self._job.outputs, *told.get("followed", ())))),
                are_saved=is_all,
                is_nothing=is_own_name,
            )
        return self._only_here

    def _cards(self) -> Cards:
        """Those of the ranks; one process may use all that it sees."""
        visible = {**os.environ, **self._job.env}.get("CUDA_VISIBLE_DEVICES")
        return Cards(visible=visible, count=self._setting.num_procs if self._setting.num_procs > 1 else None)

    def _is_set_up(self) -> bool:
        """Looked for on this disk and in this training environment: a container is younger than its volume."""
        setting = self._setting
        return is_in_place(
            self._code,
            self._job.setup,
            run_dir=self._folder.root,
            digest=setting.setup_digest,
            python=Path(setting.python),
        )

    def _is_set_up_now(self, tasks: Mapping[TaskKind, TaskState]) -> bool:
        self._set_up = self._set_up or isinstance(tasks.get(TaskKind.SETUP), Finished)
        return self._set_up

    def _is_staged_now(self, tasks: Mapping[TaskKind, TaskState]) -> bool:
        self._staged = self._staged or isinstance(tasks.get(TaskKind.STAGE), Finished)
        return self._staged

    def new_id(self) -> str:
        return uuid.uuid4().hex

    # -------------------------------------------------------------------------------- act

    def begin(self, kind: TaskKind, subject: str) -> None:
        self._board.start(kind, subject, _argv(kind), self._arguments(kind, subject), now=self._clock.now())

    def _arguments(self, kind: TaskKind, subject: str) -> dict[str, Any]:
        setting = self._setting
        failed = self._board.failure(kind, subject)
        return {
            "scene": self._scene(),
            "subject": subject,
            "job": setting.job.name,
            "run_dir": str(self._folder.root),
            "checkpoint_dir": str(self.checkpoints.root),
            "config_dir": str(setting.config_dir),
            "python": setting.python,
            "offload": setting.job.offload.model_dump(mode="json"),
            "place": dump_place(setting.job.offload),
            "abilities": self._store.abilities,
            "spoilt": self._store.spoilt,
            "staged": self._staged,
            "given_up": failed is not None and is_lost_there(failed),
            "unusable": sorted(self._store.unusable(self._history.unusable)),
            "source": setting.job.source.model_dump(mode="json") if setting.job.source else None,
            "setup": list(setting.job.setup),
            "setup_timeout_s": setting.job.setup_timeout.total_seconds(),
            "boot_id": self._boot_id,
            "withhold": sorted(setting.withhold),
            "runner": os.getpid(),
            "holder": self._holder,
            "who": _describe_holder(setting.server, self._folder),
            "spec": setting.job.model_dump(mode="json", by_alias=True),
            "workdir": str(self._workdir()),
            "num_procs": setting.num_procs,
            "num_cards": setting.num_cards,
            "deadline_at": self._deadline_at.isoformat() if self._deadline_at else None,
            "conclusion": self._dump_conclusion(),
            "machine": ledger.dump_machine(self._describe_machine()),
            "is_leaving": self.leaving.is_set(),
            "attempt": self._sight.identity(),
        }

    def _dump_conclusion(self) -> dict[str, Any] | None:
        history = self._history
        if history.conclusion is None:
            return None
        missing = tell_missing(self._job, history, self._seen) if self._seen else ""
        return dump_conclusion(history.conclusion, attempt=history.next_number - 1, missing=missing)

    def _describe_machine(self) -> Machine:
        """This machine's entry in the ledger."""
        server, now = self._setting.server, self._clock.now()
        paid_from = self._setting.paid_from or self._history.opened_at or now
        known = ledger.identify_machine(self._holder, _describe_place(server, self._folder), server, paid_from)
        return ledger.describe_machine(self._history, known, now, self._sight.running())

    def notify(self, event: str, text: str) -> None:
        setting, now = self._setting, self._clock.now()
        server = setting.server
        where = server.id if server else "this machine"
        price = f" at {server.price_per_hour} {server.currency}/h" if server and server.price_per_hour else ""
        message = {
            "event": event,
            "title": f"{setting.job.name}: {event}",
            "text": f"{setting.job.name}: {text} [{where}{price}]",
            "job": setting.job.name,
            "server": server.id if server else None,
            "run_dir": str(self._folder.root),
            "at": now.isoformat(timespec="seconds"),
        }
        arguments = {"names": list(setting.job.notify), "message": message}
        self._board.start(TaskKind.NOTIFY, event, _argv(TaskKind.NOTIFY), arguments, now=now)

    def cease(self, kind: TaskKind) -> None:
        self._board.end(kind)

    def _scene(self) -> dict[str, Any] | None:
        """Of the attempt that hangs, for the task that looks at it."""
        attempt, hang = self._sight.attempt, self._sight.hang
        if attempt is None or hang is None:
            return None
        control = pages.find_path(self._folder.root, attempt.id)
        return {
            "attempt_id": attempt.id,
            "logs": str(self._folder.attempt(attempt.number)),
            "folder": str(self._folder.evidence(attempt.number)),
            "pipes": pages.pipes_beside(control) if control else "",
            "python": self._setting.python,
            "hang": asdict(hang),
        }

    def discard(self, name: str) -> None:
        self.checkpoints.discard(name)

    def prune(self, ref: Ref) -> None:
        self.checkpoints.remove(ref)

    def set_aside(self, ref: Ref) -> None:
        self.checkpoints.set_aside(ref)

    def trim_logs(self, max_bytes: int) -> None:
        self._logs.trim(max_bytes)

    def check_launch(self) -> None:
        """`JobError` if what would be launched is not there."""
        if missing := [name for name in self._setting.missing if name in self._job.secrets]:
            raise JobError(f"secrets: no value for {', '.join(missing)}, and the next attempt needs it")
        self._argv(self._folder.root, None)

    def launch(self, attempt: Attempt) -> None:
        setting, job, folder = self._setting, self._job, self._folder.attempt(attempt.number)
        control = pages.create(self._folder.root, attempt.id, num_ranks=setting.num_procs)
        self.checkpoints.root.mkdir(parents=True, exist_ok=True)
        resume = self.checkpoints.path(attempt.resume) if attempt.resume else None
        self._saves.put_aside(attempt)
        attempts.start(
            attempts.LaunchSpec(
                number=attempt.number,
                id=attempt.id,
                argv=self._argv(folder, resume),
                cwd=self._workdir(),
                run_dir=self._folder.root,
                folder=folder,
                control=control,
                job=job.name,
                checkpoint_dir=self.checkpoints.root,
                save_interval_s=job.checkpoint.save_interval.total_seconds(),
                staging=job.checkpoint.staging,
                lineage=attempt.lineage,
                num_procs=setting.num_procs,
                num_threads=share_cores(count_cores(), setting.num_procs),
                batch=job.batch,
                grad_accum=accumulation(job, setting.num_procs),
                resume=resume,
                python=setting.python,
                env=job.env,
                changes=attempt.env,
                secrets=setting.secrets,
                withhold=setting.withhold,
            )
        )

    def _argv(self, folder: Path, resume: Path | None) -> tuple[str, ...]:
        framework = get_framework(self._job)
        folder_of_saves = self.checkpoints.root if framework.uses_library else Path(self._job.checkpoint.watch)
        words = resume_args(self._job, framework, resume)
        launch = Launch(
            python=self._setting.python,
            command=fill_command(self._job, self._setting.num_procs, folder_of_saves, words),
            num_procs=self._setting.num_procs,
            log_dir=folder,
        )
        check_command(self._job.launcher, launch, cwd=self._workdir())
        return LAUNCHERS[self._job.launcher].argv(launch)

    def _workdir(self) -> Path:
        """Where the command runs: as the job says, else where the code is."""
        return self._code / self._job.workdir if self._job.workdir else self._code

    def interrupt(self) -> None:
        self._sight.interrupt()

    def kill(self, *, savers: bool, hung: bool) -> None:
        attempt = self._sight.attempt
        if attempt is None:
            return
        if hung:
            logs = self._folder.attempt(attempt.number)
            with suppress(OSError):  # a full disk: then triage goes by what the logs say
                shutil.copyfile(self._folder.evidence(attempt.number) / HANG_FILE, logs / HANG_FILE)
            attempts.abort(attempt.id, self._sight.ranks, folder=logs, evidence=self._folder.evidence(attempt.number))
        attempts.kill(attempt.id, self._folder.attempt(attempt.number), savers=savers)

    def forget(self) -> None:
        """The attempt is over and journaled: its page can go."""
        self._sight.forget()
        pages.remove_stale(self._folder.root)

    def wait(self) -> None:
        """A tick, whatever `Wait.until` names: that is asked again at each of them."""
        shim = self._sight.shim()
        if shim and (self._job.offload.to or "").startswith("s3:"):
            with suppress(OSError):  # no memory for it, or no room for its log: then an upload starts as others do
                self._board.prepare(TaskKind.UPLOAD, _argv(TaskKind.UPLOAD, "s3"))
        self._alarm.sleep(_STEADY_TICK_S if shim else TICK_S, until=shim, children=self._board.pids())

    def wake(self) -> None:
        self._alarm.ring()


def _argv(kind: TaskKind, *ahead: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-m", "runner.tasks", kind, *ahead)


# ------------------------------------------------------------------------------ who we are


def identify_holder(server: Server | None, folder: RunFolder, disk: Disk) -> str:
    """
    A rented server has one container at a time, on whatever disk. Elsewhere it is this run
    folder on this disk: a copy of it, restored on another machine, is another holder.
    """
    if server and server.provider not in _NAMED_BY_HAND:
        return f"{server.provider}/{server.id}{folder.root}"
    path = folder.holder
    if not path.exists():
        write_durable(disk, path, uuid.uuid4().hex.encode())
    found = path.stat()
    return f"{path.read_text().strip()}-{found.st_ino:x}-{found.st_ctime_ns:x}"


def _describe_wrong(error: JobError | None) -> str:
    return "" if error is None else "; ".join(filter(None, (str(error).splitlines()[0], error.hint)))


def _describe_holder(server: Server | None, folder: RunFolder) -> str:
    return f"{_describe_place(server, folder)}, pid {os.getpid()}"


def _describe_place(server: Server | None, folder: RunFolder) -> str:
    where = f"server {server.id}, " if server else ""
    return f"{where}{socket.gethostname()}:{folder.root}"


# --------------------------------------------------------------------------------- helpers


def fill_command(job: Job, num_procs: int, checkpoint_dir: Path, resume_args: tuple[str, ...]) -> tuple[str, ...]:
    """The command's words, with what the runner knows put in."""
    values = {
        "checkpoint_dir": str(checkpoint_dir),
        "world_size": str(num_procs),
        "grad_accum": str(accumulation(job, num_procs)),
    }
    return split_command(job.command, resume_args=resume_args, values=values)
