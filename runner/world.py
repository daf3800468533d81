"""
The world of one run on one machine: `observe()` looks, one method an action does.

No decision is made here. What is slow was started as a task or an attempt, and is only
looked at; what cannot be seen again is in the journal, which the loop writes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from runner.adapters.frameworks import Save, get_framework, resume_args
from runner.adapters.launchers import LAUNCHERS, Launch, check_command, split_command
from runner.facts import (
    Attempt,
    Checkpoint,
    Conclusion,
    Diagnosis,
    Exit,
    Failed,
    Finding,
    Finished,
    Hang,
    History,
    Lease,
    LeaseState,
    Live,
    Machine,
    Observed,
    Outcome,
    Preflight,
    Progress,
    Running,
    Server,
    Severity,
    TaskKind,
    TaskState,
)
from runner.job import GuardPolicy, HangPolicy, Job
from runner.policy import ledger
from runner.policy.batch import accumulation
from runner.policy.divergence import LossWatch, divergence, watch_loss
from runner.policy.hang import Patience, Watch, judge, limit_s, look_every_s, watch
from runner.policy.lease import Pace, may_write
from runner.policy.lifecycle import ALL_OUTPUTS, Wait
from runner.policy.limits import ends
from runner.policy.preflight import decide_verdict, share_cores
from runner.policy.straggler import Lags, straggler, watch_lags
from runner.probes.host import count_cores
from runner.probes.unsaved import find_unsaved
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk, write_durable
from runner.storage.offsite.staging import is_staged
from runner.supervise import attempt as attempts
from runner.supervise import page as pages
from runner.supervise import process
from runner.supervise.autopsy import HANG_FILE
from runner.supervise.cards import Cards
from runner.supervise.clock import Clock
from runner.supervise.page import ProgressReader
from runner.supervise.pulse import PulseReader
from runner.supervise.saves import are_written
from runner.supervise.source import is_in_place, source_folder
from runner.supervise.tasks import TaskBoard
from runner.supervise.triage import first_error
from runner.supervise.trim import stored_bytes, trim
from vramfarm.protocol import DAMAGED, ControlPage, Ref, Word

TICK_S: Final = 0.5
_SUSPICIOUS_S: Final = 30.0
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_LOOK_AT_SAVES_EVERY: Final = timedelta(seconds=2)
_SIZE_LOGS_EVERY: Final = timedelta(seconds=20)
_FIND_EVERY: Final = timedelta(seconds=2)
_NS: Final = 1e-9
_LAST_WORDS_S: Final = 10.0
_MAY_WRITE: Final = frozenset({LeaseState.HELD, LeaseState.NOT_NEEDED})
_NAMED_BY_HAND: Final = frozenset({"command", "docker"})  # two of their servers may have one id


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Where the files of a run are. Its layout is in ARCHITECTURE.md."""

    root: Path

    @property
    def journal(self) -> Path:
        return self.root / "journal.jsonl"

    @property
    def job(self) -> Path:
        return self.root / "job.json"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def stop(self) -> Path:
        return self.root / "stop"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def holder(self) -> Path:
        return self.root / "holder"

    @property
    def tasks(self) -> Path:
        return self.root / "logs" / "tasks"

    def attempt(self, number: int) -> Path:
        return self.root / "logs" / f"attempt-{number:04d}"

    def evidence(self, number: int) -> Path:
        return self.root / "evidence" / f"attempt-{number:04d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What was found out about the machine before the loop began; true for this life."""

    job: Job
    job_digest: str
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
    refusal: str = ""
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
        self._store = _StoreView()
        self._logs = _Logs(folder.root / "logs")
        self._lease = _LeaseView(is_needed=self._job.offload.to is not None)
        self._holder = identify_holder(setting.server, folder, disk)
        self._sight = _AttemptSight(folder, _HangWatch(self._job.hang, folder), self._job.guard, self._clock)
        self._saves = _Saves(self._job, setting.num_procs)
        self._checked = _Checked(users=frozenset({*self._job.env, *self._job.secrets, *os.environ}))
        self._history = History()
        self._deadline_at: datetime | None = None
        self.on_deadline: Callable[[datetime], None] = lambda _: None
        self._code = source_folder(
            self._job.source, run_dir=folder.root, digest=setting.setup_digest, config_dir=setting.config_dir
        )
        self._set_up = self._is_set_up()
        self._staged = is_staged([item.to for item in self._job.data], folder.root, setting.data_digest)
        self._only_here: tuple[str, ...] | None = None
        self._saved: tuple[Path, ...] = ()
        self._awake = threading.Event()
        self.leaving = threading.Event()
        self._watcher = _watch(folder.root, self.checkpoints.root, self._awake)

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
        logging.getLogger("watchdog").setLevel(logging.CRITICAL)  # it calls its own end an error
        self._watcher.stop()
        self._watcher.join(1)

    def _has_last_words(self, tasks: Mapping[TaskKind, TaskState]) -> bool:
        """Whether there is something to tell of this boot, and we may."""
        lease = self._lease.look(tasks.get(TaskKind.LEASE))
        return bool(self._history.machine) and lease.state in _MAY_WRITE

    # ------------------------------------------------------------------------------- look

    def observe(self, history: History) -> Observed:
        process.reap()
        self._history = history
        now = self._clock.now()
        tasks = self._board.states(now)
        self._store.learn(tasks)
        self._checked.learn(tasks.get(TaskKind.PREFLIGHT))
        opened = history.opened_at or now
        deadline_at, deadline_why = self._tell_deadline(history, opened)
        seen = Observed(
            now=now,
            boot_id=self._boot_id,
            life=self._life,
            local=self.checkpoints.committed(),
            free_bytes=self._free_bytes(),
            log_bytes=self._logs.size(now),
            log_error=self._logs.error,
            leftovers=self.checkpoints.leftovers(),
            damaged=self._damaged(),
            offsite=self._store.checkpoints,
            unusable=frozenset(self._store.unusable),
            other_job=self._difference(),
            concluded_elsewhere=self._store.conclusion,
            tasks=tasks,
            refusal=self._setting.refusal,
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
            last_upload_s=self._store.last_upload_s,
        )
        if history.attempts and history.attempts[-1].ending is None:
            self._only_here = None
            seen = self._sight.look(seen, history.attempts[-1])
            return replace(seen, ready=self._saves.ready(now, history.attempts[-1], seen.live))
        seen = replace(seen, only_here=self._find_only_here(opened, tasks.get(TaskKind.OUTPUTS)))
        self._tidy_pages()  # only now: the page of a dead attempt says how far it came
        return seen

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

    def _free_bytes(self) -> int | None:
        with suppress(OSError):
            return shutil.disk_usage(self.checkpoints.root).free
        return None

    def _find_only_here(self, since: datetime, outputs: TaskState) -> tuple[str, ...]:
        """Looked for once after each attempt, and when the outputs are in the store: it reads a whole tree."""
        is_all = isinstance(outputs, Finished) and outputs.subject == ALL_OUTPUTS and not outputs.result.get("left")
        saved = tuple(map(Path, self._job.outputs)) if is_all else ()
        if self._only_here is None or saved != self._saved:
            self._saved = saved
            self._only_here = find_unsaved(
                Path(self._job.finish.save_folder),
                run_dir=self._folder.root,
                checkpoint_dir=self.checkpoints.root,
                since=since,
                saved=saved,
            )
        return self._only_here

    def _damaged(self) -> tuple[str, ...]:
        with suppress(FileNotFoundError):
            return tuple(sorted(path.name for path in self.checkpoints.root.glob(f"{DAMAGED}*")))
        return ()

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

    def digest(self) -> str:
        return self._setting.job_digest

    def new_id(self) -> str:
        return uuid.uuid4().hex

    # -------------------------------------------------------------------------------- act

    def begin(self, kind: TaskKind, subject: str) -> None:
        argv = (sys.executable, "-I", "-m", "runner.tasks", kind)
        self._board.start(kind, subject, argv, self._arguments(subject), now=self._clock.now())

    def _arguments(self, subject: str) -> dict[str, Any]:
        setting = self._setting
        return {
            "scene": self._scene(),
            "subject": subject,
            "job": setting.job.name,
            "run_dir": str(self._folder.root),
            "checkpoint_dir": str(self.checkpoints.root),
            "config_dir": str(setting.config_dir),
            "python": setting.python,
            "offload": setting.job.offload.model_dump(mode="json"),
            "abilities": self._store.abilities,
            "source": setting.job.source.model_dump(mode="json") if setting.job.source else None,
            "setup": list(setting.job.setup),
            "setup_timeout_s": setting.job.setup_timeout.total_seconds(),
            "outputs": list(setting.job.outputs),
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
            "conclusion": dump_conclusion(self._history.conclusion) if self._history.conclusion else None,
            "machine": ledger.dump_machine(self._describe_machine()),
            "is_leaving": self.leaving.is_set(),
            "attempt": self._sight.identity(),
        }

    def _describe_machine(self) -> Machine:
        """This machine's entry in the ledger."""
        server, now = self._setting.server, self._clock.now()
        opened = self._history.opened_at or now
        known = Machine(
            id=self._holder,
            where=_describe_place(server, self._folder),
            provider=server.provider if server else "",
            server=server.id if server else "",
            price_per_hour=server.price_per_hour if server else "",
            currency=server.currency if server else "EUR",
            opened_at=opened,
            paid_from=self._setting.paid_from or opened,
            seen_at=now,
        )
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
        argv = (sys.executable, "-I", "-m", "runner.tasks", TaskKind.NOTIFY)
        arguments = {"names": list(setting.job.notify), "message": message}
        self._board.start(TaskKind.NOTIFY, event, argv, arguments, now=now)

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
        attempts.kill(attempt.id, savers=savers)

    def forget(self, attempt: Attempt) -> None:
        """The attempt is over and journaled: its page can go."""
        self._sight.forget()
        pages.remove_stale(self._folder.root)
        del attempt

    def wait(self, action: Wait) -> None:
        del action  # what `until` names is at least a tick away, or asked again at once
        self._awake.wait(TICK_S)
        self._awake.clear()

    def wake(self) -> None:
        self._awake.set()


