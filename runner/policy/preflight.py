"""
What the checks before the job come to: go, go with these changes, or swap this machine.

A finding refuses only what would make training fail here and not elsewhere; what is odd, or the job's own
mistake, is said and tried. A finding whose `facts` have `env` can be cured by that: it is set in every attempt.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from runner.errors import MachineError, StoreError
from runner.facts import (
    CardReport,
    CardState,
    DiskRate,
    Fabric,
    Finding,
    Host,
    Preflight,
    Server,
    Severity,
    StoreTrial,
    Verdict,
)
from runner.job import AtEnd, FrameworkName, Job, LauncherName
from runner.policy.batch import accumulation
from runner.policy.findings import EXIT_CODE, ok, refuse, swap, warn
from runner.policy.fleet import strategy_name
from runner.policy.links import judge_fabric
from runner.policy.planning import (
    CONTEXT_BYTES,
    GB,
    SHARDED,
    Strategy,
    cheapest,
    checkpoint_bytes,
    fits,
    memory,
    workload,
)
from runner.policy.readings import judge_shared_memory

_GIB: Final = 1 << 30
_BUSY_BYTES: Final = 2 * _GIB  # on a card, before training: more than a driver keeps for itself
_CORES_A_CARD: Final = 4
_OPEN_FILES: Final = 65_536
_FEW_FILES: Final = 4096  # without cards
_LEAST_MEMLOCK: Final = 64 << 20  # NCCL pins less than that a card
_MORE_SHM: Final = "start the container with --ipc=host or --shm-size=16g"
_CAPPED: Final = 0.9  # of the power that the card was made for
_FIT: Final = "cards.fit"
_SKEW_S: Final = 300.0  # stores refuse from 15 minutes on


@dataclass(frozen=True, slots=True)
class Check:
    """One row of docs/preflight.md: what is looked at, and what to do when something is wrong."""

    looks_at: str
    advice: str


CHECKS: Final[Mapping[str, Check]] = {
    "cards": Check(
        "Number, model and memory of the cards that CUDA_VISIBLE_DEVICES lets through; whether the driver answers within 30 s.",
        "No answer, or an error: rent another machine. Cards of different kinds work, at the pace of the slowest.",
    ),
    "cards.health": Check(
        "ECC errors since the driver was loaded, remapped memory rows, the recovery action that the driver asks for, MIG, the compute mode.",
        "Swap if a row could not be remapped, if a card needs a reset or a reboot, or if nothing may run on it. The rest is only logged; remember it when a run fails.",
    ),
    "cards.fit": Check(
        "If job.yaml has a `model`: what each card is expected to hold, against its memory. It is the same estimate that `plan` makes.",
        "Use the strategy that it names, a smaller `per_card`, or bigger cards. Otherwise training runs out of memory within the first steps.",
    ),
    "cards.busy": Check(
        "Processes and memory in use on the cards before the job.",
        "End what is yours (an old run, a notebook). If it is not yours, you share the cards with somebody: tell support.",
    ),
    "cards.speed": Check(
        "Power limit against the card's own, clocks held down by heat or power, PCIe links narrower than the slot.",
        "The card is slower, not broken. Compare the price with the speed of the first steps.",
    ),
    "cards.log": Check(
        "Xid errors in the kernel's log, where the container may read it.",
        "An error from an earlier tenant may be gone. If training fails the same way, swap.",
    ),
    "fabric": Check(
        "Whether every card of an NVSwitch board has joined its fabric.",
        "`system not yet initialized` in CUDA: nothing inside the container can repair it. Swap, and tell support.",
    ),
    "links": Check(
        "`nvidia-smi topo -m` and `topo -p2p r`: what lies between the cards, the speed to expect, what it means for the job's strategy.",
        "Without NVLink, prefer DDP or ZeRO-2 to ZeRO-3 and FULL_SHARD, or rent a machine with SXM cards.",
    ),
    "p2p": Check(
        "Whether each pair of cards may read the other's memory.",
        "No access is usual on consumer cards, and slow for ZeRO-3. On NVLink it is a fault: swap.",
    ),
    "comm": Check(
        "The communication test: a correct sum over all cards, bus bandwidth, and whether anything hangs.",
        "Changes that are proved to help are set automatically. If no change helps, swap.",
    ),
    "torch": Check(
        "Whether the training torch can compute on every card: driver against CUDA, the card's architecture.",
        "Use an image with another torch, or a machine with a newer driver.",
    ),
    "shared_memory": Check(
        "Size and free space of /dev/shm. NCCL and data workers die of a bus error when it is full.",
        "Start the container with --ipc=host or --shm-size=16g. Until then the cards avoid it (NCCL_SHM_DISABLE=1).",
    ),
    "memory": Check(
        "System memory, or the container's limit, against the cards' memory and the staging of a checkpoint.",
        "Use a larger machine, or a higher --memory: a save stages one copy of the state in memory. If that is too much, `checkpoint.staging: chunked` needs 32 MB per card.",
    ),
    "limits": Check(
        "How many open files and how much locked memory a process may have.",
        "docker run --ulimit nofile=65536:65536 --ulimit memlock=-1",
    ),
    "cores": Check(
        "Processor cores per card, NUMA nodes.",
        "Data workers need four to eight cores per card. With fewer cores, use fewer workers.",
    ),
    "disk": Check(
        "Whether the run folder is on a volume, its free space against keep_last + 2 checkpoints, and its synced write rate against the cadence.",
        "Mount a volume at /workspace, or a larger one. Or set a smaller keep_last, or a longer save_interval.",
    ),
    "store": Check(
        "Whether objects can be written to the store, read back (the same bytes), listed and deleted; by which checksums it confirms copies; whether it refuses to replace an existing object; its clock; the rate of an upload.",
        "Use credentials that may delete. Set a longer save_interval if the rate is too low.",
    ),
    "data": Check(
        "Whether each source of `data` can be listed, and a byte of it read, with the keys of this machine; left out if the data is here already.",
        "A key that may list may still lack `s3:GetObject`. Correct `data.from`, or give the key that right.",
    ),
    "outputs": Check(
        "What is in `outputs` already, for links and folders that no copy would have.",
        "It says what to do with each. Otherwise a run that trained to its end ends with 4, and its disk is kept.",
    ),
    "software": Check(
        "The script, data paths in the command, modules that script and launcher need, files beside the script that hide a module, keys of services, ports.",
        "Install in `setup` what is missing. Rename a file that hides a module.",
    ),
    "container": Check(
        "Which program is PID 1: the image's entrypoint, or what the provider put in its place.",
        "Under another program, start with `vramfarm-runner up`: when an SSH session ends, it takes `run` with it.",
    ),
    "money": Check(
        "Whether the server's key is accepted (a harmless read), and whether the last upload fits before the deadline.",
        "Use the key that the provider made for this server; set an earlier limit, or use a faster store.",
    ),
    "time_limit": Check("Whether every check ended in time.", "What hangs there may hang in training."),
}


# ----------------------------------------------------------------------------------- verdict


def decide_verdict(findings: Iterable[Finding], *, users: Collection[str] = ()) -> Preflight:
    """What the findings come to. A variable that is set already (`users`: the names) is never changed."""
    found = _acquitted(tuple(findings))
    refused = tuple(one for one in found if one.severity is Severity.REFUSE)
    if refused:
        elsewhere = tuple(one for one in refused if EXIT_CODE in one.facts)  # another machine would be refused, too
        verdict = Verdict.REFUSE if elsewhere else Verdict.SWAP
        return Preflight(verdict=verdict, reasons=tuple(map(_with_hint, elsewhere or refused)), findings=found)
    env: dict[str, str] = {}
    reasons: tuple[str, ...] = ()
    for one in found:
        new = {name: value for name, value in changes_of(one).items() if name not in users and name not in env}
        env |= new
        told = " ".join(f"{name}={value}" for name, value in new.items())
        reasons += (f"{_with_hint(one)}; going on with {told}",) if new else ()
    return Preflight(verdict=Verdict.CHANGES if env else Verdict.GO, reasons=reasons, env=env, findings=found)


def exit_code_of(found: Preflight) -> int:
    """With what `preflight` ends: that of a run that would start here now."""
    match found.verdict:
        case Verdict.SWAP:
            return MachineError.exit_code
        case Verdict.REFUSE:
            return max(int(one.facts.get(EXIT_CODE, 0)) for one in found.findings)
        case Verdict.GO | Verdict.CHANGES:
            return 0


def tell_verdict(found: Preflight, *, is_part: bool = False) -> str:
    """The verdict in a line for the log, with what is odd; empty for a part of it that found nothing odd."""
    odd = [one.message for one in found.findings if one.severity is not Severity.OK and not changes_of(one)]
    if is_part and not odd and not found.reasons:
        return ""
    match found.verdict:
        case Verdict.SWAP:
            return f"preflight: swap this machine: {'; '.join(found.reasons)}"
        case Verdict.REFUSE:
            return f"preflight: this job cannot run: {'; '.join(found.reasons)}"
        case Verdict.CHANGES:
            told = f"preflight: go, with changes: {'; '.join(found.reasons)}"
        case Verdict.GO:
            told = f"preflight: go{': ' if odd else ''}"
    return f"{told}{'; ' * (found.verdict is Verdict.CHANGES and bool(odd))}{'; '.join(odd)}"


def _with_hint(finding: Finding) -> str:
    return f"{finding.message}; {finding.hint}" if finding.hint else finding.message


def changes_of(finding: Finding) -> Mapping[str, str]:
    """The environment that cures it."""
    env = finding.facts.get("env", {})
    return env if isinstance(env, Mapping) else {}


def _acquitted(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """What the cards did outweighs what the driver says they may do."""
    talked = any(one.name == "comm" and one.severity is Severity.OK and one.facts.get("proved") for one in findings)
    if not talked:
        return findings
    return tuple(
        replace(one, severity=Severity.WARN) if one.name == "p2p" and one.severity is Severity.REFUSE else one
        for one in findings
    )


# ------------------------------------------------------------------------------------- cards


def judge_report(report: CardReport | None, job: Job) -> tuple[Finding, ...]:
    """Cards that are broken, busy, held back or unlike."""
    if report is None or not report.cards:
        return (ok("cards", "no card here; the job runs on the processor"),)
    found = [_describe(report, job), *_health(report.cards), *_busy(report.cards), *_speed(report.cards)]
    fabric = Fabric(cards=tuple(card.fabric for card in report.cards if card.fabric))
    return (*found, *(judge_fabric(fabric) if fabric.cards else ()))


def _describe(report: CardReport, job: Job) -> Finding:
    cards = report.cards
    kinds = sorted({f"{card.name} {card.memory_bytes / _GIB:.0f} GiB" for card in cards})
    told = f"{len(cards)} x {kinds[0]}, driver {report.driver}, CUDA {report.cuda} at most"
    if len(kinds) > 1 and (job.cards == "all" or job.cards > 1):
        hint = "the slowest card, and the smallest memory, set the pace for all"
        return warn("cards", f"cards differ: {', '.join(kinds)}", hint)
    return ok("cards", told)


def _health(cards: tuple[CardState, ...]) -> Iterable[Finding]:
    for card in cards:
        who = f"card {card.index}"
        if card.remap_failed:
            yield swap("cards.health", f"{who}: a broken row of its memory could not be replaced")
        elif card.remap_pending:
            yield warn("cards.health", f"{who}: a broken row of its memory waits for a reset to be replaced")
        if card.recovery:
            told = swap if re.search("reset|reboot", card.recovery.lower()) else warn
            yield told("cards.health", f"{who}: the driver asks for {card.recovery!r} since an error")
        if card.uncorrected:
            hint = "if training fails with an ECC error, swap this machine and tell support"
            yield warn("cards.health", f"{who}: {card.uncorrected} uncorrectable memory errors since its start", hint)
        if card.compute_mode.lower() == "prohibited":
            yield swap("cards.health", f"{who}: its compute mode is Prohibited, nothing may run on it")
        if card.mig:
            yield warn("cards.health", f"{who}: MIG is on, NCCL does not work between slices of a card")


def _busy(cards: tuple[CardState, ...]) -> Iterable[Finding]:
    for card in cards:
        if card.used_bytes < _BUSY_BYTES and not card.processes:
            continue
        who = f": {', '.join(card.processes[:3])}" if card.processes else ""
        used = f"{card.used_bytes / _GIB:.1f} GiB"
        yield warn("cards.busy", f"card {card.index} is in use, {used}{who}", "end it, if it is yours")


def _speed(cards: tuple[CardState, ...]) -> Iterable[Finding]:
    for card in cards:
        limit, default = card.power_limit_w, card.power_default_w
        if limit and default and limit < _CAPPED * default:
            yield warn("cards.speed", f"card {card.index} may draw {limit:.0f} W of its {default:.0f} W: it is slower")
        if card.slowdowns:
            yield warn("cards.speed", f"card {card.index} is held back now: {', '.join(card.slowdowns)}")
        link = card.pcie
        if link and link.width and link.width_max and link.width < link.width_max:
            message = f"card {card.index}: its PCIe link has {link.width} lanes of {link.width_max}"
            yield warn("cards.speed", message, "loading data is slower there; it may widen under load")


_XIDS: Final[Mapping[int, str]] = {
    48: "uncorrectable memory error",
    62: "internal halt",
    64: "a row could not be remapped",
    74: "NVLink error",
    79: "fallen off the bus",
    92: "many memory errors",
    95: "uncontained memory error",
    119: "its controller does not answer",
    120: "its controller failed",
}


def judge_xids(xids: Iterable[tuple[str, int]]) -> tuple[Finding, ...]:
    """Only what speaks of broken hardware: most numbers are faults of programs."""
    told = [f"{where}: Xid {number}, {_XIDS[number]}" for where, number in xids if number in _XIDS]
    hint = "it may be cured; if training fails the same way, swap this machine and tell support"
    return (warn("cards.log", f"the kernel's log has {'; '.join(told[:4])}", hint),) if told else ()


def judge_strategy(job: Job, *, nvlink: bool, num_procs: int) -> tuple[Finding, ...]:
    """Strategies that send weights at every step, over links that are not made for it."""
    if job.model is None or nvlink or num_procs < 2 or Strategy(job.model.strategy) not in SHARDED:  # noqa: PLR2004  # a pair
        return ()
    message = f"{job.model.strategy} sends the weights at every step, and there is no NVLink: the cards will wait"
    return (warn("links", message, "zero2 or fsdp_shard_grad_op where it fits, or a machine with SXM cards"),)


# -------------------------------------------------------------------------------- the machine


def judge_host(host: Host, *, num_procs: int, card_bytes: int, checkpoint: int | None) -> tuple[Finding, ...]:
    """Memory, limits and cores against what this job needs. `card_bytes`: of all its cards together."""
    shared = judge_shared_memory(host.shared_memory) if host.shared_memory else ()
    cured = tuple(
        replace(one, hint=_MORE_SHM, facts={"env": {"NCCL_SHM_DISABLE": "1"}}) if one.severity is Severity.WARN else one
        for one in shared
    )
    return (
        *cured,
        _memory(host, card_bytes, checkpoint),
        *_limits(host, card_bytes),
        _cores(host, num_procs, card_bytes),
    )


def _memory(host: Host, card_bytes: int, checkpoint: int | None) -> Finding:
    limited = host.memory_limit_bytes is not None and host.memory_limit_bytes < (host.memory_bytes or 1 << 62)
    usable = host.memory_limit_bytes if limited else host.memory_bytes
    if usable is None:
        return ok("memory", "the size of the system memory is not told")
    told = f"{usable / _GIB:.1f} GiB of system memory" + (" (the container's limit)" if limited else "")
    hint = "give the container a higher --memory" if limited else "a machine with more memory: at least the cards' own"
    if checkpoint and usable < checkpoint:
        return warn("memory", f"{told}: a save stages {_gb(checkpoint)} in it, and does not fit", hint)
    if card_bytes and usable < card_bytes:
        return warn("memory", f"{told}, less than the cards' {card_bytes / _GIB:.0f} GiB together", hint)
    return ok("memory", told)


def _limits(host: Host, card_bytes: int) -> Iterable[Finding]:
    wanted = _OPEN_FILES if card_bytes else _FEW_FILES
    if host.open_files is not None and host.open_files < wanted:
        message = f"a process may open {host.open_files} files: data workers and ranks need more"
        yield warn("limits", message, "docker run --ulimit nofile=65536:65536")
    if card_bytes and host.memlock_bytes is not None and host.memlock_bytes < _LEAST_MEMLOCK:
        yield ok("limits", f"locked memory is limited to {host.memlock_bytes // 1024} KiB; InfiniBand would need more")


def share_cores(cores: int, num_procs: int) -> int:
    """Threads of arithmetic for each of the processes; more than 16 help nobody."""
    return min(max(cores // max(num_procs, 1), 1), 16)


def _cores(host: Host, num_procs: int, card_bytes: int) -> Finding:
    nodes = f", {host.num_nodes} NUMA nodes" if host.num_nodes > 1 else ""
    threads = share_cores(host.cores, num_procs)
    told = f"{host.cores} cores for {num_procs} processes{nodes}, OMP_NUM_THREADS={threads} where it is not set"
    if card_bytes and host.cores < _CORES_A_CARD * num_procs:
        return warn(
            "cores",
            f"{told}: fewer than {_CORES_A_CARD} a card, data loading may hold the cards up",
            "fewer num_workers",
        )
    return ok("cores", told)


# ---------------------------------------------------------------------------- disk and store


def expected_checkpoint(job: Job, largest: int | None) -> int | None:
    """Bytes of a checkpoint: as one was, else as the model's size says, else nobody knows."""
    if largest:
        return largest
    return checkpoint_bytes(workload(job.model)) if job.model else None


