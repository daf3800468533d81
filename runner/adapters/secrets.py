"""
Where values of secrets are: the environment, or a file of that name where containers get them.
Standard library only: the guardian reads keys here, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

FOLDER: Final = Path("/run/secrets")


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
