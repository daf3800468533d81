"""What the runner can do next: one frozen value an action, and the codes with which it ends."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from runner.errors import (
    GaveUpError,
    JobError,
    LeftError,
    LimitError,
    LockedError,
    MachineError,
    StoppedError,
    StoreError,
)
from runner.facts import Diagnosis, Earlier, Ending, Exit, Outcome, TaskKind
from vramfarm.protocol import Ref

EXIT_CODES = {
    Outcome.SUCCEEDED: 0,
    Outcome.GAVE_UP: GaveUpError.exit_code,
    Outcome.STOPPED: StoppedError.exit_code,
    Outcome.LIMIT: LimitError.exit_code,
    Outcome.REFUSED: MachineError.exit_code,
    Outcome.STORE: StoreError.exit_code,
}
LEFT = LeftError.exit_code
WRONG_JOB = JobError.exit_code
LOCKED = LockedError.exit_code

OTHER_JOB = (
    "give the job another name, or pass --accept-change to go on with the change, and --go-on where the run was over"
)


@dataclass(frozen=True, slots=True)
class Accept:
    """This job is ours from now on."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Start slow work."""

    kind: TaskKind
    subject: str


@dataclass(frozen=True, slots=True)
class Join:
    """This machine goes on with what others did: their attempts, time and money count."""

    machine: str
    earlier: Earlier


@dataclass(frozen=True, slots=True)
class Cease:
    """End slow work that may not go on; it is begun again when it may."""

    kind: TaskKind
    reason: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove what was never committed, or is damaged and in the way."""

    name: str


@dataclass(frozen=True, slots=True)
class Prune:
    """Remove what was committed and is not needed."""

    ref: Ref
    reason: str


@dataclass(frozen=True, slots=True)
class SetAside:
    """Take a checkpoint that must not be used out of sight, for a human."""

    ref: Ref
    reason: str = "its bytes are not what its manifest says"


@dataclass(frozen=True, slots=True)
class Distrust:
    """What this attempt saved from this step on is not to be used."""

    number: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class TrimLogs:
    """Give back what logs take beyond `max_bytes`."""

    max_bytes: int


@dataclass(frozen=True, slots=True)
class Launch:
    number: int
    resume: Ref | None
    lineage: int
    env: Mapping[str, str] = field(default_factory=dict)  # changes that preflight or earlier failures asked for
    origin: str = ""  # the checkpoint of another run that `resume` is a copy of


@dataclass(frozen=True, slots=True)
class RecordExit:
    ending: Ending
    exit: Exit
    step: int
    reason: str
    diagnosis: Diagnosis | None = None


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Ask the attempt to save and leave."""

    reason: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End every process of the attempt now."""

    reason: str
    savers: bool = False
    hung: bool = False  # it is to print its stacks, and triage is to know
    left: bool = False  # of an attempt that has ended, these are left

    @property
    def is_the_end(self) -> bool:
        """Whether training ends by this, and nothing that can be looked at again says why."""
        return not (self.savers or self.hung or self.left)


@dataclass(frozen=True, slots=True)
class Conclude:
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class GoOn:
    """The run was over, and what ended it does not hold any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell a person. `key` is journaled: what it stands for was told then."""

    event: str
    key: str
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The last word to the guardian: stop the server (or not), exit with `code`."""

    code: int
    stop: bool
    keep: bool  # the folder: something is only here
    reason: str


@dataclass(frozen=True, slots=True)
class Leave:
    """End this boot. What is left to do, the next one will find."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do now. `until`: an attempt failed, and the next one may begin then."""

    until: datetime | None = None


Action = (
    Accept
    | Begin
    | Join
    | Cease
    | Discard
    | Prune
    | SetAside
    | Distrust
    | TrimLogs
    | Launch
    | RecordExit
    | Interrupt
    | Kill
    | Conclude
    | GoOn
    | Notify
    | End
    | Leave
    | Wait
)


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing that is decided: what this machine refused to do while an attempt lives. It is tried again."""

    action: Action
    error: str
