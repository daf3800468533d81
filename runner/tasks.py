"""
Slow work, one process each: `python -I -m runner.tasks KIND`, arguments as JSON on standard
input, progress and one last word as JSON lines on standard output. `KIND SCHEME` is started ahead:
it gets ready for a store of that scheme before it waits for its arguments.

Every task may be killed at any moment and started again. What only one of them needs is imported
by it: an upload need not wait for what looks at a machine.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runner.adapters.secrets import find_values, with_store_keys
from runner.errors import JobError, RunnerError, one_line
from runner.facts import Checkpoint, TaskKind
from runner.policy.slow import WRITERS
from runner.publishing import LEDGER, Publishing, read_json
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk
from runner.storage.offsite import (
    OffsiteError,
    Store,
    comparing,
    open_store,
    parse_abilities,
    parse_place,
    restoring,
    surveying,
    tidying,
    uploading,
    warm_up,
)
from vramfarm.protocol import ALGORITHM, Manifest, Ref

if TYPE_CHECKING:
    from runner.adapters.frameworks import Save
    from runner.job import ArchiveSource, GitSource, Job, PathSource
    from runner.preflight import Mission

    Source = GitSource | PathSource | ArchiveSource | None

Progress = Callable[[float, str], None]
Arguments = Mapping[str, Any]

_A_FEW: Final = 4
_MAX_FOLLOWED: Final = 1000  # places; files in others are taken for missing, and a disk is kept for nothing
_SHOWN: Final = 150  # of each end of a line about one file
_SAY_EVERY_S: Final = 0.5
_LEASE_TIMEOUTS_S: Final = (3.0, 6.0)  # one answer that hangs, and its repetitions, must not cost the lease


def main() -> int:
    kind = TaskKind(sys.argv[1])
    for scheme in sys.argv[2:]:
        warm_up(scheme)
    raw = sys.stdin.buffer.read()
    if not raw:
        return 0  # started ahead, and whoever did so is gone
    arguments = json.loads(raw)
    _say({"begun": True})  # who says nothing is not waited for
    if kind in WRITERS:
        threading.Thread(target=_end_with, args=(arguments["runner"],), daemon=True).start()
    try:
        result = TASKS[kind](arguments, _Saying())
    except OffsiteError as error:
        more = {"curable": error.curable, "damaged": error.damaged, "unreadable": error.of_server and error.of_object}
        return _fail(str(error), hint=error.hint, final=error.final, **more)
    except RunnerError as error:
        return _fail(str(error), hint=error.hint, final=getattr(error, "final", True), exit_code=error.exit_code)
    except OSError as error:
        return _fail(f"{error.filename or 'disk'}: {error.strerror or error}", hint="", final=False)
    _say({"result": result})
    return 0


def _end_with(runner: int) -> None:
    """Who writes to the store does it under the lease, and that ends with the runner."""
    while os.getppid() == runner:
        time.sleep(1)
    os._exit(1)


def _fail(error: str, *, hint: str, final: bool, **more: bool | int) -> int:
    _say({"error": error, "hint": hint, "final": final, **more})
    return 1


def _say(line: Mapping[str, Any]) -> None:
    print(json.dumps(line), flush=True)  # noqa: T201  # the contract of tasks


class _Saying:
    """A progress callback that writes a line twice a second at most."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, fraction: float, note: str) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _SAY_EVERY_S
            _say({"progress": round(fraction, 4), "note": note})


# ------------------------------------------------------------------------------------ tasks


def setup(arguments: Arguments, progress: Progress) -> dict[str, Any]:
    from pydantic import TypeAdapter

    from runner.job import ArchiveSource, GitSource, PathSource
    from runner.supervise.source import bring

    progress(0.0, "source")
    source = TypeAdapter[Any](GitSource | PathSource | ArchiveSource | None).validate_python(arguments["source"])
    folder = bring(
        _fetched(source, arguments, progress),
        arguments["setup"],
        run_dir=Path(arguments["run_dir"]),
        digest=arguments["subject"],
        config_dir=Path(arguments["config_dir"]),
        python=Path(arguments["python"]),
        timeout_s=arguments["setup_timeout_s"],
        withhold=frozenset(arguments["withhold"]),
    )
    return {"summary": str(folder)}


