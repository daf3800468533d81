"""Where a run, or one of its checkpoints, is in a store: as one word."""

from urllib.parse import urlsplit

from vramfarm.protocol import is_name


def is_address(text: str) -> bool:
    return text.startswith(("s3://", "file://"))


def split_address(address: str) -> tuple[str, str, str]:
    """(store, run's name, checkpoint's name or nothing) of `STORE/NAME` or `STORE/NAME/checkpoints/step-…`; or `ValueError`."""
    parts = urlsplit(address)
    is_store = (parts.scheme == "s3" and parts.netloc) or (parts.scheme, parts.netloc) == ("file", "")
    scheme, _, rest = address.partition("://")
    words = rest.rstrip("/").split("/")
    checkpoint = words[-1] if is_name(words[-1]) else ""
    words = words[:-2] if checkpoint and words[-2:-1] == ["checkpoints"] else words
    if not is_store or len(words) < 2 or not words[-1]:  # noqa: PLR2004  # a store and a run
        msg = f"must be a run in its store: s3://bucket/prefix/NAME or file:///folder/NAME, got {address!r}"
        raise ValueError(msg)
    return f"{scheme}://{'/'.join(words[:-1])}", words[-1], checkpoint
