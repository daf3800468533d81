"""
The checks before the job, put together: probes look, all at once and each with a time limit; policy judges.

A check that does not end is a finding, and so is one that fails: neither may keep a job from starting, but for the
store's.
"""

from __future__ import annotations

import itertools
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

from runner.adapters.launchers import LAUNCHERS, split_command
from runner.adapters.providers import PROVIDERS, SECRETS, with_secrets
from runner.adapters.providers.http import make_send
from runner.addresses import local_path
from runner.errors import MachineError, RunnerError, StoreError
from runner.facts import (
    Broken,
    CardReport,
    Finding,
    PeerAccess,
    Reading,
    Server,
    ServerState,
    Severity,
    StoreTrial,
    Topology,
    Trial,
)
from runner.job import Job, LauncherName
from runner.policy.comm import TOTAL_S, Setting, judge_trials, next_order
from runner.policy.findings import ok, refuse, warn
from runner.policy.links import LinkClass, groups, judge_peer_access, judge_topology, link_class, wires
from runner.policy.preflight import (
    LAUNCHER_MODULES,
    expected_checkpoint,
    judge_container,
    judge_disk,
    judge_end,
    judge_fit,
    judge_host,
    judge_report,
    judge_software,
    judge_store,
    judge_store_place,
    judge_strategy,
    judge_xids,
)
from runner.probes import host as hosts
from runner.probes import smi
from runner.probes.comm import Wish, try_all
from runner.probes.machine import visible
from runner.probes.readings import read
from runner.probes.software import look_at_imports
from runner.storage.checkpoints import CheckpointDir
from runner.storage.disk import Disk
from runner.storage.offsite import PREFLIGHT, OffsiteError, Store, open_store
from runner.storage.offsite.outputs import tell_left
from runner.storage.offsite.staging import Item, taste
from runner.supervise.attempt import PREVENTION
from vramfarm.protocol import Env

LIMIT_S: Final = 40.0  # for one check
LIMITS_S: Final[Mapping[str, float]] = {"comm": 40.0 + TOTAL_S}  # the driver's answer, then the test
_PAIR: Final = 2
_WARM_SILENT_S: Final = 12.0  # in later tries: all that is slow the first time is in memory now
_SETTLE_S: Final = 15.0
_AGAIN_S: Final = 3.0
_DATA: Final = re.compile(r"-+[\w-]*(?:data|corpus|train_file)[\w-]*", re.IGNORECASE)
_DEFAULT_PORT: Final = 29_500
_STREAMS: Final = 4  # as an upload has them
_SAMPLE_BYTES: Final = 2 << 20  # of each: enough to tell 5 MB/s from 500
_STALE: Final = timedelta(hours=1)

T = TypeVar("T")
Check = Callable[[], Iterable[Finding]]
Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mission:
    """The job, and where it is to run. `deadline_at` None: not known here."""

    job: Job
    python: str
    num_procs: int
    num_cards: int
    run_dir: Path
    workdir: Path
    env: Mapping[str, str]  # of the supervisor, its own secrets too
    server: Server | None = None
    deadline_at: datetime | None = None
    needs_data: bool = True  # what `data` names is not all on this disk
    smi: str = "nvidia-smi"


def look_at_machine(mission: Mission, progress: Progress = lambda *_: None) -> list[Finding]:
    """All that can be said before the code is there."""
    sight = _Sight(mission)
    checks = {
        "cards": lambda: _cards(mission, sight),
        "links": lambda: _links(mission, sight),
        "cards.log": lambda: judge_xids(smi.read_xids()) if mission.num_cards else (),
        "comm": lambda: _comm(mission, sight),
        "memory": lambda: _host(mission, sight),
        "container": lambda: judge_container(hosts.who_is_first(), is_container=hosts.is_container()),
        "disk": lambda: _disk(mission),
        "store": lambda: _store(mission),
        "data": lambda: _data(mission),
        "outputs": lambda: _outputs(mission.job),
        "money": lambda: _money(mission),
    }
    return _all_at_once(checks, progress)


def look_at_code(mission: Mission, progress: Progress = lambda *_: None) -> list[Finding]:
    """What can be said only when the code is in place."""
    return _all_at_once({"software": lambda: _software(mission)}, progress)


class _Sight:
    """What the driver says, asked for once though several checks want it."""

    def __init__(self, mission: Mission) -> None:
        self.report = _once(lambda: _report(mission))
        self.tables = _once(lambda: _tables(mission))


