"""
`rehearse`: the night in ten minutes, with this very job, before it is left alone.

A real `run` of a name and a folder of its own is driven and watched from outside: it is asked for
a save, a rank of it is killed, it is told to leave. What comes next and what it came to is decided
in `policy/rehearsal.py`. Nothing of the real run is touched, and nothing of the rehearsal stays.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from runner.adapters.frameworks import get_framework
from runner.adapters.notifiers import notify_all
from runner.adapters.providers import NAMES, PROVIDERS, Keep, with_secrets
from runner.adapters.rented import as_told, ask, doubt, rented
from runner.adapters.secrets import FOLDER, find_values
from runner.cli.load import LoadedJob, load_job, place_of
from runner.cli.naming import add_job, named_job
from runner.cli.output import out, out_json, speaking
from runner.cli.planned import check_framework, refuse_planned
from runner.cli.rehearsal_eye import LOG, Eye
from runner.cli.rehearsal_place import MARK, Place, empty, end_run, own_folder, read_mark
from runner.cli.rehearsal_words import describe, night
from runner.cli.runs import is_alive
from runner.errors import JobError, LockedError, MachineError, StoreError
from runner.facts import Server
from runner.job import AtEnd, FinishPolicy, Job, Limits, OnLimit, ProviderName, ProviderPolicy
from runner.policy import rehearsal as policy
from runner.policy.rehearsal import Check, Deed, Figures, Mark, Notes, Result, Scene, Seen
from runner.supervise import page as pages
from runner.supervise import process

SUFFIX: Final = "-rehearsal"
_MAX_NAME: Final = 63
_KEPT: Final = frozenset({MARK, LOG, "job.yaml", "journal.jsonl", "status.json", "logs", "evidence"})
_NOTIFY: Final = "RUNNER_NOTIFY_URL"
_SLACK: Final = timedelta(minutes=10)  # of the run's own limit, for whatever outlives a killed rehearsal
_LOOK_EVERY_S: Final = 0.25
_BEAT_EVERY_S: Final = 0.02
_INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CLEAR_S: Final = 10.0  # of who interrupts it: a store that does not answer is left for the next rehearsal


def configure(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument(
        "--minutes",
        type=_minutes,
        default=10.0,
        metavar="N",
        help="time limit of the rehearsal in minutes (default: 10)",
    )
    parser.add_argument("--json", action="store_true", help="print checks, figures and verdict as JSON at the end")


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 < value <= 24 * 60:
        raise argparse.ArgumentTypeError(f"expected minutes, more than 0 and at most a day, got {text}")
    return value


def run(args: argparse.Namespace) -> int:
    """Exit 0 only if nothing failed; 3, 4 or 6 for a machine, a store or a job that is not ready."""
    _heed(_interrupt)
    env = with_secrets(os.environ)
    loaded = load_job(named_job(args), env)
    refuse_planned(loaded.job)
    check_framework(loaded.job, partial(place_of, loaded))
    job = derive(loaded, timedelta(minutes=args.minutes))
    if is_alive(Path(loaded.job.run_dir)):
        raise LockedError(f"{loaded.job.run_dir}: this run is at work here", hint="rehearse before it, or after it")
    rehearsal = _Rehearsal(loaded, job, args, env)
    with own_folder(loaded.job, job) as root:
        try:
            rehearsal.play(root)
            return rehearsal.close(root)
        except BaseException:
            _heed(signal.SIG_IGN)  # a second Ctrl-C would leave behind what the first one is about to remove
            rehearsal.abandon(root)
            raise


def _heed(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    for number in _INTERRUPTS:
        signal.signal(number, handler)


class _Interrupted(KeyboardInterrupt):
    """Python dies of SIGINT in the end when the plain one was raised in code that it made from text, whoever caught it."""


def _interrupt(number: int, frame: object) -> NoReturn:
    del number, frame
    raise _Interrupted


@contextmanager
def _undisturbed() -> Iterator[None]:
    """An interrupt that comes meanwhile counts when it is over."""
    came: list[int] = []
    _heed(lambda number, _: came.append(number))
    try:
        yield
    finally:
        _heed(_interrupt)
    if came:
        raise _Interrupted


# ------------------------------------------------------------------------ the job it runs


def derive(loaded: LoadedJob, limit: timedelta) -> Job:
    """The same job under another name: its folders, its place in the store, and no server to stop."""
    real = loaded.job
    name = f"{real.name[: _MAX_NAME - len(SUFFIX)]}{SUFFIX}"
    mine = loaded.written.model_copy(update={"name": name}).fill(
        workspace=str(loaded.workspace), date=loaded.date, config_dir=str(loaded.folder)
    )
    root = Path(mine.run_dir) if mine.run_dir != real.run_dir else Path(real.run_dir) / ".rehearsal"
    checkpoints = root / Path(mine.checkpoint.dir).name
    return mine.model_copy(
        update={
            "checkpoint": mine.checkpoint.model_copy(
                update={"dir": str(checkpoints), "watch": _saves(real, mine, root)}
            ),
            "outputs": tuple(folder for folder in mine.outputs if folder not in real.outputs),
            "limits": Limits(max_duration=2 * limit + real.restart.grace_period + _SLACK, on_limit=OnLimit.STOP_ANYWAY),
            "finish": FinishPolicy(save_folder=str(root)),
            "provider": ProviderPolicy(kind=ProviderName.NONE),
            "notify": (),
        }
    )


def _saves(real: Job, mine: Job, root: Path) -> str:
    """Where a framework saves; `JobError` if that cannot be another folder than the real run's."""
    if get_framework(real).uses_library or "{checkpoint_dir}" in real.command:
        return str(root / "saves")
    if mine.checkpoint.watch != real.checkpoint.watch:
        return mine.checkpoint.watch
    raise JobError(
        f"command: expected {{checkpoint_dir}} in it, since it would save into {real.checkpoint.watch}, the real run's",
        hint="write {checkpoint_dir} in the command in place of that folder (docs/frameworks.md)",
    )


