"""
Where values of secrets are: the environment, or a file of that name where containers get them.
Standard library only: the guardian reads keys here, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

FOLDER: Final = Path("/run/secrets")
STORE_KEYS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


OWN_STORE_KEYS: Final = tuple(f"VRAMFARM_{name}" for name in STORE_KEYS)
"""The runner's alone: nothing that begins so, and is not of an attempt, is handed to training or set-up."""


def with_store_keys(env: Mapping[str, str], folder: Path = FOLDER) -> dict[str, str]:
    """
    With the store's key: the runner's own where there is one, whole; else that of the environment, and where that has
    none as files have it: whoever writes a new one there is heard.
    """
    own = {name: env[own] for name, own in zip(STORE_KEYS, OWN_STORE_KEYS, strict=True) if env.get(own)}
    if STORE_KEYS[0] in own:
        return {name: value for name, value in env.items() if name not in STORE_KEYS} | own
    return {**env} if env.get(STORE_KEYS[0]) else {**env, **find_values(STORE_KEYS, {}, folder)}


def find_values(names: Iterable[str], env: Mapping[str, str], folder: Path = FOLDER) -> dict[str, str]:
    """Of the secrets that have one; the environment comes first."""
    found = {name: env.get(name) or read_secret(name, folder) for name in names}
    return {name: value for name, value in found.items() if value}


def read_secret(name: str, folder: Path = FOLDER) -> str:
    """Empty if there is no such file, if it is not ours to read, or no text: whoever needs it says that it is missing."""
    try:
        return (folder / name).read_text().strip()
    except (OSError, ValueError):
        return ""