# ----------------------------------------------------------------------------- the attempt


class _AttemptSight:
    """What can be seen of the attempt that runs, or has just ended."""

    def __init__(self, folder: RunFolder, hangs: _HangWatch, guard: GuardPolicy, clock: Clock) -> None:
        self._folder, self._clock = folder, clock
        self._hangs = hangs
        self._guard, self._loss = guard, LossWatch()
        self.attempt: Attempt | None = None
        self._reader: ProgressReader | None = None
        self._progress = Progress()
        self._save_s = 0.0
        self._leave_sent_at: datetime | None = None
        self._first_step_at: datetime | None = None
        self._gone_at: datetime | None = None
        self._exit_seen_at: datetime | None = None
        self._found: Live | None = None
        self._found_at = datetime.min.replace(tzinfo=UTC)
        self._told: tuple[Exit | None, Diagnosis] | None = None  # how it ended, its first error

    def look(self, seen: Observed, attempt: Attempt) -> Observed:
        if self.attempt is None or self.attempt.number != attempt.number:
            self.forget()
            self.attempt = attempt
        folder = self._folder.attempt(attempt.number)
        live = self._live(attempt.id, folder, seen.now)
        exit_ = attempts.read_exit(folder)  # after `live`: a shim writes it and then ends
        self._read_page(seen.now)
        is_known = exit_ is not None and (exit_.code is not None or attempts.is_unwatched(folder))
        seen_exit = exit_ if live is None or is_known else None
        self._exit_seen_at = (self._exit_seen_at or seen.now) if seen_exit else None
        self._gone_at = (self._gone_at or seen.now) if live and not live.trainers else None
        trains = live is not None and live.trainers and seen_exit is None and self._leave_sent_at is None
        page = self._reader.page if self._reader else None
        hang = self._hangs.look(attempt, live, page, self._save_s) if trains and live else None
        return replace(
            seen,
            live=live,
            exit=seen_exit,
            exit_seen_at=self._exit_seen_at,
            end=attempts.read_end(folder),
            diagnosis=self._diagnose(folder, exit_) if live is None else None,
            progress=self._progress,
            hang=hang,
            straggler=self._hangs.straggler,
            divergence=divergence(self._loss) if live and self._guard.nan_patience else None,
            leave_sent_at=self._leave_sent_at,
            trainers_gone_at=self._gone_at,
            last_save_s=self._save_s,
            first_step_at=self._first_step_at,
        )

    def _live(self, attempt_id: str, folder: Path, now: datetime) -> Live | None:
        """
        Who lives. All of /proc is read for it, which is most of what supervision costs: in between
        it is enough that the shim lives, because then the attempt does.
        """
        if self._found is None or now - self._found_at >= _FIND_EVERY or not attempts.is_watched(folder):
            self._found, self._found_at = attempts.live(attempt_id), now
        return self._found

    def _diagnose(self, folder: Path, exit_: Exit | None) -> Diagnosis | None:
        """Logs may be large: they are read once, when the last process of an attempt that failed is gone."""
        if exit_ is not None and exit_.code == 0:
            return None
        if self._told is None or self._told[0] != exit_:
            self._told = (exit_, first_error(folder, exit_ or Exit(code=None)))
        return self._told[1]

    def _read_page(self, now: datetime) -> None:
        assert self.attempt is not None
        if self._reader is None:
            page = pages.find(self._folder.root, self.attempt.id)
            self._reader = ProgressReader(page) if page else None
        if self._reader is None:
            return
        page = self._reader.page
        self._progress = self._reader.read()
        self._loss = watch_loss(self._loss, self._progress, self._guard)
        self._save_s = page[Word.SAVE_NS] * _NS
        began_at = self.attempt.resume.step if self.attempt.resume else 0
        if self._progress.step > began_at:
            self._first_step_at = self._first_step_at or now
        if pages.leave_requested(page):
            self._leave_sent_at = self._leave_sent_at or now

    def running(self) -> ledger.Running:
        return ledger.Running(step=self._progress.step, first_step_at=self._first_step_at)

    def interrupt(self) -> None:
        """Ask through the page; where there is none there is nobody who could save."""
        if self._reader is not None:
            pages.request_leave(self._reader.page)
        self._leave_sent_at = self._clock.now()

    def identity(self) -> dict[str, int]:
        """What a checkpoint has to say of its attempt."""
        return {"number": self.attempt.number, "lineage": self.attempt.lineage} if self.attempt else {}

    def forget(self) -> None:
        self._hangs.forget()
        self.__init__(self._folder, self._hangs, self._guard, self._clock)  # type: ignore[misc]  # as new

    @property
    def hang(self) -> Hang | None:
        return self._hangs.hang

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._hangs.ranks


