"""
The runner itself: everything is put together here, once, and handed to the loop.

Started by the guardian. What goes wrong before the loop is an early end: one line, the right
exit code, and the last word to the guardian, so that a rented server does not stay on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

from runner.adapters.notifiers import notify_all
from runner.adapters.providers import PROVIDERS, SECRETS, find_server, with_secrets
from runner.adapters.providers.contract import Answer, Keep
from runner.adapters.rented import prove, rented
from runner.adapters.secrets import FOLDER, find_values
from runner.cli.load import LoadedJob, load_accepted, load_job, place_of
from runner.cli.naming import STDIN, workspace_of
from runner.cli.planned import check_framework, refuse_planned
from runner.cli.refusal import record_refusal
from runner.cli.run import comes_back
from runner.cli.telling import Teller, say
from runner.errors import JobError, LimitError, LockedError, MachineError, RunnerError
from runner.facts import Server, ServerState
from runner.folder import RunFolder
from runner.job import ArchiveSource, Job, OnLimit
from runner.lifeline import Lifeline
from runner.loop import run as run_loop
from runner.policy.actions import OTHER_JOB, End
from runner.policy.batch import Uneven, split_batch
from runner.policy.money import tariff_of
from runner.probes import machine
from runner.probes.unsaved import has_files
from runner.storage import journal as events
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk, try_lock, write_durable
from runner.storage.journal import Journal
from runner.words import Surroundings
from runner.world import RealWorld, Setting, identify_holder

LIFELINE_VARIABLE: Final = "RUNNER_LIFELINE"
NOTIFY_VARIABLE: Final = "RUNNER_NOTIFY_URL"
ACCEPTED_VARIABLE: Final = "RUNNER_ACCEPTED"  # the guardian's: run folder of the runner that died before this one
STOP_TIMEOUT_VARIABLE: Final = "RUNNER_STOP_TIMEOUT"  # empty in the image: nobody said what `docker stop` waits
LOCK_PATIENCE_S: Final = 10.0
_LAST_MINUTE: Final = timedelta(minutes=1)
_IDENTITY: Final = ("command", "launcher", "framework", "source", "model", "batch")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config")
    parser.add_argument("--start-over", action="store_true")
    parser.add_argument("--go-on", action="store_true")
    parser.add_argument("--order", default="")
    parser.add_argument("--accept-change", action="store_true")


def run(args: argparse.Namespace) -> int:
    wire, accepted = os.environ.pop(LIFELINE_VARIABLE, None), os.environ.pop(ACCEPTED_VARIABLE, "")
    lifeline = Lifeline(int(wire) if wire else None)
    env = with_secrets(os.environ)
    server, loaded = find_server(env), None
    try:
        loaded = _load(args, env, accepted)
        server = rented(loaded.job, env)
        lifeline.server(server)
        end = _run(args, loaded, env, server, lifeline, is_restart=bool(accepted))
    except RunnerError as error:
        after = _early_end(error, server, lifeline)
        loaded = loaded or _parsed(args, env)
        if loaded:
            reason = "; ".join(filter(None, (str(error).splitlines()[0], error.hint, after)))
            record_refusal(loaded, env, code=error.exit_code, reason=reason, server=server.id if server else "")
        _tell_early_end(error, loaded.job if loaded else None, server, env, after)
        raise
    return end.code


def _parsed(args: argparse.Namespace, env: Mapping[str, str]) -> LoadedJob | None:
    """A job that was refused, if it can be read at all: it names the store, and who is to be told."""
    with suppress(RunnerError):
        return None if args.config == STDIN else load_job(args.config, env)
    return None


def _load(args: argparse.Namespace, env: Mapping[str, str], accepted: str) -> LoadedJob:
    """
    The job as job.yaml has it; for a runner that takes over from one that died, else as that one accepted it.

    A job.yaml that was broken since would end training that is alive and well.
    """
    try:
        loaded = load_job(args.config, env)
        refuse_planned(loaded.job)
        check_framework(loaded.job, partial(place_of, loaded))
        if accepted:
            _expect_successor(loaded, Path(accepted), env, accept_change=args.accept_change)
    except (JobError, MachineError) as error:
        known = load_accepted(Path(accepted), args.config, env) if accepted else None
        if known is None:
            raise
        why = str(error).splitlines()[0]
        say(f"job.yaml cannot be used now, the run goes on with the job as it was accepted ({known.path}): {why}")
        return known
    return loaded


def _expect_successor(loaded: LoadedJob, run_dir: Path, env: Mapping[str, str], *, accept_change: bool) -> None:
    """All that would refuse this job here."""
    if Path(loaded.job.run_dir) != run_dir:
        raise JobError(f"{loaded.path}: expected the job of {run_dir}, got that of {loaded.job.run_dir}")
    rented(loaded.job, env)
    machine.find_python(loaded.job.python)
    if not accept_change:
        _refuse_change(identity(loaded.written), RunFolder(root=run_dir))


def _early_end(error: RunnerError, server: Server | None, lifeline: Lifeline) -> str:
    """
    Every early end on a rented server stops that server, but for the one that another runner of ours uses.
    Returns what is billed after it: with files in the workspace a provider may keep a disk, and ask for it.
    """
    stop = server is not None and not isinstance(error, LockedError)
    workspace = workspace_of(os.environ)  # not of job.yaml: that may be what is wrong
    keep = str(workspace) if has_files(workspace) else None
    lifeline.end(code=error.exit_code, stop=stop, keep=keep, hold_s=None, reason=str(error).splitlines()[0])
    if server is None or not stop:
        return ""
    return PROVIDERS[server.provider].explain(Keep(keep), Answer(ServerState.UNKNOWN, keeping=server.keeping))


def _tell_early_end(
    error: RunnerError, job: Job | None, server: Server | None, env: Mapping[str, str], after: str
) -> None:
    """Where there is no loop that would. The guardian waits for it, not longer than for any last word."""
    name, where = job.name if job else "job.yaml", server.id if server else "this machine"
    text = f"{name}: did not start: {str(error).splitlines()[0]} {f'({error.hint})' if error.hint else ''} [{where}]{f'; {after}' if after else ''}"
    message = {"event": "ended", "title": f"{name}: did not start", "text": text, "job": name, "server": where}
    urls = [env[NOTIFY_VARIABLE]] if env.get(NOTIFY_VARIABLE) else []
    notify_all([*(find_values(job.notify, env).values() if job else ()), *urls], message)


def _run(  # noqa: PLR0913  # all that a run is put together from
    args: argparse.Namespace,
    loaded: LoadedJob,
    env: Mapping[str, str],
    server: Server | None,
    lifeline: Lifeline,
    *,
    is_restart: bool,
) -> End:
    job, folder = loaded.job, RunFolder(root=Path(loaded.job.run_dir))
    server, doubt = prove(server, env)
    lifeline.server(server)  # with its price
    with _on_this_disk(folder.root), _locked(folder):
        journal = Journal(folder.journal, Disk())
        if loaded.identity is None:
            _accept(loaded, folder, accept_change=args.accept_change or not _has_trained(job, journal))
        _reopen(args, journal, folder, server, identify_holder(server, folder, Disk()), is_restart=is_restart)
        setting = replace(find_out(loaded, env, server, accept_change=args.accept_change), stop_doubt=doubt)
        if is_restart and setting.missing:
            say(
                f"secrets: no value for {', '.join(setting.missing)} now: what trains goes on, nothing is launched without"
            )
        if wrong := setting.wrong if is_restart else find_wrong(setting):
            if not _is_billed(setting, journal):
                raise wrong
            setting = replace(setting, wrong=wrong)
        lifeline.listeners(tuple(find_values(job.notify, env).values()))
        world = RealWorld(setting, folder, Disk())
        world.on_deadline = partial(_tell_deadline, job, folder, setting, lifeline)
        world.on_turn = lifeline.alive
        world.observe(journal.history)  # before anything else the guardian knows until when
        around, told = _surroundings(folder, server, loaded.workspace), env.get(STOP_TIMEOUT_VARIABLE)
        teller = Teller(job, folder, around, machine=_describe(setting), stop_timeout=told)
        _listen(world)
        try:
            end = run_loop(job, journal, world, teller)
            teller.close(journal.history, end)
        finally:
            world.close()
    if setting.wrong is not None and end.code == setting.wrong.exit_code:
        raise setting.wrong  # an early end as any other, which the ledger has now
    if journal.history.conclusion is None:
        record_refusal(loaded, env, code=end.code, reason=end.reason, server=server.id if server else "")
    hold = None if job.finish.hold == "auto" else job.finish.hold.total_seconds()
    keep = job.finish.save_folder if end.keep else None
    stop = end.stop and server is not None
    lifeline.end(code=end.code, stop=stop, keep=keep, hold_s=_hold(end, hold), reason=end.reason)
    return end


def _hold(end: End, wished: float | None) -> float | None:
    """A job that ran to its end has nothing to look at: the server goes at once."""
    ran = end.code in {0, 8, LimitError.exit_code}
    return 0.0 if ran else wished


# ------------------------------------------------------------------------------ the folder


@contextmanager
def _on_this_disk(root: Path) -> Iterator[None]:
    """A disk that fails is one line, not a traceback."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        where = error.filename or root
        raise MachineError(
            f"{where}: {error.strerror or error}",
            hint=f"the run folder {root} must be on a disk that can be written; free some space or mount a volume there",
        ) from error


