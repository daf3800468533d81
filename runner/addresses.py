"""
Where a store, a run in it, or one of its checkpoints is: as one word.

What is written is the path: `#`, `?` and `%20` are characters of a name here, and mean nothing else. Whatever
takes an address apart does it with these.
"""

from pathlib import Path
from typing import Final

from vramfarm.protocol import is_name

_FILE: Final = "file://"


def is_address(text: str) -> bool:
    return text.startswith(("s3://", _FILE))


def scheme_of(address: str) -> str:
    return address.partition("://")[0]


def local_path(address: str) -> Path | None:
    """The file or folder of a file:// address; None: it is no such address."""
    return Path(address.removeprefix(_FILE)) if address.startswith(_FILE) else None


def is_store(address: str) -> bool:
    """Whether it names a bucket, with a path that a request can have, or a folder from the root on."""
    scheme, _, rest = address.partition("://")
    if "\0" in address or (scheme == "s3" and {".", ".."}.intersection(rest.split("/"))):
        return False
    return (scheme == "s3" and rest[:1] not in {"", "/"}) or (scheme == "file" and rest[:1] == "/")


def is_doubled(address: str) -> bool:
    """Whether two names in it have more than one `/` between them: some S3 servers take that for one, in part of their answers."""
    return address.startswith("s3://") and "//" in address.removeprefix("s3://").rstrip("/")


def split_address(address: str) -> tuple[str, str, str]:
    """(store, run's name, checkpoint's name or nothing) of `STORE/NAME` or `STORE/NAME/checkpoints/step-…`; or `ValueError`."""
    scheme, _, rest = address.partition("://")
    words = rest.rstrip("/").split("/")
    checkpoint = words[-1] if is_name(words[-1]) else ""
    words = words[:-2] if checkpoint and words[-2:-1] == ["checkpoints"] else words
    if not is_store(address) or is_doubled(address) or len(words) < 2 or not words[-1]:  # noqa: PLR2004  # a store and a run
        raise ValueError(f"must be a run in its store: s3://bucket/prefix/NAME or file:///folder/NAME, got {address!r}")
    return f"{scheme}://{'/'.join(words[:-1])}", words[-1], checkpoint
