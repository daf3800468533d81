"""
The job as the user wrote it, parsed once and never changed.

The fields' descriptions are the reference: `docs/job-yaml.md` is generated from them.
Reading YAML, with line numbers for messages, is `runner/cli/load.py`; nothing below `cli`
sees a `dict` from the user.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, TypeVar
from zoneinfo import ZoneInfo

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from runner.addresses import is_doubled, is_store, local_path, split_address

# ------------------------------------------------------------------- durations, sizes, money

_Amount = TypeVar("_Amount", timedelta, Decimal)

_DURATION_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_SIZE_UNITS = {"B": 1, "kB": 1000} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT")
}
_SIZE = r"(\d+(?:\.\d+)?)\s*(k?B|[KMGT]i?B)(?:/s)?"
_PLACEHOLDER_OF_FOLDER = re.compile(r"\{(?:config_dir|workspace)\}")
_LONGEST = timedelta(days=3650)
_SMALLEST = 1000  # bytes
_MOST_KEPT = 10_000  # checkpoints; their list is read at every save
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)(ms|s|m|h|d))+")


def parse_duration(value: object) -> timedelta:
    """`90s`, `30m`, `1h30m`, `2d`. A bare number is refused: nobody knows its unit."""
    if isinstance(value, timedelta):
        return value
    text = str(value).replace(" ", "")
    if not isinstance(value, str) or not _DURATION.fullmatch(text):
        raise ValueError(f"must be a duration such as 90s, 30m or 1h30m, got {value!r}")
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", text)
    seconds = sum(float(n) * _DURATION_UNITS[unit] for n, unit in parts)
    if seconds > _LONGEST.total_seconds():
        raise ValueError(f"must be a duration of at most {_LONGEST.days}d, got {value!r}")
    return timedelta(seconds=seconds)


def format_duration(value: timedelta) -> str:
    """As job.yaml writes it; `parse_duration` gives the duration back, to the millisecond."""
    left = round(value.total_seconds() * 1000)
    parts = []
    for unit in ("d", "h", "m", "s", "ms"):
        count, left = divmod(left, round(_DURATION_UNITS[unit] * 1000))
        parts += [f"{count}{unit}"] if count else []
    return "".join(parts) or "0s"


def parse_size(value: object) -> int:
    """`64MiB`, `10GB`, `50MB/s`. A bare number is refused, as for a duration: nobody knows its unit."""
    match = re.fullmatch(_SIZE, value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"must be a size with its unit such as 64MiB or 10GB, got {value!r}")
    return int(Decimal(match[1]) * _SIZE_UNITS[match[2]])


def format_size(value: int) -> str:
    """As job.yaml writes it; `parse_size` gives the size back, to the byte."""
    whole = (unit for unit in sorted(_SIZE_UNITS, key=_SIZE_UNITS.__getitem__) if value % _SIZE_UNITS[unit] == 0)
    *_, largest = whole if value else ("B",)
    return f"{value // _SIZE_UNITS[largest]}{largest}"


def parse_money(value: object) -> Decimal:
    amount = Decimal(-1)
    if isinstance(value, int | float | str | Decimal) and not isinstance(value, bool):
        with suppress(InvalidOperation):
            amount = Decimal(str(value))
    if not amount.is_finite() or amount < 0:
        raise ValueError(f"must be an amount of money such as 300 or 12.50, got {value!r}")
    return amount


def _more_than_nothing(value: _Amount) -> _Amount:
    if not value:
        raise ValueError(f"must be more than 0, got {value}")
    return value


def _some_bytes(value: int | None) -> int | None:
    """Nobody means fifty bytes: who writes 50B has another unit in mind."""
    if value is not None and value < _SMALLEST:
        raise ValueError(f"must be at least 1KB, got {value}")
    return value


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


Duration = Annotated[
    timedelta,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": r"^(\d+(\.\d+)?(ms|s|m|h|d))+$", "x-kind": "duration"}),
]
Size = Annotated[
    int,
    BeforeValidator(parse_size),
    PlainSerializer(format_size, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": rf"^{_SIZE.replace('(?:', '(')}$", "x-kind": "size"}),
]
Money = Annotated[
    Decimal,
    BeforeValidator(parse_money),
    WithJsonSchema({"type": ["number", "string"], "x-kind": "money"}),
]
SomeSize = Annotated[Size, AfterValidator(_some_bytes)]
SomeTime = Annotated[Duration, AfterValidator(_more_than_nothing)]
SomeMoney = Annotated[Money, AfterValidator(_more_than_nothing)]
Texts = Annotated[
    tuple[str, ...],
    BeforeValidator(_listed),
    WithJsonSchema({"type": ["array", "string"], "items": {"type": "string"}, "x-kind": "text, or a list of texts"}),
]
SecretName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


# -------------------------------------------------------------------------------- choices


class LauncherName(StrEnum):
    TORCHRUN = "torchrun"
    ACCELERATE = "accelerate"
    DEEPSPEED = "deepspeed"
    AXOLOTL = "axolotl"
    LLAMAFACTORY = "llamafactory"
    TORCHTUNE = "torchtune"
    COMMAND = "command"


class FrameworkName(StrEnum):
    AUTO = "auto"
    VRAMFARM = "vramfarm"
    HF_TRAINER = "hf_trainer"
    LIGHTNING = "lightning"
    DEEPSPEED = "deepspeed"
    TORCHTUNE = "torchtune"
    DCP = "dcp"
    TORCH_SAVE = "torch_save"
    NONE = "none"


class ProviderName(StrEnum):
    AUTO = "auto"
    VRAMFARM = "vramfarm"
    RUNPOD = "runpod"
    VAST = "vast"
    DOCKER = "docker"
    COMMAND = "command"
    NONE = "none"


class AtEnd(StrEnum):
    STOP = "stop"
    KEEP = "keep"


class OnLimit(StrEnum):
    KEEP_DATA = "keep_data"
    STOP_ANYWAY = "stop_anyway"


# -------------------------------------------------------------------------------- sections


def without_password(address: str) -> str:
    """An address as it may be written down and shown: without who logs in there, and how."""
    return re.sub(r"\b(https?://)[^/?#\s]*@", r"\1", address)


class GitSource(Model):
    git: str = Field(description="Address of the git repository.")
    ref: str = Field(default="HEAD", description="Branch, tag or commit.")


class PathSource(Model):
    path: str = Field(description="A folder, relative to job.yaml. `submit` packs and uploads it.")


class ArchiveSource(Model):
    archive: str = Field(
        description="A `.tar`, `.tar.gz`, `.tar.zst` or `.zip` file: its path, or an https:// or s3:// address; what comes from a store is compared with the checksum that it reports."
    )


def _kind_of_source(value: object) -> str | None:
    """Which kind a `source` means to be, so that a message speaks of that kind only."""
    if isinstance(value, Model):
        return type(value).__name__
    kinds = {"git": "GitSource", "path": "PathSource", "archive": "ArchiveSource"}
    return next((kinds[key] for key in kinds if isinstance(value, Mapping) and key in value), None)


Source = Annotated[
    Annotated[GitSource, Tag("GitSource")]
    | Annotated[PathSource, Tag("PathSource")]
    | Annotated[ArchiveSource, Tag("ArchiveSource")],
    Discriminator(
        _kind_of_source,
        custom_error_type="source_kind",
        custom_error_message="must have one of git, path, archive",
    ),
]


class DataItem(Model):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    source: str = Field(alias="from", description="Folder or file in a store: an s3:// or file:// address.")
    to: str = Field(description="Where to put it on this machine: a folder, or the name of the file.")

    @field_validator("source")
    @classmethod
    def _in_a_store(cls, value: str) -> str:
        if is_store(_PLACEHOLDER_OF_FOLDER.sub("/_", value, count=1)):
            return value
        raise ValueError(f"must be s3://bucket/path or file:///path, got {value!r}")


class ModelSize(Model):
    parameters: float = Field(ge=1, le=1e15, description="Number of parameters, such as 8e9.")
    strategy: Literal["ddp", "zero1", "zero2", "zero3", "fsdp_shard_grad_op", "fsdp_full_shard", "lora", "qlora"] = (
        Field(default="ddp", description="How the model is split over the cards.")
    )
    optimizer: Literal["adamw", "adamw_8bit", "sgd", "adafactor"] = Field(default="adamw", description="Optimizer.")
    precision: Literal["fp32", "bf16", "fp16"] = Field(default="bf16", description="Precision of the weights.")
    sequence: int = Field(default=2048, gt=0, le=10**8, description="Tokens per sample.")
    layers: int | None = Field(
        default=None, gt=0, le=10**4, description="Number of layers. Unset: estimated from the parameters."
    )
    hidden: int | None = Field(
        default=None, gt=0, le=10**6, description="Width of a layer. Unset: estimated from the parameters."
    )
    activation_checkpointing: bool = Field(default=True, description="Activations are recomputed, not kept.")
    cpu_offload: bool = Field(default=False, description="Optimizer states are kept in system memory.")


class Batch(Model):
    global_: int = Field(
        gt=0,
        alias="global",
        description="Samples per optimizer step on all cards together: per_card x cards x accumulation.",
    )
    per_card: int = Field(gt=0, description="Samples that a card processes at once (the micro-batch).")

    @model_validator(mode="after")
    def _can_be_split(self) -> Batch:
        refuse_uneven(self, 1)
        return self

    def largest_per_card(self, cards: int) -> int | None:
        """The largest `per_card`, not above the wished one, that keeps `global` on so many cards; None: there is none."""
        most = min(self.per_card, self.global_ // cards)
        return next((n for n in range(most, 0, -1) if self.global_ % (n * cards) == 0), None)


def refuse_uneven(batch: Batch, cards: int) -> None:
    """`ValueError` where `global` is not per_card x cards x a whole number."""
    if batch.global_ % (batch.per_card * cards) == 0:
        return
    unit = f"per_card {batch.per_card}" + (f" x cards {cards}" if cards > 1 else "")
    smaller = batch.largest_per_card(cards)
    cure = f"per_card {smaller} keeps it" if smaller else f"no per_card keeps it on {cards} cards"
    raise ValueError(f"global {batch.global_} is not a multiple of {unit}; {cure}")


class CheckpointPolicy(Model):
    dir: str = Field(
        default="{workspace}/{name}/checkpoints",
        description="Folder of the checkpoints. Its parent is the run folder, with journal, logs and evidence.",
    )
    watch: str = Field(
        default="{workspace}/{name}/saves",
        description="Folder that a framework with its own saves writes to (`framework`). `{checkpoint_dir}` in `command` is then this folder.",
    )
    resume_flag: str = Field(
        default="auto",
        description="Flag that `{resume_args}` puts before the checkpoint's path. `auto`: the flag that the framework's scripts use. If it ends with `=`, as `--load=`, flag and path are one word.",
    )
    save_interval: SomeTime = Field(default=timedelta(minutes=30), description="Wall-clock time between saves.")
    keep_last: int = Field(
        default=2,
        ge=2,
        le=_MOST_KEPT,
        description="How many checkpoints stay on this disk. One is not enough: the newest may be damaged.",
    )
    resume: str = Field(
        default="auto",
        description="`auto`: resume from the newest checkpoint that verifies. `never`: start over. Or where this run begins while it has no checkpoint of its own: a checkpoint of another run (a folder, or `s3://bucket/runs/NAME/checkpoints/step-…`), or another run's newest (its folder, or `s3://bucket/runs/NAME`).",
    )
    staging: Literal["auto", "full", "chunked"] = Field(
        default="auto",
        description="Memory for a save. `full`: one copy of the state; training does not wait for the disk. `chunked`: 32 MB per rank; training waits while the checkpoint is written. `auto`: full if there is enough memory.",
    )

    @field_validator("resume")
    @classmethod
    def _a_place(cls, value: str) -> str:
        place = _PLACEHOLDER_OF_FOLDER.sub("/_", value, count=1)
        if "://" in value:
            split_address(place)
        elif not value:
            raise ValueError("must be auto, never, a folder or an address, got nothing")
        return value if value == "/" else value.rstrip("/")


class OffloadPolicy(Model):
    to: str | None = Field(
        default=None, description="`s3://bucket/prefix` or `file:///folder`. Unset: checkpoints stay on this disk."
    )
    endpoint: str | None = Field(default=None, description="Address of an S3 server that is not AWS.")
    region: str | None = Field(default=None, description="Region of the bucket. Most servers other than AWS ignore it.")
    addressing: Literal["auto", "path", "virtual"] = Field(
        default="auto",
        description="Whether a request names the bucket in the path or in the host name. `auto`: in the path, if there is an endpoint.",
    )
    keep_last: int = Field(default=2, ge=1, le=_MOST_KEPT, description="How many checkpoints stay in the store.")
    max_bandwidth: SomeSize | None = Field(
        default=None, description="Upload limit in bytes per second, such as 50MB. Unset: no limit."
    )
    outlives_server: bool = Field(
        default=False,
        description="For a `file://` folder on the same disk as the run: says that this disk stays when the server is gone (a network volume).",
    )

    @field_validator("to")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if is_store(_PLACEHOLDER_OF_FOLDER.sub("/_", value, count=1)) and not is_doubled(value):
            return value.rstrip("/")
        raise ValueError(f"must be s3://bucket/prefix or file:///folder, got {value!r}")

    @field_validator("endpoint")
    @classmethod
    def _a_server(cls, value: str | None) -> str | None:
        if not value or re.fullmatch(r"(?i:https?)://[^/?#\s]\S*", value):
            return value
        raise ValueError(
            "expected http:// or https:// and a host, found no such address"
        )  # which may have a password in it

    @field_validator("region")
    @classmethod
    def _one_word(cls, value: str | None) -> str | None:
        if not value or re.fullmatch(r"[A-Za-z0-9._-]+", value):
            return value
        raise ValueError(f"must be one word such as eu-central-1, got {value!r}")


class PreflightPolicy(Model):
    comm_test: bool = Field(default=True, description="Test communication between the cards before the job begins.")
    min_bus_bandwidth: Literal["auto"] | Size = Field(
        default="auto", description="Lowest acceptable bus bandwidth in the communication test, in bytes per second."
    )


class RestartPolicy(Model):
    max_restarts_without_progress: int = Field(
        default=3,
        ge=1,
        description="The run is given up after so many failed attempts in a row without a new checkpoint.",
    )
    initial_delay: Duration = Field(default=timedelta(seconds=10), description="Wait before the first restart.")
    backoff_coefficient: float = Field(
        default=2.0, ge=1, le=100, description="Each further wait is longer by this factor."
    )
    max_delay: Duration = Field(default=timedelta(minutes=5), description="Longest wait.")
    grace_period: Duration = Field(
        default=timedelta(minutes=2), description="How long an interrupted attempt may take to save and leave."
    )


class HangPolicy(Model):
    startup_timeout: SomeTime = Field(default=timedelta(minutes=30), description="Longest time until the first step.")
    step_timeout: Literal["auto"] | SomeTime = Field(
        default="auto", description="Longest time for a step. `auto`: learned from the run."
    )
    checkpoint_timeout: Literal["auto"] | SomeTime = Field(
        default="auto", description="Longest time for a save. `auto`: learned from the run."
    )
    safety_factor: float = Field(default=5.0, ge=1, description="Learned times are multiplied by this factor.")


class GuardPolicy(Model):
    nan_patience: int = Field(
        default=0,
        ge=0,
        description="The run is given up after so many steps in a row whose loss is not a finite number. The last checkpoint from before is kept. 0: never.",
    )
    divergence_threshold: float | None = Field(
        default=None, gt=0, description="With `nan_patience`: a loss above this value counts, too."
    )

    @model_validator(mode="after")
    def _patience_is_set(self) -> GuardPolicy:
        if self.divergence_threshold is not None and not self.nan_patience:
            raise ValueError(
                "divergence_threshold needs nan_patience: after how many steps above it the run is given up"
            )
        return self


class Limits(Model):
    max_duration: SomeTime | None = Field(
        default=None,
        description="Time limit for the whole run, all machines together, by the ledger in the store. Unset: 24h per machine.",
    )
    until: str | None = Field(
        default=None,
        description="Point in time at which the run ends: a clock time with a zone, such as `07:00 Europe/Berlin`, or an ISO date and time (UTC if it names no zone).",
    )
    max_cost: SomeMoney | None = Field(
        default=None,
        description="Cost limit for the whole run, all machines together, in the provider's currency. It is counted as the provider bills: VRAMfarm whole minutes, at least fifteen per server; others the seconds used.",
    )
    on_limit: OnLimit = Field(
        default=OnLimit.KEEP_DATA,
        description="`keep_data`: data that is only on this machine is saved first. `stop_anyway`: the server never runs a minute longer.",
    )

    @field_validator("until")
    @classmethod
    def _a_time(cls, value: str | None) -> str | None:
        if value is None or _is_time(value):
            return value
        raise ValueError(
            f"must be a clock time with a zone such as 07:00 Europe/Berlin, or an ISO date and time such as 2026-12-01T07:00+01:00, got {value!r}"
        )


def _is_time(text: str) -> bool:
    clock = re.fullmatch(r"(?:[01]?\d|2[0-3]):[0-5]\d (\S+)", text)
    try:
        if clock:
            ZoneInfo(clock[1])
            return True
        datetime.fromisoformat(text)
    except (ValueError, OSError, KeyError):  # ZoneInfoNotFoundError is a KeyError
        return False
    return "T" in text or "-" in text


class LogPolicy(Model):
    max_size: SomeSize = Field(
        default=4 << 30,
        description="Most space that logs may take on this disk, all attempts together. Beyond it, the middle of the largest log is removed.",
    )


class FinishPolicy(Model):
    on_success: AtEnd = Field(
        default=AtEnd.STOP, description="What happens to the server after a success: `stop` or `keep`."
    )
    on_failure: AtEnd = Field(
        default=AtEnd.STOP, description="What happens to the server after a failure: `stop` or `keep`."
    )
    hold: Literal["auto"] | Duration = Field(
        default="auto",
        description="How long to keep the server after an early end, so that you can look at it. `auto`: until the minutes that are paid anyway are used up (VRAMfarm: 15); not at all with other providers.",
    )
    save_folder: str = Field(
        default="{workspace}", description="Folder that the provider keeps if data is only on this machine."
    )


class ProviderPolicy(Model):
    kind: ProviderName = Field(
        default=ProviderName.AUTO, description="Who rents the server out. `auto`: found out from the environment."
    )
    max_machines: int = Field(default=3, ge=1, description="For `submit`: how many machines it may try.")
    gpu: str | None = Field(
        default=None, description="For `submit`: the card, by the provider's name for it, such as h100."
    )
    max_price: SomeMoney | None = Field(
        default=None, description="For `submit`: highest price per hour for the whole machine."
    )
    image: str = Field(default="vramfarm/runner", description="For `submit`: the image that the server starts.")
    stop_command: Texts = Field(
        default=(),
        description="With `kind: command`: the program that stops this server, as a list of words. Exit code 0 means that the stop was requested. The program is called again until the server is gone. `RUNNER_STOP_COMMAND` in the environment does the same even if job.yaml cannot be read.",
    )
    status_command: Texts = Field(
        default=(),
        description="With `kind: command`: a harmless program that prints `running`, `stopping` or `gone`. Without it the runner cannot know that the server is gone.",
    )

    @model_validator(mode="after")
    def _has_its_command(self) -> ProviderPolicy:
        if (self.kind is ProviderName.COMMAND) == bool(self.stop_command):
            return self
        raise ValueError(
            "stop_command goes with kind: command, and kind: command needs one (or RUNNER_STOP_COMMAND and kind: auto)"
        )


# ------------------------------------------------------------------------------------- job


class Job(Model):
    """One job. Everything but `command` has a sensible default."""

    name: str = Field(
        default="job",
        description="Name of the run, of its folder, and of its prefix and lease in the store. A second machine that starts a run of the same name ends with exit code 5. Use `{date}` for nightly runs.",
    )
    command: str = Field(
        min_length=1,
        description="The training script and its arguments. `{resume_args}`, `{checkpoint_dir}`, `{grad_accum}` and `{world_size}` are filled in at each start.",
    )
    launcher: LauncherName = Field(
        default=LauncherName.TORCHRUN, description="Program that starts one process per card."
    )
    framework: FrameworkName = Field(default=FrameworkName.AUTO, description="What writes the checkpoints.")
    cards: Literal["all"] | int = Field(default="all", description="How many cards to use.")
    cpu_processes: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Number of processes to start if the machine has no card at all. 0: a machine without a card is refused.",
    )
    workdir: str | None = Field(
        default=None,
        description="Folder in which the command runs. Unset: the source's folder, else the folder of job.yaml.",
    )
    source: Source | None = Field(default=None, description="Where the code comes from. Unset: it is already here.")
    setup: Texts = Field(
        default=(), description="Shell commands that run once per source, in the training environment."
    )
    setup_timeout: SomeTime = Field(default=timedelta(minutes=30), description="Time limit for one setup command.")
    data: tuple[DataItem, ...] = Field(default=(), description="Data to fetch before training.")
    outputs: Texts = Field(
        default=(), description="Folders that are copied to the store during training and at the end."
    )
    env: Mapping[str, str] = Field(default_factory=dict, description="Environment of the training command.")
    secrets: tuple[SecretName, ...] = Field(
        default=(),
        description="Names of secrets for the training command. Their values come from the environment or /run/secrets.",
    )
    model: ModelSize | None = Field(
        default=None,
        description="Size and layout of the model, from which `preflight` and `plan` estimate memory and cost.",
    )
    batch: Batch | None = Field(
        default=None,
        description="Keeps the global batch the same on any number of cards. Gradient accumulation is computed at each start, exported as VRAMFARM_GRAD_ACCUM, and filled in for `{grad_accum}`.",
    )
    checkpoint: CheckpointPolicy = Field(default=CheckpointPolicy(), description="Saving and resuming.")
    offload: OffloadPolicy = Field(default=OffloadPolicy(), description="Copies of checkpoints off this machine.")
    preflight: PreflightPolicy = Field(default=PreflightPolicy(), description="Checks of the machine before the job.")
    restart: RestartPolicy = Field(default=RestartPolicy(), description="What happens after a failed attempt.")
    hang: HangPolicy = Field(
        default=HangPolicy(), description="How long training may be silent before it counts as hung."
    )
    logs: LogPolicy = Field(default=LogPolicy(), description="Output of ranks and launcher.")
    guard: GuardPolicy = Field(default=GuardPolicy(), description="When to give up a run whose loss goes wrong.")
    limits: Limits = Field(default=Limits(), description="Limits of time and money.")
    finish: FinishPolicy = Field(default=FinishPolicy(), description="What happens to the server at the end.")
    provider: ProviderPolicy = Field(default=ProviderPolicy(), description="Who rents the server out.")
    python: str = Field(
        default="auto",
        description="The training interpreter, or a virtual environment. `auto`: `python3` on PATH, or else the supervisor's own interpreter; the first of them that has torch.",
    )
    notify: tuple[SecretName, ...] = Field(
        default=(),
        description="Names of secrets that hold addresses for messages. An https:// address gets a JSON object; other addresses are apprise's (`pip install 'vramfarm-runner[notify]'`). See docs/notifications.md.",
    )

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", value.replace("{date}", "0")) is None:
            raise ValueError(
                f"must begin with a letter or a digit, then letters, digits, '.', '_' and '-', at most 63, got {value!r}"
            )
        return value

    @field_validator("env")
    @classmethod
    def _can_be_set(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for name, text in value.items():
            if not name or "=" in name or "\0" in name:
                raise ValueError(f"must have names without '=' (write NAME: value); not so: {name!r}")
            if "\0" in text:
                raise ValueError(f"must have values without a zero byte, not so: {name}")
        return value

    @field_validator("cards")
    @classmethod
    def _some_cards(cls, value: str | int) -> str | int:
        if isinstance(value, int) and not 1 <= value <= 64:  # noqa: PLR2004  # ranks on one machine
            raise ValueError(f"must be all, or 1 to 64, got {value}")
        return value

    @field_validator("outputs")
    @classmethod
    def _told_apart(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = [PurePosixPath(folder).name for folder in value]
        twice = sorted({name for name in names if names.count(name) > 1 or not name})
        if twice:
            raise ValueError(
                f"must have folders of different names, which they keep in the store; not so: {', '.join(twice) or '/'}"
            )
        return value

    @field_validator("batch")
    @classmethod
    def _even(cls, value: Batch | None, info: ValidationInfo) -> Batch | None:
        cards = info.data.get("cards")
        if value is not None and isinstance(cards, int):
            refuse_uneven(value, cards)
        return value

    @model_validator(mode="before")
    @classmethod
    def _no_nulls(cls, data: Any) -> Any:  # noqa: ANN401  # pydantic hands over whatever came
        """An empty section (`offload:` with nothing under it) means its defaults."""
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if v is not None or k == "command"}

    def without_passwords(self) -> Job:
        """The same job as it may be written down: whoever reads that does not log in anywhere with it."""
        source = self.source
        if isinstance(source, GitSource):
            source = source.model_copy(update={"git": without_password(source.git)})
        elif isinstance(source, ArchiveSource):
            source = source.model_copy(update={"archive": without_password(source.archive)})
        endpoint = None if self.offload.endpoint is None else without_password(self.offload.endpoint)
        offload = self.offload.model_copy(update={"endpoint": endpoint})
        return self.model_copy(update={"source": source, "offload": offload})

    @property
    def checkpoint_dir(self) -> PurePosixPath:
        return PurePosixPath(self.checkpoint.dir)

    @property
    def run_dir(self) -> PurePosixPath:
        """The run folder. Placeholders are filled in by `fill`, before anything uses it."""
        return self.checkpoint_dir.parent

    def fill(self, *, workspace: str, date: str, config_dir: str = "") -> Job:
        """
        The same job with `{workspace}`, `{name}`, `{date}` and `{config_dir}` put in everywhere they may stand.

        `{config_dir}` is the folder of job.yaml; relative folders start there, but for `workdir`,
        which starts in the source's folder where there is one.
        """
        name = self.name.replace("{date}", date)
        known = {"{workspace}": workspace, "{name}": name, "{date}": date, "{config_dir}": config_dir}

        def put(text: str) -> str:
            return re.sub("|".join(map(re.escape, known)), lambda match: known[match[0]], text)

        def folder(text: str) -> str:
            return posixpath.normpath(posixpath.join(config_dir, put(text)))

        def address(text: str) -> str:
            filled = put(text)
            path = local_path(filled)
            return f"file://{posixpath.normpath(path)}" if path else filled

        def place(text: str) -> str:
            return text if text in {"auto", "never"} else address(text) if "://" in text else folder(text)

        source = self.source
        if isinstance(source, PathSource):
            source = source.model_copy(update={"path": folder(source.path)})
        elif isinstance(source, ArchiveSource) and "://" not in source.archive:
            source = source.model_copy(update={"archive": folder(source.archive)})
        return self.model_copy(
            update={
                "name": name,
                "command": put(self.command),
                "setup": tuple(map(put, self.setup)),
                "workdir": None if self.workdir is None else posixpath.normpath(put(self.workdir)),
                "source": source,
                "data": tuple(
                    item.model_copy(
                        update={
                            "source": address(item.source),
                            "to": folder(item.to) + ("/" if item.to.endswith("/") else ""),
                        }
                    )
                    for item in self.data
                ),
                "outputs": tuple(map(folder, self.outputs)),
                "env": {k: put(v) for k, v in self.env.items()},
                "checkpoint": self.checkpoint.model_copy(
                    update={
                        "dir": folder(self.checkpoint.dir),
                        "watch": folder(self.checkpoint.watch),
                        "resume": place(self.checkpoint.resume),
                    }
                ),
                "offload": self.offload.model_copy(
                    update={"to": None if self.offload.to is None else address(self.offload.to)}
                ),
                "finish": self.finish.model_copy(update={"save_folder": folder(self.finish.save_folder)}),
            }
        )
