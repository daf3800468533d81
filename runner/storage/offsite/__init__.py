"""
Stores off this machine. To add one: a module with a class that satisfies `Store`, a line in `STORES`,
and a fixture in the conformance suite.
"""

from collections.abc import Callable, Mapping
from typing import Final

from runner.addresses import local_path, scheme_of
from runner.storage.disk import Disk
from runner.storage.offsite.contract import (
    PREFLIGHT,
    Abilities,
    Checksums,
    OffsiteError,
    Store,
    Where,
    dump_place,
    parse_abilities,
    parse_place,
)
from runner.storage.offsite.file import FileStore
from runner.storage.offsite.pace import Pace

__all__ = [
    "PREFLIGHT",
    "STORES",
    "Abilities",
    "Checksums",
    "OffsiteError",
    "Store",
    "dump_place",
    "open_store",
    "parse_abilities",
    "parse_place",
    "warm_up",
]


Timeouts = tuple[float, float]  # seconds: to connect, and for an answer
_Open = Callable[[Where, Mapping[str, str], Abilities | None, Timeouts | None], Store]


def _open_file(offload: Where, _env: Mapping[str, str], _abilities: Abilities | None, _: Timeouts | None) -> Store:
    root = local_path(offload.to or "")
    assert root, "a store of files has a folder"
    return FileStore(root, Disk(), Pace(offload.max_bandwidth))


def _open_s3(offload: Where, env: Mapping[str, str], abilities: Abilities | None, timeouts_s: Timeouts | None) -> Store:
    from runner.storage.offsite.s3 import S3Store  # noqa: PLC0415  # botocore costs a quarter of a second and 40 MB
    from runner.storage.offsite.wire import TIMEOUTS_S  # noqa: PLC0415  # the same

    return S3Store(offload, env, abilities, timeouts_s=timeouts_s or TIMEOUTS_S)


STORES: Final[Mapping[str, _Open]] = {
    "file": _open_file,
    "s3": _open_s3,
}


def open_store(
    offload: Where,
    env: Mapping[str, str],
    abilities: Abilities | None = None,
    *,
    timeouts_s: Timeouts | None = None,
) -> Store:
    """
    The store of `offload.to`; nothing is asked of it yet. Credentials come from `env`.

    `abilities`: what `probe` found out earlier, so that it is not tried again. `timeouts_s`: shorter
    ones than large objects need.
    """
    assert offload.to, "a job without offload.to has no store"
    return STORES[scheme_of(offload.to)](offload, env, abilities, timeouts_s)


def warm_up(scheme: str) -> None:
    """Do now what the first `open_store` of a process would take a quarter of a second for, whatever the place."""
    if scheme == "s3":
        from runner.storage.offsite import s3  # noqa: PLC0415  # as above

        s3.warm_up()