class _HangWatch:
    """Looks for signs of life every few seconds, and has them judged."""

    def __init__(self, policy: HangPolicy, folder: RunFolder) -> None:
        self._policy, self._patience, self._folder = policy, Patience(), folder
        self._cards = Cards()
        self.forget()

    def forget(self) -> None:
        self._reader: PulseReader | None = None
        self._watch = Watch()
        self._lags = Lags()
        self.straggler = ""
        self._next_s = 0.0
        self.hang: Hang | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank.pid for rank in self._watch.last.ranks) if self._watch.last else ()

    def look(self, attempt: Attempt, live: Live, page: ControlPage | None, last_save_s: float) -> Hang | None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return self.hang
        if self._reader is None:
            self._reader = PulseReader(self._folder.attempt(attempt.number), self._cards)
        limit = limit_s(self._watch, self._policy, self._patience, last_save_s=last_save_s)
        since = self._watch.clock_s - self._watch.moved_s
        pulse = self._reader.read(live, page, closely=since >= max(limit / 2, _SUSPICIOUS_S))
        self._watch = watch(self._watch, pulse, self._patience)
        self._lags = watch_lags(self._lags, pulse)
        self.straggler = straggler(self._lags)
        self.hang = judge(self._watch, self._policy, self._patience, last_save_s=last_save_s)
        self._next_s = now_s + look_every_s(self._policy)
        return self.hang