def _once(ask: Callable[[], T]) -> Callable[[], T]:
    """The same answer, or the same error, for all threads; the first one gets it."""
    lock = threading.Lock()
    answers: list[T] = []
    errors: list[MachineError] = []

    def get() -> T:
        with lock:
            if errors:
                raise errors[0]
            if not answers:
                try:
                    answers.append(ask())
                except MachineError as error:
                    errors.append(error)
                    raise
            return answers[0]

    return get


# ------------------------------------------------------------------------------ at one time


def _all_at_once(checks: Mapping[str, Check], progress: Progress, *, limit_s: float | None = None) -> list[Finding]:
    """In the order of the checks. Threads that hang are left: they are daemons, and this process ends soon."""
    answers: queue.SimpleQueue[tuple[str, tuple[Finding, ...]]] = queue.SimpleQueue()
    limits = {name: limit_s or LIMITS_S.get(name, LIMIT_S) for name in checks}
    for name, check in checks.items():
        threading.Thread(target=lambda n=name, c=check: answers.put((n, _caught(n, c))), daemon=True).start()
    done: dict[str, tuple[Finding, ...]] = {}
    began = time.monotonic()
    while waiting := [name for name in checks if name not in done]:
        left = max(limits[name] for name in waiting) - (time.monotonic() - began)
        try:
            name, found = answers.get(timeout=max(left, 0.01))
        except queue.Empty:
            break
        done[name] = found
        progress(len(done) / len(checks), ", ".join(name for name in checks if name not in done))
    late = {name: (_late(name, limits[name]),) for name in checks if name not in done}
    return [one for name in checks for one in (done | late)[name]]


def _late(name: str, limit_s: float) -> Finding:
    message = f"{name}: no answer within {limit_s:.0f} s"
    return warn("time_limit", message, "what hangs here may hang in training")


def _caught(name: str, check: Check) -> tuple[Finding, ...]:
    try:
        return tuple(check())
    except MachineError as error:
        return (refuse(name, str(error), error.hint),)
    except OffsiteError as error:
        return (_of_the_store(name, error),)
    except RunnerError as error:
        return (warn(name, str(error), error.hint),)
    except Exception as error:  # noqa: BLE001  # a check that fails must not keep a job from starting
        if name == "store":  # whoever comes after it fails as well, with nobody there to read it
            return (refuse(name, f"store: {error!r}", exit_code=StoreError.exit_code),)
        return (warn(name, f"{name}: not checked: {error!r}"),)


def _of_the_store(name: str, error: OffsiteError) -> Finding:
    """One that refuses us ends any run at its start; one that is away may be back by then."""
    if error.final:
        return refuse(name, str(error), error.hint, exit_code=error.exit_code)
    return warn(name, str(error), error.hint)


# ------------------------------------------------------------------------------------ cards


def _report(mission: Mission) -> CardReport | None:
    """Of the cards that CUDA may see, by their place in this container."""
    report = _settled(mission) if mission.num_cards else None
    if report is None:
        return None
    cards = visible(report.cards, mission.env.get("CUDA_VISIBLE_DEVICES"))
    return replace(report, cards=cards or report.cards)


def _settled(mission: Mission) -> CardReport | None:
    """A fabric that is only just being joined, on a machine that has only just started, is asked again."""
    ends = time.monotonic() + _SETTLE_S
    while True:
        report = smi.read_report(mission.smi)
        is_joining = report and any(c.fabric and c.fabric.state.lower() == "in progress" for c in report.cards)
        if not is_joining or time.monotonic() >= ends:
            return report
        time.sleep(_AGAIN_S)


def _tables(mission: Mission) -> tuple[Reading, ...]:
    """How the cards are linked, and whether they may read each other's memory; nothing for one card."""
    if mission.num_cards < _PAIR:
        return ()
    asked = (("topo", "-m"), ("topo", "-p2p", "r"))
    return tuple(read(smi.read_table(mission.smi, *words) or "") for words in asked)


def _cards(mission: Mission, sight: _Sight) -> Iterable[Finding]:
    report = sight.report()
    smallest = min((card.memory_bytes for card in report.cards), default=0) if report else 0
    fit = judge_fit(mission.job, num_procs=mission.num_procs, card_bytes=smallest)
    return (*judge_report(report, mission.job), *fit)


