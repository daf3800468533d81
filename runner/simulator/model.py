"""
The nouns of the assumed API, as they go over the wire.
"""

from __future__ import annotations

import re
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StringConstraints,
    ValidationInfo,
    model_validator,
)

STORED: Final = "stored"  # the context in which what was once accepted is read back

Country = Annotated[str, StringConstraints(pattern=r"^[A-Z]{2}$")]
Cuda = Annotated[str, StringConstraints(pattern=r"^\d+\.\d+$")]
Label = Annotated[str, StringConstraints(max_length=64, pattern=r"^[A-Za-z0-9._:-]+$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Value = Annotated[str, StringConstraints(max_length=32_768)]


_DECIMAL: Final = re.compile(r"[0-9]+(\.[0-9]{1,4})?")


def _money(value: object) -> object:
    if isinstance(value, Decimal) or (isinstance(value, str) and _DECIMAL.fullmatch(value)):
        return value
    raise ValueError("must be a decimal text such as '2.36'")


Money = Annotated[Decimal, BeforeValidator(_money), Field(ge=0, max_digits=20, decimal_places=4)]


def _whole(value: object) -> object:
    if isinstance(value, bool | str):
        raise ValueError("must be a number")  # noqa: TRY004  # pydantic makes a message of it
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_whole)]
Count = Annotated[Literal[1, 2, 4, 8], BeforeValidator(_whole)]


def _moment(value: object) -> object:
    if isinstance(value, datetime) or (isinstance(value, str) and _RFC3339.fullmatch(value)):
        return value
    raise ValueError("must be a moment such as '2026-01-31T23:59:59Z'")


_RFC3339: Final = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")
Moment = Annotated[datetime, BeforeValidator(_moment)]


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Asked(Wire):
    """What clients send. A field may be left out; null is a value, and only of those named `nullable`."""

    nullable: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _null_is_a_value(cls, fields: Any, info: ValidationInfo) -> Any:  # noqa: ANN401  # JSON
        if info.context != STORED and isinstance(fields, dict):
            nulls = [name for name, value in fields.items() if value is None and name not in cls.nullable]
            if nulls:
                raise ValueError(f"{', '.join(nulls)}: may be left out, and is never null")
        return fields


class State(StrEnum):
    QUEUED = "queued"
    PROVISIONING = "provisioning"
    PULLING = "pulling"
    RUNNING = "running"
    SAVING = "saving"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return self in {State.STOPPED, State.FAILED}


class Policy(StrEnum):
    ALWAYS = "always"
    ON_FAILURE = "on_failure"
    NEVER = "never"


class Machine(Wire):
    id: str
    gpu: str
    gpu_name: str
    count: Count
    vram_gb_per_card: int
    vram_gb: int
    cpu_cores: int
    ram_gb: int
    disk_gb: int
    pcie_gb_s: float
    driver: str
    cuda: Cuda
    country: Country
    max_rental_days: int
    price_per_hour: Money
    currency: Literal["EUR"] = "EUR"
    available: bool = True


class SaveSpec(Asked):
    path: str = Field(max_length=1024, pattern=r"^/[^\x00]*$")
    name: Label | None = None


class IdleSetting(Wire):
    enabled: StrictBool


class RegistryAuth(Wire):
    username: str
    password: str


class ServerCreate(Asked):
    nullable = frozenset({"deadline_save"})

    kind: Literal["docker_image", "pytorch_jupyter"]
    machine_id: str | None = None
    gpu: str | None = None
    count: Count
    image: str | None = Field(default=None, max_length=512)
    args: list[Annotated[str, StringConstraints(max_length=8192)]] = Field(default=[], max_length=256)
    env: dict[Variable, Value] = Field(default={}, max_length=100)
    secrets: dict[Variable, Value] = Field(default={}, max_length=50)
    registry_auth: RegistryAuth | None = None
    rental_days: Whole = Field(ge=1, le=365)
    disk_gb: Whole = Field(ge=10)
    max_price: Money | None = None
    min_ram_gb: Whole | None = Field(default=None, ge=1)
    min_cpu_cores: Whole | None = Field(default=None, ge=1)
    min_pcie_gb_s: Number | None = Field(default=None, gt=0)
    min_cuda: Cuda | None = None
    countries: list[Country] = []
    ssh_public_key: str | None = Field(default=None, max_length=4096)
    restore_save_id: str | None = None
    restart_policy: Policy = Policy.ALWAYS
    idle_detection: IdleSetting | None = None
    deadline_at: Moment | None = None
    deadline_save: SaveSpec | None = None
    label: Label | None = None

    @model_validator(mode="after")
    def _belongs_together(self) -> ServerCreate:
        if not (self.machine_id or self.gpu):
            raise ValueError("needs machine_id or gpu")
        if self.kind == "docker_image" and not self.image:
            raise ValueError("image: needed for docker_image")
        if self.kind != "docker_image" and (self.image or self.args):
            raise ValueError("image, args: only for docker_image")
        if self.deadline_at and "deadline_save" not in self.model_fields_set:
            raise ValueError("deadline_save: needed with deadline_at, an object or null")
        return self