def _fetched(source: Source, arguments: Arguments, progress: Progress) -> Source:
    """An archive that lies in a store, brought beside where it is unpacked; any other source as it is."""
    from runner.job import ArchiveSource
    from runner.storage.offsite import staging

    if not isinstance(source, ArchiveSource) or not source.archive.startswith(("s3://", "file://")):
        return source
    folder, _, name = source.archive.rpartition("/")
    run_dir = Path(arguments["run_dir"])
    target = run_dir / "source" / f"{arguments['subject']}-{name}"
    store = _open_at(folder, arguments)
    if not staging.stage_object(store, name, target, run_dir=run_dir, boot_id=arguments["boot_id"], progress=progress):
        raise JobError(f"source.archive: expected an object at {source.archive}, found none")
    return ArchiveSource(archive=str(target))


def preflight(arguments: Arguments, progress: Progress) -> dict[str, Any]:
    """Look at the machine, and at the code as soon as it is there; `subject` names the parts."""
    from runner.policy.between import CODE, MACHINE
    from runner.policy.preflight import decide_verdict, tell_verdict
    from runner.preflight import look_at_code, look_at_machine

    mission = _mission(arguments)
    parts = arguments["subject"]
    findings = [*(look_at_machine(mission, progress) if MACHINE in parts else ())]
    findings += look_at_code(mission, progress) if CODE in parts else ()
    found = decide_verdict(findings, users={*mission.job.env, *mission.job.secrets, *mission.env})
    return {
        "findings": [asdict(one) for one in findings],
        "summary": tell_verdict(found, is_part=MACHINE not in parts),
    }


def _mission(arguments: Arguments) -> Mission:
    from runner.adapters.providers import with_secrets
    from runner.adapters.rented import rented
    from runner.preflight import Mission

    env = with_store_keys(with_secrets(os.environ))
    job = _job(arguments)
    return Mission(
        job=job,
        python=arguments["python"],
        num_procs=arguments["num_procs"],
        num_cards=arguments["num_cards"],
        run_dir=Path(arguments["run_dir"]),
        workdir=Path(arguments["workdir"]),
        env=env,
        server=rented(job, env),
        needs_data=not arguments["staged"],
        deadline_at=datetime.fromisoformat(arguments["deadline_at"]) if arguments["deadline_at"] else None,
    )


def survey(arguments: Arguments, progress: Progress) -> dict[str, Any]:
    """The first look. A store that cannot be written is found out now, not with the first checkpoint."""
    store = _store(arguments)
    abilities = store.probe()
    written = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "run_dir": arguments["run_dir"]}
    uploading.publish(
        store, arguments["job"], {surveying.LOOKED: json.dumps({**written, "abilities": asdict(abilities)}).encode()}
    )
    job, ledger = (read_json(store, f"{arguments['job']}/{name}") for name in ("job.json", LEDGER))
    progress(0.0, "listing")
    seen = look(store, arguments)
    return {
        **seen,
        "job": job,
        "ledger": ledger,
        "abilities": asdict(abilities),
        "summary": f"{seen['summary']}; {abilities.confirmed}",
    }


def look(store: Store, arguments: Arguments) -> dict[str, Any]:
    known = {name: (which, why) for name, (which, why) in arguments["spoilt"].items()}
    here = {checkpoint.ref.name for checkpoint in _directory(arguments).committed()}
    found = surveying.survey(store, arguments["job"], here=here, spoilt=known, given_up=arguments["given_up"])
    return {
        "checkpoints": [dump_checkpoint(c) for c in found.checkpoints],
        "spoilt": found.spoilt,
        "refused": sorted(found.refused),
        "outcome": found.outcome,
        "summary": _survey_summary(found),
    }


def _survey_summary(found: surveying.Survey) -> str:
    more = f"; and {len(found.problems) - _A_FEW} more" if len(found.problems) > _A_FEW else ""
    unusable = f"; unusable: {'; '.join(found.problems[:_A_FEW])}{more}" if found.problems else ""
    newest = f", newest {max(c.ref for c in found.checkpoints).name}" if found.checkpoints else ""
    count = len(found.checkpoints)
    outcome = f"; the job is over there: {one_line(str(found.outcome.get('outcome')))}" if found.outcome else ""
    return f"{count or 'no'} checkpoint{'s' * (count != 1)}{newest}{unusable}{outcome}"


