"""
What was observed and what was done. Plain frozen data: no methods that decide, no I/O.
Every other module speaks in these types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Any, Final

from runner import committed
from vramfarm.protocol import EndRecord, Ref

FULL_BYTES: Final = 1 << 18  # with less, a disk is full: the logs and records of a launch do not fit

# ----------------------------------------------------------------------------- checkpoints

Checkpoint = committed.Checkpoint

# -------------------------------------------------------------------------------- attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills:
    """The kernel killed so many processes of the container for want of memory; no limit is 0."""

    count: int = 0
    limit_bytes: int = 0

    def describe(self, who: str = "a process") -> str:
        """What happened, and what to do."""
        more = f" and {self.count - 1} more" if self.count > 1 else ""
        limit = f"may have {self.limit_bytes / 1e9:.1f} GB" if self.limit_bytes else "has no limit"
        cure = "give it more (docker run --memory), or use fewer data workers or smaller batches"
        return f"out of memory: the kernel killed {who}{more}; the container {limit}: {cure}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How the launcher ended; a negative code is a signal, None is unknown (its shim died)."""

    code: int | None
    kills: Kills = Kills()  # meanwhile


class Ending(StrEnum):
    """What an attempt came to. Only FAILED counts against the restart budget."""

    SUCCEEDED = "succeeded"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


class Decision(StrEnum):
    """What triage advises after a failed attempt."""

    RETRY_AS_IS = "retry_as_is"
    RETRY_ENV = "retry_env"  # with one recorded change
    RESUME = "resume"
    GIVE_UP_USER = "give_up_user"
    GIVE_UP_MACHINE = "give_up_machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The first real error of an attempt; `rank` is None if it was none or all of them."""

    label: str
    category: str
    rank: int | None
    primary_line: str  # one whole line of a log; empty: no line names an error
    primary_line_no: int | None
    cause: str
    remedy: str
    decision: Decision
    env: Mapping[str, str]  # the one change that a retry makes
    confidence: str  # high, medium or low
    summary: str = ""  # one line for a human: who, what, and the log to read


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One launch of the training command. `ending` is None until its exit is journaled."""

    number: int
    id: str
    resume: Ref | None
    lineage: int
    boot_id: str
    launched_at: datetime
    env: Mapping[str, str] = field(default_factory=dict)  # changes that earlier failures asked for
    ending: Ending | None = None
    exit: Exit | None = None
    step: int = 0  # last optimizer step seen
    from_log: bool = False  # it is a guess, by lines that rank 0 printed
    ended_at: datetime | None = None
    reason: str = ""  # first error, for a human
    diagnosis: Diagnosis | None = None  # of one that failed
    world_size: int = 0  # processes it was started with; 0: not written down
    global_batch: int = 0  # samples a step, where job.yaml says it
    steps_per_s: float = 0.0  # at its end
    first_step_at: datetime | None = None  # None: none was seen by a runner
    killed: str = ""  # why the runner killed it
    left: str = ""  # what it left behind, and the runner ended
    origin: str = ""  # the checkpoint of another run that `resume` is a copy of

    @property
    def told_step(self) -> int:
        """The step that ranks themselves reported: a guess decides nothing."""
        return 0 if self.from_log else self.step


class Outcome(StrEnum):
    """Why the job is over. Each has one exit code, in `errors.py`."""

    SUCCEEDED = "succeeded"
    GAVE_UP = "gave_up"
    STOPPED = "stopped"
    LIMIT = "limit"
    REFUSED = "refused"  # this machine is wrong; the job could go on elsewhere
    STORE = "store"  # the store cannot be used; nothing was trained without it


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """The job is over; a boot after this only gets things off the machine and stops it."""

    outcome: Outcome
    reason: str
    at: datetime
    attempt: int | None = None  # in the store: number of the last one before the end; None: an older runner's
    missing: str = ""  # in the store: what of a run that succeeded is not there, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What one machine did for a run, by its own clock. `seen_at`: when it last told the store."""

    id: str
    where: str = ""  # for people
    provider: str = ""  # empty: not rented
    server: str = ""
    price_per_hour: str = ""  # a decimal text
    currency: str = "EUR"
    opened_at: datetime
    paid_from: datetime
    seen_at: datetime
    is_anew: bool = False  # the operator reopened the run on it: limits count from here
    concluded_at: datetime | None = None  # the run was over; what comes after is billed, and is no part of it
    outcome: str = ""
    reason: str = ""
    attempts: tuple[Attempt, ...] = ()
    distrusted: tuple[tuple[int, int], ...] = ()  # as in `History`


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What other machines did before this one joined the run, as far as it counts for limits."""

    num_machines: int = 0
    last_attempt: int = 0
    duration: timedelta = timedelta()
    cost: Decimal = Decimal(0)
    is_anew: bool = False  # the operator reopened the run here: time and money of others do not count
    distrusted: tuple[tuple[int, int], ...] = ()  # as in `History`


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The journal, folded. Only what the world cannot be asked again."""

    accepted_at: datetime | None = None
    attempts: tuple[Attempt, ...] = ()
    interrupted: int = 0  # number of the attempt that was last asked to save and leave
    distrusted: tuple[tuple[int, int], ...] = ()  # attempt and step: its checkpoints from there on are not resumed from
    unusable: frozenset[str] = frozenset()  # names of checkpoints that are damaged in the store
    conclusion: Conclusion | None = None
    stop_sent_in: str = ""  # the life that last asked for the server's stop
    opened_at: datetime | None = None  # accepted, or reopened by the operator: limits count from here
    budget_from: int = 0  # attempts before this index belong to a part of the run that is over
    orders: frozenset[str] = frozenset()  # --start-over and --go-on that were carried out
    fresh_from: int = 0  # number of the attempt that started over; checkpoints before it are not used
    notified: Mapping[str, datetime] = field(default_factory=dict)  # what a person was told, and when last
    machine: str = ""  # that this journal speaks of now
    reopened_on: str = ""  # the machine on which the operator last reopened the run
    earlier: Earlier = Earlier()

    @property
    def last(self) -> Attempt | None:
        """The newest attempt, running or ended."""
        return self.attempts[-1] if self.attempts else None

    @property
    def running(self) -> Attempt | None:
        """The newest attempt, until its exit is journaled."""
        return self.last if self.last and self.last.ending is None else None

    @property
    def next_number(self) -> int:
        """Of the next attempt: numbers go on over machines."""
        return max(self.earlier.last_attempt, *(attempt.number for attempt in self.attempts), 0) + 1