def judge_disk(rate: DiskRate, job: Job, checkpoint: int | None) -> tuple[Finding, ...]:
    """Room for what is kept, the one being written and one to spare; and whether a save ends before the next."""
    found = []
    keep = job.checkpoint.keep_last
    if not rate.is_volume:
        message = f"{rate.folder} is in the container's own layer ({rate.kind}): it goes with the container"
        found.append(warn("disk", message, "mount a volume at /workspace"))
    needed = checkpoint * (keep + 2) if checkpoint else 0
    if needed > rate.free_bytes:
        message = f"{rate.folder}: {_gb(rate.free_bytes)} free, {keep} + 2 checkpoints of {_gb(checkpoint or 0)} need {_gb(needed)}"
        found.append(warn("disk", message, "a larger disk, or a smaller checkpoint.keep_last"))
    found += _too_slow("disk", "writes", rate.rate, job, checkpoint)
    if not found:
        found.append(ok("disk", f"{rate.folder}: {_gb(rate.free_bytes)} free, {_rate(rate.rate)} synced"))
    return tuple(found)


def judge_store_place(job: Job, server: Server | None, *, shares_disk: bool, is_local: bool) -> tuple[Finding, ...]:
    """A copy on the disk of a server that is stopped goes with it. A container's volumes stay."""
    is_stopped = AtEnd.STOP in {job.finish.on_success, job.finish.on_failure}
    goes = server is not None and server.provider != "docker" and is_stopped and not is_local
    if not (goes and shares_disk) or job.offload.outlives_server:
        return ()
    message = (
        f"{job.offload.to} is on the disk of this run, which goes with the server: is the store's own disk mounted?"
    )
    hint = "mount it, or name an s3:// store; if that disk outlives the server (a network volume): offload.outlives_server: true"
    return (refuse("store", message, hint, exit_code=StoreError.exit_code),)


