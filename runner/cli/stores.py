"""A run in the store, for commands that look into it from anywhere. Its libraries are imported late: they are slow."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.errors import JobError, StoreError
from runner.job import OffloadPolicy, split_address

if TYPE_CHECKING:
    from runner.storage.offsite import Abilities, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run in a store, and a checkpoint's name if the address named one."""

    store: Store
    job: str
    checkpoint: str = ""


def is_address(text: str) -> bool:
    return text.startswith(("s3://", "file://"))


def open_run(address: str, abilities: Abilities | None = None) -> StoredRun:
    """
    Open `STORE/JOB`, or `STORE/JOB/checkpoints/step-…`; nothing is asked of the store yet. `abilities`: of the
    store, where they are known.

    Credentials, and the server if it is not AWS, come from the environment: AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL.
    """
    from runner.storage.offsite import open_store  # noqa: PLC0415  # slow

    try:
        where, job, checkpoint = split_address(address)
    except ValueError:
        raise JobError(
            f"{address}: expected the run in its store: s3://bucket/prefix/NAME or file:///folder/NAME"
        ) from None
    offload = OffloadPolicy(to=where, endpoint=os.environ.get("AWS_ENDPOINT_URL"))
    return StoredRun(store=open_store(offload, os.environ, abilities), job=job, checkpoint=checkpoint)


def read_object(address: str, limit_bytes: int) -> bytes:
    """One object, by its whole address: s3://bucket/path/job.yaml."""
    from runner.storage.offsite import open_store  # noqa: PLC0415  # slow

    folder, _, name = address.rpartition("/")
    if folder in {"s3:/", "s3:", "file:/"} or not name:
        raise JobError(f"{address}: expected s3://bucket/path/job.yaml")
    offload = OffloadPolicy(to=folder, endpoint=os.environ.get("AWS_ENDPOINT_URL"))
    found = open_store(offload, os.environ).get(name, limit_bytes=limit_bytes)
    if found is None:
        raise JobError(f"{address}: expected an object, found none")
    return found


def read_small(address: str, name: str) -> bytes:
    """A small file of the run."""
    run = open_run(address)
    found = run.store.get(f"{run.job}/{name}")
    if found is None:
        raise StoreError(
            f"{address}: no {name} there",
            hint="the runner writes it with its first copy; is the name of the run right?",
        )
    return found