# ------------------------------------------------------------------------------- slow work


class TaskKind(StrEnum):
    """Slow work in a process of its own; started, and its end observed. All are idempotent."""

    SETUP = "setup"  # bring the source, run `setup`
    STAGE = "stage"  # bring the data in
    SURVEY = "survey"  # list the store: which checkpoints are verified there, is the job concluded
    COMMIT = "commit"  # what a framework saved by itself becomes a checkpoint of ours
    UPLOAD = "upload"  # one checkpoint, shards first, manifest last, confirmed by the store
    OUTPUTS = "outputs"  # copy folders that the job writes, what changed in them
    FORK = "fork"  # one checkpoint of another run to this disk, verified, committed as the first of this run
    RESTORE = "restore"  # one checkpoint from the store to this disk, verified, committed
    PUBLISH = "publish"  # journal, logs, status, conclusion to the store
    REOPEN = "reopen"  # take back from the store that the run is over
    TIDY = "tidy"  # remote retention
    LEASE = "lease"  # takes the lease of the run and renews it; runs as long as the runner does
    PREFLIGHT = "preflight"  # look at the machine before the job: cards, links, memory, disk, store, software, money
    NOTIFY = "notify"  # tells a person
    VERIFY = "verify"  # compare one checkpoint in the store with its manifest, byte counts and checksums
    EVIDENCE = "evidence"  # look at the processes of an attempt that hangs, before they are killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    subject: str
    started_at: datetime
    progress: float = 0.0  # 0 to 1
    note: str = ""
    moved_at: datetime | None = None  # when it last told of progress
    told: Mapping[str, Any] = field(default_factory=dict)  # what it found out so far
    has_spoken: bool = True  # it has read its arguments
    stopped_at: datetime | None = None  # since when its process is one that somebody stopped (SIGSTOP)
    after: Failed | None = None  # how it ended before, where that is why it runs again


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    subject: str
    at: datetime
    result: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """
    `final`: trying again cannot help (403, no such bucket, a wrong command); `curable`: unless somebody renews
    credentials or makes room meanwhile.
    """

    subject: str
    at: datetime
    error: str
    final: bool
    failures: int  # in a row, of this subject
    hint: str = ""
    since: datetime | None = None  # first of these failures
    curable: bool = False
    damaged: bool = False  # the bytes at the source do not match their manifest
    unreadable: bool = False  # the store fails at them, by its own word, and reads what is beside them
    exit_code: int = 1  # of the error, in `errors.py`


