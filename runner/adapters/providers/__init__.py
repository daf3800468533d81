"""
Where the server was rented. Standard library only: the guardian calls these when all else is broken.

To add one: a module here with the functions of `Provider`, a line in `PROVIDERS`, a recorded
exchange in the conformance suite.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from runner.adapters.providers import vramfarm
from runner.adapters.providers.contract import Answer, Keep, Provider, Reply, Send
from runner.facts import Server

__all__ = ["PROVIDERS", "SECRETS", "Answer", "Keep", "Provider", "Reply", "Send", "find_server", "with_secrets"]

PROVIDERS: Final[Mapping[str, Provider]] = {
    "vramfarm": vramfarm,
}

SECRETS: Final = (vramfarm.KEY,)  # never handed to the training command


def find_server(env: Mapping[str, str]) -> Server | None:
    """The rented server we are in; None on a machine of one's own, where there is nothing to stop."""
    found = (provider.identify(env) for provider in PROVIDERS.values())
    return next((server for server in found if server is not None), None)


def with_secrets(env: Mapping[str, str], folder: Path = Path("/run/secrets")) -> dict[str, str]:
    """The environment with the providers' keys that came as files. Read once: the disk may be gone later."""
    return {name: value for name in SECRETS if (value := _read(folder / name))} | dict(env)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""  # no such secret, or none that is a text: the provider will say that it has no key