def _environment(env: Mapping[str, str], real: Job, root: Path) -> dict[str, str]:
    """Nothing in it names a server: whatever goes wrong, the real one is not stopped. Nobody is told of it."""
    nobody = {name: "" for name in NAMES if name not in real.secrets}
    kept = {name: value for name, value in env.items() if name not in {*real.notify} - {*real.secrets}}
    return {**kept, **nobody, _NOTIFY: "", "VRAMFARM_WORKSPACE": str(root)}


# --------------------------------------------------------------------------- the rehearsal


class _Rehearsal:
    """Plays the checks, tells each as it comes, and cleans up."""

    def __init__(self, loaded: LoadedJob, job: Job, args: argparse.Namespace, env: Mapping[str, str]) -> None:
        self._loaded, self._real, self._job, self._env = loaded, loaded.job, job, env
        self._limit = timedelta(minutes=args.minutes)
        self._as_json: bool = args.json
        self._place: Place | None = None
        self._results: list[Result] = []
        self._server: Server | None = None
        self._scene = make_scene(loaded.job, self._limit)
        self._seen = Seen(now_s=0.0)

    def play(self, root: Path) -> None:
        self._say(
            f"rehearsal of {self._real.name} as {self._job.name} in {root}; {self._limit.total_seconds() / 60:g} minutes at most"
        )
        self._try_stop()
        self._try_notify()
        if self._take_place():
            self._watch(root, self._start(root))
            self._try_restore(root)

    def abandon(self, root: Path) -> None:
        """No process of it stays, and nothing in the store, if that answers soon."""
        end_run(root, read_mark(root))
        clearing = threading.Thread(target=self._clear_place, daemon=True)
        clearing.start()
        clearing.join(_CLEAR_S)
        if clearing.is_alive():
            sys.stderr.write(f"warning: {self._where()} is not removed yet, the next rehearsal removes it\n")

    def close(self, root: Path) -> int:
        """The verdict, and nothing left but the logs of what failed. Returns the exit code."""
        for check in policy.missing(self._results):
            self._tell(policy.not_made(check, "what comes before it failed"))
        ordered = sorted(self._results, key=lambda result: list(Check).index(result.check))
        code = policy.exit_code(ordered)
        self._clear_place()
        has_logs = bool(code) and (root / LOG).exists()
        if has_logs:
            empty(root, keep=_KEPT)
        else:
            shutil.rmtree(root)
        pages.remove_stale(root)
        figures = [*night(self._real, ordered, self._scene, self._seen, server=self._server, now=datetime.now(UTC))]
        for line in figures:
            self._say(f"{'night':<8} {line}")
        said, logs = policy.verdict(ordered), str(root / LOG) if has_logs else None
        self._say(f"verdict: {said}" + (f"; its log is {logs}" if logs else ""))
        if self._as_json:
            out_json({
                "job": self._real.name,
                "verdict": said,
                "exit_code": code,
                "checks": [asdict(result) for result in ordered],
                "night": figures,
                "logs": logs,
            })  # fmt: skip
        return code

    def _say(self, line: str) -> None:
        """As it happens: data, or beside it where the data is JSON."""
        if self._as_json:
            sys.stderr.write(f"{line}\n")
            return
        out(line)
        with speaking():
            sys.stdout.flush()

    def _tell(self, result: Result) -> None:
        self._results.append(result)
        for line in describe(result):
            self._say(line)

    # ------------------------------------------------------------ beside the run

    def _try_stop(self) -> None:
        server = rented(self._real, self._env)
        if server is None:
            text = "no rented server: nothing is stopped in the end"
            self._tell(policy.ok(Check.STOP, {"text": text}))
            return
        answer = ask(server, self._env)
        self._server, problem = as_told(server, answer), doubt(server, answer)
        keep = None if self._real.offload.to else self._real.finish.save_folder
        text = PROVIDERS[server.provider].explain(Keep(keep), answer)
        if self._real.finish.on_success is AtEnd.KEEP:
            text = f"after a success it is kept, and billed (finish.on_success); at the limit: {text}"
        text = f"{server.provider} {server.id}: {answer.detail}; nothing was asked. At the end: {text}"
        self._tell_beside(Check.STOP, {"text": text}, problem, "set a key that may read and stop it: docs/providers.md")

    def _try_notify(self) -> None:
        if not self._real.notify:
            self._tell(policy.ok(Check.NOTIFY, {}, "nobody is told how the night goes (notify is not set)"))
            return
        urls = find_values(self._real.notify, self._env)
        told = {name: f"no value in the environment or {FOLDER}" for name in self._real.notify if name not in urls}
        name = self._real.name
        message = {
            "event": "rehearsal",
            "title": f"{name}: rehearsal",
            "text": f"{name}: this is how you will be told [{socket.gethostname()}]",
            "job": name,
        }
        told |= {name: why for name, why in zip(urls, notify_all(tuple(urls.values()), message), strict=True) if why}
        problem = "; ".join(f"{name}: {why}" for name, why in told.items())
        figures = {"told": len(urls) - len(told.keys() & urls.keys())}
        cure = "mend the secrets that notify names: docs/notifications.md"
        self._tell_beside(Check.NOTIFY, figures, problem, cure)

    def _tell_beside(self, check: Check, figures: Figures, problem: str, cure: str) -> None:
        code = MachineError.exit_code
        self._tell(policy.failed(check, problem, cure, code, figures) if problem else policy.ok(check, figures))

    def _take_place(self) -> bool:
        if self._job.offload.to is None:
            return True
        try:
            self._place = Place(self._job, 2 * self._limit + _SLACK)
            self._place.take()
        except StoreError as error:
            self._tell(policy.failed(Check.STORE, str(error), error.hint, error.exit_code))
            self._place = None
            return False
        return True

    def _clear_place(self) -> None:
        if self._place is None or not self._place.is_ours:
            return
        try:
            self._place.clear()
        except StoreError as error:
            sys.stderr.write(f"warning: {self._where()} could not be removed: {error}; the next rehearsal removes it\n")

    def _where(self) -> str:
        return f"{self._job.offload.to}/{self._job.name}"

    def _try_restore(self, root: Path) -> None:
        there = any(r.check is Check.STORE and r.mark in {Mark.OK, Mark.WARN} for r in self._results)
        if self._place is None or not there:
            problem = "there is no checkpoint in the store"
            self._tell(policy.not_made(Check.RESTORE, problem))
            return
        begun = time.monotonic()
        try:
            found = self._place.restore(root / "restored")
        except StoreError as error:
            self._tell(policy.failed(Check.RESTORE, str(error), error.hint, error.exit_code))
            return
        took = time.monotonic() - begun
        figures = {"step": found.ref.step, "size_bytes": found.size_bytes, "seconds": took}
        self._tell(policy.ok(Check.RESTORE, figures))

    # ------------------------------------------------------------------ the run

    def _start(self, root: Path) -> subprocess.Popen[bytes]:
        text = json.dumps(self._job.model_dump(mode="json", by_alias=True), indent=1)
        (root / "job.yaml").write_text(text)
        argv = (sys.executable, "-I", "-m", "runner", "understudy", "--parent", str(os.getpid()))
        env = _environment(os.environ, self._real, root)
        with (root / "job.yaml").open("rb") as job, (root / LOG).open("ab") as log, _undisturbed():
            child = subprocess.Popen(
                argv, env=env, cwd=self._loaded.folder, stdin=job, stdout=log, stderr=log, start_new_session=True
            )
            (root / MARK).write_text(json.dumps({"pid": child.pid, "started": process.identify(child.pid).started}))
        return child

    def _watch(self, root: Path, child: subprocess.Popen[bytes]) -> None:
        eye, notes = Eye(self._job, child), Notes()
        while True:
            seen = eye.look()
            self._seen = policy.remember(self._seen, seen)
            act = policy.decide(self._scene, notes, seen)
            if act is Deed.END:
                break
            if isinstance(act, Result):
                self._tell(act)
                notes = replace(notes, results=(*notes.results, act))
                continue
            notes = self._do(act, eye, child, notes, seen)
            _wait(eye.beat)
        end_run(root, read_mark(root))
        child.wait()

    def _do(self, deed: Deed, eye: Eye, child: subprocess.Popen[bytes], notes: Notes, seen: Seen) -> Notes:
        match deed:
            case Deed.ASK_SAVE if eye.ask_save():
                return replace(notes, asked_s=eye.now_s())
            case Deed.KILL_RANK if (kill := eye.kill_rank(seen)) is not None:
                return replace(notes, killed=kill)
            case Deed.ASK_LEAVE:
                child.send_signal(signal.SIGTERM)
                return replace(notes, left_s=eye.now_s(), left_step=seen.step)
            case _:
                return notes


def make_scene(job: Job, limit: timedelta) -> Scene:
    return Scene(
        limit_s=limit.total_seconds(),
        uses_library=get_framework(job).uses_library,
        has_store=job.offload.to is not None,
        save_interval_s=job.checkpoint.save_interval.total_seconds(),
        keep_last=job.checkpoint.keep_last,
        grace_s=job.restart.grace_period.total_seconds(),
    )


def _wait(beat: Callable[[], None]) -> None:
    until = time.monotonic() + _LOOK_EVERY_S
    while time.monotonic() < until:
        beat()
        time.sleep(_BEAT_EVERY_S)