TaskState = Running | Finished | Failed | None


# -------------------------------------------------------------------------------- progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the ranks last said through the control page, else in their log. Zeros where they said nothing."""

    step: int = 0
    max_steps: int = 0
    loss: float | None = None
    steps_per_s: float | None = None
    phase: str = "starting"
    num_failed: int = 0
    save_error: str = ""
    is_waiting: bool = False  # what that tells of: nothing has failed
    attached: bool = False  # the script uses the library
    ended: bool = False  # its last state is saved: the saver has come to its end
    from_log: bool = False  # step, loss and rate are a guess, by lines that rank 0 printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Processes of an attempt that exist now."""

    attempt_id: str
    trainers: tuple[int, ...]  # pids: shim, launcher, ranks, their workers
    savers: tuple[int, ...]  # pids: they outlive the trainers until their save is committed
    left: tuple[str, ...] = ()  # trainers that outlived the launcher, as a person knows them: 4711 python3 logger.py


# ----------------------------------------------------------------------------------- lease


class LeaseState(StrEnum):
    """Whether this runner is the one that may write to the store. HELD and NOT_NEEDED are."""

    NOT_NEEDED = "not_needed"  # no store, or one that cannot keep two writers apart
    UNKNOWN = "unknown"  # not asked for, or no answer yet
    WATCHING = "watching"  # another runner's; does it live?
    HELD = "held"
    LAPSED = "lapsed"  # ours, and not renewed in time: another one may take it
    TAKEN = "taken"  # another runner has it, and lives


class Vacancy(StrEnum):
    """Why a lease that another runner had could be taken."""

    SILENT = "silent"  # it was not renewed for a minute
    GIVEN_BACK = "given_back"
    GONE = "gone"  # somebody removed the object


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to write this run, as far as it is known here. `who` has it, `until` by its own clock; `vacancy`: why it was free."""

    state: LeaseState = LeaseState.NOT_NEEDED
    fence: int = 0
    who: str = ""
    until: str = ""
    trouble: str = ""
    vacancy: Vacancy = Vacancy.SILENT


# ------------------------------------------------------------------------------------ hangs


class Stage(StrEnum):
    """What training is doing, as far as limits differ by it."""

    STARTING = "starting"
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"
    ENDING = "ending"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPulse:
    """One rank, looked at once. Sums are of it and its descendants, and only grow."""

    rank: int
    pid: int
    state: str  # of the rank's own process, as in /proc: R, S, D, T
    step: int = 0  # 0 where it tells none
    beat_s: float = 0.0  # when it made that step
    cpu_s: float = 0.0
    io_bytes: int = 0  # read and written


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPulse:
    """One card, as nvidia-smi says; None where it does not."""

    index: int
    use_percent: float | None = None
    memory_percent: float | None = None  # of the time its memory was read or written
    power_w: float | None = None
    limit_w: float | None = None
    used_bytes: int | None = None  # of its memory
    total_bytes: int | None = None
    temperature: float | None = None  # in °C
    throttled: tuple[str, ...] = ()  # why its clocks are held down, if they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """Signs of life of an attempt, taken at once but for `cards`, which are asked for more rarely."""

    at_s: float  # monotonic
    stage: Stage = Stage.STARTING
    ranks: tuple[RankPulse, ...] = ()
    cards: tuple[CardPulse, ...] = ()
    log_bytes: int = 0
    progress: str = ""  # the last line of progress, of scripts that do not use the library
    question: str = ""  # a last line without an end that asks something
    received_bytes: int = 0  # by this machine's network
    saver_bytes: int = 0  # written by the saver
    dirty_bytes: int = 0  # of this machine, on their way to a disk or a network storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The loss is not a finite number, or too large, since a step, and still is."""

    good_step: int | None  # the last that was seen with a loss that was fine
    since_step: int
    num_steps: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """No progress for longer than is explained. `rank` is None if that cannot be told from outside."""

    rank: int | None
    stage: Stage
    step: int
    waited_s: float
    limit_s: float
    reason: str