def judge_store(trial: StoreTrial, job: Job, checkpoint: int | None) -> tuple[Finding, ...]:
    """What will fail with the first checkpoint is better known now."""
    done = ", ".join(("written", "read back", *(("deleted",) if trial.deletes else ())))
    words = (f"{trial.address}: {done}", _rate(trial.rate) if trial.rate else "", trial.confirms)
    found = [ok("store", "; ".join(filter(None, words)))]
    if not trial.deletes:
        hint = "the store fills up; let these credentials delete, or remove old checkpoints yourself"
        found.append(warn("store", f"{trial.address} does not let us delete: old checkpoints stay", hint))
    if missing := trial.missing_rights:
        anew = "" if missing == ("s3:AbortMultipartUpload",) else "an upload that was killed begins anew, and "
        message = (
            f"{trial.address}: the key lacks {', '.join(missing)}: {anew}what is left half sent may stay and cost money"
        )
        hint = "give it these rights (docs/store.md), or end unfinished uploads by a lifecycle rule"
        found.append(warn("store", message, hint))
    if not trial.is_exclusive:
        message = (
            f"{trial.address} replaces what it was asked not to (conditional writes): two machines could write one run"
        )
        found.append(warn("store", message, "never start this job on two machines at once"))
    if abs(trial.skew_s) > _SKEW_S:
        message = f"the clocks of this machine and the store are {abs(trial.skew_s):.0f} s apart"
        found.append(warn("store", message, "stores refuse requests from 15 minutes on: tell support"))
    if trial.rate:
        found += _too_slow("store", "takes", trial.rate, job, checkpoint)
    return tuple(found)