class ServerUpdate(Asked):
    nullable = frozenset({"deadline_at", "deadline_save"})

    label: Label | None = None
    idle_detection: IdleSetting | None = None
    deadline_at: Moment | None = None
    deadline_save: SaveSpec | None = None

    @model_validator(mode="after")
    def _changes_something(self) -> ServerUpdate:
        if not self.model_fields_set:
            raise ValueError("needs a field at least")
        return self


class StopRequest(Asked):
    nullable = frozenset({"save"})

    save: SaveSpec | None
    on_save_failure: Literal["keep_running", "stop_anyway"] = "keep_running"
    grace_seconds: Whole = Field(default=30, ge=0, le=300)
    reason: Literal["user_request", "self_request", "job_succeeded", "job_failed"] = "user_request"


class Container(Wire):
    state: Literal["none", "running", "exited"] = "none"
    restart_count: int = 0
    exit_code: int | None = None
    started_at: datetime | None = None
    exited_at: datetime | None = None


class Idle(Wire):
    enabled: bool = False
    idle_since: datetime | None = None
    email_sent_at: datetime | None = None
    stops_at: datetime | None = None


class Billing(Wire):
    price_per_hour: Money
    currency: Literal["EUR"] = "EUR"
    minimum_minutes: Literal[15] = 15
    started_at: datetime | None = None
    ended_at: datetime | None = None
    billed_minutes: int = 0
    cost: Money = Decimal("0.0000")


class Save(Wire):
    id: str
    server_id: str
    path: str
    name: str | None
    state: Literal["running", "complete", "failed"] = "running"
    bytes: int = 0
    files: int = 0
    created_at: datetime
    completed_at: datetime | None = None
    error: str | None = None


class Server(Wire):
    id: str
    kind: str
    state: State
    state_reason: str | None = None
    state_changed_at: datetime
    created_at: datetime
    machine: Machine
    count: Count
    image: str | None
    args: list[str]
    env: dict[str, str]
    label: str | None
    disk_gb: int
    rental_days: int
    rental_ends_at: datetime | None
    restart_policy: Policy
    container: Container = Container()
    idle_detection: Idle = Idle()
    deadline_at: datetime | None = None
    billing: Billing
    save: Save | None = None
    actions: list[str] = []


class Activity(Asked):
    gpu_util_percent: Number | None = Field(default=None, ge=0, le=100)
    ssh_connections: Whole | None = Field(default=None, ge=0)
    jupyter_connections: Whole | None = Field(default=None, ge=0)
    exit_code: Whole | None = Field(default=None, ge=0, le=255)


class Stopping(BaseModel):
    """A stop under way, and how far its container was pushed."""

    wish: StopRequest
    reason: str
    term_at: datetime | None = None


class Rented(BaseModel):
    """A server with what the API does not show."""

    server: Server
    key: str
    secrets: dict[str, str] = {}
    restore_save_id: str | None = None
    deadline_save: SaveSpec | None = None
    stop: Stopping | None = None
    activity: Activity = Activity()


class Event(Wire):
    id: str
    type: str
    server_id: str
    at: datetime
    data: dict[str, Any]


class Email(Wire):
    at: datetime
    kind: str
    server_id: str
    subject: str


class Fault(Asked):
    operation: str
    kind: Literal["status", "timeout", "reset", "drop_after_commit", "html_body", "slow"]
    status: Whole = Field(default=503, ge=400, le=599)
    times: Whole = Field(default=1, ge=1)
    retry_after: Whole | None = Field(default=None, ge=0)
    delay_ms: Whole = Field(default=0, ge=0, le=120_000)


class Faults(Wire):
    faults: list[Fault]


class Advance(Wire):
    advance_seconds: Whole = Field(ge=0, le=31_536_000)