def _links(mission: Mission, sight: _Sight) -> Iterable[Finding]:
    """A table that cannot be read says nothing against the machine: other checks do."""
    link = LinkClass.UNKNOWN
    for reading in sight.tables():
        match reading:
            case Topology():
                link = link_class(reading)
                nvlink = link is LinkClass.NVLINK
                yield from judge_topology(reading)
                yield from judge_strategy(mission.job, nvlink=nvlink, num_procs=mission.num_procs)
            case PeerAccess():
                yield from judge_peer_access(reading, link=link)
            case Broken(message=message):
                yield warn("links", f"nvidia-smi topo: {message}")
            case _:
                pass


# ----------------------------------------------------------------------- communication test


def _comm(mission: Mission, sight: _Sight) -> Iterable[Finding]:
    """Try, and try again as policy says, within a minute. One process on the CPU has nobody to talk to."""
    job = mission.job
    if not job.preflight.comm_test or (not mission.num_cards and mission.num_procs < _PAIR):
        return ()
    setting, wish = comm_setting(mission, sight), comm_wish(mission)
    ends = time.monotonic() + TOTAL_S
    trials: list[Trial] = []
    while order := next_order(trials, setting, left := ends - time.monotonic()):
        patient = replace(wish, silent_s=_WARM_SILENT_S) if trials and setting.on_cards else wish
        trials += try_all(patient, order.groups, order.env, limit_s=left)
    found = judge_trials(trials, setting)
    if job.launcher is LauncherName.COMMAND:  # it may use the cards without torch
        return tuple(replace(one, severity=Severity.WARN) if _is_about_torch(one) else one for one in found)
    return found


def _is_about_torch(finding: Finding) -> bool:
    return finding.name == "torch" and finding.severity is Severity.REFUSE


def comm_wish(mission: Mission, fault: Mapping[str, object] | None = None) -> Wish:
    """How the test's processes are started; `fault`: what one of them is to do wrong."""
    return Wish(python=mission.python, env=_comm_env(mission), on_cards=bool(mission.num_cards), fault=fault)


def comm_setting(mission: Mission, sight: _Sight | None = None) -> Setting:
    """What is between the cards, for policy."""
    sight = sight or _Sight(mission)
    report = sight.report()
    tables = sight.tables()
    models = tuple(card.name for card in report.cards) if report else ()
    topology = next((table for table in tables if isinstance(table, Topology)), None)
    access = next((table for table in tables if isinstance(table, PeerAccess)), None)
    peer = all(status == "OK" for _, _, status in access.pairs) if access and access.pairs else None
    wanted = mission.job.preflight.min_bus_bandwidth
    job = mission.job
    return Setting(
        num=mission.num_procs,
        on_cards=bool(mission.num_cards),
        nvlink=topology is not None and link_class(topology) is not LinkClass.PCIE and len(groups(topology)) == 1,
        wires=wires(topology, models, peer=peer) if topology else (),
        models=models,
        floor=None if wanted == "auto" else wanted / 1e9,
        users={*mission.env, *job.env, *job.secrets},
    )