class _Saves:
    """What a framework saves by itself, in a folder of its own."""

    def __init__(self, job: Job, num_procs: int) -> None:
        self._framework, self._folder = get_framework(job), Path(job.checkpoint.watch)
        self._num_procs = num_procs
        self._looked_at = datetime.min.replace(tzinfo=UTC)
        self._candidate, self._ready = "", ""

    def ready(self, now: datetime, attempt: Attempt, live: Live | None) -> str:
        """The newest complete save of the attempt: the same in two looks, and no process that could write to it."""
        if self._framework.uses_library or (live and now - self._looked_at < _LOOK_AT_SAVES_EVERY):
            return self._ready
        self._looked_at = now
        newest = self._newest(attempt)
        before, self._candidate = self._candidate, newest.id if newest else ""
        if newest and (live is None or (before == newest.id and not _is_written(live, newest))):
            self._ready = newest.id
        return self._ready

    def _newest(self, attempt: Attempt) -> Save | None:
        launched_ns = attempt.launched_at.timestamp() / _NS
        saves = self._framework.saves(self._folder, self._num_procs)
        own = [save for save in saves if save.complete and save.stamp >= launched_ns]
        return max(own, key=lambda save: save.stamp, default=None)

    def put_aside(self, attempt: Attempt) -> None:
        """
        What lies beyond the checkpoint that this attempt resumes from, and what never became whole:
        a framework that looks for the highest number would take it, or keep it and delete newer ones.
        """
        self._candidate = self._ready = ""
        if self._framework.uses_library:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        step = attempt.resume.step if attempt.resume else 0
        saves = self._framework.saves(self._folder, self._num_procs)
        for save in saves:
            if not save.complete or (save.step is not None and save.step > step):
                self._move(save, self._folder / f".aside-before-attempt-{attempt.number:04d}")

    def _move(self, save: Save, aside: Path) -> None:
        aside.mkdir(exist_ok=True)
        inside = {self._folder / Path(name).parts[0] for name in save.files}
        for path in inside if save.root == self._folder else {save.root}:
            with suppress(OSError):
                path.rename(aside / path.name)