def commit(arguments: Arguments, progress: Progress) -> dict[str, Any]:
    """What a framework saved; found anew here, since the task may be started again after a crash."""
    from runner.adapters.frameworks import framework_name, get_framework
    from runner.storage.adopting import SOURCE, NotAdoptedError, adopt, find_adopted, next_step

    job, directory, told = _job(arguments), _directory(arguments), arguments["attempt"]
    framework, folder = get_framework(job), Path(job.checkpoint.watch)

    def find() -> Save | None:
        saves = framework.saves(folder, arguments["num_procs"])
        return next((save for save in saves if save.id == arguments["subject"] and save.complete), None)

    if known := find_adopted(directory, arguments["subject"]):
        return {"summary": f"{known.name}, as before"}
    save = find()
    if save is None:
        raise NotAdoptedError(f"{folder}: {arguments['subject'].partition('@')[0]} is gone, or was written to again")
    started = time.monotonic()
    draft = Manifest(
        job=job.name,
        lineage=told["lineage"],
        step=next_step(directory, told["lineage"]) if save.step is None else save.step,
        id=uuid.uuid4().hex[:8],
        attempt=told["number"],
        world_size=arguments["num_procs"],
        written_at=datetime.now(UTC).isoformat(),
        algorithm=ALGORITHM,
        shards=(),
        framework=framework_name(job),
        state={SOURCE: save.id},
    )
    files = {name: (save.root / name).stat().st_size for name in save.files}
    checkpoint = adopt(directory, draft, save.root, files, is_unchanged=lambda: find() == save, progress=progress)
    return {"summary": f"{checkpoint.ref.name} of {save.name}, {_moved(checkpoint.size_bytes, started)}"}


def upload(arguments: Arguments, progress: Progress) -> dict[str, Any]:
    from runner.keeper import expect_ours

    directory, store = _directory(arguments), _store(arguments)
    ref = _local_ref(directory, arguments["subject"])
    publishing = _publishing(store, arguments)
    started = time.monotonic()
    with ThreadPoolExecutor(1) as beside:  # a few small files: they need not make the checkpoint's safety known later
        published = beside.submit(publishing.publish_files, logs=False, wait=False)
        ours = partial(expect_ours, store, arguments["job"], arguments["holder"])
        copied = uploading.upload(store, arguments["job"], directory, ref, progress, arguments["unusable"], ours)
        summary = _moved(directory.manifest(ref).size_bytes, started)
        with suppress(OffsiteError):  # that is for a task of its own to try again, and to tell: the checkpoint is safe
            published.result()
        swept = beside.submit(tidying.sweep, store, arguments["job"])
        seen = look(store, arguments)
        with suppress(OffsiteError):  # the next upload, or the end of the run, comes by again
            swept.result()
    if publishing.are_logs_late():
        with suppress(OffsiteError):  # it is tried again with the next copy; the checkpoint is safe
            publishing.publish_files(logs=True)
    spared = f" ({copied / 1e6:.1f} MB of it were there and were copied there)" if copied else ""
    return {**seen, "summary": f"{summary}{spared}, confirmed by the store"}


def restore(arguments: Arguments, progress: Progress) -> dict[str, Any]:
    store = _store(arguments)
    started = time.monotonic()
    whole = surveying.find_whole(store, arguments["job"], arguments["subject"])
    checkpoint = restoring.restore(store, arguments["job"], whole.ref, _directory(arguments), progress, whole)
    return {"summary": f"{_moved(checkpoint.size_bytes, started)}, checksums compared"}


def fork(arguments: Arguments, progress: Progress) -> dict[str, Any]:
    """Endpoint and credentials are those of `offload`, as they are for data."""
    from runner.adapters.frameworks import framework_name
    from runner.storage import forking

    job = _job(arguments)
    lineage, _, place = arguments["subject"].partition(" ")
    started = time.monotonic()
    forked = forking.fork(
        place,
        partial(_open_at, arguments=arguments),
        _directory(arguments),
        job=job.name,
        framework=framework_name(job),
        lineage=int(lineage),
        given_up=arguments["given_up"],
        progress=progress,
    )
    moved = f"{_moved(forked.checkpoint.size_bytes, started)}, checksums compared"
    older = f"; newer ones were passed over: {'; '.join(forked.passed_over)}" if forked.passed_over else ""
    return {"summary": f"{forked.checkpoint.ref.name} is a copy of {forked.checkpoint.origin}: {moved}{older}"}