# ---------------------------------------------------------------------------------- server


class ServerState(StrEnum):
    """The provider's word, in ours. UNKNOWN is never taken for gone."""

    RUNNING = "running"
    STOPPING = "stopping"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """
    The rented machine we are in; `price_per_hour` is a decimal text in `currency`, `keeping` what a disk that
    is kept after its stop costs, in the provider's numbers.

    The commands are for a machine that a program of the user's stops; empty for all others.
    """

    provider: str
    id: str
    price_per_hour: str = ""
    currency: str = "EUR"
    rental_ends_at: str = ""
    keeping: str = ""
    stop_command: tuple[str, ...] = ()
    status_command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A machine that can be rented now, as the provider's catalogue has it. `card` is the provider's word for its cards."""

    id: str
    card: str
    name: str
    cards: int
    card_bytes: int  # memory of each
    cpu_cores: int
    ram_bytes: int
    disk_bytes: int
    price_per_hour: Decimal  # of the whole machine
    currency: str = "EUR"
    max_rental_days: int = 0  # 0: not told
    available: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RentedServer:
    """A server of the account, as the provider tells it; `state` in our words, `detail` in theirs."""

    id: str
    state: ServerState
    detail: str
    label: str
    machine: str  # `Offer.id`
    created_at: str
    rental_ends_at: str
    price_per_hour: Decimal
    cost: Decimal  # so far


# -------------------------------------------------------------------------------- observed


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The world, looked at once. Taken fresh on every turn of the loop."""

    now: datetime
    boot_id: str  # of the machine: unsynced bytes do not survive it
    life: str  # of this runner process
    live: Live | None = None
    exit: Exit | None = None  # of the last attempt, as its shim recorded it
    exit_seen_at: datetime | None = None
    end: EndRecord | None = None  # of the last attempt, as its saver recorded it
    diagnosis: Diagnosis | None = None  # of the last attempt, when it ended badly
    progress: Progress = Progress()
    hang: Hang | None = None  # of the live attempt
    divergence: Divergence | None = None  # of the live attempt, where job.yaml has a guard for it
    straggler: str = ""  # which rank holds the others up, and why
    leave_sent_at: datetime | None = None  # the live attempt was asked to save and leave
    terminated: bool = False  # some of it got SIGTERM with that: some trainers save on it
    asked_live: bool = False  # and one of these lives
    unasked: bool = False  # one that would be asked so has come since
    trainers_gone_at: datetime | None = None  # only savers of it are left
    local: tuple[Checkpoint, ...] = ()
    free_bytes: int | None = None  # on the disk of the checkpoints
    log_bytes: int = 0  # what logs take on the disk
    log_error: str = ""  # why nothing of it can be given back
    leftovers: tuple[str, ...] = ()  # half-written folders that nobody is writing
    ready: str = ""  # the newest save of this attempt that a framework calls complete, and nobody writes to
    offsite: tuple[Checkpoint, ...] | None = None  # verified there; None: not known yet
    damaged: tuple[str, ...] = ()  # set aside on this disk
    unusable: frozenset[str] = (
        frozenset()
    )  # names of those that are damaged there, as this life or an earlier one found
    unusable_now: frozenset[str] = frozenset()  # as this life found
    spoilt: frozenset[str] = (
        frozenset()
    )  # names of what is in the store, and no checkpoint: a manifest that makes no sense
    vanished: frozenset[str] = (
        frozenset()
    )  # names of checkpoints that the store had in this life, and nobody here removed
    other_job: str = ""  # how the job that the store has under this name differs from ours
    concluded_elsewhere: Conclusion | None = None  # what the store says of this job
    tasks: Mapping[TaskKind, TaskState] = field(default_factory=dict)
    num_procs: int = 0  # that a launch starts: one a card
    card: str = ""  # their model, as the driver calls it
    global_batch: int = 0  # samples a step, where job.yaml says it
    stored_batch: int = 0  # the same, as the job that the store has says it
    kills: Kills = Kills()  # in this container, so far
    refusal: str = ""  # why this machine cannot do the job at all: too few cards
    wrong_job: str = ""  # why it cannot start here as it is: no value for a secret, no interpreter
    preflight: Preflight | None = None  # what was found so far in this life
    setup_digest: str = ""  # of source and set-up as job.yaml asks for them; empty: it asks for none
    set_up: bool = False  # they are in place on this machine
    data_digest: str = ""  # of the data that job.yaml asks for; empty: it asks for none
    staged: bool = False  # it is on this disk
    lease: Lease = Lease()
    machine: str = ""  # this one, in the ledger
    ledger: tuple[Machine, ...] | None = None  # of the store; None: not known yet
    first_step_at: datetime | None = None  # of the running attempt
    stop_requested: bool = False  # by the operator: the job ends
    leaving: bool = False  # SIGTERM: this boot ends, the job does not
    rented: bool = False
    stop_doubt: str = ""  # why the stop of this server may fail when its time comes
    outputs_stuck: str = ""  # what of them the last copy left, and why, and the next one will; the first one
    only_here: tuple[str, ...] = ()  # files of the run, beside its checkpoints, that no store has; a few of them
    deadline_at: datetime | None = None
    deadline_why: str = ""  # what sets it
    last_save_s: float = (
        0.0  # staged to durable, or what a script took to write its own and we to copy it; in this life
    )
    last_upload_s: float = 0.0

    @property
    def usable(self) -> tuple[Checkpoint, ...]:
        """What the store has and is not known to be damaged there; nothing where it is not known yet."""
        return tuple(c for c in self.offsite or () if c.ref.name not in self.unusable)