@contextmanager
def _locked(folder: RunFolder) -> Iterator[None]:
    """One runner a run folder: a restart waits for the one that is going, a second one is refused."""
    with folder.lock.open("a+") as file:
        deadline_s = time.monotonic() + LOCK_PATIENCE_S
        while not try_lock(file):
            if time.monotonic() >= deadline_s:
                file.seek(0)
                raise LockedError(
                    f"{folder.root}: another runner writes this run ({file.read().strip() or 'unknown'})",
                    hint="`vramfarm-runner status` shows how it is doing; `vramfarm-runner stop` ends it",
                )
            time.sleep(0.1)
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _has_trained(job: Job, journal: Journal) -> bool:
    """Where nothing was, a corrected command is no other job: there are no weights that it could take for its own."""
    return bool(journal.history.attempts or CheckpointDir(Path(job.checkpoint.dir), Disk()).committed())


def _accept(loaded: LoadedJob, folder: RunFolder, *, accept_change: bool) -> None:
    """From now on the run folder has the job, whatever becomes of job.yaml."""
    new = identity(loaded.written)
    if not accept_change:
        _refuse_change(new, folder)
    record = loaded.job.without_passwords().model_dump(mode="json", by_alias=True) | {"identity": new}
    write_durable(Disk(), folder.job, json.dumps(record, indent=1).encode())