def _is_written(live: Live, save: Save) -> bool:
    return are_written(live.trainers, (save.root / name for name in save.files))


class _Logs:
    """What logs take on the disk, looked at now and then."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._size = 0
        self._sized_at = datetime.min.replace(tzinfo=UTC)
        self.error = ""

    def size(self, now: datetime) -> int:
        if now - self._sized_at >= _SIZE_LOGS_EVERY and not self.error:
            self._size, self._sized_at = stored_bytes(self._folder), now
        return self._size

    def trim(self, max_bytes: int) -> None:
        self._size = 0  # until it is looked at again
        try:
            trim(self._folder, max_bytes)
        except OSError as error:
            self.error = error.strerror or str(error)


# -------------------------------------------------------------------------------- preflight


class _Checked:
    """What preflight found in this life, part by part."""

    def __init__(self, *, users: frozenset[str]) -> None:
        self.verdict: Preflight | None = None
        self._users = users
        self._known: TaskState = None

    def learn(self, state: TaskState) -> None:
        if state is self._known or not isinstance(state, Finished | Failed):
            return
        self._known = state
        before = self.verdict.findings if self.verdict else ()
        self.verdict = decide_verdict((*before, *_findings(state)), users=self._users)


def _findings(state: Finished | Failed) -> tuple[Finding, ...]:
    """A task that died has found nothing out: that is said, and refuses nothing."""
    if isinstance(state, Failed):
        message = f"not checked: {state.error}"
        return (Finding(name="time_limit", severity=Severity.WARN, message=message),)
    return tuple(parse_finding(fields) for fields in state.result.get("findings", ()))


def parse_finding(fields: Mapping[str, Any]) -> Finding:
    """The inverse of `dataclasses.asdict`, after JSON."""
    return Finding(**{**fields, "severity": Severity(fields["severity"])})


# -------------------------------------------------------------------------------- the store


class _StoreView:
    """What tasks told of the store in this life."""

    def __init__(self) -> None:
        self.checkpoints: tuple[Checkpoint, ...] | None = None
        self.conclusion: Conclusion | None = None
        self.unusable: set[str] = set()
        self.job: Mapping[str, Any] = {}
        self.ledger: tuple[Machine, ...] | None = None
        self.abilities: Mapping[str, Any] | None = None
        self.last_upload_s = 0.0
        self._known: dict[TaskKind, TaskState] = {}

    def learn(self, tasks: Mapping[TaskKind, TaskState]) -> None:
        for kind, state in tasks.items():
            if state is self._known.get(kind) or state == self._known.get(kind):
                continue
            if isinstance(state, Finished):
                self._finished(kind, state, self._known.get(kind))
            elif isinstance(state, Failed) and kind is TaskKind.RESTORE and state.damaged:
                self.unusable.add(state.subject)
            self._known[kind] = state

    def global_batch(self) -> int:
        """Of the job that is there; 0 where it has none, or makes no sense."""
        batch = self.job.get("batch")
        samples = batch.get("global") if isinstance(batch, Mapping) else 0
        return samples if isinstance(samples, int) else 0

    def _finished(self, kind: TaskKind, state: Finished, before: TaskState) -> None:
        started = getattr(before, "started_at", None)
        if kind is TaskKind.UPLOAD and started:
            self.last_upload_s = (state.at - started).total_seconds()
        if "checkpoints" in state.result:
            self.checkpoints = tuple(parse_checkpoint(fields) for fields in state.result["checkpoints"])
        if kind is TaskKind.SURVEY:
            self.ledger = ledger.parse(state.result.get("ledger"))
            self.job = (state.result.get("job") or {}).get("identity") or {}
            self.abilities = state.result.get("abilities")
        if state.result.get("outcome"):
            self.conclusion = parse_conclusion(state.result["outcome"])


class _LeaseView:
    """What the keeper told, and for how long it holds."""

    def __init__(self, *, is_needed: bool) -> None:
        self._is_needed = is_needed
        self._told: Mapping[str, Any] = {"state": LeaseState.UNKNOWN if is_needed else LeaseState.NOT_NEEDED}
        self._renewed_s: float | None = None

    def look(self, task: TaskState) -> Lease:
        trouble = ""
        if isinstance(task, Running):
            self._learn(task.told)
            trouble = task.note
        elif isinstance(task, Finished):
            self._learn(task.result.get("told", {}))
        elif isinstance(task, Failed):
            trouble = task.error
        state = LeaseState(self._told["state"])
        if self._renewed_s is not None and state in {LeaseState.HELD, LeaseState.UNKNOWN}:
            is_fresh = may_write(self._renewed_s, process.boot_time_s(), Pace())
            state = LeaseState.HELD if is_fresh else LeaseState.LAPSED
        told = self._told
        return Lease(
            state=state,
            fence=int(told.get("fence", 0)),
            who=str(told.get("who", ""))[:200],
            until=str(told.get("until", ""))[:40],
            trouble=trouble,
        )

    def _learn(self, told: Mapping[str, Any]) -> None:
        if told.get("state"):
            self._told = told
        if told.get("renewed_s") is not None:
            self._renewed_s = float(told["renewed_s"])


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


def _describe_holder(server: Server | None, folder: RunFolder) -> str:
    return f"{_describe_place(server, folder)}, pid {os.getpid()}"


def _describe_place(server: Server | None, folder: RunFolder) -> str:
    where = f"server {server.id}, " if server else ""
    return f"{where}{socket.gethostname()}:{folder.root}"


def parse_checkpoint(fields: Mapping[str, Any]) -> Checkpoint:
    """The inverse of `dump_checkpoint`, which the tasks use."""
    return Checkpoint(
        ref=Ref(**fields["ref"]),
        size_bytes=fields["size_bytes"],
        world_size=fields["world_size"],
        written_at=datetime.fromisoformat(fields["written_at"]),
        framework=fields["framework"],
    )


def dump_conclusion(conclusion: Conclusion) -> dict[str, str]:
    """`outcome.json` of the store; `parse_conclusion` reads it."""
    return {"outcome": conclusion.outcome, "reason": conclusion.reason, "at": conclusion.at.isoformat()}


def parse_conclusion(fields: Mapping[str, Any]) -> Conclusion | None:
    with suppress(KeyError, ValueError, TypeError):  # of a newer runner, or not ours: nothing to go by
        return Conclusion(
            outcome=Outcome(fields["outcome"]),
            reason=str(fields["reason"])[:500],
            at=datetime.fromisoformat(fields["at"]),
        )
    return None


# --------------------------------------------------------------------------------- helpers


def fill_command(job: Job, num_procs: int, checkpoint_dir: Path, resume_args: tuple[str, ...]) -> tuple[str, ...]:
    """The command's words, with what the runner knows put in."""
    values = {
        "checkpoint_dir": str(checkpoint_dir),
        "world_size": str(num_procs),
        "grad_accum": str(accumulation(job, num_procs)),
    }
    return split_command(job.command, resume_args=resume_args, values=values)


class _Wake(FileSystemEventHandler):
    """Wakes the loop for what it would act on, not for the files that it writes itself."""

    def __init__(self, names: tuple[str, ...], wake: Callable[[], None]) -> None:
        self._names, self._wake = names, wake

    def on_any_event(self, event: FileSystemEvent) -> None:
        moved = event.event_type in {"created", "moved", "deleted"}
        paths = (os.fsdecode(event.src_path), os.fsdecode(event.dest_path))
        if moved and any(Path(path).name.startswith(self._names) for path in paths):
            self._wake()


def _watch(run_dir: Path, checkpoint_dir: Path, awake: threading.Event) -> Any:  # noqa: ANN401  # watchdog's alias is no type
    """Wake the loop when a checkpoint is committed or somebody asks for the stop."""
    checkpoint_dir.mkdir(parents=True, exist_ok=True)
    observer = Observer()
    observer.schedule(_Wake(("stop",), awake.set), str(run_dir), recursive=False)
    observer.schedule(_Wake(("step-",), awake.set), str(checkpoint_dir), recursive=False)
    observer.start()
    return observer