# --------------------------------------------------------------------------------- finding


class Severity(StrEnum):
    OK = "ok"
    WARN = "warn"  # goes on, and says so
    REFUSE = "refuse"  # training here would fail


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `message` says what was found, `hint` what to do; `facts` are for decisions."""

    name: str
    severity: Severity
    message: str
    hint: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


class Verdict(StrEnum):
    """What preflight comes to. CHANGES: go, with the environment that it names."""

    GO = "go"
    CHANGES = "changes"
    SWAP = "swap"  # this machine cannot do the job: rent another one
    REFUSE = "refuse"  # no machine can, before something else is mended: the store


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """The checks before the job, and what they come to. `env` is set in every attempt, `reasons` say why."""

    verdict: Verdict
    reasons: tuple[str, ...] = ()  # of a verdict that is not simply `go`
    env: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


class TrialEnding(StrEnum):
    """How one try of the communication test ended."""

    GOOD = "good"
    WRONG = "wrong"  # they talk, and what arrives is not what was sent
    ERROR = "error"
    SILENT = "silent"  # it hangs
    LATE = "late"  # not even torch was there in time: says nothing about the cards


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """
    One try of the communication test: which cards, with which changes, and what came of it.

    `speeds` is (bytes, GB/s of bus bandwidth), the smaller first. `silent`: ranks that stayed behind the others;
    none where all stand at the same place.
    """

    cards: tuple[int, ...]
    ending: TrialEnding
    env: Mapping[str, str] = field(default_factory=dict)
    message: str = ""
    phase: str = ""  # where it ended: import, device, join, reduce, done
    silent: tuple[int, ...] = ()
    speeds: tuple[tuple[int, float], ...] = ()
    num_wrong: int = 0
    devices: tuple[Mapping[str, Any], ...] = ()  # what each rank's torch says of its card
    took_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CardState:
    """One card as `nvidia-smi -q -x` shows it. None and empty: it does not say."""

    index: int
    name: str
    uuid: str = ""
    memory_bytes: int = 0
    used_bytes: int = 0
    processes: tuple[str, ...] = ()
    uncorrected: int = 0  # ECC errors since the driver was loaded
    remap_pending: bool = False
    remap_failed: bool = False
    recovery: str = ""  # what the driver asks for, since something failed: Reset, Reboot, …; newer drivers say
    mig: bool = False
    compute_mode: str = "Default"
    power_limit_w: float | None = None
    power_default_w: float | None = None
    slowdowns: tuple[str, ...] = ()  # what holds the clocks down now, by the hardware
    fabric: FabricState | None = None
    pcie: PcieLink | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CardReport:
    """All cards that training may use. `cuda` is the newest version that this driver can serve."""

    cards: tuple[CardState, ...]
    driver: str = ""
    cuda: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine, or the part of it that the container may use. None: not told."""

    cores: int
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    shared_memory: SharedMemory | None = None
    memlock_bytes: int | None = None  # None: no limit
    open_files: int | None = None  # what a process may raise it to
    num_nodes: int = 1  # NUMA


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRate:
    """A folder that was written to: `rate` is bytes a second, each piece synced."""

    folder: str
    free_bytes: int
    rate: float
    kind: str = ""  # of the file system
    is_volume: bool = True  # False: the container's own layer, which goes with it


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTrial:
    """What the store did with a small object. `rate`: bytes a second of one upload; None: not measured."""

    address: str
    rate: float | None = None
    deletes: bool = True
    is_exclusive: bool = True  # `put_new` refuses what is there
    confirms: str = ""  # what of a large file, in words
    missing_rights: tuple[str, ...] = ()  # that an upload does without, at a price
    skew_s: float = 0.0  # the store's clock less ours