def _too_slow(name: str, verb: str, rate: float, job: Job, checkpoint: int | None) -> list[Finding]:
    """A checkpoint must be there before the next one comes."""
    if not checkpoint:
        return []
    every = job.checkpoint.save_interval.total_seconds()
    needed = checkpoint / every
    if rate >= needed:
        return []
    minutes = f"{every / 60:.0f} min" if every >= 60 else f"{every:.0f} s"  # noqa: PLR2004
    message = f"a {_gb(checkpoint)} checkpoint every {minutes} needs {_rate(needed)}; the {name} {verb} {_rate(rate)}"
    longer = -(-checkpoint // max(rate, 1)) // 60 + 1
    return [warn(name, message, f"checkpoint.save_interval: {longer:.0f}m or more")]


# ---------------------------------------------------------------------------- software, money


def judge_container(first: str, *, is_container: bool) -> tuple[Finding, ...]:
    """`first`: the command line of PID 1."""
    if not is_container:
        return ()
    ours = "vramfarm-runner" in first or "entrypoint.sh" in first or "runner.guardian" in first
    told = "the image's own entrypoint" if ours else f"another program ({first[:60]}): this was started by hand"
    return (ok("container", f"PID 1 is {told}"),)


def judge_software(  # noqa: PLR0913  # what was found, one each
    job: Job,
    env: Mapping[str, str],
    *,
    missing: Collection[str],
    hidden: Collection[str],
    imports: Collection[str],
    problem: str = "",
    absent: Collection[str] = (),
    taken: Collection[int] = (),
    keys: Collection[str] = (),
) -> tuple[Finding, ...]:
    """What the script will not find. `keys`: services whose key lies in a file; `taken`: ports."""
    found = []
    if problem:
        found.append(warn("software", f"the script cannot be looked at: {problem}"))
    found += [warn("software", f"{path} is named in the command, and is not there") for path in absent]
    if missing:
        message = f"modules that the training python does not have: {', '.join(sorted(missing))}"
        found.append(warn("software", message, "install them in `setup`, or in the image"))
    found += [warn("software", f"{path} hides the module of that name", "rename it") for path in hidden]
    if "wandb" in imports and not {"WANDB_API_KEY", "WANDB_MODE"} & env.keys() and "wandb" not in keys:
        hint = "name WANDB_API_KEY in `secrets` to see it on the web; `wandb sync` sends it later"
        found.append(
            warn("software", "the script uses W&B and there is no key: it writes to disk (WANDB_MODE=offline)", hint)
        )
    if (
        {"transformers", "datasets", "huggingface_hub"} & set(imports)
        and "HF_TOKEN" not in env
        and "huggingface" not in keys
    ):
        found.append(ok("software", "no HF_TOKEN: gated models of Hugging Face will be refused"))
    if _is_of_hugging_face(job) and "enable_jit_checkpoint" not in job.command:
        found.append(
            ok(
                "software",
                "the Trainer saves every save_steps only; with enable_jit_checkpoint (transformers 5 and newer) it saves "
                "when it is asked to leave, too",
            )
        )
    found += [warn("software", f"port {port} is taken, and {job.launcher} will want it") for port in taken]
    return tuple(found) or (ok("software", "what the script imports is there"),)


def _is_of_hugging_face(job: Job) -> bool:
    return job.framework is FrameworkName.HF_TRAINER or (
        job.framework is FrameworkName.AUTO and job.launcher in {LauncherName.AXOLOTL, LauncherName.LLAMAFACTORY}
    )


LAUNCHER_MODULES: Final[Mapping[LauncherName, str]] = {
    LauncherName.ACCELERATE: "accelerate",
    LauncherName.DEEPSPEED: "deepspeed",
    LauncherName.AXOLOTL: "axolotl",
    LauncherName.LLAMAFACTORY: "llamafactory",
    LauncherName.TORCHTUNE: "torchtune",
}


def judge_end(
    deadline_at: datetime | None, now: datetime, *, checkpoint: int | None, rate: float | None
) -> tuple[Finding, ...]:
    """Whether the last upload fits before the deadline."""
    if deadline_at is None or not checkpoint or not rate:
        return ()
    takes, left = timedelta(seconds=checkpoint / rate), deadline_at - now
    if takes * 4 < left:
        return ()
    message = f"the last upload takes about {takes.total_seconds() / 60:.0f} min of the {left.total_seconds() / 60:.0f} min until the deadline"
    return (warn("money", message, "a later limit, or a faster store"),)


# ----------------------------------------------------------------------------------- helpers


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.0f} GB" if num_bytes >= 1e10 else f"{num_bytes / 1e9:.1f} GB"  # noqa: PLR2004