def verify(arguments: Arguments, progress: Progress) -> dict[str, Any]:
    progress(0.0, "comparing")
    store = _store(arguments)
    ref = surveying.find_whole(store, arguments["job"], arguments["subject"]).ref
    manifest = comparing.verify(store, arguments["job"], ref, lambda path, _: progress(0.0, path))
    return {"summary": f"{len(manifest.shards)} shards, {manifest.size_bytes / 1e6:.1f} MB, all there and the same"}


def tidy(arguments: Arguments, progress: Progress) -> dict[str, Any]:
    progress(0.0, "tidying")
    store = _store(arguments)
    keep_last, unusable = arguments["offload"]["keep_last"], arguments["unusable"]
    removed = tidying.tidy(store, arguments["job"], keep_last=keep_last, unusable=unusable)
    return {**look(store, arguments), "summary": f"removed {', '.join(removed) or 'nothing'}"}


def lease(arguments: Arguments, progress: Progress) -> dict[str, Any]:
    from runner.keeper import keep_lease

    del progress
    return {
        "told": keep_lease(
            _store(arguments, _LEASE_TIMEOUTS_S),
            arguments["job"],
            runner=arguments["runner"],
            holder=arguments["holder"],
            who=arguments["who"],
            status=Path(arguments["run_dir"]) / "status.json",
            tell=_say,
        )
    }


def tell(arguments: Arguments, progress: Progress) -> dict[str, Any]:
    """Never tried again: by then it would be news no more."""
    from runner.adapters.notifiers import notify_all

    progress(0.0, "telling")
    urls = list(find_values(arguments["names"], os.environ).values())
    answers = notify_all(urls, arguments["message"])
    if troubles := [f"{name}: {answer}" for name, answer in zip(arguments["names"], answers, strict=False) if answer]:
        raise JobError("; ".join(troubles), hint="the message may have reached nobody")
    return {"summary": f"{len(urls)} told"}


def publish(arguments: Arguments, progress: Progress) -> dict[str, Any]:
    from runner.policy.house import NO_LOGS

    progress(0.0, "journal, status, logs")
    store = _store(arguments)
    publishing, conclusion = _publishing(store, arguments), arguments["conclusion"]
    number = publishing.publish_files(logs=not arguments["subject"].endswith(NO_LOGS))
    if conclusion:
        uploading.publish(store, arguments["job"], {surveying.OUTCOME: json.dumps(conclusion).encode()})
        with suppress(OffsiteError):  # a key that may not remove anything
            tidying.close(store, arguments["job"])
    if arguments["machine"]["attempts"]:  # else an earlier machine's report says more
        publishing.publish_report()
    return {"summary": f"{number} files"}


def reopen(arguments: Arguments, progress: Progress) -> dict[str, Any]:
    """Written over, not removed: a key that may not delete may open a run again."""
    progress(0.0, "opening the run again")
    told = {"outcome": "", "reason": "open again", "at": datetime.now(UTC).isoformat(timespec="seconds")}
    uploading.publish(_store(arguments), arguments["job"], {surveying.OUTCOME: json.dumps(told).encode()})
    return {"outcome": None, "summary": f"it is not over any more ({arguments['subject']})"}


def evidence(arguments: Arguments, progress: Progress) -> dict[str, Any]:
    from runner.supervise import autopsy

    progress(0.0, "looking")
    scene = arguments["scene"]
    paths = {name: Path(scene[name]) for name in ("logs", "folder")}
    return {"summary": autopsy.collect(autopsy.Scene(**{**scene, **paths}))}


def stage(arguments: Arguments, progress: Progress) -> dict[str, Any]:
    """The data, from wherever each item lies; endpoint and credentials are those of `offload`."""
    from runner.storage.offsite import staging

    job = _job(arguments)
    started = time.monotonic()
    found = staging.stage(
        [staging.Item(source=item.source, to=item.to) for item in job.data],
        partial(_open_at, arguments=arguments),
        run_dir=Path(arguments["run_dir"]),
        digest=arguments["subject"],
        boot_id=arguments["boot_id"],
        progress=progress,
    )
    by_size = f"; {len(found.unsure)} by size only, such as {found.unsure[0]}" if found.unsure else ""
    fetched = f"{found.fetched_bytes / 1e6:.1f} MB of it fetched in {time.monotonic() - started:.1f}s"
    return {"summary": f"{found.num_files} files, {found.size_bytes / 1e6:.1f} MB, {fetched}, compared{by_size}"}