# -------------------------------------------------------------------------------- readings

Pair = tuple[int, int, str]  # two GPU numbers as the driver counts them, the smaller first, and what lies between


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """
    `nvidia-smi topo -m`: every pair of `gpus` is in `pairs`, with its link as printed (NV18, PIX, SYS).

    `hides_nvlink`: the view (-mp) shows PCIe paths only. `doubtful`: pairs told differently from either side.
    """

    gpus: tuple[str, ...]
    pairs: tuple[Pair, ...]
    hides_nvlink: bool = False
    doubtful: tuple[Pair, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAccess:
    """`nvidia-smi topo -p2p`: whether each pair may read the other's memory (OK, NS, CNS, GNS, TNS, DR, U)."""

    gpus: tuple[str, ...]
    pairs: tuple[Pair, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricState:
    """What one card says of its NVLink fabric, as printed; empty where it says nothing."""

    state: str
    status: str = ""
    health: str = ""
    troubles: tuple[str, ...] = ()  # further lines that are not well
    recovering: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The fabric blocks of `nvidia-smi -q`; none on cards that have no fabric."""

    cards: tuple[FabricState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieLink:
    """Generation and width now and at most; None where the table does not say."""

    gen: int | None = None
    width: int | None = None
    gen_max: int | None = None
    width_max: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CardTable:
    """
    `nvidia-smi --query-gpu=… --format=csv`: one entry of `rows` per line that says anything.

    `columns` is empty where the head was left out. `problems` name cards that are lost or want a
    reset; `silent_rows` are lines of errors only.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: tuple[str, ...] = ()
    pcie: tuple[PcieLink, ...] = ()
    problems: tuple[str, ...] = ()
    silent_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """The `/dev/shm` that `df` or `mount` tells of. `need_bytes`: what a program asked for in vain."""

    size_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    need_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """The control group's limit on memory; None is no limit. `host_bytes`: what `free` says of the machine."""

    limit_bytes: int | None
    current_bytes: int | None = None
    host_bytes: int | None = None
    host_text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BusBandwidth:
    """
    One all-reduce measurement, the largest size that was tried, the better of out of place and in place.

    GB/s of 10^9 bytes, as nccl-tests counts; None where the text does not say. `others`: (ranks, busbw).
    """

    ranks: int | None
    size_bytes: int | None
    algbw: float | None
    busbw: float | None
    average: float | None = None  # as printed, over all sizes: never judge by it
    rows_omitted: bool = False  # that average is of more rows than the text has
    models: tuple[str, ...] = ()
    num_wrong: int = 0  # elements with a wrong sum
    others: tuple[tuple[int, float], ...] = ()


class ReadingKind(StrEnum):
    TOPO = "topo"
    P2P = "p2p"
    FABRIC = "fabric"
    QUERY = "query"
    SHM = "shm"  # of /dev/shm and of control groups
    BUSBW = "busbw"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """
    A reading that is cut, damaged or an error message. `gpus` and `pairs` are what could be read.

    `no_cards`: the driver itself says that there is no card to be used.
    """

    kind: ReadingKind
    message: str
    hint: str = ""
    gpus: tuple[str, ...] = ()
    pairs: tuple[Pair, ...] = ()
    no_cards: bool = False


Reading = Topology | PeerAccess | Fabric | CardTable | SharedMemory | MemoryLimit | BusBandwidth | Broken