def _refuse_change(new: Mapping[str, Any], folder: RunFolder) -> None:
    """One name, one run: another job under an old name would resume from the wrong weights."""
    old = _read_identity(folder.job)
    changed = [name for name in new if old and old.get(name) != new[name]]
    if changed:
        raise JobError(
            f"{folder.job}: this run was started with another {', '.join(changed)}: "
            + "; ".join(f"was {json.dumps(old.get(n))}, is {json.dumps(new[n])}" for n in changed),
            hint=OTHER_JOB,
        )


def identity(job: Job) -> dict[str, Any]:
    """What makes a job this job, as written; limits, cadence and the like may change between starts."""
    fields = job.without_passwords().model_dump(mode="json", by_alias=True, include=set(_IDENTITY))
    if isinstance(job.source, ArchiveSource) and job.source.archive.startswith(f"{job.offload.to}/"):
        fields["source"] = "sent by submit"  # its name is that of its content, and a mended script is the same job
    return fields


def _read_identity(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes())["identity"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return {}  # the first start, or lost by a crash in it: it is written anew


def _reopen(  # noqa: PLR0913  # what an order is told by
    args: argparse.Namespace,
    journal: Journal,
    folder: RunFolder,
    server: Server | None,
    machine: str,
    *,
    is_restart: bool,
) -> None:
    """The same order is carried out once: a runner that is started again has the same arguments."""
    if not (args.start_over or args.go_on):
        return
    if args.order and args.order in journal.history.orders:
        if journal.history.conclusion and not is_restart:
            _tell_repeated(args, server)
        return
    folder.stop.unlink(missing_ok=True)
    journal.append(events.reopened(start_over=args.start_over, order=args.order, at=datetime.now(UTC), machine=machine))


def _tell_repeated(args: argparse.Namespace, server: Server | None) -> None:
    """
    An order that was carried out, of a run that is over. A restart repeats it, and so does whoever names it; who did
    neither wants it anew, a line of a crontab for one, and must not take nothing for success.
    """
    option = "--start-over" if args.start_over else "--go-on"
    is_named = args.order != socket.gethostname()
    if server or is_named or comes_back(os.getppid()):  # an early end stops a server, whatever `finish` says of it
        say(
            f"{option} was carried out here before and is not again: a restart repeats it; --order NAME makes it a new one"
        )
        return
    raise JobError(
        f"{option}: it was carried out here before, and the run is over: nothing is done",
        hint=f"a script names each order: {option} --order NAME (a date, say); a name that comes again is carried out once",
    )


# ----------------------------------------------------------------------------- the setting


def find_out(loaded: LoadedJob, env: Mapping[str, str], server: Server | None, *, accept_change: bool) -> Setting:
    """What is true of this machine and this job for one life; `JobError` or `MachineError` if it cannot be told."""
    job = loaded.job
    python, wrong = _find_python(job)
    names = machine.card_names()
    cards = len(names)
    num_procs, refusal = how_many(job, cards)
    refusal = refusal or _uneven(job, num_procs)
    secrets = find_values((*job.secrets, *job.notify), env)
    return Setting(
        job=job,
        identity=None if accept_change else loaded.identity or identity(loaded.written),
        setup_digest=_digest({"source": job.without_passwords().model_dump(mode="json")["source"], "setup": job.setup})
        if job.source or job.setup
        else "",
        data_digest=_digest([item.model_dump(mode="json") for item in job.data]) if job.data else "",
        config_dir=loaded.folder,
        python=python,
        num_cards=cards,
        num_procs=num_procs,
        card=names[0] if names else "",
        server=server,
        paid_from=machine.first_boot_at(loaded.workspace) if server else None,
        withhold=frozenset({*SECRETS, *job.notify} - {*job.secrets}),
        secrets={name: secrets[name] for name in job.secrets if name in secrets},
        missing=tuple(name for name in (*job.secrets, *job.notify) if name not in secrets),
        refusal=refusal,
        wrong=wrong,
    )


def _find_python(job: Job) -> tuple[str, JobError | None]:
    """The training interpreter; ours where there is none, and why."""
    try:
        return str(machine.find_python(job.python).path), None
    except JobError as error:
        return sys.executable, error


def find_wrong(setting: Setting) -> JobError | None:
    """Why the job cannot start here as it is: no interpreter, or a secret without a value."""
    if setting.wrong or not setting.missing:
        return setting.wrong
    return JobError(
        f"secrets: no value for {', '.join(setting.missing)}",
        hint=f"set it in the container's environment, or mount a file of that name into {FOLDER}",
    )


def _is_billed(setting: Setting, journal: Journal) -> bool:
    """Whether the loop is to write into the ledger what this start cost, before it ends. Not beside an attempt that lives."""
    return setting.server is not None and setting.job.offload.to is not None and journal.history.running is None


def how_many(job: Job, cards: int) -> tuple[int, str]:
    """Processes to start, and why this machine is refused, if it is."""
    if cards == 0:
        return (
            job.cpu_processes or 1,
            ""
            if job.cpu_processes
            else "no card found (in a container: docker run --gpus all); a job for the CPU says cpu_processes",
        )
    if job.cards == "all":
        return cards, ""
    if job.cards > cards:
        return cards, f"{job.cards} cards are asked for (cards), this machine has {cards}"
    return job.cards, ""


def _uneven(job: Job, num_procs: int) -> str:
    """Why this number of cards is refused: the global batch would be another."""
    split = None if job.batch is None else split_batch(job.batch, num_procs)
    return split.reason if isinstance(split, Uneven) else ""


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _tell_deadline(job: Job, folder: RunFolder, setting: Setting, lifeline: Lifeline, at: datetime) -> None:
    soon, server = datetime.now(UTC) + _LAST_MINUTE, setting.server
    paid = tariff_of(server.provider).minimum if server else timedelta()
    if server is None or (setting.paid_from and soon <= setting.paid_from + paid):
        at = max(at, soon)  # it costs nothing: let the runner say what happened, and not be ended in the middle of it
    keep = None if job.limits.on_limit is OnLimit.STOP_ANYWAY else job.finish.save_folder
    lifeline.deadline(at, run=str(folder.root), keep=keep, stop_anyway=job.limits.on_limit is OnLimit.STOP_ANYWAY)


def _surroundings(folder: RunFolder, server: Server | None, workspace: Path) -> Surroundings:
    return Surroundings(
        run_dir=str(folder.root),
        server=server,
        first_boot_at=machine.first_boot_at(workspace),
        runner_pid=os.getpid(),
    )


def _describe(setting: Setting) -> str:
    what = f"{setting.num_cards} cards" if setting.num_cards else f"no card, {setting.num_procs} processes on the CPU"
    return f"{what}; training with {setting.python}"


def _listen(world: RealWorld) -> None:
    """SIGTERM ends this boot, never the job; a closed terminal ends nothing."""

    def leave(number: int, frame: object) -> None:
        del number, frame
        world.leaving.set()
        world.wake()

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