def _rate(rate: float) -> str:
    return f"{rate / 1e6:.0f} MB/s"


def judge_fit(job: Job, *, num_procs: int, card_bytes: int) -> tuple[Finding, ...]:
    """
    Whether the cards hold the job: an estimate, which warns and refuses nothing.

    `card_bytes`: memory of the smallest card. Nothing where job.yaml has no `model`, or no card says its size.
    """
    if job.model is None or not card_bytes:
        return ()
    per_card = job.batch.per_card if job.batch else 1
    work = workload(job.model, per_card=per_card, accumulation=accumulation(job, num_procs))
    needed = memory(work, num_procs).total + CONTEXT_BYTES
    told = (
        f"{strategy_name(work.strategy)} is expected to take {needed / GB:.0f} of the {card_bytes / GB:.0f} GB of each card "
        f"({per_card} x {work.sequence} tokens at once)"
    )
    if fits(work, num_procs, card_bytes):
        return (ok(_FIT, told),)
    found = cheapest(work, num_procs, card_bytes)
    cure = "a smaller per_card, shorter sequences, an 8-bit optimizer, or bigger cards"
    if found is not None:
        offload = " with the optimizer in system memory" if found.offload else ""
        cure = f"{strategy_name(found.strategy)}{offload} fits here"
    message = f"{told}: out of memory within the first steps"
    return (warn(_FIT, message, cure),)