def outputs(arguments: Arguments, progress: Progress) -> dict[str, Any]:
    from runner.policy.finish import ALL_OUTPUTS
    from runner.storage.offsite.links import Places
    from runner.storage.offsite.outputs import WRITTEN, copy_outputs

    job = _job(arguments)
    progress(0.0, "looking for what changed")
    found = copy_outputs(
        _store(arguments),
        arguments["job"],
        [Path(folder) for folder in job.outputs],
        Places.of(job),
        progress,
        believe=arguments["subject"] != ALL_OUTPUTS,
    )
    names = [": ".join(one) for one in found.left_out[:_A_FEW]]
    missing = f"; no such folder: {', '.join(found.missing)}" if found.missing else ""
    there = f"{found.num_stored} of {found.num_files} files in the store"
    left = _a_few(names, 3, found.num_left_out)
    return {
        "summary": f"{there}, {found.sent_bytes / 1e6:.1f} MB of them sent now{f'; left: {left}' * bool(left)}{missing}",
        "there": f"{there}{missing}",
        "not_there": _a_few(names, 1, found.num_left_out),
        "stuck": _a_few([": ".join(one) for one in found.left_out if one[1] != WRITTEN][:1], 1, 1),
        "only_here": [path for path, _ in found.left_out[:3]],
        "followed": found.followed[:_MAX_FOLLOWED],
        "sent_bytes": found.sent_bytes,
    }


def _a_few(names: Sequence[str], number: int, total: int) -> str:
    names = [f"{name[:_SHOWN]} … {name[-_SHOWN:]}" if len(name) > 2 * _SHOWN else name for name in names]
    more = f" (and {total - number} more)" if total > number else ""
    return f"{'; '.join(names[:number])}{more}"


TASKS: Final[Mapping[TaskKind, Callable[[Arguments, Progress], dict[str, Any]]]] = {
    TaskKind.SETUP: setup,
    TaskKind.STAGE: stage,
    TaskKind.OUTPUTS: outputs,
    TaskKind.PREFLIGHT: preflight,
    TaskKind.SURVEY: survey,
    TaskKind.COMMIT: commit,
    TaskKind.UPLOAD: upload,
    TaskKind.FORK: fork,
    TaskKind.RESTORE: restore,
    TaskKind.PUBLISH: publish,
    TaskKind.NOTIFY: tell,
    TaskKind.REOPEN: reopen,
    TaskKind.TIDY: tidy,
    TaskKind.VERIFY: verify,
    TaskKind.LEASE: lease,
    TaskKind.EVIDENCE: evidence,
}


# ---------------------------------------------------------------------------------- helpers


def dump_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    return {**asdict(checkpoint), "written_at": checkpoint.written_at.isoformat()}


def _store(arguments: Arguments, timeouts_s: tuple[float, float] | None = None) -> Store:
    abilities = parse_abilities(arguments.get("abilities"))
    return open_store(parse_place(arguments["place"]), with_store_keys(os.environ), abilities, timeouts_s=timeouts_s)


def _open_at(address: str, arguments: Arguments) -> Store:
    """Another place, with endpoint and credentials of `offload`."""
    from runner.job import OffloadPolicy

    offload = OffloadPolicy.model_validate({**arguments["offload"], "to": address})
    return open_store(offload, with_store_keys(os.environ))


def _job(arguments: Arguments) -> Job:
    from runner.job import Job

    return Job.model_validate(arguments["spec"])


def _moved(size_bytes: int, started: float) -> str:
    return f"{size_bytes / 1e6:.1f} MB in {time.monotonic() - started:.1f}s"


def _publishing(store: Store, arguments: Arguments) -> Publishing:
    return Publishing(
        store=store,
        job=arguments["job"],
        run_dir=Path(arguments["run_dir"]),
        machine=arguments["machine"],
        is_leaving=arguments["is_leaving"],
        is_over=bool(arguments["conclusion"]),
    )


def _directory(arguments: Arguments) -> CheckpointDir:
    return CheckpointDir(Path(arguments["checkpoint_dir"]), Disk())


def _local_ref(directory: CheckpointDir, name: str) -> Ref:
    found = [c.ref for c in directory.committed() if c.ref.name == name]
    if not found:
        raise OffsiteError(f"{directory.root / name}: expected a committed checkpoint, found none", final=True)
    return found[0]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Python would take all apart that was imported, for a tenth of a second in which the runner waits
