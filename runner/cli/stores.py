"""A run in the store, for commands that look into it from anywhere. Its libraries are imported late: they are slow."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from runner.adapters.secrets import with_store_keys
from runner.addresses import is_doubled, split_address
from runner.errors import JobError, StoreError

if TYPE_CHECKING:
    from runner.job import Job
    from runner.storage.offsite import Abilities, Store
    from runner.storage.offsite.contract import Where

_MARKS: Final = ("status.json", "ledger.json", "job.json")


@dataclass(frozen=True, slots=True)
class Address:
    """
    `STORE/JOB`, or `STORE/JOB/checkpoints/step-…`, and how that store is reached: as a job.yaml says, else as
    the environment and the AWS configuration files do, for whatever it leaves open.
    """

    text: str
    offload: Where | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run in a store, and a checkpoint's name if the address named one."""

    store: Store
    job: str
    checkpoint: str = ""

    def means(self, name: str) -> bool:
        return self.checkpoint in {"", name}

    def is_there(self) -> bool:
        """Whether a runner has written anything of it."""
        return any(self.store.head(f"{self.job}/{name}") for name in _MARKS)


def address_of(job: Job) -> Address:
    """Where a job's run is in its store; it has one."""
    return Address(f"{job.offload.to}/{job.name}", job.offload)


def open_run(address: Address, abilities: Abilities | None = None) -> StoredRun:
    """Nothing is asked of the store yet. `abilities`: of the store, where they are known."""
    try:
        where, job, checkpoint = split_address(address.text)
    except ValueError:
        raise JobError(
            f"{address}: expected the run in its store: s3://bucket/prefix/NAME or file:///folder/NAME",
            hint="write one / where there are several" if is_doubled(address.text) else "",
        ) from None
    return StoredRun(store=_open(where, address.offload, abilities), job=job, checkpoint=checkpoint)


def read_object(address: str, limit_bytes: int) -> bytes:
    """One object, by its whole address: s3://bucket/path/job.yaml."""
    folder, _, name = address.rpartition("/")
    if folder in {"s3:/", "s3:", "file:/"} or not name:
        raise JobError(f"{address}: expected s3://bucket/path/job.yaml")
    found = _open(folder).get(name, limit_bytes=limit_bytes)
    if found is None:
        raise JobError(f"{address}: expected an object, found none")
    return found


def no_run(address: Address) -> StoreError:
    """Nothing that a runner writes is there: one word and one exit code for whoever asks for a run."""
    is_folder = str(address).rstrip("/").endswith("/checkpoints")
    hint = "leave /checkpoints out: the run is STORE/NAME" if is_folder else "is its name right? STORE/NAME of the job"
    return StoreError(f"{address}: expected a run, found none", hint=hint)


def read_small(address: Address, name: str) -> bytes:
    """A small file of the run."""
    run = open_run(address)
    found = run.store.get(f"{run.job}/{name}")
    if found is None:
        raise StoreError(
            f"{address}: no {name} there",
            hint="the runner writes it with its first copy; is the name of the run right?",
        )
    return found


def _open(where: str, offload: Where | None = None, abilities: Abilities | None = None) -> Store:
    from runner.storage.offsite import dump_place, open_store, parse_place  # noqa: PLC0415  # slow

    place = parse_place({**(dump_place(offload) if offload else {}), "to": where})
    return open_store(place, with_store_keys(os.environ), abilities)