def _comm_env(mission: Mission) -> dict[str, str]:
    """That of an attempt, without secrets and our own names but for those by which what is left over is found."""
    ours = {Env.RUN, Env.ROLE}
    outer = {
        name: value
        for name, value in mission.env.items()
        if name not in SECRETS and (not name.startswith("VRAMFARM_") or name in ours)
    }
    quiet = {} if mission.num_cards else {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return {**PREVENTION, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **quiet, **outer, **mission.job.env}


# ----------------------------------------------------------------------------- the machine


def _host(mission: Mission, sight: _Sight) -> Iterable[Finding]:
    report = None
    with suppress(MachineError):  # told by the check of the cards
        report = sight.report()
    return judge_host(
        hosts.read_host(),
        num_procs=mission.num_procs,
        card_bytes=sum(card.memory_bytes for card in report.cards) if report else 0,
        checkpoint=_expected(mission),
    )


def _expected(mission: Mission) -> int | None:
    folder = Path(mission.job.checkpoint.dir)
    sizes = [c.size_bytes for c in CheckpointDir(folder, Disk()).committed()] if folder.is_dir() else []
    return expected_checkpoint(mission.job, max(sizes, default=None))


def _disk(mission: Mission) -> Iterable[Finding]:
    try:
        rate = hosts.measure_disk(mission.run_dir)
    except OSError as error:
        raise MachineError(
            f"{mission.run_dir}: expected a folder that can be written, got: {error.strerror}",
            hint="mount a volume there that this user may write, or free some space",
        ) from None
    return judge_disk(rate, mission.job, _expected(mission))


# --------------------------------------------------------------------------------- the store


def _store(mission: Mission) -> Iterable[Finding]:
    if mission.job.offload.to is None:
        return ()
    shares_disk, is_local = _shares_disk(mission), _is_local(mission.env)
    if found := judge_store_place(mission.job, mission.server, shares_disk=shares_disk, is_local=is_local):
        return found
    try:
        trial = _try_store(mission)
    except OffsiteError as error:
        return _spare(mission, "store", error)
    checkpoint = _expected(mission)
    end = judge_end(mission.deadline_at, datetime.now(UTC), checkpoint=checkpoint, rate=trial.rate)
    return (*judge_store(trial, mission.job, checkpoint), *end)


def _data(mission: Mission) -> Iterable[Finding]:
    items = [Item(source=item.source, to=item.to) for item in mission.job.data] if mission.needs_data else []
    if not items:
        return ()
    try:
        taste(items, lambda place: open_store(mission.job.offload.model_copy(update={"to": place}), mission.env))
    except OffsiteError as error:
        return _spare(mission, "data", error)
    return (ok("data", f"can be listed and read: {', '.join(item.source for item in items)}"),)


def _outputs(job: Job) -> Iterable[Finding]:
    if left := tell_left(job):
        yield warn("outputs", f"this does not get into the store: {left}", "as it is, the run ends with 4")


def _spare(mission: Mission, name: str, error: OffsiteError) -> tuple[Finding, ...]:
    """What may be mended refuses no run that has work here: the runner waits for it."""
    if error.curable and CheckpointDir(Path(mission.job.checkpoint.dir), Disk()).committed():
        return (warn(name, str(error), error.hint),)
    raise error


def _shares_disk(mission: Mission) -> bool:
    """Whether the store is a folder on the file system of the run; one where no disk is mounted is, too."""
    place = local_path(mission.job.offload.to or "")
    return place is not None and _device(place) == _device(mission.run_dir)


def _device(path: Path) -> int:
    there = next(one for one in (path, *path.parents) if one.exists())
    return there.stat().st_dev


def _is_local(env: Mapping[str, str]) -> bool:
    """Whether the provider is the simulated one, whose servers are processes here and whose disks are folders."""
    host = urlsplit(env.get("VRAMFARM_API_URL", "")).hostname or ""
    return host in {"localhost", "::1"} or host.startswith("127.")


def _try_store(mission: Mission) -> StoreTrial:
    """Put, read, list, delete. What fails because the store is away is the survey's to tell."""
    store = open_store(mission.job.offload, mission.env)
    folder = f"{mission.job.name}/{PREFLIGHT}"
    abilities = store.probe()
    keys = [f"{folder}/{uuid.uuid4().hex}" for _ in range(_STREAMS)]
    limit = mission.job.offload.max_bandwidth
    sample = os.urandom(min(_SAMPLE_BYTES, max(1, limit // _STREAMS)) if limit else _SAMPLE_BYTES)  # or a second
    started, asked_at = time.monotonic(), datetime.now(UTC)
    with ThreadPoolExecutor(_STREAMS) as pool:
        list(pool.map(lambda key: store.put(key, sample), keys))
    rate = _STREAMS * len(sample) / (time.monotonic() - started)
    try:
        _expect_back(store, keys[0], sample)
        missing_rights = store.find_missing_rights(folder)
        entries = list(store.list(folder))
    except OffsiteError:
        with suppress(OffsiteError):  # what went wrong before is what is told
            _can_delete(store, keys)
        raise
    modified = next((entry.modified_at for entry in entries if entry.key == keys[0]), asked_at)
    stale = [entry.key for entry in entries if entry.modified_at < modified - _STALE]  # of one that was killed
    return StoreTrial(
        address=store.address,
        rate=min(rate, limit or rate),
        deletes=_can_delete(store, [*keys, *stale]),
        is_exclusive=abilities.conditional,
        confirms=abilities.confirmed,
        missing_rights=missing_rights,
        skew_s=(modified - asked_at).total_seconds(),
    )


def _expect_back(store: Store, key: str, sample: bytes) -> None:
    """A run reads its lease and its journal at once, and its checkpoints on the next machine."""
    found = store.get(key)
    if found != sample:
        size = "none" if found is None else f"{len(found)} bytes, other ones"
        raise OffsiteError(
            f"{store.address}/{key}: expected the {len(sample)} bytes that were just written, found {size}",
            hint="what this store gives back cannot be used: ask its owner, or name another one in offload.to",
            final=found is not None,  # it may come late
        )


def _can_delete(store: Store, keys: Iterable[str]) -> bool:
    try:
        for key in keys:
            store.delete(key)
    except OffsiteError as error:
        if not error.final:
            raise  # it is away, and has refused nothing
        return False
    return True


# --------------------------------------------------------------------------------- the rest


def _money(mission: Mission) -> Iterable[Finding]:
    """A harmless read proves the key that stops the server; the answer's date proves the clock."""
    server = mission.server
    if server is None:
        return
    dates: list[str] = []
    send = make_send()

    def listening(method: str, url: str, *, headers: Mapping[str, str], body: bytes | None = None):  # type: ignore[no-untyped-def]  # noqa: ANN202  # a Send
        reply = send(method, url, headers=headers, body=body)
        dates.append(reply.headers.get("date", ""))
        return reply

    answer = PROVIDERS[server.provider].read(server, with_secrets(mission.env), listening)
    if answer.state is ServerState.UNKNOWN:
        hint = "the guardian will not be able to stop it: stop it yourself, or give the right key"
        message = f"server {server.id} cannot be asked: {answer.detail}"
        yield warn("money", message, hint)
    else:
        message = f"the key is accepted: server {server.id} can be asked, and stopped"
        yield ok("money", message)
    if dates and dates[-1]:
        skew = abs((parsedate_to_datetime(dates[-1]) - datetime.now(UTC)).total_seconds())
        if skew > 300:  # noqa: PLR2004  # what certificates and stores forgive
            message = f"this machine's clock is {skew:.0f} s off the provider's"
            yield warn("money", message, "tell support: limits go by it")


def _software(mission: Mission) -> Iterable[Finding]:
    job = mission.job
    words = split_command(job.command, resume_args=(), values={})
    target = LAUNCHERS[job.launcher].target(words)
    script = mission.workdir / target if target and target.endswith(".py") else None
    if job.launcher is LauncherName.COMMAND:
        script = next((mission.workdir / word for word in words[1:2] if word.endswith(".py")), None)
    modules = [LAUNCHER_MODULES[job.launcher]] if job.launcher in LAUNCHER_MODULES else []
    env = {**mission.env, **job.env, "PYTHONPATH": _python_path(mission)}
    found = look_at_imports(mission.python, script if script and script.is_file() else None, modules, env=env)
    return judge_software(
        job,
        {**mission.env, **job.env, **dict.fromkeys(job.secrets, "")},
        missing=() if found.moves else found.missing,
        hidden=found.hidden,
        imports=found.imports,
        problem=found.problem,
        absent=_absent(words, target, mission),
        taken=_taken(job, {**mission.env, **job.env}),
        keys=_keys(mission.env),
    )


def _absent(words: Sequence[str], target: str | None, mission: Mission) -> list[str]:
    """The script, and absolute paths that options for data name; others may be made by the run, or are on their way."""
    pairs = [(one, other) for one, other in itertools.pairwise(words) if "=" not in one]
    pairs += [(name, value) for name, _, value in (word.partition("=") for word in words) if value]
    data = [value for name, value in pairs if _DATA.fullmatch(name) and value.startswith("/")]
    script = [target] if target and (target.endswith(".py") or "/" in target) else []
    coming = [Path(item.to) for item in mission.job.data]
    data = [path for path in data if not any(Path(path).is_relative_to(to) for to in coming)]
    return [path for path in (*script, *data) if not (mission.workdir / path).exists()]


def _python_path(mission: Mission) -> str:
    """With our library on it, as in an attempt."""
    given = mission.job.env.get("PYTHONPATH") or mission.env.get("PYTHONPATH")
    library = Path(__file__).resolve().parents[1]
    return os.pathsep.join(part for part in (given, str(mission.run_dir / "lib"), str(library)) if part)


def _taken(job: Job, env: Mapping[str, str]) -> tuple[int, ...]:
    """torchrun takes a port that is free; the others have one of their own."""
    if job.launcher not in {LauncherName.ACCELERATE, LauncherName.DEEPSPEED}:
        return ()
    text = env.get("MASTER_PORT", "")
    port = int(text) if text.isdecimal() else _DEFAULT_PORT
    return () if hosts.is_free(port) else (port,)


def _keys(env: Mapping[str, str]) -> tuple[str, ...]:
    """Services whose key lies in a file."""
    home = Path(env.get("HOME", "/root"))
    netrc = Path(env.get("NETRC", home / ".netrc"))
    token = Path(env.get("HF_HOME", home / ".cache" / "huggingface")) / "token"
    try:
        has_wandb = "wandb" in netrc.read_text(errors="replace")
    except OSError:
        has_wandb = False
    return ("wandb",) * has_wandb + ("huggingface",) * token.is_file()
